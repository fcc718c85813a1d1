"""AdamW and its parameter groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lion.config import setting


@dataclass
class OptimConfig:
    """AdamW. `lr` holds for `lr_batch` samples a step and scales linearly with the batch; null takes it as it is.

    `no_decay` says which parameters weight decay spares: `deit` those of one dimension, biases, position
    embedding and cls; `gpt` those of fewer than two dimensions; `none` spares none.
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


def split_decay(model: nn.Module, no_decay: str) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """(decayed, spared) parameters by name."""
    decayed, spared = {}, {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        spare = {
            "deit": parameter.dim() <= 1 or name.endswith("bias") or name in ("position", "cls"),
            "gpt": parameter.dim() < 2,
            "none": False,
        }[no_decay]
        (spared if spare else decayed)[name] = parameter
    return decayed, spared


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over both groups; the learning rate is set by the trainer at every step."""
    decayed, spared = split_decay(model, config.no_decay)
    groups = [
        {"params": list(group.values()), "weight_decay": decay}
        for group, decay in ((decayed, config.weight_decay), (spared, 0.0))
        if group
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
