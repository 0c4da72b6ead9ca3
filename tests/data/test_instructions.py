"""Fine-tuning rows: their forms, bad ones, and what TRL makes of them."""

import gzip
import json

import pytest
from tiny import load
from transformers import AutoTokenizer

from midus.data import DataOptions, read_instructions
from midus.errors import MidusError

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
ALPACA = {"instruction": "w4 w5", "input": "", "output": "w6"}


@pytest.fixture
def tokenizer(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rows_file(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read(path, tokenizer, **options):
    return read_instructions(
        DataOptions(**{"sources": str(path), "held_out": 0, **options}), tokenizer
    )


def test_alpaca_rows_become_its_prompt(tmp_path, tokenizer):
    with_input = {**ALPACA, "input": "w7"}
    path = rows_file(tmp_path, ALPACA, with_input)
    first, second = read(path, tokenizer).train
    assert first["prompt"] == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nw4 w5\n\n### Response:\n"
    )
    assert first["completion"] == "w6</s>"
    assert "### Input:\nw7\n\n### Response:\n" in second["prompt"]


def test_dolly_rows_are_alpaca_rows_by_other_names(tmp_path, tokenizer):
    rows = [{**ALPACA, "input": "w7"}, {"instruction": "w4 w5", "context": "w7", "response": "w6"}]
    first, second = read(rows_file(tmp_path, *rows), tokenizer).train
    assert first == second


def test_braces_in_a_row_are_text(tmp_path, tokenizer):
    path = rows_file(tmp_path, {**ALPACA, "instruction": "{input} {0}"})
    assert "\n{input} {0}\n" in read(path, tokenizer).train[0]["prompt"]


def test_alpaca_rows_can_be_chats(tmp_path, tokenizer):
    path = rows_file(tmp_path, {**ALPACA, "input": "w7"})
    (row,) = read(path, tokenizer, row_format="chat").train
    assert row["prompt"] == [{"role": "user", "content": "w4 w5\n\nw7"}]
    assert row["completion"] == [{"role": "assistant", "content": "w6"}]


def test_the_last_answer_of_a_chat_is_the_completion(tmp_path, tokenizer):
    turns = [("system", "w4"), ("user", "w5"), ("assistant", "w6"), ("user", "w7")]
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = {"role": "assistant", "content": "w8"}
    path = rows_file(
        tmp_path,
        {"messages": [*messages, answer]},
        {"messages": [*messages, answer, {"role": "user", "content": "unanswered"}]},
        {"conversations": [{"from": "human", "value": "w5"}, {"from": "gpt", "value": "w8"}]},
    )
    first, second, third = read(path, tokenizer).train
    assert first == second == {"prompt": messages, "completion": [answer]}
    assert third == {"prompt": [{"role": "user", "content": "w5"}], "completion": [answer]}


def test_prompt_completion_rows_get_one_end(tmp_path, tokenizer):
    rows = [{"prompt": "w4 ", "completion": end} for end in ("w5", "w5</s>")]
    prepared = read(rows_file(tmp_path, *rows), tokenizer)
    assert prepared.train["completion"] == ["w5</s>", "w5</s>"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.parquet"])
def test_rows_come_from_every_kind_of_file(tmp_path, tokenizer, name):
    path = tmp_path / name
    if name == "a.json":
        path.write_text(json.dumps([ALPACA]))
    elif name == "a.jsonl.gz":
        path.write_bytes(gzip.compress(json.dumps(ALPACA).encode()))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ALPACA]), path)
    assert read(path, tokenizer).train["completion"] == ["w6</s>"]


def test_rows_of_a_hub_dataset_are_streamed(tmp_path, tokenizer, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: iter([ALPACA]))
    assert read("org/rows", tokenizer).num_rows == 1


def test_bad_rows_are_counted_and_named(tmp_path, tokenizer):
    path = rows_file(
        tmp_path,
        ALPACA,
        "{",
        {"instruction": "w4", "output": ""},
        {"instruction": 4, "output": "w5"},
        {"question": "w4", "answer": "w5"},
        {"messages": [{"role": "user", "content": "w4"}]},
        {"messages": [{"role": "oracle", "content": "w4"}]},
        {"messages": "w4"},
        ["w4"],
    )
    prepared = read(path, tokenizer)
    assert (prepared.num_rows, prepared.bad_rows) == (1, 8)
    names = prepared.bad_row_names
    assert names[0].startswith(f"{path}:2: invalid JSON")
    assert names[1] == f"{path}:3: field 'output' is empty"
    assert names[2] == f"{path}:4: field 'instruction' is a int, not a text"
    assert "(its fields: answer, question)" in names[3]
    assert "no assistant message" in names[4]
    assert "role 'oracle'" in names[5]


def test_held_out_rows_are_chosen_by_content(tmp_path, tokenizer):
    rows = [{**ALPACA, "instruction": f"w{i}"} for i in range(200)]
    one = read(rows_file(tmp_path, *rows), tokenizer, held_out=0.2)
    two = read(rows_file(tmp_path, *reversed(rows)), tokenizer, held_out=0.2, seed=1)
    assert 20 < len(one.held_out) < 60
    assert len(one.train) + len(one.held_out) == one.num_rows == 200
    assert sorted(one.held_out["prompt"]) == sorted(two.held_out["prompt"])
    assert not set(one.held_out["prompt"]) & set(one.train["prompt"])


def test_rows_that_do_not_fit_are_refused(tmp_path, tokenizer):
    chat = {"messages": [{"role": r, "content": "w4"} for r in ("user", "assistant")]}
    mixed = rows_file(tmp_path, ALPACA, chat)
    with pytest.raises(MidusError, match="mix plain rows and chat rows; set row_format to chat"):
        read(mixed, tokenizer)
    assert read(mixed, tokenizer, row_format="chat").num_rows == 2
    with pytest.raises(MidusError, match="holds no usable rows"):
        read(rows_file(tmp_path, chat), tokenizer, row_format="alpaca")
    tokenizer.chat_template = None
    with pytest.raises(MidusError, match="the tokenizer has no chat template"):
        read(rows_file(tmp_path, chat), tokenizer)


@pytest.mark.parametrize("row_format", ["auto", "chat"])
def test_trl_trains_on_the_completion_alone(tmp_path, model, tokenizer, row_format):
    from trl import SFTConfig, SFTTrainer

    path = rows_file(tmp_path, ALPACA, {**ALPACA, "output": "w7 w8"})
    prepared = read(path, tokenizer, row_format=row_format)
    arguments = SFTConfig(
        output_dir=str(tmp_path / "run"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=2,
        max_length=None,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        load(model), args=arguments, train_dataset=prepared.train, processing_class=tokenizer
    )
    (batch,) = trainer.get_train_dataloader()
    trained = sorted(
        [label for label in labels if label != -100] for labels in batch["labels"].tolist()
    )
    assert trained == [[6, 2], [7, 8, 2]]  # each with one EOS
