"""Norms by name: modules (x, layout) -> x of tokens x (B, L, dim). A new one is one class and its line in `NORMS`; one
whose statistics are those of several tokens says so by `over_tokens`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from lion.layers.layout import PLAIN, Layout


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """In the dtype of its weights or wider: autocast leaves it in bf16, which PyTorch warns of."""

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return super().forward(x if self.weight is None else x.to(torch.promote_types(x.dtype, self.weight.dtype)))


class OverProcesses(torch.autograd.Function):
    """The sum over all processes, and so its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return all_reduce(gradient.contiguous(), "sum", dist.group.WORLD)


class BatchNorm(nn.Module):
    """Batch normalisation over all valid tokens of all processes, in float32; padding counts for nothing.

    In training by the mean and (biased) variance of the batch, of which `mean` and `var` keep running averages,
    `momentum` being the share of the old value (as in S5); else by these. The batch is the micro-batch: accumulating
    gradients does not add its tokens up.
    """

    over_tokens = True

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.9) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var = self.moments(wide, layout.valid) if self.training else (self.mean, self.var)
        scale = self.weight * torch.rsqrt(var.to(wide.dtype) + self.eps)
        return ((wide - mean) * scale + self.bias).to(x.dtype)

    def moments(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance (dim,) of the valid tokens of x (B, L, dim)."""
        kept = x if valid is None else x.masked_fill(~valid[..., None], 0)
        count = x.new_full((1,), x.shape[0] * x.shape[1]) if valid is None else valid.sum().to(x.dtype)[None]
        total = summed(torch.cat([kept.sum((0, 1)), count]))
        count = total[-1].clamp_min(1)
        mean = total[:-1] / count
        off = x - mean if valid is None else (x - mean).masked_fill(~valid[..., None], 0)
        var = summed(off.square().sum((0, 1))) / count
        with torch.no_grad():
            for running, new in ((self.mean, mean), (self.var, var)):
                running.lerp_(new.to(running.dtype), 1 - self.momentum)
        return mean, var


def summed(x: Tensor) -> Tensor:
    """Over all processes, where there are several."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return OverProcesses.apply(x) if several else x


class NoNorm(nn.Module):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return x


NORMS: dict[str, type[nn.Module]] = {"batchnorm": BatchNorm, "layernorm": LayerNorm, "rmsnorm": RMSNorm}
NO_NORM = "none"


def over_tokens(name: str | None) -> bool:
    """Return whether a norm takes its statistics over several tokens, so that in training a token sees later ones."""
    return getattr(NORMS.get(name), "over_tokens", False)


def check_causal(norm: str | None, key: str) -> None:
    """Raises ValueError: The norm, which the setting `key` names, takes its statistics over tokens."""
    if over_tokens(norm):
        fits = " or ".join(repr(name) for name in NORMS if not over_tokens(name))
        raise ValueError(
            f"{key}: {norm!r} takes its mean over all tokens, so that in training a causal model would see later ones; "
            f"use {fits}"
        )
