"""What follows the weights: the averaged model, and buffers that a skipped step must not change."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def persistent_buffers(model: nn.Module) -> list[str]:
    """Names of what a checkpoint of the model holds beside its parameters."""
    held = model.state_dict().keys()
    return [name for name, _ in model.named_buffers() if name in held]


class Buffers:
    """A model's persistent buffers (running statistics), which a skipped step must leave as they were before it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, persistent_buffers(model)
        self.before: list[Tensor] = []

    def current(self) -> list[Tensor]:
        held = dict(self.model.named_buffers()) if self.names else {}
        return [held[name] for name in self.names]

    def keep(self) -> None:
        self.before = [buffer.clone() for buffer in self.current()]

    def put_back(self, skipped: Tensor) -> None:
        """What was kept, where `skipped`, a tensor, is not 0; nothing waits for the device."""
        for buffer, before in zip(self.current(), self.before):
            buffer.copy_(torch.where(skipped.bool(), before, buffer))


class Average:
    """An exponential moving average of a model, `average = decay * average + (1 - decay) * model` at every step.

    It covers what a checkpoint of the model holds: weights and floating buffers; other buffers (counts) are copied. A
    skipped step counts as one in which the model stood still.
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
