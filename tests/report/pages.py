"""Folders as runs and analyses leave them, and pages read back as a browser would."""

import json
import struct
from dataclasses import dataclass, field
from html.parser import HTMLParser
from zlib import compress, crc32

from tiny import save_base

from midus import MemoryConfig, UpscaleConfig
from midus.upscaling import upscale_checkpoint

VOID = {"meta", "link", "img", "br", "hr", "input"}
# Drawn without children: written as <path ... />.
DRAWN = {"line", "path", "circle"}
MEMORY = UpscaleConfig(memory=MemoryConfig(num_subkeys=8))


def make_png(width=3, height=2):
    """A grey picture."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = compress((b"\0" + b"\x80" * width) * height)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


@dataclass(eq=False)
class Element:
    tag: str
    attrs: dict
    # The tree is no part of what a failing test prints.
    parents: list = field(repr=False)
    text: str = field(default="", repr=False)
    children: list = field(default_factory=list, repr=False)

    def find(self, tag):
        return [e for e in walk(self) if e.tag == tag]


def walk(element):
    for child in element.children:
        yield child
        yield from walk(child)


class Page(HTMLParser):
    """A page as a tree; fails where tags do not match."""

    def __init__(self, html):
        super().__init__()
        self.root = Element("root", {}, [])
        self._open = [self.root]
        self.feed(html)
        self.close()
        assert self._open == [self.root], [e.tag for e in self._open]

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), list(self._open))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID | DRAWN, tag
        self._open[-1].children.append(Element(tag, dict(attrs), list(self._open)))

    def handle_endtag(self, tag):
        assert self._open[-1].tag == tag, (tag, [e.tag for e in self._open])
        self._open.pop()

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def all(self, tag):
        return self.root.find(tag)

    def table(self, caption):
        """Cells of the table with that caption: a list of texts a row."""
        (table,) = [t for t in self.all("table") if t.find("caption")[0].text == caption]
        return [
            [" ".join(c.text.split()) for c in row.children if c.tag in ("th", "td")]
            for row in table.find("tr")
        ]

    def headings(self):
        return [e.text for e in walk(self.root) if e.tag in ("h1", "h2", "h3")]


def make_model(folder, delta=True):
    """A base and its grown model, two memory blocks of four and eight sub-keys."""
    if not (folder / "base").is_dir():
        save_base(folder / "base")
    upscale_checkpoint(folder / "base", folder / "grown", MEMORY, delta=delta)
    return folder / "grown"


def make_run(folder, model=None, steps=20, every=5):
    """A finished run: losses fall from 3, slots of the blocks 1 and 4 are counted."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(0, steps + 1, every):
        if step:
            lines.append(
                {
                    "step": step,
                    "loss": 3 - step / 100,
                    "grad_norm": 0.5,
                    "tokens": 64 * step,
                    "lr/decay": 1e-3 * (1 - step / steps),
                    "lr/no_decay": 1e-3 * (1 - step / steps),
                    "lr/memory": 1e-2,
                    "tokens_per_second": 100.0 + step,
                    "peak_memory_gb": 1.5,
                }
            )
        if step in (0, steps):
            slots = {f"slots_used/{block}": 0.5 + step / 100 for block in (1, 4)}
            entropy = {f"slots_entropy/{block}": 0.9 for block in (1, 4)}
            loss = 3.1 - step / 100
            held_out = {"eval_loss": loss, "eval_perplexity": 2.718281828**loss}
            lines.append({"step": step, "tokens": 64 * step, **held_out, **slots, **entropy})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"stage": "cpt", "model": "smollm2-135m", "optimizer": {"lr": 0.001}, "seed": 42}
    (folder / "options.json").write_text(json.dumps(options))
    result = {
        "steps": steps,
        "tokens": 64 * steps,
        "seconds": 600.0,
        "trainable": 6208,
        "before_loss": 3.1,
        "before_perplexity": 22.198,
        "after_loss": 2.9,
        "after_perplexity": 18.174,
        "hardware": "a machine",
        "conditions": {"date": "2026-11-15T11:46:24+00:00", "commit": "abc123", "command": "c"},
    }
    (folder / "result.json").write_text(json.dumps(result))
    if model is not None:
        (folder / "model").symlink_to(model, target_is_directory=True)
    return folder


def write_json(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    for name in values.get("figures", []):
        (path.parent / name).write_bytes(make_png())
    return path


def result(kind, model, model_id, **values):
    """What every result file says."""
    return {
        "kind": f"midus.{kind}",
        "model": model,
        "model_id": model_id,
        "hardware": "a machine",
        "versions": {"midus": "0.1.0", "torch": "2.13.0"},
        "commit": "def456",
        "date": "2026-11-15T12:00:00+00:00",
        "command": f"midus analyze {kind}",
        "figures": [] if kind == "eval" else [f"{kind}.png"],
        **values,
    }


def heads(model, model_id):
    layers = [
        {"index": 0, "base_index": 0, "kind": "base"},
        {"index": 1, "base_index": 1, "kind": "memory"},
        {"index": 2, "base_index": 1, "kind": "base"},
    ]
    summary = {
        "num_base_layers": 2,
        "num_layers_of_higher_variance": 1,
        "mean_variance_ratio": 1.5,
        "median_variance_ratio": 1.25,
        "share_of_risen_heads": 0.75,
        "mean_importance": {"base": 0.1, "model": 0.2},
        "mean_gini": {"base": 0.3, "model": 0.4},
    }
    return result(
        "heads",
        model,
        model_id,
        task="piqa",
        num_examples=100,
        reduction="example",
        loss="sum",
        layer_norm=False,
        dtype="float32",
        base={"model": "smollm2-135m", "model_id": "0" * 12, "num_layers": 2, "num_heads": 2},
        layers={"base": layers[::2], "model": layers},
        importance={"base": [[0.1, 0.2], [0.1, 0.0]], "model": [[0.1, 0.5], [0.3, 0.3], [0.2, 0]]},
        variance={"base": [0.0025, 0.0025], "model": [0.04, 0.0, 0.01]},
        summary=summary,
    )


def slots(model, model_id):
    block = {
        "index": 1,
        "anchor": 1,
        "kind": "hml",
        "num_heads": 4,
        "num_slots": 64,
        "top_k": 4,
        "used": 0.25,
        "entropy": 0.5,
        "weighted_entropy": 0.4,
        "dead_slots": [1, 2, 3, 4],
        "slots_no_head_uses": 7,
        "busiest_percent_share": 0.2,
        "head_overlap": {"jaccard": [], "cosine": [], "mean_jaccard": 0.1, "mean_cosine": 0.2},
        "value_norms": {"median": 0.3, "zero_rows": 5},
        "correction_ratio": 0.0125,
        "rank_frequency": {"rank": [1], "share": [1.0]},
    }
    tokens = [{"token": token, "count": 3, "lift": 2.0} for token in (" the", "\n")]
    slot = {
        "head": 2,
        "slot": 17,
        "row": 2,
        "col": 1,
        "count": 12,
        "weight": 3.5,
        "value_norm": 1.0,
        "tokens": tokens,
        "next_tokens": tokens,
        "promotes": [{"token": " sea", "logit": 1.0}],
        "suppresses": [{"token": "\u27e8x\u27e9", "logit": -1.0}],
        "contexts": [{"left": "over ", "token": "the", "right": " sea & <b>", "weight": 0.75}],
    }
    busiest = {"block": 1, "slots": [slot]}
    text = {"text": "moby.txt", "num_tokens": 1024, "window": 256}
    return result("slots", model, model_id, blocks=[block], busiest=busiest, **text)


def theorem(model=None, model_id=None):
    curve = {
        "rank": [0, 1],
        "hive_loss": [1.0, 0.25],
        "headwise_loss": 0.25,
        "shared_loss": 0.5,
        "head_width": 8,
    }
    return result(
        "theorem",
        model,
        model_id,
        instances=20,
        seed=0,
        max_equality_error=1.3e-15,
        max_bound_violation=-0.1,
        min_strict_gap=0.33,
        counter_example_gap=1.5e-16,
        heterogeneity={"scale": [0.0, 1.0], "gap": [0.0, 0.5], "formula": [0.0, 0.5]},
        rank_curve=curve,
        near_rank_curve=curve,
        model_check=None,
    )


def evaluation(rows, suite="general", limit=None, missing=(), paper=(), **values):
    """Two tasks and a perplexity; ``rows`` holds (model, id, arc, piqa, perplexity)."""
    columns = [
        {"task": "arc_easy", "label": "ARC", "metric": "acc", "higher_is_better": True},
        {"task": "piqa", "label": "PIQA", "metric": "acc", "higher_is_better": True},
        {"task": "wikitext", "label": "Wiki", "metric": "ppl", "higher_is_better": False},
    ]
    for column in columns:
        column |= {"percent": column["higher_is_better"], "shots": 0}
    lines = []
    for model, model_id, *scores in rows:
        named = zip(("arc_easy", "piqa", "wikitext"), scores, strict=True)
        lines.append(
            {
                "model": model,
                "model_id": model_id,
                "dtype": "float32",
                "scores": {
                    task: {"value": value, "stderr": 0.01, "num_docs": 50}
                    for task, value in named
                    if value is not None
                },
                "average": None if None in scores[:2] else sum(scores[:2]) / 2,
            }
        )
    document = {
        "suite": suite,
        "limit": limit,
        "columns": columns,
        "average": {"label": "Average", "over": ["arc_easy", "piqa"]},
        "missing": list(missing),
        "rows": lines,
        "paper": list(paper),
    }
    return result("eval", rows[0][0], rows[0][1], **{**document, **values})
