"""Memory layers as modules, one paper idea a file, and the registry of their names."""

from midus.errors import MidusError
from midus.memory.base import MemoryLayer, MemoryModule
from midus.memory.hml import HeadwiseMemory

MEMORY_LAYERS: dict[str, type[MemoryLayer]] = {"hml": HeadwiseMemory}


def memory_layer_class(kind: str) -> type[MemoryLayer]:
    """The memory layer of that name."""
    if kind not in MEMORY_LAYERS:
        raise MidusError(
            f"memory layer {kind!r} is unknown; choose one of {', '.join(MEMORY_LAYERS)}"
        )
    return MEMORY_LAYERS[kind]


__all__ = ["MEMORY_LAYERS", "HeadwiseMemory", "MemoryLayer", "MemoryModule", "memory_layer_class"]
