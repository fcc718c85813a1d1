"""The averaged model."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    """An exponential moving average of a model, `average = decay * average + (1 - decay) * model` at every step.

    It covers what a checkpoint of the model holds: weights and floating buffers; other buffers (counts) are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        held = model.state_dict().keys()
        self.buffers = [name for name, _ in model.named_buffers() if name in held]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - self.decay)
        averaged, current = (dict(m.named_buffers()) if self.buffers else {} for m in (self.model, model))
        for name in self.buffers:
            if averaged[name].is_floating_point():
                averaged[name].lerp_(current[name], 1 - self.decay)
            else:
                averaged[name].copy_(current[name])
