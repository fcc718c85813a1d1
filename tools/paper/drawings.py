"""Drawings that need no runs: masks in chunks (LION, Figure 8), and scan orders (Figure 11)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lion.layers.layout import SCANS
from lion.ops import linear_attention
from tools.colours import colour_of

TOKENS, CHUNK = 16, 4
SIDE = 5  # patches of the side of a scanned image


def masks(fig: Any) -> None:
    """Draw the masks of Lion-lit, Lion-D and Lion-S of 16 tokens, with the borders of chunks of 4."""
    generator = torch.Generator().manual_seed(0)
    selective = torch.rand(TOKENS, generator=generator).log() / 2
    decays = {"Lion-lit": torch.zeros(TOKENS), "Lion-D": torch.full((TOKENS,), -0.25), "Lion-S": selective}
    axes = fig.subplots(1, len(decays))
    for ax, (name, log_decay) in zip(axes, decays.items()):
        image = ax.imshow(mask(log_decay).numpy(), vmin=0, vmax=1, cmap="viridis")
        for border in range(CHUNK, TOKENS, CHUNK):
            ax.axhline(border - 0.5, color="white", linewidth=1)
            ax.axvline(border - 0.5, color="white", linewidth=1)
        ax.set(title=name, xlabel="key j", xticks=[], yticks=[])
    axes[0].set_ylabel("query i")
    fig.colorbar(image, ax=axes, label="M_ij")


def mask(log_decay: Tensor) -> Tensor:
    """Return the mask M (L, L) of log decays (L,), in both directions: Y = (Q K^T * M) V of ones and V = 1."""
    length = log_decay.shape[0]
    ones, identity = torch.ones(1, 1, length, 1), torch.eye(length)[None, None]
    y = linear_attention(ones, ones, identity, log_decay[None, None], feature_map="identity", normalize="none")
    return y[0, 0]


def scans(fig: Any) -> None:
    """Draw the orders in which scans read the patches of an image, from the first (dot) to the last (square)."""
    grid = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    axes = fig.subplots(1, len(SCANS))
    for ax, (name, order) in zip(axes, SCANS.items()):
        places = order(grid).flatten().tolist()
        y, x = zip(*(divmod(place, SIDE) for place in places))
        ax.plot(x, y, color=colour_of("lion_s"), linewidth=1.5)
        ax.plot(x[0], y[0], "o", x[-1], y[-1], "s", color=colour_of("lion_s"))
        ax.set(title=name, xticks=[], yticks=[], aspect="equal")
        ax.invert_yaxis()
