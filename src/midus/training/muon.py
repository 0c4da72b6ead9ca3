"""Muon for the matrices of blocks, beside another optimizer for the rest (beyond the paper).

AdamW's step is as large in every entry of a matrix; Muon's, the orthogonal matrix nearest to the
momentum, in every direction. It is for matrices alone, so two optimizers share groups and state
here, and are one to schedules, checkpoints and the trainer.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from midus.training.orthogonal import Group, step_matrices


class MuonBeside(Optimizer):
    """Steps groups that are marked ``muon`` by Muon, and the others by another optimizer.

    A step of Muon is scaled to the size of AdamW's ("Muon is scalable for LLM training", 2025), so
    rates mean the same for both.

    Args:
        groups: Groups of parameters, as `split_for_muon` makes them.
        make_other: Makes the other optimizer of its groups.
    """

    def __init__(
        self, groups: Iterable[Group], make_other: Callable[[list[Group]], Optimizer]
    ) -> None:
        super().__init__(list(groups), {})
        others = self._groups(False)
        self._other = make_other(others) if others else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_matrices(self._groups(True), self.state)
        if self._other is not None:
            # What loads a state (accelerate does) puts new objects into the places of old ones.
            self._other.param_groups, self._other.state = self._groups(False), self.state
            self._other.step()
        return loss

    def _groups(self, is_muon: bool) -> list[Group]:
        return [group for group in self.param_groups if group.get("muon", False) == is_muon]


def split_for_muon(
    groups: Iterable[Group], model: nn.Module, tables: Container[str]
) -> list[Group]:
    """The same groups, with the matrices of blocks in groups apart that are marked ``muon``.

    Head projections, norms, biases and both embeddings stay where they are.

    Args:
        groups: Groups with names.
        model: Whose parameters they are.
        tables: Names of groups that stay too, whose rows are slots and read one by one.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or module is head
    }
    made: list[Group] = []
    for group in groups:
        is_table = group["name"] in tables
        by_muon = [
            parameter
            for parameter in group["params"]
            if parameter.ndim == 2 and not is_table and id(parameter) not in embeddings
        ]
        taken = set(map(id, by_muon))
        others = [parameter for parameter in group["params"] if id(parameter) not in taken]
        if by_muon:
            # Parts keep their names, which their schedules go by.
            name = "matrices" if group["name"] == "decay" else group["name"]
            made.append({**group, "name": name, "params": by_muon, "muon": True})
        if others:
            made.append({**group, "params": others})
    return made
