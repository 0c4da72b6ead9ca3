"""Functions on tensors behind the memory layers; no modules, no transformers."""

from midus.ops.linear_topk.reference import linear_topk
from midus.ops.product_key_topk.reference import product_key_topk
from midus.ops.tucker_topk.reference import tucker_topk
from midus.ops.weighted_gather.reference import weighted_gather

__all__ = ["linear_topk", "product_key_topk", "tucker_topk", "weighted_gather"]
