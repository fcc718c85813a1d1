"""Norms by name."""

from torch import nn

NORMS = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}
NO_NORM = "none"
