"""`midus bench efficiency`, `prefill`, `sweep` and `decode`: whole models, measured here."""

from pathlib import Path
from typing import Annotated

import typer

from midus.cli.bench_run import BenchRun
from midus.errors import MidusError

_Shape = Annotated[
    str, typer.Option(help="Built-in shape; default: llama-3.1-8b on a GPU, tiny on a CPU.")
]
_Model = Annotated[
    str, typer.Option(help="Checkpoint or hub id whose config is taken; weights are random.")
]
_Methods = Annotated[str, typer.Option(help="With commas: method[:memory][@placement].")]
_Prompts = Annotated[str, typer.Option(help="Prompt lengths, with commas; default: by device.")]
_Device = Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one.")]
_Dtype = Annotated[str, typer.Option(help="Type of weights and states.")]
_Repeats = Annotated[int, typer.Option(help="Timed iterations; the median is reported.")]
_Sequence = Annotated[int | None, typer.Option(help="Training sequence; default: by device.")]
_MicroBatch = Annotated[int, typer.Option(help="Sequences of one pass.")]
_Accumulation = Annotated[
    int | None, typer.Option(help="Passes of one iteration; default: 16, on a CPU 2.")
]
_FusedBlocks = Annotated[
    bool,
    typer.Option("--fused-blocks/--plain-blocks", help="Train base blocks with our kernels."),
]
_CudaGraphs = Annotated[
    bool,
    typer.Option("--cuda-graphs/--eager-steps", help="Replay training steps as CUDA graphs."),
]
_Json = Annotated[
    Path | None, typer.Option("--json", help="Result file; default: under bench/. PNG beside it.")
]


def efficiency(
    shape: _Shape = "",
    model: _Model = "",
    methods: _Methods = "",
    paper: Annotated[bool, typer.Option("--paper", help="Add the paper's figures.")] = False,
    prompts: _Prompts = "",
    skip: Annotated[
        str, typer.Option(help="Phases to leave out, with commas: train, decode, prefill, ...")
    ] = "",
    hf_compiled: Annotated[
        str, typer.Option(help="Methods to decode by transformers' own compiled step too; slow.")
    ] = "",
    fused_blocks: _FusedBlocks = True,
    cuda_graphs: _CudaGraphs = True,
    sequence: _Sequence = None,
    micro_batch: _MicroBatch = 1,
    accumulation: _Accumulation = None,
    repeats: _Repeats = 3,
    device: _Device = "",
    dtype: _Dtype = "bfloat16",
    json_path: _Json = None,
) -> None:
    """Measure the paper's efficiency table: parameters, memory, training, decoding, prefill."""
    run = BenchRun("efficiency", shape, model, device)
    from midus.cli.bench_tables import print_efficiency
    from midus.efficiency.plots import plot_efficiency
    from midus.efficiency.protocol import make_protocol, parse_skip
    from midus.efficiency.rows import Point
    from midus.efficiency.subjects import PAPER_METHODS, parse_subjects

    protocol = make_protocol(
        run.device,
        dtype=dtype,
        repeats=repeats,
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=accumulation,
        prompts=_lengths(prompts),
        fused_blocks=fused_blocks,
        cuda_graphs=cuda_graphs,
        skip=parse_skip(skip),
    )
    compiled = parse_subjects(hf_compiled) if hf_compiled else []
    measured = parse_subjects(methods or PAPER_METHODS)
    if left_out := [subject.label for subject in compiled if subject not in measured]:
        raise MidusError(f"hf_compiled names {left_out[0]}, which methods does not; add it there")
    run.measure(
        methods or PAPER_METHODS,
        lambda subject: (
            Point(subject=subject, protocol=protocol, labels={}, hf_compiled=subject in compiled),
        ),
        protocol,
        json_path,
    )
    print_efficiency(run.rows, run.target if paper else None)
    run.finish(plot_efficiency)


def prefill(
    shape: _Shape = "",
    model: _Model = "",
    methods: _Methods = "",
    prompts: _Prompts = "",
    device: _Device = "",
    dtype: _Dtype = "bfloat16",
    json_path: _Json = None,
) -> None:
    """Measure prefill over prompt lengths, and its change against depth up-scaling."""
    run = BenchRun("prefill", shape, model, device)
    from midus.cli.bench_tables import print_prefill
    from midus.efficiency.plots import plot_prefill
    from midus.efficiency.protocol import make_protocol
    from midus.efficiency.rows import Point

    on_gpu = "128,256,512,1024,2048,4096,8192,16384,32768"
    default = on_gpu if run.device == "cuda" else "8,16,32,64"
    protocol = make_protocol(run.device, dtype=dtype, prompts=_lengths(prompts or default))
    protocol = protocol.with_phases("prefill")
    run.measure(
        methods or "llama_pro,base,midus:linear,midus:pkm,midus:ultramem,midus:hml",
        lambda subject: (Point(subject=subject, protocol=protocol, labels={}),),
        protocol,
        json_path,
    )
    print_prefill(run.rows)
    run.finish(plot_prefill)


def sweep(
    over: Annotated[str, typer.Option(help="batch, sequence, top_k, num_subkeys or placement.")],
    values: Annotated[str, typer.Option(help="Its values, with commas.")] = "",
    shape: _Shape = "",
    model: _Model = "",
    methods: _Methods = "",
    sequence: _Sequence = None,
    micro_batch: _MicroBatch = 1,
    accumulation: _Accumulation = None,
    repeats: _Repeats = 3,
    device: _Device = "",
    dtype: _Dtype = "bfloat16",
    json_path: _Json = None,
) -> None:
    """Measure training over batch size, sequence length, memory size or placement."""
    run = BenchRun(f"sweep-{over}", shape, model, device)
    from midus.cli.bench_tables import print_sweep
    from midus.efficiency.plots import plot_sweep
    from midus.efficiency.protocol import make_protocol
    from midus.efficiency.sweeps import default_methods, sweep_points

    if over == "batch" and micro_batch != 1:
        raise MidusError(
            f"micro_batch={micro_batch} follows from the values of a sweep over batch; leave it out"
        )
    protocol = make_protocol(
        run.device,
        dtype=dtype,
        repeats=repeats,
        sequence=sequence,
        micro_batch=micro_batch,
        accumulation=accumulation,
        prompts=(2048,) if run.device == "cuda" else None,
    )
    run.measure(
        methods or default_methods(over),
        lambda subject: sweep_points(subject, over, values, protocol),
        protocol,
        json_path,
    )
    print_sweep(run.rows, over)
    run.finish(plot_sweep)


def decode(
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "",
    context: Annotated[str, typer.Option(help="Tokens in the cache before, with commas.")] = "",
    shape: _Shape = "",
    model: _Model = "",
    methods: _Methods = "base,llama_pro,midus:hml",
    repeats: _Repeats = 3,
    device: _Device = "",
    dtype: _Dtype = "bfloat16",
    json_path: _Json = None,
) -> None:
    """Measure eager and compiled decoding over batch sizes and context lengths."""
    run = BenchRun("decode", shape, model, device)
    from midus.cli.bench_tables import print_decode
    from midus.efficiency.plots import plot_decode
    from midus.efficiency.protocol import make_protocol, parse_numbers
    from midus.efficiency.sweeps import decode_points

    is_cuda = run.device == "cuda"
    batches = parse_numbers("batch", batch or ("1,8,64" if is_cuda else "1,2"))
    contexts = parse_numbers("context", context or ("128" if is_cuda else "8"))
    protocol = make_protocol(run.device, dtype=dtype, repeats=repeats)
    protocol = protocol.with_phases("decode_eager", "decode_compiled")
    run.measure(
        methods,
        lambda subject: decode_points(subject, batches, contexts, protocol),
        protocol,
        json_path,
    )
    print_decode(run.rows)
    run.finish(plot_decode)


def _lengths(text: str) -> tuple[int, ...] | None:
    from midus.efficiency.protocol import parse_numbers

    return tuple(parse_numbers("prompts", text)) if text else None
