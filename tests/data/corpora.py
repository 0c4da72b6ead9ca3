"""Small corpora of the tiny tokenizer's words, and folders of tokens made by hand."""

import hashlib
import json
import random

import numpy as np

EOS = 2
SHA = "0" * 64


def sentences(count: int, seed: int = 0, length: int = 9) -> list[str]:
    """Documents of ``w4`` to ``w98``, each its own token."""
    chance = random.Random(seed)
    return [" ".join(f"w{chance.randint(4, 98)}" for _ in range(length)) for _ in range(count)]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def token_folder(folder, dtype="uint16", sha=SHA, **splits):
    """A token folder with the given files' tokens: ``train=[[1, 2, 3], [4, 5]]``."""
    folder.mkdir()
    facts = {}
    for split, files in {"train": [], **splits}.items():
        entries = []
        for number, ids in enumerate(files):
            data = np.array(ids, np.dtype(dtype).newbyteorder("<")).tobytes()
            name = f"{split}-{number:05d}.bin"
            (folder / name).write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            entries.append({"name": name, "bytes": len(data), "sha256": digest})
        facts[split] = {"documents": 1, "tokens": sum(map(len, files)), "files": entries}
    manifest = {
        "format": "midus-tokens",
        "version": 1,
        "dtype": dtype,
        "tokenizer": {"source": "other", "sha256": sha},
        "splits": facts,
        "sources": [],
        "bad_rows": {"count": 0, "first": []},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def contents(folder):
    """Every file of a folder with its bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(folder, split):
    """The documents of a split as lists of ids, without their EOS."""
    found, current = [], []
    for path in sorted(folder.glob(f"{split}-*.bin")):
        for token in np.fromfile(path, "<u2").tolist():
            if token == EOS:
                found.append(current)
                current = []
            else:
                current.append(token)
    assert not current, "the last document has no end"
    return found
