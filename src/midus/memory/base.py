"""What every memory layer is: attended tokens in, a correction of the residual stream out."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from midus.config import MemoryConfig


class MemoryModule(nn.Module):
    """A module whose own parameters start as ``reset_parameters`` says."""

    def reset_parameters(self) -> None:
        """Fills this module's own parameters, through ``torch.nn.init`` only.

        Hugging Face guards those functions while it loads a checkpoint, so that only tensors the
        checkpoint does not have are filled.
        """
        raise NotImplementedError


class MemoryLayer(nn.Module):
    """Mem(.): ``[B, T, attended_dim] -> [B, T, hidden_size]``, zero before training.

    Args:
        config: Options of the memory layer.
        hidden_size: Width of the residual stream (paper: d).
        num_heads: Query heads of the base's attention (paper: H).
        attended_dim: Width of the attention output that the layer reads.
    """

    def __init__(
        self, config: "MemoryConfig", hidden_size: int, num_heads: int, attended_dim: int
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_slots = config.num_slots

    def forward(self, attended: Tensor) -> Tensor:
        raise NotImplementedError
