"""Memory layers as modules, one paper idea a file, and the registry of their names."""

from midus.errors import MidusError
from midus.memory.base import MemoryLayer
from midus.memory.hml import HeadwiseMemory
from midus.memory.linear import LinearMemory
from midus.memory.module import MemoryModule
from midus.memory.pkm import ProductKeyMemory
from midus.memory.ultramem import UltraMemory

MEMORY_LAYERS: dict[str, type[MemoryLayer]] = {
    "hml": HeadwiseMemory,
    "linear": LinearMemory,
    "pkm": ProductKeyMemory,
    "ultramem": UltraMemory,
}


def memory_layer_class(kind: str) -> type[MemoryLayer]:
    """The memory layer of that name."""
    if kind not in MEMORY_LAYERS:
        raise MidusError(
            f"memory layer {kind!r} is unknown; choose one of {', '.join(MEMORY_LAYERS)}"
        )
    return MEMORY_LAYERS[kind]


__all__ = ["MEMORY_LAYERS", "HeadwiseMemory", "MemoryLayer", "MemoryModule", "memory_layer_class"]
