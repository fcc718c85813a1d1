"""Weights that are read outside of their module.

Others change what a module computes: adapters (PEFT) replace it, offloading (accelerate) wraps its `forward` and leaves
weights on the meta device, quantisation (torchao) wraps its weights. Its own weights then are not what it computes
with, and the module has to be called. `is_plain` decides, for all modules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["linear"]  # for mixers of your own

# modules of tensors that stand for a weight: shards, and values that are traced
OF_TORCH = ("torch.distributed.", "torch._subclasses.", "torch.fx.")


def is_plain(layer: nn.Module) -> bool:
    """Return whether a linear layer or an embedding computes with its weight and bias alone."""
    if not isinstance(layer, (nn.Linear, nn.Embedding)):
        return False
    if "forward" in vars(layer) or type(layer).forward not in (nn.Linear.forward, nn.Embedding.forward):
        return False
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooks and not is_wrapped(layer.weight) and not is_wrapped(getattr(layer, "bias", None))


def is_wrapped(weight: Tensor | None) -> bool:
    """Return whether a weight is a tensor of another library, such as a quantised one."""
    if weight is None:
        return False
    return type(weight) not in (Tensor, nn.Parameter) and not type(weight).__module__.startswith(OF_TORCH)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a linear layer in the dtype of `x`, float32 or float64, whatever the dtype of its weights.

    A layer that is not plain computes in the dtype of its own parameters.
    """
    if not isinstance(layer, nn.Linear) or not is_plain(layer):
        return layer(x.to(like(layer, x).dtype)).to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def rows_of(embedding: nn.Module, count: int, device: torch.device) -> Tensor:
    """Return the rows of an embedding (rows, dim); if it is not plain, the first `count`, as it returns them."""
    if isinstance(embedding, nn.Embedding) and is_plain(embedding):
        return embedding.weight
    return embedding(torch.arange(count, device=device))


def like(layer: nn.Module, otherwise: Tensor | None = None) -> Tensor:
    """Return an empty tensor with the dtype and the device of the weights of a layer.

    Weights on the meta device count only if there are no others, here or `otherwise`.
    """
    floating: list[Tensor] = [p for p in layer.parameters() if p.dtype.is_floating_point]
    if otherwise is not None:
        floating.append(otherwise)
    present = [p for p in floating if not p.is_meta]
    for found in (present, floating):
        if found:
            return torch.empty(0, dtype=found[0].dtype, device=found[0].device)
    return torch.empty(0)
