"""LION: linear attention for bidirectional sequence modelling, as full attention, chunks and an RNN."""

from __future__ import annotations

from typing import Any

from lion.layers import LionAttention
from lion.layers.layout import Layout
from lion.layers.mixer import set_form
from lion.ops import linear_attention

__version__ = "0.1.0"
__all__ = ["Layout", "LionAttention", "linear_attention", "load", "load_recipe", "set_form"]


def __getattr__(name: str) -> Any:  # these import the tasks, and so torchvision: only when asked for
    if name == "load":
        from lion.runs import load

        return load
    if name == "load_recipe":
        from lion.recipe import load_recipe

        return load_recipe
    raise AttributeError(f"module 'lion' has no attribute {name!r}")
