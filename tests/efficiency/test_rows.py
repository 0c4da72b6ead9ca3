"""What the figures of a row are, and what a row is when a phase fails."""

import gc
from dataclasses import replace

import pytest
import torch

from midus.efficiency import inference, row_phases, timing, training_step
from midus.efficiency.protocol import make_protocol
from midus.efficiency.random_model import make_random_model
from midus.efficiency.rows import Job, Point, run_job
from midus.efficiency.subjects import Subject, parse_subjects
from midus.efficiency.sweeps import decode_points, sweep_points
from midus.models.shapes import shape_config

CPU = torch.device("cpu")
PROTOCOL = make_protocol(
    "cpu", dtype="float32", repeats=1, sequence=8, prompts=(4, 8), decode_tokens=2
)
HML = Subject(method="midus", memory="hml")


@pytest.fixture(autouse=True, scope="module")
def _quick_collections():
    # Between phases garbage is collected; what the suite has imported need not be looked at.
    gc.freeze()
    yield
    gc.unfreeze()


def run(*points):
    sent = []
    run_job(
        Job(target="tiny", is_shape=True, points=points),
        lambda kind, content: sent.append((kind, content)),
    )
    assert sent[0][0] == "hardware"
    return [content for kind, content in sent if kind == "rows"][-1], sent


def point(subject=HML, protocol=PROTOCOL):
    return Point(subject=subject, protocol=protocol, labels={})


def tiny(subject=HML):
    return make_random_model(subject.grown_config(shape_config("tiny")), CPU, torch.float32)


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")


def test_running_out_of_memory_is_a_result(monkeypatch):
    real = inference.measure_prefill
    monkeypatch.setattr(
        inference, "measure_prefill", lambda m, n, *a: out_of_memory() if n > 4 else real(m, n, *a)
    )
    monkeypatch.setattr(training_step, "measure_training", out_of_memory)
    (row,), _ = run(point())
    assert row["oom"] == ["prefill 8", "train"]
    assert row["errors"] == {}
    assert list(row["prefill_ms"]) == ["4"]
    assert row["train_s_per_iter"] is None
    assert row["decode_eager_tok_s"] > 0


def test_a_failure_keeps_its_first_line_and_the_other_phases(monkeypatch):
    def fail(*args):
        raise RuntimeError("the first line\nthe second")

    monkeypatch.setattr(inference, "measure_decoder", fail)
    (row,), _ = run(point())
    assert row["errors"] == {"decode_compiled": "RuntimeError: the first line"}
    assert row["oom"] == []
    assert row["decode_compiled_tok_s"] is None
    assert row["train_s_per_iter"] > 0


def test_a_model_that_does_not_fit_leaves_an_empty_row(monkeypatch):
    monkeypatch.setattr(row_phases, "make_random_model", out_of_memory)
    (row,), _ = run(point())
    assert row["oom"] == ["build"]
    assert row["params_total"] is None


def test_cublas_running_out_of_memory_counts_as_such():
    def fail():
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")

    row = {"oom": [], "errors": {}}
    assert not row_phases.run_phase(row, "train", fail, CPU)
    assert row == {"oom": ["train"], "errors": {}}


def test_an_iteration_trains_what_the_method_trains_and_nothing_else():
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training_step.prepare_training(model, fused_blocks=True)
    measured = training_step.measure_training(
        model, CPU, sequence=8, micro_batch=3, accumulation=2, repeats=1, warmup=1, cuda_graphs=True
    )
    assert measured["train_tokens_per_iter"] == 3 * 2 * 8
    assert measured["train_s_spread"] == 0
    assert measured["train_graphed"] is False
    assert measured["train_gb"] is None
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert changed == trained
    assert trained
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_an_iteration_are_those_of_the_mean_loss_clipped(monkeypatch):
    """One iteration's update equals plain AdamW on the mean loss over all its tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 3, 8))
    monkeypatch.setattr(torch, "randint", lambda *a, **k: tokens)
    model, plain = tiny(), tiny()
    training_step.prepare_training(model, fused_blocks=True)
    training_step.measure_training(
        model, CPU, sequence=8, micro_batch=3, accumulation=2, repeats=1, warmup=0, cuda_graphs=True
    )
    from midus.models.record import set_trainable

    set_trainable(plain)
    logits = plain(tokens.flatten(0, 1)).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, tokens.flatten(0, 1)[:, 1:].flatten()).backward()
    trained = [p for p in plain.parameters() if p.requires_grad]
    norm = torch.sqrt(sum(p.grad.square().sum() for p in trained))
    for expected, actual in zip(plain.parameters(), model.parameters(), strict=True):
        if expected.requires_grad:
            grad = expected.grad / max(1.0, norm.item())
            # The first step of Adam: the rate times the gradient's sign, softened by eps.
            step = 1e-4 * grad / (grad.abs() + 1e-8)
            moved = grad.abs() > 1e-5
            torch.testing.assert_close(
                (expected - step)[moved], actual[moved], rtol=1e-4, atol=2e-6
            )


def test_decoding_is_timed_from_the_second_token_to_the_last(monkeypatch):
    now, runs = [0.0], []
    monkeypatch.setattr(inference.time, "perf_counter", lambda: now[0])

    def generate(input_ids, max_new_tokens, min_new_tokens, do_sample, stopping_criteria):
        assert (min_new_tokens, do_sample) == (max_new_tokens, False)
        runs.append(max_new_tokens)
        # Prefill and capture take long; then a token takes 1 s in the first runs, 3 in the last.
        for cost in [100.0, 50.0] + [3.0 if len(runs) == 4 else 1.0] * (max_new_tokens - 2):
            now[0] += cost
            stop = stopping_criteria[0](input_ids, None)
            assert stop.shape == (4,)
            assert not stop.any()
        return torch.zeros(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)

    rate = inference.measure_generate(generate, torch.zeros(4, 5), 8, 3, CPU)
    assert rate == (4.0, pytest.approx(4 - 4 / 3), [4.0, 4.0, pytest.approx(4 / 3)])
    assert runs == [10] * 4  # a warm-up, and three


def test_replayed_steps_are_warmed_up_then_timed(monkeypatch):
    from midus.models import fast

    calls = []

    class Decoder:
        def __init__(self, model, batch_size, max_length):
            calls.append((batch_size, max_length))

        def prefill(self, input_ids):
            calls.append("prefill")

        def step(self):
            calls.append("step")

    monkeypatch.setattr(fast, "FastDecoder", Decoder)
    monkeypatch.setattr(inference, "time_runs", lambda f, d, runs: [f() or 0.5] * runs)
    rate = inference.measure_decoder(None, torch.zeros(2, 5), 4, 3, 2, CPU)
    assert rate == (2 * 4 / 0.5, 0, [2 * 4 / 0.5] * 3)
    batch, length = calls[0]
    assert batch == 2
    assert length >= 5 + 2 + 3 * 4
    assert calls[1] == "prefill"
    assert calls.count("step") == 2 + 4


def test_runs_are_warmed_up_and_each_is_timed():
    calls = []
    seconds = timing.time_runs(lambda: calls.append(1), CPU, runs=3, warmup=2)
    assert len(calls) == 5
    assert len(seconds) == 3


def test_cache_bytes_are_two_tensors_a_block():
    # Keys and values, 2 heads of 16 numbers of 4 bytes, in each of 6 blocks.
    assert inference.kv_cache_bytes(tiny(), 5, CPU) == 2 * 6 * 2 * 16 * 4 * 5


def test_points_of_one_model_share_it_and_others_do_not(monkeypatch):
    made = []
    real = row_phases.make_random_model
    monkeypatch.setattr(
        row_phases, "make_random_model", lambda *a, **k: made.append(1) or real(*a, **k)
    )
    rows, _ = run(*sweep_points(HML, "batch", "2,4", PROTOCOL))
    assert [row["train_tokens_per_iter"] for row in rows] == [16, 32]
    assert len(made) == 1
    quick = replace(PROTOCOL, decode_tokens=1, prompts=(4,))
    rows, _ = run(*sweep_points(HML, "top_k", "1,2", quick))
    assert [row["value"] for row in rows] == [1, 2]
    assert len(made) == 3


def test_decoding_rows_say_batch_context_and_cache():
    (base,) = parse_subjects("base")
    points = decode_points(base, [1, 3], [4], PROTOCOL)
    rows, _ = run(*points)
    assert [(row["batch"], row["context"]) for row in rows] == [(1, 4), (3, 4)]
    assert rows[1]["kv_cache_bytes"] == 3 * rows[0]["kv_cache_bytes"] == 3 * 4 * 4 * 2 * 2 * 16 * 4
    assert all(row["decode_compiled_tok_s"] > 0 for row in rows)
    assert all(row["errors"] == {} for row in rows)
