"""The AdamW optimizer and its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lion.config import setting
from lion.layers.optim_factors import OptimFactors, optim_factors


@dataclass
class OptimConfig:
    """Settings of AdamW.

    `lr` is the learning rate for a batch of `lr_batch` samples and scales linearly with the batch size. With
    `lr_batch: null`, `lr` is used unchanged.

    `no_decay` selects the parameters without weight decay. `deit`: biases, parameters of at most one dimension, and
    parameters marked by the model (position embedding, cls). `gpt`: parameters of fewer than two dimensions, and
    parameters marked by the model. `none`: no parameters.
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
        """Return the peak learning rate for a global batch of `batch_size` samples."""
        return self.lr if self.lr_batch is None else self.lr * batch_size / self.lr_batch


class Factors(NamedTuple):
    """Factors of the weight decay and the learning rate of a parameter."""

    weight_decay: float
    lr: float


def factors(model: nn.Module, no_decay: str) -> dict[str, Factors]:
    """Return the factors of every trained parameter by name, from `no_decay` and `lion.layers.optim_factors`."""
    named = optim_factors(model)
    own_factors = {id(p): named[name] for name, p in model.named_parameters(remove_duplicate=False) if name in named}
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own = own_factors.get(id(parameter), OptimFactors())
        spared = {
            "deit": parameter.dim() <= 1 or name.endswith("bias"),
            "gpt": parameter.dim() < 2,
            "none": False,
        }[no_decay]
        decay = 1.0 if no_decay == "none" else own.weight_decay
        found[name] = Factors(0.0 if spared else decay, own.lr)
    return found


def make_optimizer(model: nn.Module, config: OptimConfig) -> tuple[torch.optim.AdamW, list[float]]:
    """Make the AdamW optimizer.

    Returns:
        The optimizer, and the learning-rate factor of each parameter group; the trainer sets the rate at every step.
    """
    parameters = dict(model.named_parameters())
    groups: dict[OptimFactors, list[nn.Parameter]] = {}
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
