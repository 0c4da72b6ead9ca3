"""Recipes of whole runs: what a file gets where it says nothing, beyond the paper.

Unlike ``optimizer.recipe``, which names rates for any method, a recipe says what memory blocks are,
how their keys start and how each part trains. It is written out when a file is read, so a run
saves, and a study compares, plain options.
"""

from typing import Any

from midus.errors import MidusError

_FALLING = {"schedule": "cosine", "warmup_ratio": 0.02}
_STEADY = {"schedule": "constant", "warmup_ratio": 0.02}
# A table for every head, which reads stream and attention by keys among the base's queries.
_MEMORY = {
    "kind": "hml",
    "values": "independent",
    "num_subkeys": 28,
    "attention_residual": True,
    "query_norm": "layer",
    "key_scale": 3.5,
}
# Matrices by Muon: 8e-3 in 400 steps on the base below.
_MUON = {
    "recipe": "short",
    "matrices": "muon",
    "relative_lr": 0.042,
    "for_steps": 400,
    "schedule": "linear",
    "warmup_ratio": 0.02,
}
_KEYS = {"lr": 1e-2, **_FALLING}
# All are for runs of hundreds of steps, and were chosen in docs/results/quality_recipe.md on a
# base whose weights have size 0.19. Keys are compared with queries that a norm has scaled,
# whatever the base. What writes into the stream goes with its size.
_RECIPES: dict[str, dict[str, Any]] = {
    # Many blocks with small tables, whose output shares a map with attention's: 1e-2 for the table
    # there.
    "short": {
        "key_start": "queries",
        "optimizer": {
            **_MUON,
            "parts": {
                "values": {"relative_lr": 0.053, "for_steps": 400, "steps_power": 0.5, **_STEADY},
                "keys": _KEYS,
                "bypass": {"by_stream": True},
            },
        },
        "upscale": {
            "method": "midus",
            "placement": "dense",
            "memory": {**_MEMORY, "num_subkeys": 16, "top_k": 8, "bypass": "joined"},
        },
    },
    # As many parameters in half as many blocks as the base has, with larger tables: 5e-3 for them.
    # At a constant rate a table comes as far in any number of steps.
    "short_half": {
        "key_start": "queries",
        "optimizer": {
            **_MUON,
            "parts": {
                "values": {
                    "relative_lr": 0.026,
                    "for_steps": 400,
                    "steps_power": 1.0,
                    **_STEADY,
                    "by_stream": True,
                },
                "keys": _KEYS,
                "bypass": {"by_stream": True},
                "output_proj": {"by_stream": True},
            },
        },
        "upscale": {
            "method": "midus",
            "memory": {**_MEMORY, "bypass": "attention", "memory_output_proj": True},
        },
    },
    # The like by AdamW alone, which learns less and forgets less: 6e-3 and 3e-2 there.
    "short_adamw": {
        "key_start": "queries",
        "optimizer": {
            "recipe": "short",
            "relative_lr": 0.032,
            "parts": {
                "values": {"relative_lr": 0.16, **_FALLING},
                "keys": _KEYS,
            },
        },
        "upscale": {"method": "midus", "memory": {**_MEMORY, "bypass": "both"}},
    },
}

# What the recipe leaves out where the file has a rate of its own.
_RATES = ("lr", "relative_lr")
_OF_A_RATE = (*_RATES, "for_steps", "steps_power")


RUN_RECIPES = tuple(_RECIPES)


def recipe_blocks(name: str) -> dict[str, Any]:
    """What blocks a recipe inserts and where, in the words of ``upscale``."""
    return dict(_RECIPES[name]["upscale"])


def with_recipe(values: Any) -> Any:
    """The options of a mapping, with those of its ``recipe`` where it gives none of its own."""
    if not isinstance(values, dict) or "recipe" not in values:
        return values
    own = {name: value for name, value in values.items() if name != "recipe"}
    name = values["recipe"]
    if name is None:
        return own
    if not isinstance(name, str) or name not in _RECIPES:
        known = ", ".join(_RECIPES)
        raise MidusError(f"recipe={name!r} is unknown; choose one of {known}, or leave it out")
    if own.get("stage") != "cpt":
        raise MidusError(
            f"recipe={name!r} grows a model and trains it on text; use it with stage: cpt"
        )
    if own.get("control") not in (None, "none"):
        raise MidusError(
            f"recipe={name!r} is for memory blocks, and control={own['control']!r} trains none; "
            "leave one of them out"
        )
    filled: dict[str, Any] = _filled(own, _of_memory_lr(own, _RECIPES[name]))
    upscale = filled["upscale"]
    if upscale["method"] != "midus" or upscale["memory"]["kind"] != "hml":
        raise MidusError(
            f"recipe={name!r} is for MIDUS-HML; leave it out with upscale.method="
            f"{upscale['method']!r} and upscale.memory.kind={upscale['memory']['kind']!r}"
        )
    return filled


def _of_memory_lr(own: dict[str, Any], recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without rates of keys and values where the file has one for both."""
    optimizer = own.get("optimizer")
    if not isinstance(optimizer, dict) or optimizer.get("memory_lr") is None:
        return recipe
    parts = dict(recipe["optimizer"]["parts"])
    for name in ("keys", "values"):
        parts[name] = {key: value for key, value in parts[name].items() if key not in _OF_A_RATE}
    return {**recipe, "optimizer": {**recipe["optimizer"], "parts": parts}}


def _filled(own: dict[str, Any], recipe: dict[str, Any], where: str = "") -> dict[str, Any]:
    filled = dict(own)
    has_rate = any(own.get(name) is not None for name in _RATES)
    for name, value in recipe.items():
        said = filled.get(name)
        if has_rate and name in _OF_A_RATE:
            continue
        if name == "placement" and own.get("positions") is not None:
            continue
        if not isinstance(value, dict):
            filled.setdefault(name, value)
        elif said is None:
            filled[name] = _filled({}, value)
        elif isinstance(said, dict):
            filled[name] = _filled(said, value, f"{where}{name}.")
        else:
            raise MidusError(f"{where}{name}={said!r} must be a mapping of options")
    return filled
