"""The operators that `bench ops` times: one for every mixer, and some in one direction or over several scans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.config import ConfigError, nearest
from lion.layers.layout import PLAIN, ROW_MAJOR, Layout, grid_layout
from lion.layers.mixers import LINEAR, LionAttention
from lion.layers.mixers.lightnet import LIGHTNET, KeySoftmax
from lion.layers.mixers.linear import Operands
from lion.ops import (
    Settings,
    linear_attention,
    multi_scan_attention,
    one_scan_attention,
    reference_attention,
    reference_one_scan_attention,
)
from lion.ops.features import apply_feature_map

SCAN = "log_decay_"  # prefix of the names of the decays of several scans


@dataclass(frozen=True)
class Operator:
    """The operator of a mixer's layer, as `LionAttention.mix` calls it.

    `inputs` makes the arguments of the operator: leaf tensors by name, and `fixed` arguments. If the decay depends on
    the keys alone (LightNet in one direction), the timed call includes the computation of the decay.
    """

    mixer: str
    direction: str = "both"
    scans: tuple[str, ...] = ROW_MAJOR

    @property
    def one_scan(self) -> bool:
        return self.mixer == LIGHTNET and self.direction == "both"

    @property
    def of_keys(self) -> bool:
        """Return whether the decay is computed from the keys."""
        return self.mixer == LIGHTNET and self.direction != "both"

    def inputs(
        self,
        heads: int,
        dim: int,
        batch: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
        featurized: bool | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the arguments of the operator, as the layer computes them from random tokens.

        Args:
            heads: Number of heads.
            dim: Head dimension.
            batch: Batch size.
            length: Sequence length.
            device: Device of the tensors.
            dtype: The autocast dtype; float32 disables autocast.
            featurized: Whether the feature map is applied to q and k here; by default it is on a CPU, and not on a GPU.
                If not, the feature map is one of the fixed arguments.

        Returns:
            Contiguous leaf tensors by name, and the other (fixed) arguments.
        """
        if featurized is None:
            featurized = device.type == "cpu"
        torch.manual_seed(0)
        layer = LionAttention(heads * dim, heads, self.mixer, direction=self.direction, scans=self.scans).to(device)
        x = torch.randn(batch, length, heads * dim, device=device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            q, k, v = layer.heads(x)
            given = arguments_of(layer, layer.operands(x, q, k, v, Layout()))
            if featurized:
                featurize(given)
            if self.mixer == LIGHTNET:
                given["q"] = apply_feature_map(layer.config.feature_map, q)
                given["k"] = k
                given.pop("log_decay", None)
                given.pop("prefix", None)
            if self.scans != ROW_MAJOR:
                layout = grid(length, self.scans)
                given["orders"] = layout.orders.to(device)
                del given["log_decay"]
                for place, decay in enumerate(layer.decays):
                    given[f"{SCAN}{place}"] = decay(x, k, layout).log_decay
        tensors: dict[str, Tensor] = {}
        fixed: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                leaf = value.detach().clone(memory_format=torch.contiguous_format)
                tensors[name] = leaf.requires_grad_(value.requires_grad)
            else:
                fixed[name] = value
        return tensors, fixed

    def run(
        self, tensors: dict[str, Tensor], fixed: dict[str, Any], form: str, chunk_size: int, kernels: str = "auto"
    ) -> Tensor:
        if self.one_scan:
            return one_scan_attention(**tensors, form=form, chunk_size=chunk_size)
        settings = Settings(form=form, chunk_size=chunk_size, direction=self.direction, kernels=kernels)
        given = self.arguments(tensors, fixed)
        if self.scans == ROW_MAJOR:
            return linear_attention(**given, settings=settings)
        return multi_scan_attention(**given, settings=settings)

    def definition(self, tensors: dict[str, Tensor], fixed: dict[str, Any]) -> Tensor:
        """Compute the operator token by token, by its definition."""
        if self.one_scan:
            return reference_one_scan_attention(**tensors)
        given = self.arguments(tensors, fixed)
        featurize(given)
        del given["feature_map"]
        if self.scans == ROW_MAJOR:
            given.pop("prefix", None)  # used only for gradients
            return reference_attention(**given, direction=self.direction)
        v = given["v"]
        values = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        sums = torch.zeros_like(values)  # over scans, of the numerators and, from the column of ones, the row sums
        for order, log_decay in zip(given["orders"].cpu(), given["log_decays"]):
            found = reference_attention(
                given["q"][:, :, order],
                given["k"][:, :, order],
                values[:, :, order],
                log_decay[:, :, order],
                direction=self.direction,
                decay_convention=given["decay_convention"],
                normalize="none",
                scale=1.0,
            )
            sums = sums + found[:, :, order.argsort()]
        return sums[..., :-1] / sums[..., -1:]

    def arguments(self, tensors: dict[str, Tensor], fixed: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `linear_attention`, or of `multi_scan_attention` for several scans."""
        given = fixed | tensors
        if self.scans != ROW_MAJOR:
            given["log_decays"] = [given.pop(name) for name in tensors if name.startswith(SCAN)]
        if self.of_keys:
            k = tensors["k"]
            gates = KeySoftmax(k.shape[1] * k.shape[3], k.shape[1])(k, k, PLAIN)
            given |= {"k": gates.k, "log_decay": gates.log_decay, "prefix": gates.gates.prefix}
        return given

    def kind(self, tensors: dict[str, Tensor]) -> str:
        """Return the kind of the operator: "one_scan", "delta", "decay", or "plain" (no decay)."""
        if self.one_scan:
            return "one_scan"
        if not tensors.keys().isdisjoint(("beta", "erase", "read")):
            return "delta"
        if self.of_keys or any(name.startswith("log_decay") for name in tensors):
            return "decay"
        return "plain"

    def vectors(self, tensors: dict[str, Tensor]) -> bool:
        """Return whether a decay has one lambda for each key dimension."""
        return self.of_keys or any(t.dim() in (2, 4) for name, t in tensors.items() if name.startswith("log_decay"))


def featurize(given: dict[str, Any]) -> None:
    """Replace q and k in the arguments of an operator by their features, which leaves no feature map."""
    phi = given["feature_map"]
    given["q"] = apply_feature_map(phi, given["q"])
    given["k"] = apply_feature_map(phi, given["k"])
    given["feature_map"] = None


def check_operators(names: Sequence[str]) -> None:
    """Check that every name is one of `OPERATORS`.

    Raises:
        ConfigError: An unknown name.
    """
    for name in names:
        if name not in OPERATORS:
            raise ConfigError(f"unknown mixer {name!r}, {nearest(name, OPERATORS)}")


def rank(names: Iterable[str], name: str) -> int:
    """Return the position of a name, from 1; 0 for a name that is not listed (SDPA)."""
    for place, known in enumerate(names, 1):
        if known == name:
            return place
    return 0


def softmax(tensors: dict[str, Tensor]) -> Tensor:
    """Return the attention of PyTorch's SDPA, with which all operators are compared."""
    return F.scaled_dot_product_attention(tensors["q"], tensors["k"], tensors["v"])


def grid(length: int, scans: tuple[str, ...]) -> Layout:
    """Return the layout of an image with `length` tokens.

    The grid is as close to a square as possible. A class token is added if `length` is one more than a square number.
    """
    special = int(math.isqrt(length - 1) ** 2 == length - 1)
    height = max(n for n in range(1, math.isqrt(length) + 1) if (length - special) % n == 0)
    return grid_layout(height, (length - special) // height, scans, special)


OPERATORS = {name: Operator(name) for name in LINEAR} | {
    "lion_s_multiscan": Operator("lion_s", scans=("row_snake", "column_snake")),  # 2 orders x 2 directions: 4 scans
    "gla_forward": Operator("gla", "forward"),
    "lightnet_forward": Operator("lightnet", "forward"),
}


def arguments_of(layer: LionAttention, operands: Operands) -> dict[str, Any]:
    """Return the arguments of `linear_attention` by name, without its form."""
    given = {"q": operands.q, "k": operands.k, "v": operands.v}
    for name, gate in operands.gates._asdict().items():
        if gate is not None:
            given[name] = gate
    for name in ("feature_map", "normalize", "decay_convention", "scale", "eps", "undecayed_erase"):
        given[name] = getattr(layer.operator_settings, name)
    return given
