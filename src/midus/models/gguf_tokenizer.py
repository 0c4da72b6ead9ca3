"""A Hugging Face tokenizer in a GGUF file, as llama.cpp has tokenizers.

There are two kinds: byte-level BPE, whose splitting of text llama.cpp knows by name, and
SentencePiece's BPE, which merges by scores.
"""

import json
from pathlib import Path
from typing import Any

from midus.errors import MidusError
from midus.models.untrusted import read_json, reason_of

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names of the patterns by which text is split before byte-level BPE.
_SPLITS = {_LLAMA3: "llama-bpe", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"): "qwen2"}


def add_tokenizer(writer: Any, folder: Path, vocab_size: int) -> None:
    """Adds tokens, merges, special tokens and chat template of a model's folder.

    Args:
        writer: A `gguf.GGUFWriter`.
        folder: The model's folder, with a tokenizer.json.
        vocab_size: Rows of the model's embedding; what the tokenizer lacks is filled up.
    """
    import gguf

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise MidusError(
            f"{folder} has no tokenizer.json, which a GGUF file is made with; "
            "save its tokenizer there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        tokenizer = read_json(path)
        model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
        tokens: list[str | None] = [None] * vocab_size
        for text, index in model["vocab"].items():
            tokens[index] = text
        is_bytewise = _uses_bytes(tokenizer.get("pre_tokenizer"))
        scores = _scores(model) if not is_bytewise else {}
        types = [_type_of(text, is_bytewise) for text in tokens]
        for token in added:
            tokens[token["id"]] = token["content"]
            types[token["id"]] = (
                gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
            )
        special = gguf.SpecialVocab(folder, load_merges=is_bytewise, n_vocab=vocab_size)
    except MidusError:
        raise
    except Exception as error:
        # Other programs' files go wrong in as many ways as there are fields.
        raise MidusError(
            f"{path} cannot be put into a GGUF file ({type(error).__name__}: {reason_of(error)}); "
            "use a byte-level or SentencePiece BPE tokenizer"
        ) from error
    writer.add_tokenizer_model("gpt2" if is_bytewise else "llama")
    writer.add_tokenizer_pre(_split_name(tokenizer["pre_tokenizer"]) if is_bytewise else "default")
    filled = [f"[PAD{i}]" if text is None else text for i, text in enumerate(tokens)]
    writer.add_token_list(filled)
    if not is_bytewise:
        writer.add_token_scores([scores.get(text, -1000.0) for text in filled])
        writer.add_add_space_prefix(_adds_space(tokenizer))
    writer.add_token_types(types)
    # Without a word, llama.cpp would put the first token before every text.
    special.add_special_token.setdefault("bos", False)
    special.add_special_token.setdefault("eos", False)
    special.add_to_gguf(writer, quiet=True)


def _uses_bytes(pre_tokenizer: Any) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(pre_tokenizer))


def _steps(pre_tokenizer: Any) -> list[Any]:
    if pre_tokenizer is None:
        return []
    return list(pre_tokenizer.get("pretokenizers", [pre_tokenizer]))


def _split_name(pre_tokenizer: Any) -> str:
    """What llama.cpp calls this way to split text before the merges."""
    steps = _steps(pre_tokenizer)
    kinds = [step["type"] for step in steps]
    byte_level = steps[-1]
    if kinds == ["ByteLevel"] and byte_level.get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not byte_level.get("use_regex", True):
        name = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    raise MidusError(
        f"the tokenizer splits text by {json.dumps(pre_tokenizer)[:200]}, for which no name in "
        "llama.cpp is known here; use llama.cpp's own converter"
    )


def _scores(model: dict[str, Any]) -> dict[str, float]:
    """SentencePiece's scores: of two merges the earlier one has the larger."""
    if model.get("type") != "BPE" or not model.get("byte_fallback"):
        raise MidusError(
            f"the tokenizer is a {model.get('type')} model without bytes, and llama.cpp knows BPE; "
            "use a byte-level or SentencePiece BPE tokenizer"
        )
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(pairs):
        scores.setdefault(left + right, -float(rank))
    return scores


def _type_of(text: str | None, is_bytewise: bool) -> Any:
    import gguf

    if text is None:
        return gguf.TokenType.UNUSED
    is_byte = not is_bytewise and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL


def _adds_space(tokenizer: dict[str, Any]) -> bool:
    """Whether a word at the start is read like one after a space."""
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    before = any(step.get("type") == "Prepend" for step in steps)
    schemes = [step.get("prepend_scheme") for step in _steps(tokenizer.get("pre_tokenizer"))]
    return before or any(scheme in ("first", "always") for scheme in schemes)
