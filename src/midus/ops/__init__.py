"""Functions on tensors behind the memory layers; no modules, no transformers."""

from midus.ops.product_key_topk.reference import product_key_topk
from midus.ops.weighted_gather.reference import weighted_gather

__all__ = ["product_key_topk", "weighted_gather"]
