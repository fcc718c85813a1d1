"""Models and attention layers for timm, and weights that go both ways between runs and timm.

`import lion.timm` registers `vit_lion_*` in `timm.create_model`; `timm.list_models("vit_lion_*")` lists the names.
`attention(mixer)` makes a class for the argument `attn_layer` of timm's models. `from_run` opens a run as a model of
timm; `./run.sh convert` makes a run from the weights of such a model.
"""

from __future__ import annotations

try:
    from timm.layers import resolve_self_attn_mask  # noqa: F401 (since 1.0.26, like the masks of its models)
except ImportError:
    raise ImportError("lion.timm needs timm 1.0.26 or newer: pip install -U 'timm>=1.0.26'") from None

from lion.timm.layers import LionAttention, attention
from lion.timm.vision_transformer import LionVisionTransformer
from lion.timm.weights import from_run

__all__ = ["LionAttention", "LionVisionTransformer", "attention", "from_run"]
