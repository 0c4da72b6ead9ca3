"""Hugging Face's training step by graph replay, where that can be."""

import warnings
from typing import Any

import torch
from torch import Tensor

from midus.training.graphed import Batch, GraphedStep, why_failed, why_not_graphed


class GraphedStepsMixin:
    """Goes before `transformers.Trainer`; its first optimizer step is eager, then graphs replay.

    Eager steps come first so that the optimizer's states are there when the graph takes its memory,
    and what is reported as the peak is one. A batch of another shape runs eagerly.
    """

    cuda_graphs: bool = False
    """Whether steps may be graphed."""
    _graphed: GraphedStep | None = None

    def training_step(
        self: Any, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """As the trainer's."""
        if not self.cuda_graphs or self.args.device.type != "cuda":
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc,no-any-return]
        inputs = self._prepare_inputs(inputs)
        batch = {**inputs, "num_items_in_batch": _as_tensor(num_items_in_batch, self.args.device)}
        if self._graphed is not None and not self._graphed.is_current():
            self._graphed = None  # somebody froze, unfroze or replaced weights
        if self._graphed is None and self._bare_optimizer().state:
            self._graphed = self._capture(model, batch)
        if self._graphed is None or not self._graphed.fits(batch):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc,no-any-return]
        loss: Tensor = self._graphed(batch)
        return loss

    def _capture(self: Any, model: Any, batch: Batch) -> GraphedStep | None:
        def loss_of(batch: Batch) -> Tensor:
            with self.compute_loss_context_manager():
                inputs = {k: v for k, v in batch.items() if k != "num_items_in_batch"}
                loss: Tensor = self.compute_loss(
                    model, inputs, num_items_in_batch=batch["num_items_in_batch"]
                )
                return loss

        reason = self._why_not(model, batch)
        if not reason:
            model.train()
            try:
                return GraphedStep(model, loss_of, batch)
            except RuntimeError as error:
                reason = why_failed(error)
        warnings.warn(
            f"training without CUDA graphs: {reason} (cuda_graphs: false ends this warning)",
            stacklevel=2,
        )
        self.cuda_graphs = False
        return None

    def _why_not(self: Any, model: Any, batch: Batch) -> str:
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            return "there are several processes or devices"
        if model is not self._bare_model():
            return "the model is wrapped or compiled"
        if self.accelerator.scaler is not None:
            return "the loss is scaled"
        if batch["num_items_in_batch"] is None or not self.model_accepts_loss_kwargs:
            return "tokens of a step are not counted beforehand"
        return why_not_graphed(model, batch)


def _as_tensor(count: Any, device: torch.device) -> Tensor | None:
    if count is None:
        return None
    return torch.as_tensor(count, device=device)
