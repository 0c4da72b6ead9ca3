"""What stands beside the weights: the model card, and the stub that loads them.

The stub lets `trust_remote_code=True` work without `import midus`; it imports the installed
package and copies none of it, so a checkpoint never carries code that could go stale.
"""

import json
import re
from pathlib import Path
from typing import Any

from midus.config import MemoryConfig
from midus.models.families import find_family, is_upscaled
from midus.models.record import base_of, inserted_positions, num_base_layers, record_of

STUB_NAME = "modeling_midus"
_MARK = "<!-- This card was written by midus. Without this line it is left alone. -->"
_LICENCE_FIELDS = ("license", "license_name", "license_link")


def auto_map(config: Any) -> dict[str, str]:
    """Which class of the stub each Auto class loads."""
    family = find_family(config.model_type)
    text = family.text_prefix or family.prefix
    return {
        "AutoConfig": f"{STUB_NAME}.Midus{text}Config",
        "AutoModel": f"{STUB_NAME}.Midus{text}Model",
        "AutoModelForCausalLM": f"{STUB_NAME}.Midus{family.prefix}ForCausalLM",
    }


def write_stub(folder: Path, config: Any) -> None:
    """Writes the stub beside the weights."""
    classes = [target.split(".")[1] for target in auto_map(config).values()]
    (folder / f"{STUB_NAME}.py").write_text(
        '"""Loads this checkpoint through the installed midus package: pip install midus."""\n\n'
        f"from midus.models import {', '.join(sorted(classes))}  # noqa: F401\n"
    )


def write_card(folder: Path, config: Any, licence: dict[str, str], tags: list[str]) -> None:
    """Writes the model card: settings, base and the base's licence."""
    record = record_of(config)
    base_model = base_of(config)
    base = base_model.get("id") or "an unnamed base"
    is_hub_id = not Path(base).is_absolute() and base.count("/") == 1
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **(licence or {"license": "other"}),
        "tags": ["midus", "depth-up-scaling", *tags],
    }
    if is_hub_id:
        front["base_model"] = base
    settings = {key: record.get(key) for key in ("method", "placement", "seed", "trainable")}
    has_memory = is_upscaled(config.model_type)
    if has_memory:
        settings |= MemoryConfig.from_dict(config.memory).to_dict()
    name = base if is_hub_id else Path(base).name
    kind = "delta (the inserted tensors only)" if record.get("is_delta") else "full"
    positions = inserted_positions(config)
    inserted = "memory blocks" if has_memory else "copied blocks"
    load = [
        *(["import midus"] if has_memory else []),
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("path/or/hub-id")',
    ]
    if record.get("is_delta") and not has_memory:
        load = ["import midus", "", 'model = midus.load_model("path/or/hub-id")']
    lines = [
        "---",
        *(f"{key}: {json.dumps(value)}" for key, value in front.items()),
        "---",
        "",
        f"# {name}, up-scaled with {record.get('method')}",
        "",
        f"{num_base_layers(config)} blocks of the base and {len(positions)} {inserted} at "
        f"{positions}; checkpoint: {kind}.",
        "",
        "```python",
        *load,
        "```",
        "",
        f"The base's licence applies: {licence.get('license', 'not stated by the base')}.",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| {key} | {value} |" for key, value in settings.items()),
        f"| base | {name} |",
        f"| base revision | {base_model.get('revision')} |",
        f"| base fingerprint | {base_model.get('fingerprint')} |",
        "",
        _MARK,
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines))


def is_our_card(path: Path) -> bool:
    """Whether a card may be replaced: it is missing or was written here."""
    return not path.is_file() or _MARK in path.read_text(errors="replace")


def read_licence(folder: Path) -> dict[str, str]:
    """The licence fields of a base's model card."""
    card = folder / "README.md"
    lines = card.read_text(errors="replace").splitlines() if card.is_file() else []
    fields: dict[str, str] = {}
    if lines and lines[0].strip() == "---":
        for line in lines[1:]:
            if line.strip() == "---":
                break
            key, _, value = line.partition(":")
            if key in _LICENCE_FIELDS and value.strip():
                said = re.split(r"\s#", value)[0].strip().strip("\"'")  # without YAML's comment
                fields[key] = "".join(char for char in said if char.isprintable())
    return fields
