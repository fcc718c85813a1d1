"""Checks of numbers: low precision, extreme inputs, and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tools.conform.measure import (
    BEYOND,
    LENGTH,
    Measure,
    case,
    error_line,
    gradients,
    loss_weights,
    not_finite,
    tensors_of,
)
from tools.conform.subject import NotOffered, Subject

LOW = 0.05  # limit of the relative error of bfloat16, whose rounding is 0.004
SLOPE = 0.01  # limit of the relative error of a gradient; layers that compute in float32 inside come near 0.001
STEP = 1e-4  # of the differences
SCALES = (0.0, 1e-4, 1e2, 1e4)


def bf16(subject: Subject) -> Iterator[Measure]:
    """Compare bfloat16, of all weights and by autocast, with float32 computations on the same numbers."""
    x = subject.tokens(2, LENGTH).bfloat16()
    low, high, plain = subject.fresh("bfloat16"), subject.fresh("bfloat16"), subject.fresh()
    high.layer.float()  # float32 with the weights rounded
    with torch.no_grad():
        with case("weights in bfloat16"):
            y = low(x)
        yield Measure(error(y, high(x.float())), LOW, "weights in bfloat16")
        with case("autocast to bfloat16"), torch.autocast("cpu", torch.bfloat16):
            y = plain(x.float())
        yield Measure(error(y, plain(x.float())), LOW, "autocast to bfloat16")


def error(y: Tensor, reference: Tensor) -> float:
    """Return the root mean square error relative to the reference's root mean square; infinite if not finite."""
    if not_finite(y, reference):
        return torch.inf
    return ((y.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)).item()


def extremes(subject: Subject) -> Iterator[Measure]:
    """Count numbers that are not finite, in outputs and gradients, for very small and large inputs.

    Equal large tokens saturate each gate in one direction along the whole sequence.
    """
    run = subject.fresh()
    for length in (LENGTH, BEYOND):
        x, half = subject.tokens(1, length), torch.arange(length)[:, None] < length // 2
        inputs = {f"activations times {scale:g}": scale * x for scale in SCALES}
        inputs["equal tokens"] = (SCALES[-1] * x[:, :1]).expand_as(x)
        inputs["equal tokens, the second half negated"] = inputs["equal tokens"] * torch.where(half, 1, -1)
        inputs["one large token"] = torch.where(torch.arange(length)[:, None] == length // 2, SCALES[-1], 1) * x
        for kind, extreme in inputs.items():
            where = f"{length} tokens, {kind}"
            with case(where):
                y, grads = gradients(run, extreme)
            yield Measure(not_finite(y), 0, f"outputs, {where}")
            for name, grad in grads.items():
                yield Measure(not_finite(grad), 0, f"gradient of {name}, {where}")


def slopes(subject: Subject) -> Iterator[Measure]:
    """Compare the gradient of each tensor, in float32, with a float64 difference in a random direction."""
    x, exact = subject.tokens(2, LENGTH), subject.fresh("double")
    _, grads = gradients(subject.fresh(), x)
    x = x.double()
    tensors = tensors_of(exact, x)
    total = torch.stack([grad.double().norm() for grad in grads.values()]).norm().item()
    try:
        with torch.no_grad():
            weights = loss_weights(exact(x))
    except Exception as problem:
        raise NotOffered(f"does not run in float64: {error_line(problem)}") from problem
    for seed, (name, grad) in enumerate(grads.items()):
        generator = torch.Generator().manual_seed(seed)
        direction = torch.randn(grad.shape, generator=generator, dtype=torch.float64)
        ends = []
        with torch.no_grad():
            tensor = tensors[name]
            start = tensor.clone()
            for sign in (1, -1):
                tensor.copy_(start + sign * STEP * direction)
                ends.append((exact(x) * weights).sum().item())
            tensor.copy_(start)
        slope = (grad.double() * direction).sum().item()
        wanted = (ends[0] - ends[1]) / (2 * STEP)
        scale = max(grad.double().norm().item(), abs(wanted), 1e-3 * total, 1e-30)
        value = abs(slope - wanted) / scale
        yield Measure(value if math.isfinite(value) else torch.inf, SLOPE, f"gradient of {name}")


def alive(subject: Subject) -> Iterator[Measure]:
    """Count the parameters whose gradient is missing, or zero in every element."""
    _, grads = gradients(subject.fresh(), subject.tokens(2, LENGTH))
    dead = [name for name, grad in grads.items() if name != "x" and grad.numel() and not grad.any()]
    yield Measure(len(dead), 0, ", ".join(dead))
