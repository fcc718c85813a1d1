"""The layer under test: fresh copies of it, and one way to call layers that differ in their masks and states."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.mixers.base import Mixer

NOISE = 0.02  # added to every parameter: zeros at the start, of biases or a projection, would hide faults
Adapt = Callable[[nn.Module], Any]  # layer -> an object with some of the methods that `Calls` looks for


def adapt_mixer(layer: Mixer) -> SimpleNamespace:
    """Adapt a mixer of `lion`, which takes masks as a `Layout`."""
    offered = SimpleNamespace(
        forward=lambda x, valid=None, segments=None: layer(x, Layout.of(x, valid, segments)),
    )
    if "chunk" in layer.forms:
        offered.set_chunk_size = lambda size: layer.set_form("chunk", size)
    if layer.causal:
        offered.prefill, offered.step = layer.prefill, layer.step
    else:
        offered.reasons = {"streaming": "streams in one direction only: --init direction=forward"}
    return offered


def adapt_plain(layer: nn.Module) -> nn.Module:
    """Return the layer, whose own methods are used if they have the names of an adapter's."""
    return layer


class NotOffered(Exception):
    """Error for a check that does not apply to a layer; the message is the reason."""


class Calls:
    """A copy of the layer, and the calls that its adapter offers.

    The adapter may have the methods `forward(x, valid, segments)` (without a mask that the layer does not take),
    `prefill(x)` and `step(x, state)`, which return (output, state), and `set_chunk_size(size)`.

    Attributes:
        layer: The copy.
        offers: "valid", "segments", "streaming", "chunk sizes", as far as the adapter has them.
        reasons: Why the adapter lacks some of them, in place of the general reason.
    """

    def __init__(self, layer: nn.Module, adapt: Adapt) -> None:
        self.layer, self.adapted = layer, adapt(layer)
        self.reasons: dict[str, str] = getattr(self.adapted, "reasons", {})
        forward = getattr(self.adapted, "forward", layer.forward)
        self.direct = self.adapted if isinstance(self.adapted, nn.Module) else getattr(self.adapted, "forward", layer)
        self.offers = {name for name in ("valid", "segments") if name in inspect.signature(forward).parameters}
        if hasattr(self.adapted, "prefill") and hasattr(self.adapted, "step"):
            self.offers.add("streaming")
        if hasattr(self.adapted, "set_chunk_size"):
            self.offers.add("chunk sizes")

    def __call__(self, x: Tensor, **masks: Tensor) -> Tensor:
        """Return the output for a copy of x (B, L, D), so that a layer that writes to x disturbs no other check.

        Raises:
            TypeError: The output is not a tensor of the shape of x.
        """
        y = self.direct(x.clone(), **masks)
        if not torch.is_tensor(y):
            raise TypeError(f"returned {type(y).__name__}, expected a tensor (B, L, D)")
        if y.shape != x.shape:
            raise TypeError(f"returned shape {tuple(y.shape)} for tokens {tuple(x.shape)}")
        return y


@dataclass
class Subject:
    """A layer under test.

    Attributes:
        name: The layer as the command line names it, with its arguments.
        layer: A copy of the layer, with noise on its parameters.
        adapt: Adapter.
        dim: Width D of the tokens.
        causal: Whether the layer claims to be causal.
    """

    name: str
    layer: nn.Module
    adapt: Adapt
    dim: int
    causal: bool = False

    def __post_init__(self) -> None:
        self.layer, generator = copy.deepcopy(self.layer), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.add_(NOISE * noise.to(parameter))

    def fresh(self, cast: str = "float", train: bool = False) -> Calls:
        """Return calls of a new copy; `cast` is "float", "double" or "bfloat16"."""
        return Calls(getattr(copy.deepcopy(self.layer), cast)().train(train), self.adapt)

    def tokens(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """Return random tokens (batch, length, D)."""
        return torch.randn(batch, length, self.dim, generator=torch.Generator().manual_seed(seed))
