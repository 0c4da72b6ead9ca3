"""A module that says how its own parameters start."""

from torch import nn


class MemoryModule(nn.Module):
    """A module whose own parameters start as ``reset_parameters`` says."""

    def reset_parameters(self) -> None:
        """Fills this module's own parameters, through ``torch.nn.init`` only.

        Hugging Face guards those functions while it loads a checkpoint, so that only tensors the
        checkpoint does not have are filled.
        """
        raise NotImplementedError
