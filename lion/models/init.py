"""Initialisations by name: the recipe's `model.init`."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn


def deit(model: nn.Module, std: float) -> None:
    """DeiT's: Linear truncated normal, biases 0; all other parameters keep their own."""
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


def gpt2(model: nn.Module, std: float) -> None:
    """GPT-2's, as in nanoGPT: Linear and Embedding normal, biases 0; what writes into the residual stream smaller by
    the root of how often that is done. Norms and other parameters of decays keep their own."""
    residual = [m for name, m in model.named_modules() if name.endswith((".attention.proj", ".mlp.fc2"))]
    for m in model.modules():
        if isinstance(m, (nn.Linear, nn.Embedding)):
            nn.init.normal_(m.weight, std=std / math.sqrt(len(residual)) if m in residual else std)
            if getattr(m, "bias", None) is not None:
                nn.init.zeros_(m.bias)


INITS: dict[str, Callable[[nn.Module, float], None]] = {"bert": bert, "deit": deit, "gpt2": gpt2}
