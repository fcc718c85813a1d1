"""Initialisations by name: the recipe's `model.init`."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def deit(model: nn.Module, std: float) -> None:
    """DeiT's: Linear truncated normal, biases 0; norms, convolutions and decays keep their own."""
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=std)
            if m.bias is not None:
                nn.init.zeros_(m.bias)


def bert(model: nn.Module, std: float) -> None:
    """BERT's: Linear and Embedding normal, biases 0; norms and other parameters of decays keep their own."""
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=std)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)


INITS: dict[str, Callable[[nn.Module, float], None]] = {"bert": bert, "deit": deit}
