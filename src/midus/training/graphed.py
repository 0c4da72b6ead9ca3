"""Forward and backward of a micro batch as one CUDA graph, captured once and replayed.

A step launches thousands of kernels. Of a small model each runs for microseconds, less than Python
takes to launch the next one, and the GPU waits; a graph launches them all at once. The
operations are the eager step's; in bfloat16 neither repeats to the bit (docs/training.md).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from midus.models.captured_attention import causal_attention, why_not_captured
from midus.models.fused import is_llama_like

Batch = dict[str, Tensor]


class GraphedStep:
    """Adds the gradients of one micro batch to the parameters' and gives its loss.

    Gradients live at fixed places; setting them to None between steps empties those.

    Args:
        model: A causal language model in training mode for which `why_not_graphed` is empty.
        loss_of: The loss of a batch by the model, ready for ``backward``.
        example: A batch; later ones have the same names, shapes and types.

    Raises:
        RuntimeError: It could not be captured, for want of memory or otherwise; the gradients are
            as they were.
    """

    def __init__(self, model: Any, loss_of: Callable[[Batch], Tensor], example: Batch) -> None:
        self._model, self._captured = model, _places(model)
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._batch = {name: tensor.clone() for name, tensor in example.items()}
        before = [parameter.grad for parameter in self._trained]
        device = next(iter(example.values())).device
        outer = torch.cuda.current_stream(device)
        try:
            with causal_attention(model), torch.cuda.device(device):
                self._capture(loss_of, torch.cuda.Stream(device), before)
        except RuntimeError:
            _leave_capture(device, outer)
            for parameter, old in zip(self._trained, before, strict=True):
                parameter.grad = old
            raise

    def _capture(
        self,
        loss_of: Callable[[Batch], Tensor],
        stream: torch.cuda.Stream,
        before: list[Tensor | None],
    ) -> None:
        self._warm_up(loss_of, stream)
        self._grads = [torch.zeros_like(parameter) for parameter in self._trained]
        for parameter, grad, old in zip(self._trained, self._grads, before, strict=True):
            parameter.grad = grad
            if old is not None:
                grad.copy_(old)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._loss = loss_of(self._batch)
            self._loss.backward()

    def is_current(self) -> bool:
        """Whether the model's weights are where they were and train as they did."""
        return _places(self._model) == self._captured

    def fits(self, batch: Batch) -> bool:
        """Whether a batch is of the example's kind."""
        return batch.keys() == self._batch.keys() and all(
            _kind(batch[name]) == _kind(own) for name, own in self._batch.items()
        )

    def __call__(self, batch: Batch) -> Tensor:
        """The loss; the gradients have been added."""
        for name, own in self._batch.items():
            own.copy_(batch[name])
        emptied = [
            (parameter, grad)
            for parameter, grad in zip(self._trained, self._grads, strict=True)
            if parameter.grad is not grad
        ]
        if emptied:
            torch._foreach_zero_([grad for _, grad in emptied])
            for parameter, grad in emptied:
                if parameter.grad is not None:
                    grad.copy_(parameter.grad)
                parameter.grad = grad
        self._graph.replay()
        return self._loss.detach().clone()

    def _warm_up(self, loss_of: Callable[[Batch], Tensor], stream: torch.cuda.Stream) -> None:
        """What first calls allocate and compile must not happen while a graph is captured."""
        device, current = stream.device, torch.cuda.current_stream(stream.device)
        for parameter in self._trained:
            parameter.grad = None
        stream.wait_stream(current)
        with torch.random.fork_rng([device]), torch.cuda.stream(stream):
            loss_of(self._batch).backward()
        current.wait_stream(stream)
        for parameter in self._trained:
            parameter.grad = None


def why_not_graphed(model: Any, names: Iterable[str]) -> str:
    """What keeps a model's step on batches of such names from being captured; empty if nothing."""
    reason = why_not_captured(model)
    if reason:
        return reason
    others = set(names) - {"input_ids", "labels", "num_items_in_batch"}
    if others:
        return f"batches have {', '.join(sorted(others))}, and graphs are for packed text"
    if getattr(model, "is_gradient_checkpointing", False):
        return "gradient checkpointing computes blocks twice"
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return "its query norm keeps running statistics"
    modules = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    if any(module.p > 0 for module in modules) or model.config.to_dict().get("attention_dropout"):
        return "it has dropout"
    attentions = [module.self_attn for module in model.modules() if hasattr(module, "self_attn")]
    if not all(is_llama_like(model.config, attention) for attention in attentions):
        return "some of its blocks attend otherwise than Llama's"
    return ""


def _leave_capture(device: torch.device, outer: torch.cuda.Stream) -> None:
    """Puts right what PyTorch leaves behind where the end of a capture fails.

    It does not leave the capture's stream, and the generator of random numbers goes on counting for
    the graph; a copy of it does not.
    """
    torch.cuda.set_stream(outer)
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


def why_failed(error: RuntimeError) -> str:
    """A failed capture as the reason that `why_not_graphed` could not know."""
    first = str(error).strip().partition("\n")[0]
    return f"capturing the step failed ({type(error).__name__}: {first})"


def _places(model: Any) -> list[tuple[int, bool]]:
    return [(p.data_ptr(), p.requires_grad) for p in model.parameters()]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device
