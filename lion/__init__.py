"""LION: linear attention for bidirectional sequence modelling, in the full, chunk and RNN forms."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lion.distribution import VERSION

if TYPE_CHECKING:
    from lion.functions import evaluate, train
    from lion.inference.text import generate
    from lion.layers.layout import Layout
    from lion.layers.mixers import LionAttention, make_mixer
    from lion.layers.mixers.base import set_form
    from lion.ops import linear_attention
    from lion.recipe import load_recipe
    from lion.runs import load, open_run

__version__ = VERSION
__all__ = [
    "Layout",
    "LionAttention",
    "evaluate",
    "generate",
    "linear_attention",
    "load",
    "load_recipe",
    "make_mixer",
    "open_run",
    "set_form",
    "train",
]
HOMES = {
    "Layout": "lion.layers.layout",
    "LionAttention": "lion.layers.mixers",
    "evaluate": "lion.functions",
    "generate": "lion.inference.text",
    "linear_attention": "lion.ops",
    "load": "lion.runs",
    "load_recipe": "lion.recipe",
    "make_mixer": "lion.layers.mixers",
    "open_run": "lion.runs",
    "set_form": "lion.layers.mixers.base",
    "train": "lion.functions",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that a command line is checked before PyTorch is loaded."""
    if name not in HOMES:
        raise AttributeError(f"module 'lion' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
