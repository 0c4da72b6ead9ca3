"""Training steps by graph replay: the same losses and gradients as eager steps."""

import contextlib
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from tiny import TOLERANCE, fill_tables, grown, prompt_ids, relative_error, tiny_base
from transformers import TrainingArguments, default_data_collator

from midus import MemoryConfig, UpscaleConfig, upscale
from midus.models.captured_attention import causal_attention
from midus.training import graphed_trainer
from midus.training.graphed import GraphedStep, why_not_graphed
from midus.training.graphed_trainer import GraphedStepsMixin
from midus.training.loss import use_chunked_loss
from midus.training.optimizer_options import OptimizerOptions
from midus.training.trainer import CptTrainer

BATCH = ("input_ids", "labels", "num_items_in_batch")


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_attention_without_a_mask_is_causal_attention(family):
    model = grown(family, **({"sliding_window": None} if family == "mistral" else {}))
    ids = prompt_ids(2, 20)
    with torch.no_grad():
        plain = model(ids).logits
        with causal_attention(model):
            assert model.config._attn_implementation == "midus_causal"
            assert torch.equal(model(ids).logits, plain)
    assert model.config._attn_implementation == "sdpa"


class OnGpu:
    """A model that says it is on a GPU, so that the other reasons come up."""

    def __init__(self, model):
        self.device = torch.device("cuda")
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.mark.parametrize(
    ("options", "names", "reason"),
    [
        ({}, BATCH, ""),
        ({}, (*BATCH, "attention_mask"), "batches have attention_mask"),
        ({"attention_dropout": 0.1}, BATCH, "dropout"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            BATCH,
            "positions are 'dynamic'",
        ),
        ({"family": "gemma2"}, BATCH, "attends? otherwise"),
        ({"family": "mistral", "sliding_window": 8}, BATCH, "attends? otherwise"),
        ({"memory": MemoryConfig(num_subkeys=8, query_norm="batch")}, BATCH, "running statistics"),
    ],
)
def test_what_cannot_be_graphed_says_why(options, names, reason):
    said = why_not_graphed(OnGpu(grown(**options)), names)
    assert re.search(reason, said) if reason else said == ""


def test_checkpointing_other_attention_and_cpus_are_not_graphed():
    model = grown()
    assert "is on cpu" in why_not_graphed(model, BATCH)
    model.gradient_checkpointing_enable()
    assert "checkpointing" in why_not_graphed(OnGpu(model), BATCH)
    model.set_attn_implementation("eager")
    assert "'eager'" in why_not_graphed(OnGpu(model), BATCH)


class NoMemory:
    """A graph that cannot be captured, after it has begun to."""

    def __init__(self, model, loss_of, batch):
        loss_of(batch).backward()
        model.zero_grad(set_to_none=True)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore of it")


def test_a_capture_that_fails_leaves_training_eager_with_one_sentence(monkeypatch):
    trainer = SimpleNamespace(
        cuda_graphs=True,
        _why_not=lambda *_: "",
        compute_loss=lambda *_, **__: torch.ones(1, requires_grad=True).sum(),
        compute_loss_context_manager=contextlib.nullcontext,
    )
    monkeypatch.setattr(graphed_trainer, "GraphedStep", NoMemory)
    reason = r"the step failed \(OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\) \("
    with pytest.warns(UserWarning, match=reason):
        graph = GraphedStepsMixin._capture(trainer, grown(), {"num_items_in_batch": None})
    assert graph is None
    assert not trainer.cuda_graphs


def test_gradients_are_there_again_after_a_capture_that_failed(monkeypatch):
    model = grown()
    trained = [p for p in model.parameters() if p.requires_grad]
    ids = prompt_ids(2)
    model(ids, labels=ids).loss.backward()
    before = [p.grad.clone() for p in trained]

    def fail(self, loss_of, stream):
        for parameter in trained:
            parameter.grad = None
        raise RuntimeError("no graph")

    monkeypatch.setattr(GraphedStep, "_warm_up", fail)
    left = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the outer one")
    monkeypatch.setattr(torch.cuda, "set_stream", left.append)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="no graph"):
        GraphedStep(model, lambda batch: model(**batch).loss, {"input_ids": ids, "labels": ids})
    assert left == ["the outer one"]
    for parameter, gradient in zip(trained, before, strict=True):
        assert torch.equal(parameter.grad, gradient)


# --- on a GPU


def method_model(kind, dtype=torch.float32):
    base = tiny_base(hidden_size=64, head_dim=16, num_key_value_heads=4, initializer_range=0.1)
    if kind == "base":
        return base.cuda().to(dtype)
    if kind == "llama_pro":
        model = upscale(base, UpscaleConfig(method="llama_pro"))
        for parameter in model.parameters():
            if not parameter.any():  # behind outputs of zero no gradient would be compared
                torch.nn.init.normal_(parameter, std=0.1)
    else:
        memory = MemoryConfig(kind=kind, num_subkeys=16, top_k=4)
        model = fill_tables(upscale(base, UpscaleConfig(memory=memory)), scale=0.3)
    return model.cuda().to(dtype)


def batches(count=3):
    total = torch.tensor(2 * 31 * count, device="cuda")
    return [
        {"input_ids": ids, "labels": ids, "num_items_in_batch": total}
        for ids in (prompt_ids(2, 32, seed=seed).cuda() for seed in range(count))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["base", "llama_pro", "hml", "linear", "pkm", "ultramem"])
def test_replayed_steps_add_up_the_gradients_of_eager_ones(kind):
    model = method_model(kind).train()
    use_chunked_loss(model, 1024)
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss_of(batch):
        return model(**batch).loss

    losses = []
    for batch in batches():
        loss = loss_of(batch)
        loss.backward()
        losses.append(loss.detach())
    del loss
    expected = [p.grad for p in trained]
    model.zero_grad(set_to_none=True)
    step = GraphedStep(model, loss_of, batches()[0])
    for _ in range(2):  # a second round starts from gradients that were set to None
        model.zero_grad(set_to_none=True)
        replayed = [step(batch) for batch in batches()]
        assert relative_error(torch.stack(replayed), torch.stack(losses)) < 1e-5
        for parameter, gradient in zip(trained, expected, strict=True):
            assert relative_error(parameter.grad, gradient) < TOLERANCE[torch.float32]
    assert not step.fits({**batches()[0], "attention_mask": batches()[0]["input_ids"]})
    assert not step.fits({**batches()[0], "labels": batches()[0]["labels"][:, :5]})


@pytest.mark.gpu
def test_gradients_that_are_there_when_a_graph_is_captured_stay():
    model = method_model("hml").train()
    use_chunked_loss(model, 1024)

    def loss_of(batch):
        return model(**batch).loss

    first, second, _ = batches()
    loss_of(first).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad.clone() for p in trained]
    step = GraphedStep(model, loss_of, second)
    for parameter, gradient in zip(trained, before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    step(second)
    assert any(not torch.equal(p.grad, g) for p, g in zip(trained, before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["frozen", "moved"])
def test_a_graph_knows_when_the_model_has_changed(change):
    model = method_model("hml").train()
    use_chunked_loss(model, 1024)
    step = GraphedStep(model, lambda batch: model(**batch).loss, batches()[0])
    assert step.is_current()
    parameter = next(p for p in model.parameters() if p.requires_grad)
    if change == "frozen":
        parameter.requires_grad_(False)
    else:
        parameter.data = parameter.data.clone()
    assert not step.is_current()


@pytest.mark.gpu
def test_after_an_invalid_capture_eager_steps_go_on_as_before():
    model = method_model("hml").train()
    use_chunked_loss(model, 1024)
    first = batches()[0]

    def loss_of(batch):
        loss = model(**batch).loss
        if torch.cuda.is_current_stream_capturing():
            loss.item()  # waits for the device, which no capture allows
        return loss

    outer = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        GraphedStep(model, loss_of, first)
    assert torch.cuda.current_stream() == outer
    torch.randn(4, device="cuda")
    loss_of(first).backward()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 25  # an odd one out: the last batch of an epoch is smaller

    def __getitem__(self, index):
        ids = prompt_ids(1, 32, seed=index)[0]
        return {"input_ids": ids, "labels": ids.clone()}


def train(folder, graphs, bf16):
    model = method_model("hml")
    use_chunked_loss(model, 1024)
    trainer = CptTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=10,
            bf16=bf16,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Rows(),
        data_collator=default_data_collator,
        optimizer_options=OptimizerOptions(recipe="short").resolved("cpt"),
        saves_delta=True,
        tokenizer=None,
    )
    trainer.cuda_graphs = graphs
    trainer.train()
    assert (trainer._graphed is not None) == graphs
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_with_graphs_is_the_run_without(tmp_path, bf16):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training without CUDA graphs")
        graphed = train(tmp_path / "graphed", True, bf16)
    eager = train(tmp_path / "eager", False, bf16)
    assert len(graphed) == 10
    assert graphed[-1] < graphed[0]
    # bfloat16: sums in another order round otherwise, and ten steps carry it on.
    assert graphed == pytest.approx(eager, rel=2e-2 if bf16 else 1e-4)
