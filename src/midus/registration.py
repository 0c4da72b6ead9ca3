"""Registers the up-scaled models with transformers the moment its Auto classes are imported.

Registering needs the model classes, hence torch and transformers: seconds that `midus --help` and
a bare `import midus` should not take. So if the Auto classes are not there yet, a finder waits for
their import and registers right after it.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_AUTO = "transformers.models.auto.modeling_auto"


class _ThenRegister(Loader):
    """Loads a module as its own loader does, then imports `midus.models`, which registers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        import_module("midus.models")


class _AutoFinder(MetaPathFinder):
    """Watches for the one import, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


def register_with_transformers() -> None:
    """Registers now if the Auto classes are imported, else when they are."""
    if _AUTO in sys.modules:
        import_module("midus.models")
    elif not any(isinstance(finder, _AutoFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AutoFinder())
