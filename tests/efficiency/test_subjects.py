"""`method[:memory][@placement]`, sweeps over it, and the numbers users write beside it."""

import pytest

from midus import MidusError
from midus.efficiency.cost_comparison import name_of, stack_of
from midus.efficiency.cost_sizes import read_stack
from midus.efficiency.paper import PAPER, paper_row
from midus.efficiency.protocol import make_protocol, parse_numbers, parse_skip
from midus.efficiency.subjects import PAPER_METHODS, Subject, parse_subjects
from midus.efficiency.sweeps import default_methods, default_values, sweep_points
from midus.models.shapes import shape_config
from midus.training.options import TrainOptions
from midus.upscaling.methods import plan_upscaling

CPU = make_protocol("cpu")
HML = Subject(method="midus", memory="hml")


def test_a_subject_is_read_from_its_parts():
    base, copies, memory = parse_subjects("base,opt_deus,midus:pkm@top_heavy")
    assert base.names() == {"method": "base", "memory": None, "placement": None, "label": "Base"}
    assert (copies.method, copies.resolved_placement) == ("opt_deus", "top_heavy")
    assert (memory.memory, memory.placement) == ("pkm", "top_heavy")
    assert memory.label == "MIDUS PKM (top-heavy)"


def test_memory_defaults_to_hml_and_placement_to_the_methods():
    (subject,) = parse_subjects("midus")
    assert subject == HML
    assert subject.resolved_placement == "distributed"


def test_a_recipe_stands_in_the_place_of_a_memory_layer():
    config = shape_config("smollm2-135m")
    plain, dense, half, moved = parse_subjects(
        "midus:hml,midus:short,midus:short_half,midus:short@top_heavy"
    )
    assert (dense.label, dense.resolved_placement) == ("MIDUS recipe: short", "dense")
    assert (half.label, half.resolved_placement) == ("MIDUS recipe: short_half", "distributed")
    assert moved.label == "MIDUS recipe: short (top-heavy)"
    run = {"stage": "cpt", "model": "smollm2-135m", "output": "out", "recipe": "short"}
    recipe = TrainOptions.from_dict({**run, "data": {"sources": "text.jsonl"}}).upscale
    grown = dense.grown_config(config)
    assert grown.memory == plan_upscaling(config, recipe, {})[1].memory
    assert len(grown.memory_positions) == 25
    assert len(half.grown_config(config).memory_positions) == 15
    assert grown.memory != plain.grown_config(config).memory
    assert moved.grown_config(config).memory == grown.memory
    wider = dense.changed(num_subkeys=32).grown_config(config).memory
    assert (wider["num_subkeys"], wider["bypass"]) == (32, "joined")


@pytest.mark.parametrize("name", ["midus:short", "midus:short@distributed", "midus:short_half"])
def test_a_row_of_a_recipe_is_predicted_as_it_was_measured(name):
    (subject,) = parse_subjects(name)
    expected = read_stack(subject.grown_config(shape_config("smollm2-135m")))
    assert stack_of(subject.names(), "smollm2-135m") == expected
    assert name_of(subject.names()) == name


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "gemma-2-2b"])
def test_a_recipe_fits_bases_whose_heads_are_not_as_wide_as_the_stream(shape):
    (dense,) = parse_subjects("midus:short")
    memory = dense.grown_config(shape_config(shape)).memory
    assert memory["attn_output_proj"]
    assert not dense.grown_config(shape_config("smollm2-135m")).memory["attn_output_proj"]


def test_a_recipe_is_none_of_the_papers_rows():
    (half,) = parse_subjects("midus:short_half")
    assert paper_row("llama-3.1-8b", half.names()) is None
    assert paper_row("llama-3.1-8b", HML.names()) is not None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "methods=''"),
        ("base,", "methods=''"),
        ("nothing", "method='nothing' is unknown"),
        ("midus:", "methods='midus:'"),
        ("midus@", "methods='midus@'"),
        ("llama_pro:hml", "which has none"),
        ("midus:shrot", "'shrot' is no memory layer .*ultramem.* and no recipe .short, "),
        ("midus:short,midus:short@dense", "names MIDUS recipe: short twice"),
        ("base,base", "names Base twice"),
    ],
)
def test_wrong_methods_are_refused(text, part):
    with pytest.raises(MidusError, match=part):
        parse_subjects(text)


def test_numbers_and_phases_are_checked():
    assert parse_numbers("prompts", "1,128") == [1, 128]
    for text in ("a", "0", "", "1,,2", "-1"):
        with pytest.raises(MidusError, match="prompts="):
            parse_numbers("prompts", text)
    assert parse_skip("train,decode") == (
        "train", "decode_eager", "decode_hf_compiled", "infer_gb", "decode_compiled",
        "generate_fast",
    )  # fmt: skip
    assert parse_skip("decode_hf_compiled") == ("decode_hf_compiled",)
    with pytest.raises(MidusError, match="skip='trane'"):
        parse_skip("trane")


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"repeats": 0}, "repeats=0"),
        ({"sequence": 1}, "sequence=1"),
        ({"accumulation": 0}, "accumulation=0"),
    ],
)
def test_a_protocol_that_cannot_be_is_refused(values, part):
    with pytest.raises(MidusError, match=part):
        make_protocol("cuda", **values)


def test_defaults_on_a_gpu_are_the_papers():
    protocol = make_protocol("cuda")
    tokens = protocol.sequence * protocol.micro_batch * protocol.accumulation
    assert tokens == 16 * 2048
    assert default_values("batch", protocol, HML) == "16,32,64"
    assert protocol.longest >= max(protocol.prompts)


def test_batch_points_change_the_micro_batch_alone():
    points = sweep_points(HML, "batch", "2,8", CPU)
    assert [p.protocol.micro_batch for p in points] == [1, 4]
    assert {p.protocol.accumulation for p in points} == {2}
    assert {p.subject for p in points} == {HML}  # one model for all of them
    assert [p.labels for p in points] == [
        {"over": "batch", "value": 2},
        {"over": "batch", "value": 8},
    ]
    with pytest.raises(MidusError, match="has 3, which 2 accumulation steps do not divide"):
        sweep_points(HML, "batch", "2,3", CPU)


def test_memory_sizes_change_the_model_and_are_inferred_with_too():
    points = sweep_points(HML, "top_k", "1,4", CPU)
    assert [p.subject.top_k for p in points] == [1, 4]
    assert all(p.protocol.runs_phase("decode_compiled") for p in points)
    with pytest.raises(MidusError, match="has no memory layer"):
        sweep_points(Subject(method="llama_pro"), "top_k", "1", CPU)


def test_a_sweep_of_a_recipe_has_values_that_its_tables_can_have():
    (dense,) = parse_subjects("midus:short")
    assert [p.subject.top_k for p in sweep_points(dense, "top_k", "", CPU)] == [1, 2, 4, 8, 16]
    assert [p.subject.top_k for p in sweep_points(HML, "top_k", "", CPU)][-1] == 32


def test_placements_have_the_methods_own_names():
    names = "top_heavy,distributed,bottom_heavy"
    copies = sweep_points(Subject(method="llama_pro"), "placement", names, CPU)
    assert [p.subject.placement for p in copies] == ["top_heavy", "llama_pro", "bottom_heavy"]
    memory = sweep_points(HML, "placement", names, CPU)
    assert [p.subject.placement for p in memory] == names.split(",")


@pytest.mark.parametrize(
    "function",
    [
        default_methods,
        lambda over: default_values(over, CPU, HML),
        lambda over: sweep_points(HML, over, "1", CPU),
    ],
)
def test_an_unknown_sweep_is_refused(function):
    with pytest.raises(MidusError, match="over='depth'"):
        function("depth")


def test_the_papers_table_is_found_by_method_memory_and_placement():
    rows = [subject.names() for subject in parse_subjects(PAPER_METHODS)]
    found = [paper_row("llama-3.1-8b", row) for row in rows]
    assert len(set(found)) == len(PAPER["llama-3.1-8b"]) == 7
    assert found[-1].train_s_per_iter == 5.05
    # The ratios the paper's text and our goals are written in.
    assert found[-1].train_s_per_iter / found[1].train_s_per_iter == pytest.approx(0.73, abs=0.005)
    (top,) = parse_subjects("midus:hml@top_heavy")
    assert paper_row("llama-3.1-8b", top.names()) is None
    assert paper_row("llama-3.2-1b", top.names()) is None
