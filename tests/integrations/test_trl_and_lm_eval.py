"""TRL's trainers and lm-evaluation-harness's command, with nothing of ours but the import."""

import json
import os
import subprocess
import sys

import pytest
import torch
from stored import save_grown
from tiny import TOLERANCE, load, relative_error
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus.models.checkpoint import is_inserted

FLOAT32 = TOLERANCE[torch.float32]
WORDS = [f"w{i}" for i in range(4, 99)]
ARGUMENTS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def texts(count, start=0):
    return [" ".join(WORDS[(start + i) % 80 : (start + i) % 80 + 8]) for i in range(count)]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True])
def test_sft_trainer_takes_a_delta_by_its_name(tmp_path, adapters):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    import midus

    model = save_grown(tmp_path)
    trainer = SFTTrainer(
        model=str(tmp_path / "delta"),
        args=SFTConfig(output_dir=str(tmp_path / "run"), max_length=32, **ARGUMENTS),
        train_dataset=Dataset.from_dict({"text": texts(2)}),
        peft_config=LoraConfig(r=2, **midus.lora_targets(model)) if adapters else None,
    )
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    trainer.save_model(tmp_path / "out")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(4, 16)[None]
    with torch.no_grad():
        trained = trainer.model.eval()(ids).logits
        assert relative_error(saved(ids).logits, trained) < FLOAT32
        assert relative_error(trained, model(ids).logits) > 1e-3


@pytest.mark.slow
def test_dpo_trainer_prefers_what_was_chosen(tmp_path):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    save_grown(tmp_path)
    model = load(tmp_path / "full")
    model.freeze_base()
    rows = {"prompt": texts(4), "chosen": texts(4, 20), "rejected": texts(4, 40)}
    trainer = DPOTrainer(
        model=model,
        ref_model=load(tmp_path / "full"),
        args=DPOConfig(output_dir=str(tmp_path / "run"), max_length=64, **ARGUMENTS),
        train_dataset=Dataset.from_dict(rows),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "base"),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    assert history[-1]["rewards/margins"] > history[0]["rewards/margins"]
    for name, parameter in model.named_parameters():
        if not is_inserted(name, model.config):
            assert torch.equal(parameter, before[name]), name


TASK = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: ["w5", "w6", "w7"]
doc_to_target: 0
metric_list:
  - metric: acc
"""


@pytest.mark.slow
def test_lm_eval_scores_a_delta_as_its_full_checkpoint(tmp_path):
    """The plain command; the checkpoint's stub finds midus."""
    model = save_grown(tmp_path)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(6)))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "tiny.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **offline, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf",
        "--model_args", f"pretrained={tmp_path / 'delta'},trust_remote_code=True,dtype=float32",
        "--tasks", "tiny_choice", "--include_path", str(tmp_path / "tasks"), "--device", "cpu",
        "--log_samples", "--output_path", str(tmp_path / "out"),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        ids = tokenizer(sample["doc"]["text"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            scores = model(ids).logits[0, -1].log_softmax(-1)[[5, 6, 7]]
        theirs = torch.tensor([float(answer[0]) for answer in sample["filtered_resps"]])
        torch.testing.assert_close(theirs, scores, rtol=1e-3, atol=1e-3)
