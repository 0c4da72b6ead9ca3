"""Registers the up-scaled models with transformers the first time an Auto class is asked for one.

Registering needs the model classes, hence torch and transformers: seconds that `midus --help` and a
bare `import midus` should not take. Importing them as soon as transformers is imported is no way
out either, since transformers' own modules are then half initialised. So the two calls through
which every Auto class finds a config, `AutoConfig.from_pretrained` and `AutoConfig.for_model`,
register first and then do what they always do.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_AUTO = "transformers.models.auto.configuration_auto"
_CALLS = ("from_pretrained", "for_model")


def register_with_transformers() -> None:
    """Prepares `AutoConfig`, now if it is imported, else when it is."""
    module = sys.modules.get(_AUTO)
    if module is not None and hasattr(module, "AutoConfig"):
        _prepare(module.AutoConfig)
    elif not any(isinstance(finder, _AutoConfigFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoConfigFinder())


def _prepare(auto_config: Any) -> None:
    """Makes the two calls register before they run, once."""
    if "midus.models" in sys.modules:
        return
    originals = {name: vars(auto_config)[name] for name in _CALLS}

    def wrapped(name: str) -> Any:
        def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            for call_name, original in originals.items():
                setattr(auto_config, call_name, original)
            import_module("midus.models")
            return getattr(cls, name)(*args, **kwargs)

        call.__doc__ = originals[name].__func__.__doc__
        return call

    for name, original in originals.items():
        setattr(auto_config, name, type(original)(_bound(wrapped(name), original, auto_config)))


def _bound(call: Any, original: Any, auto_config: Any) -> Any:
    """``call`` in the shape of the descriptor it stands in for."""
    if isinstance(original, staticmethod):
        return lambda *args, **kwargs: call(auto_config, *args, **kwargs)
    return call


class _AutoConfigFinder(MetaPathFinder):
    """Waits for the module of `AutoConfig` and lets every other import pass."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AUTO:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenPrepare(spec.loader, self)
                return spec
        return None


class _ThenPrepare(Loader):
    """Loads the module as its own loader does, then prepares what it defined."""

    def __init__(self, loader: Loader, finder: MetaPathFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _prepare(module.AutoConfig)
