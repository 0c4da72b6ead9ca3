"""How documents become tokens: a model's own tokenizer, with EOS after every document.

The tokenizer's post-processor is replaced, so that a document is the BOS token (where the tokenizer
adds one itself), its text and the EOS token, whatever the tokenizer was set up for.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus.errors import MidusError


@dataclass(frozen=True)
class DocumentEncoding:
    """A tokenizer as a build uses it."""

    source: str
    """The model it comes from, as the user gave it."""
    sha256: str
    """Of its tokenizer.json without padding and truncation, which trainers change when saving."""
    vocab_size: int
    eos_token_id: int
    bos_token_id: int | None
    """None where the tokenizer adds no BOS token of its own."""
    rules: str
    """The tokenizer.json that puts BOS and EOS around a document."""

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def facts(self) -> dict[str, Any]:
        """What the manifest says of it."""
        return {
            "source": self.source,
            "sha256": self.sha256,
            "vocab_size": self.vocab_size,
            "eos_token_id": self.eos_token_id,
            "bos_token_id": self.bos_token_id,
        }


def read_encoding(source: str | Path) -> DocumentEncoding:
    """The encoding of a model given as a folder, hub id, ``.gguf`` file or ``smollm2-135m``."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = _load(source)
    if not getattr(tokenizer, "is_fast", False):
        raise MidusError(
            f"the tokenizer of {source} has no tokenizer.json; add it, or use a model that has one"
        )
    if tokenizer.eos_token_id is None:
        raise MidusError(
            f"the tokenizer of {source} has no EOS token, which ends every document; set eos_token "
            "in its tokenizer_config.json"
        )
    plain = json.loads(tokenizer.backend_tokenizer.to_str())
    plain.update(truncation=None, padding=None)
    rules = Tokenizer.from_str(json.dumps(plain))
    ids = tokenizer("a").input_ids
    adds_bos = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    special = [("<EOS>", tokenizer.eos_token_id)]
    if adds_bos:
        special.append(("<BOS>", tokenizer.bos_token_id))
    rules.post_processor = TemplateProcessing(
        single="<BOS> $A <EOS>" if adds_bos else "$A <EOS>", special_tokens=special
    )
    canonical = json.dumps(plain, sort_keys=True, ensure_ascii=False).encode()
    return DocumentEncoding(
        source=str(source),
        sha256=hashlib.sha256(canonical).hexdigest(),
        # Some vocabularies have holes, and the largest id decides how wide a token is stored.
        vocab_size=max(rules.get_vocab(with_added_tokens=True).values()) + 1,
        eos_token_id=int(tokenizer.eos_token_id),
        bos_token_id=int(tokenizer.bos_token_id) if adds_bos else None,
        rules=rules.to_str(),
    )


def _load(source: str | Path) -> Any:
    from transformers import AutoTokenizer

    from midus.models.loading import load_tokenizer
    from midus.models.sources import EMBEDDED

    path = Path(source).expanduser()
    if path.exists() or str(source) == EMBEDDED or path.suffix == ".gguf":
        return load_tokenizer(source)
    # Of a hub model only the tokenizer is fetched; its weights are not needed here.
    try:
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise MidusError(
            f"{source} is no model with a tokenizer ({reason}); check the name and the connection"
        ) from error
