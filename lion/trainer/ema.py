"""Exponential moving average of a model, and protection of its buffers from skipped steps."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> list[str]:
    """Return the names of the buffers that are saved in a checkpoint of the model."""
    held = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in held]


class Buffers:
    """The persistent buffers of a model (running statistics), which a skipped step must leave unchanged."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, persistent_buffers(model)
        self.before: list[Tensor] = []

    def current(self) -> list[Tensor]:
        held = dict(self.model.named_buffers()) if self.names else {}
        return [held[name] for name in self.names]

    def keep(self) -> None:
        self.before = [buffer.clone() for buffer in self.current()]

    def put_back(self, skipped: Tensor) -> None:
        """Restore the kept buffers if the tensor `skipped` is not 0, without waiting for the device."""
        for buffer, before in zip(self.current(), self.before):
            buffer.copy_(torch.where(skipped.bool(), before, buffer))


class Average:
    """An exponential moving average of a model, `average = decay * average + (1 - decay) * model` at every step.

    The average covers the weights and persistent floating-point buffers of the model. Other persistent buffers
    (counts) are copied. A skipped step counts as a step in which the model did not change.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.buffers = persistent_buffers(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - self.decay)
        averaged, current = (dict(m.named_buffers()) if self.buffers else {} for m in (self.model, model))
        for name in self.buffers:
            if averaged[name].is_floating_point():
                averaged[name].lerp_(current[name], 1 - self.decay)
            else:
                averaged[name].copy_(current[name])
