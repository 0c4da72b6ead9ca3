"""Training grown models: which tensors get which learning rate."""

from midus.training.optim import constant_memory_schedule, parameter_groups

__all__ = ["constant_memory_schedule", "parameter_groups"]
