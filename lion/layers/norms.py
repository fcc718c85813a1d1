"""Norms by name: modules (x, layout) -> x for tokens x (B, L, dim).

A new norm is one class and its line in `NORMS`. A norm with statistics over several tokens sets `over_tokens`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lion.layers.layout import PLAIN, Layout
from lion.ops.dtypes import wide_dtype
from lion.ops.exchange import Summed


class LayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its weights or wider.

    Autocast leaves the input in bf16, which makes PyTorch warn about different dtypes.
    """

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return super().forward(x if self.weight is None else x.to(torch.promote_types(x.dtype, self.weight.dtype)))


class BatchNorm(nn.Module):
    """Batch normalisation over all valid tokens of all processes, in float32 or wider; padding is ignored.

    Training uses the mean and the (biased) variance of the batch, and keeps running averages in `mean` and `var`, where
    `momentum` is the share of the old value (as in S5). Evaluation uses the running averages. The batch is the
    micro-batch: gradient accumulation does not combine the statistics of several micro-batches.
    """

    over_tokens = True
    mean: Tensor
    var: Tensor

    def __init__(self, dim: int, eps: float = 1e-5, momentum: float = 0.9) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        wide = x.to(wide_dtype(x))
        mean, var = self.moments(wide, layout.valid) if self.training else (self.mean, self.var)
        scale = self.weight * torch.rsqrt(var.to(wide.dtype) + self.eps)
        return ((wide - mean) * scale + self.bias).to(x.dtype)

    def moments(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance (dim,) of the valid tokens of x (B, L, dim), and update the running averages."""
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
    """Return the sum of x over all processes, if there are several."""
    if not dist.is_available() or not dist.is_initialized():
        return x
    group = dist.group.WORLD
    if group is None or group.size() == 1:
        return x
    return Summed.apply(x, group.group_name)


class NoNorm(nn.Module):
    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        return x


NORMS: dict[str, type[nn.Module]] = {"batchnorm": BatchNorm, "layernorm": LayerNorm, "rmsnorm": RMSNorm}
NO_NORM = "none"


def over_tokens(name: str | None) -> bool:
    """Return whether a norm computes statistics over several tokens, so that in training a token sees later ones."""
    return name is not None and getattr(NORMS.get(name), "over_tokens", False)


def check_causal(norm: str | None, key: str) -> None:
    """Check that the norm, the value of the setting `key`, fits to a model in which tokens see one side only.

    Raises:
        ValueError: The norm computes statistics over several tokens.
    """
    if over_tokens(norm):
        fits = " or ".join(repr(name) for name in NORMS if not over_tokens(name))
        raise ValueError(
            f"{key}: {norm!r} averages over all tokens, so that in training a model of one direction would see "
            f"earlier and later tokens; use {fits}"
        )
