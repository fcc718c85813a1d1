"""Measurements of checks: differences of outputs, gradients, and errors with their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tools.conform.subject import Calls

LENGTH, BEYOND = 24, 300  # tokens of most checks, and of a sequence of several chunks
SAME = 1e-4  # limit of a difference between two computations of one result in float32
LEAK = 1e-5  # limit of the influence of a token on an output that must not depend on it, at equal shapes

Outcome = tuple[Tensor, dict[str, Tensor]]  # outputs, and gradients by name


class Measure(NamedTuple):
    """A measured value, which holds up to its limit; `where` describes the case."""

    value: float
    limit: float
    where: str

    @property
    def holds(self) -> bool:
        return self.value <= self.limit

    @property
    def excess(self) -> float:
        """Return how many times the limit the value is."""
        if self.limit:
            return self.value / self.limit
        if self.value:
            return torch.inf
        return 0.0


class LayerError(Exception):
    """Error of a layer in a check; the message is one line with the case and the error."""


@contextlib.contextmanager
def case(where: str) -> Iterator[None]:
    """Name the case in an error that the layer raises."""
    try:
        yield
    except Exception as error:
        raise LayerError(f"{where}: {error_line(error)}") from error


def error_line(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it is empty."""
    if tensor.numel() == 0:
        return 0.0
    return tensor.abs().max().item()


def difference(y: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to the largest value of the reference.

    A tensor that is not finite makes the difference infinite.
    """
    y, reference = y.double(), reference.double()
    if not_finite(y, reference):
        return torch.inf
    return largest(y - reference) / max(largest(reference), 1e-30)


def not_finite(*tensors: Tensor) -> int:
    """Count the numbers that are NaN or infinite."""
    return sum(int((~t.isfinite()).sum()) for t in tensors)


def loss_weights(y: Tensor) -> Tensor:
    """Return the fixed random weights by which a loss sums the outputs y (B, L, D)."""
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)


def tensors_of(run: Calls, x: Tensor) -> dict[str, Tensor]:
    """Return the tensors that get gradients: "x" and every parameter by its name."""
    found = {"x": x}
    for name, parameter in run.layer.named_parameters():
        if parameter.requires_grad:
            found[name] = parameter
    return found


def gradients(run: Calls, x: Tensor, **masks: Tensor) -> Outcome:
    """Return the valid outputs, and the gradients of their weighted sum: of "x" and of every parameter.

    A parameter without a gradient gets zeros.
    """
    x = x.detach().requires_grad_()
    y = run(x, **masks)
    weights = loss_weights(y)
    if "valid" in masks:
        y = y[masks["valid"]]
        weights = weights[masks["valid"]]
    tensors = tensors_of(run, x)
    found = torch.autograd.grad((y * weights).sum(), list(tensors.values()), materialize_grads=True)
    return y.detach(), dict(zip(tensors, found))


def compare(found: Outcome, expected: Outcome, limit: float, where: str = "") -> Iterator[Measure]:
    """Compare two results of `gradients`; `where` ends the descriptions of both measurements."""
    y, grads = found
    expected_y, expected_grads = expected
    yield Measure(difference(y, expected_y), limit, f"outputs{where}")
    value, name = differences(grads, expected_grads)
    yield Measure(value, limit, f"gradient of {name}{where}")


def differences(grads: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference of gradients, and the name of the tensor; one scale serves all tensors."""
    scale = max(map(largest, reference.values())) or 1e-30
    worst = 0.0, "x"
    for name, wanted in reference.items():
        if not_finite(grads[name], wanted):
            return torch.inf, name
        worst = max(worst, (largest(grads[name] - wanted) / scale, name))
    return worst
