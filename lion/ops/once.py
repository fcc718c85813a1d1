"""Gradients that raise an error when they are differentiated again.

`torch.autograd.function.once_differentiable` marks the gradients alone: where `torch.autograd.grad` asks for the
gradients of given inputs, it passes by the mark and returns a wrong second derivative, without an error.
"""

from __future__ import annotations

import torch
from torch import Tensor


def once(of: str, gradients: tuple[Tensor, ...], *sources: Tensor) -> tuple[Tensor, ...]:
    """Return gradients that refuse to be differentiated with respect to the tensors that they were computed from.

    Args:
        of: Name of the operation in the error message.
        gradients: The gradients.
        sources: The tensors that they were computed from.
    """
    return _Once.apply(of, len(gradients), *gradients, *sources) if torch.is_grad_enabled() else gradients


class _Once(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(of: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx, inputs: tuple, outputs: tuple[Tensor, ...]) -> None:
        ctx.of = inputs[0]

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> None:
        raise RuntimeError(f"no second derivatives of {ctx.of}")
