"""AdamW and its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lion.config import setting
from lion.layers.marks import Marks, marks_of


@dataclass
class OptimConfig:
    """AdamW. `lr` holds for `lr_batch` samples a step and scales linearly with the batch; null takes it as it is.

    `no_decay` says which parameters weight decay spares: `deit` those of one dimension, biases, and what the model
    marks (position embedding, cls); `gpt` those of fewer than two dimensions, and what the model marks; `none` none.
    """

    lr: float = setting(above=0)
    lr_batch: int | None = setting(None, min=1)
    weight_decay: float = setting(0.0, min=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = setting(1e-8, above=0)
    no_decay: str = setting("deit", choices=("deit", "gpt", "none"))

    def __post_init__(self) -> None:
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")

    def peak(self, batch_size: int) -> float:
        """The learning rate of a global batch of `batch_size` samples."""
        return self.lr if self.lr_batch is None else self.lr * batch_size / self.lr_batch


class Factors(NamedTuple):
    """What a parameter's weight decay and learning rate are multiplied by."""

    weight_decay: float
    lr: float


def factors(model: nn.Module, no_decay: str) -> dict[str, Factors]:
    """Of every trained parameter, by name: the rule, and what the modules mark (`lion.layers.marks`)."""
    marked = marks_of(model)
    marks = {id(p): marked[name] for name, p in model.named_parameters(remove_duplicate=False) if name in marked}
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = marks.get(id(parameter), Marks())
        spared = {
            "deit": parameter.dim() <= 1 or name.endswith("bias"),
            "gpt": parameter.dim() < 2,
            "none": False,
        }[no_decay]
        decay = 1.0 if no_decay == "none" else own.weight_decay
        found[name] = Factors(0.0 if spared else decay, own.lr)
    return found


def make_optimizer(model: nn.Module, config: OptimConfig) -> tuple[torch.optim.AdamW, list[float]]:
    """AdamW, and for each of its groups the factor of the learning rate, which the trainer sets at every step."""
    parameters, groups = dict(model.named_parameters()), {}
    for name, factor in factors(model, config.no_decay).items():
        groups.setdefault(factor, []).append(parameters[name])
    order = sorted(groups, reverse=True)
    optimizer = torch.optim.AdamW(
        [{"params": groups[factor], "weight_decay": config.weight_decay * factor.weight_decay} for factor in order],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    return optimizer, [factor.lr for factor in order]
