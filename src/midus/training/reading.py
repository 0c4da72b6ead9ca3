"""YAML files as options: overrides into their depths, and mappings as dataclasses."""

from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from midus.data.options import DataOptions
from midus.errors import MidusError

_ENDLESS = "holds a list or mapping within itself, or too many within each other; write it flat"


def read_yaml(
    path: str | Path, overrides: list[str] | tuple[str, ...], example: str
) -> dict[str, Any]:
    """The mapping a YAML file holds, with ``a.b=value`` overrides.

    Args:
        path: The file.
        overrides: As ``read_options`` takes them.
        example: What its first line might be, for messages.
    """
    import yaml

    file = Path(path)
    try:
        # Numbers are made here, in a copy that shares nothing: YAML's aliases are one object.
        values = numeric(yaml.load(file.read_text(encoding="utf-8"), Loader=_unique_keys()))
    except OSError as error:
        raise MidusError(f"{file} cannot be read ({error.strerror}); give a YAML file") from error
    except (yaml.YAMLError, ValueError) as error:  # such as 2024-13-01, a date that is none
        reason = " ".join(str(error).split())
        raise MidusError(f"{file} is not valid YAML ({reason})") from error
    except RecursionError as error:
        raise MidusError(f"{file} {_ENDLESS}") from error
    if not isinstance(values, dict):
        raise MidusError(f"{file} holds no options; write them as `{example}` and so on")
    for override in overrides:
        override_option(values, override)
    return values


def _unique_keys() -> Any:
    """PyYAML's safe loader, which would take the last of two equal keys without a word."""
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)  # before merges are written into it
            keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for key in keys:
                if key != "<<" and keys.count(key) > 1:
                    raise yaml.composer.ComposerError(
                        None, None, f"{key} is given twice", node.start_mark
                    )
            return node

    return UniqueKeys


def override_option(values: Any, override: str) -> None:
    """Sets what ``a.b=value`` says."""
    import yaml

    key, equals, text = override.partition("=")
    if not equals or not key:
        raise MidusError(f"--set {override!r} must be a key and a value, such as optimizer.lr=1e-4")
    try:
        value = numeric(yaml.safe_load(text))
    except (yaml.YAMLError, ValueError) as error:
        raise MidusError(f"--set {override!r}: {text!r} is no YAML value") from error
    except RecursionError as error:
        raise MidusError(f"--set {override!r} {_ENDLESS}") from error
    set_option(values, key, value, f"--set {override!r}")


def set_option(values: Any, key: str, value: Any, said: str) -> None:
    """Puts a value into nested options.

    Args:
        values: What a YAML file holds; it is changed.
        key: Names with dots between them; a number reaches into a list.
        value: What stands there then.
        said: Who asks for it, for messages.
    """
    *path, last = key.split(".")
    place = values
    for part in path:
        if _is_index(part, place):
            if isinstance(place[int(part)], str):
                place[int(part)] = {"path": place[int(part)]}  # a source written as its path
            place = place[int(part)]
        elif isinstance(place, dict):
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        else:
            raise MidusError(f"{said}: there is no {part!r} in the file to set it in")
    if _is_index(last, place):
        place[int(last)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise MidusError(f"{said}: there is no {last!r} in the file to set it in")


def _is_index(part: str, place: Any) -> bool:
    is_number = part.isascii() and part.isdecimal()
    return isinstance(place, list) and is_number and int(part) < len(place)


def numeric(value: Any) -> Any:
    """YAML 1.1 takes 1e-4 for a string; people mean the number."""
    if isinstance(value, dict):
        return {key: numeric(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numeric(item) for item in value]
    if isinstance(value, str) and "e" in value.lower():
        try:
            return float(value)
        except ValueError:
            return value
    return value


def default_option(cls: type[Any], name: str) -> Any:
    """What an option is where nobody gives it; None where it has to be given.

    Args:
        cls: The dataclass of all options.
        name: The option's, with dots between those of nested dataclasses, or mappings of them.
    """
    first, _, rest = name.partition(".")
    known = {f.name: f for f in fields(cls)}
    if first not in known:
        return None
    if not rest:
        default, factory = known[first].default, known[first].default_factory
        if default is not MISSING:
            return default
        return None if factory is MISSING else factory()
    kind = get_type_hints(cls)[first]
    inner = _nested(kind)
    if inner is None:
        return None
    return default_option(inner, rest.partition(".")[2] if get_origin(kind) is dict else rest)


def _nested(kind: Any) -> Any:
    """The dataclass that an option's type is or has, if it has one."""
    return next((t for t in (kind, *get_args(kind)) if is_dataclass(t)), None)


def build_options(cls: type[Any], values: Any, where: str, besides: tuple[str, ...] = ()) -> Any:
    """A dataclass from a mapping, nested ones included.

    Args:
        cls: The dataclass.
        values: The mapping.
        where: Names of what it is nested in, for messages.
        besides: What may be said there and is no field, for messages.
    """
    if not isinstance(values, dict):
        raise MidusError(f"{where.rstrip('.')}={values!r} must be a mapping of options")
    known = {f.name: f for f in fields(cls)}
    for key in values:
        if key not in known:
            names = ", ".join([*besides, *known])
            raise MidusError(f"unknown option {where}{key}; known options: {names}")
    types = get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, value in values.items():
        kind = _nested(types[name])
        if kind is DataOptions:
            made[name] = DataOptions.from_dict(numeric(value))
        elif kind is not None and value is None and types[name] is kind:
            continue  # null takes the section's defaults
        elif kind is not None and get_origin(types[name]) is dict:
            if not isinstance(value, dict):
                raise MidusError(f"{where}{name}={value!r} must be a mapping of options by name")
            made[name] = {
                part: build_options(kind, own, f"{where}{name}.{part}.")
                for part, own in value.items()
            }
        elif kind is not None and value is not None:
            made[name] = build_options(kind, value, f"{where}{name}.")
        else:
            made[name] = numeric(value)
    missing = [
        f"{where}{name}"
        for name, f in known.items()
        if name not in made and f.default is f.default_factory  # both MISSING
    ]
    if missing:
        raise MidusError(f"{missing[0]} is missing; add it to the file")
    return cls(**made)
