"""Base model to deeper model: the methods by name, and the two ways to run one.

`upscale` grows a loaded model and shares its weights; `upscale_checkpoint` grows a stored one, file
to file, without building it.
"""

from midus.upscaling.build import upscale
from midus.upscaling.methods import METHODS
from midus.upscaling.stored import merge_delta, upscale_checkpoint

__all__ = ["METHODS", "merge_delta", "upscale", "upscale_checkpoint"]
