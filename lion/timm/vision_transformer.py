"""The vision transformers of this package as models of timm: `vit_lion_*` in `timm.create_model`.

This module has the name of timm's own, because timm's tests select models by the last name of their module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import Attention, GELUTanh, GluMlp, Mlp, register_notrace_module
from timm.models import build_model_with_cfg, checkpoint_seq, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from lion.layers.layout import ROW_MAJOR
from lion.layers.mixers import LINEAR, SOFTMAX, AttentionConfig, resolve_mixer
from lion.layers.mixers.config import ALTERNATING
from lion.layers.norms import NORMS, over_tokens
from lion.layers.optim_factors import optim_factors
from lion.layers.tpe import TPE
from lion.models.vit import ViTConfig
from lion.timm.grid import Grid, Placed, copy_own
from lion.timm.layers import TimmAttention, attention

__all__ = ["LionVisionTransformer", "arguments", "build"]

for norm in NORMS.values():
    register_notrace_module(norm)


@register_notrace_module
class GridTPE(TPE):
    """MD-TPE (`lion.layers.tpe`) of an image's tokens (B, L, dim), whose layout is `place`."""

    def __init__(self, dim: int, states: int, place: Grid) -> None:
        super().__init__(dim, states, place.size)
        self.place = place

    def forward(self, x: Tensor, size: tuple[int, int] | None = None) -> Tensor:  # type: ignore[override]
        """Sum tokens x (B, L, dim) of images with another number of patches, (height, width), or that of the model."""
        return super().forward(x, self.place(size), grid=size)

    def reset_parameters(self) -> None:
        _, dim, states = self.weight.shape
        with torch.device(self.weight.device):
            copy_own(TPE(dim, states, self.grid), self)


class Glu(GluMlp):
    """`lion.layers.blocks.base.Glu` with timm's constructor; `hidden_features` is the width after the gate."""

    def __init__(self, in_features: int, hidden_features: int, **settings: Any) -> None:
        super().__init__(in_features, 2 * hidden_features, gate_last=False, **settings)

    def init_weights(self) -> None:
        """Keep the initialisation of linear layers; timm's GLU has another one for the gate."""


class BareGlu(Glu):
    """A `Glu` without biases, whatever `bias` is: timm passes the bias of the attention's output."""

    def __init__(self, in_features: int, hidden_features: int, bias: bool = False, **settings: Any) -> None:
        super().__init__(in_features, hidden_features, bias=False, **settings)


MLPS = {  # `mlp_layer` and `act_layer`, by `model.mlp`
    "mlp": (Mlp, nn.GELU),
    "mlp_tanh": (Mlp, GELUTanh),
    "glu": (Glu, nn.SiLU),
    "glu_bare": (BareGlu, nn.SiLU),
    "glu_gelu": (Glu, nn.GELU),
}


class LionVisionTransformer(VisionTransformer):
    """timm's `VisionTransformer` with linear attention layers that receive the places of the patches.

    Prefix tokens (cls, registers) do not decay in Lion-S. Several scans, rotations and MD-TPE use rows and columns.

    Args:
        tpe: Number of hidden states of MD-TPE, which precedes the blocks; 0: no MD-TPE.
        settings: Arguments of `timm.models.VisionTransformer`; `attention` makes the class `attn_layer`.

    Raises:
        ValueError: `patch_drop_rate` is set, which removes patches and their order.
    """

    def __init__(self, *args: Any, tpe: int = 0, **settings: Any) -> None:
        if settings.get("patch_drop_rate"):
            raise ValueError("patch_drop_rate: not available, because patches that are removed leave no grid; use 0")
        super().__init__(*args, **settings)
        layers = [m for m in self.modules() if isinstance(m, TimmAttention)]
        self.linear = bool(layers)
        scans: tuple[str, ...] = ROW_MAJOR
        if layers:
            scans = layers[0].config.scans
        weight = self.patch_embed.proj.weight
        with torch.device(weight.device):
            self.place = Grid(self.patch_embed.grid_size, self.num_prefix_tokens, scans)
            self.tpe = None
            if tpe:
                self.tpe = GridTPE(self.embed_dim, tpe, self.place).to(weight.dtype)
        for layer in layers:
            layer.place = self.place

    def set_input_size(self, *args: Any, **settings: Any) -> None:
        super().set_input_size(*args, **settings)
        self.resize(self.patch_embed.grid_size)

    def resize(self, size: tuple[int, int]) -> None:
        """Place the tokens of images with another number of patches, (height, width)."""
        with torch.device(self.place.coords.device):
            self.place.resize(size)
        if self.tpe is not None:
            self.tpe.grid = self.place.size

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Add prefix tokens, position embeddings and MD-TPE, as far as the model has them, to patches x."""
        if self.tpe is None:
            return super()._pos_embed(x)
        size = None
        if self.dynamic_img_size:
            size = tuple(x.shape[1:3])  # x: (B, height, width, dim)
        return self.tpe(super()._pos_embed(x), size)

    def placed(self, images: Tensor, mask: Tensor | None) -> Tensor | Placed | None:
        """Return the mask of a call, with the layout of its tokens if the images do not have the size of the model."""
        if not self.dynamic_img_size or not self.linear:
            return mask
        size = tuple(self.patch_embed.dynamic_feat_size(images.shape[-2:]))
        if size == self.place.size:
            return mask
        return Placed(mask, self.place(size))

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        mask = self.placed(x, attn_mask)
        if mask is attn_mask or attn_mask is not None or is_causal or not self.grad_checkpointing:
            return super().forward_features(x, mask, is_causal)  # type: ignore[arg-type]  # the layers read it
        x = self._pos_embed(self.patch_embed(x))
        x = self.norm_pre(x)
        blocks = [partial(block, attn_mask=mask) for block in self.blocks]
        return self.norm(checkpoint_seq(blocks, x))

    def forward_intermediates(self, x: Tensor, *args: Any, attn_mask: Tensor | None = None, **settings: Any) -> Any:
        mask = self.placed(x, attn_mask)
        return super().forward_intermediates(x, *args, **settings, attn_mask=mask)  # type: ignore[arg-type, misc]

    def no_weight_decay(self) -> set[str]:
        names = set(super().no_weight_decay())
        for name, factor in optim_factors(self).items():
            if not factor.weight_decay:
                names.add(name)
        return names

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        groups = super().group_matcher(coarse)
        return {**groups, "stem": f"{groups['stem']}|tpe"}


def arguments(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of `LionVisionTransformer` for the model of a recipe.

    Raises:
        ValueError: A setting that timm's `VisionTransformer` does not have.
    """
    c = config.resolved()
    for found, key, value in (
        (c.block != "pre_norm", "block", c.block),
        (c.distilled, "distilled", c.distilled),
        (c.cls_place != "first", "cls_place", c.cls_place),
        (c.mlp not in MLPS, "mlp", c.mlp),
        (over_tokens(c.norm), "norm", c.norm),
        (c.attention.direction == ALTERNATING, "attention.direction", c.attention.direction),
        (c.mixer != SOFTMAX and c.mixer not in LINEAR, "mixer", c.mixer),
    ):
        if found:
            raise ValueError(f"{key}: timm's VisionTransformer has no place for {value!r}")
    mlp, activation = MLPS[c.mlp]
    return {
        "patch_size": c.patch_size,
        "embed_dim": c.dim,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "mlp_ratio": c.mlp_ratio,
        "qkv_bias": c.attention.qkv_bias,
        "attn_drop_rate": c.attention.score_dropout,
        "proj_drop_rate": c.dropout,
        "drop_path_rate": c.drop_path,
        "class_token": c.cls,
        "pos_embed": "learn" if c.position_embedding else "none",
        "global_pool": "token" if c.readout == "cls" else "avg",
        "pool_include_prefix": True,
        "fc_norm": False,
        "norm_layer": partial(NORMS[c.norm], eps=c.norm_eps),
        "attn_layer": attn_layer(config),
        "tpe": c.tpe,
        "mlp_layer": mlp,
        "act_layer": activation,
    }


def attn_layer(config: ViTConfig) -> type[nn.Module]:
    """Return the class of the attention layers of a recipe's model.

    Raises:
        ValueError: Settings of softmax attention that timm's layer does not have.
    """
    found = config.resolved().attention
    usual = resolve_mixer(config.mixer, type(config.attention)())
    settings = {}
    for key, value in vars(found).items():
        if key not in ("qkv_bias", "score_dropout") and value != getattr(usual, key):
            settings[key] = value
    if config.mixer != SOFTMAX:
        return attention(config.mixer, **settings)
    if settings:
        raise ValueError(f"attention.{min(settings)}: timm's softmax attention has no place for it")
    return Attention


SNAKES = AttentionConfig(scans=("row_snake", "column_snake"))
LIGHTNET = {"cls": False, "mlp": "glu_bare", "mlp_ratio": 2.666667, "norm": "rmsnorm"}
VARIANTS: dict[str, dict[str, Any]] = {  # of `vit_lion_VARIANTtiny_patch16_224`; without a variant: Lion-S
    "": {"mixer": "lion_s"},
    "lit_": {"mixer": "lion_lit"},
    "d_": {"mixer": "lion_d"},
    "s_": {"mixer": "lion_s"},
    "d_multiscan_": {"mixer": "lion_d", "attention": SNAKES},
    "s_multiscan_": {"mixer": "lion_s", "attention": SNAKES},
    "lightnet_": {"mixer": "lightnet", **LIGHTNET},
}
SIZES = {"tiny": (192, 3, 6), "small": (384, 6, 16), "base": (768, 12, 16)}  # width, heads of DeiT, heads of LightNet
CONFIGS = {}
for variant, settings in VARIANTS.items():
    for size, (dim, deit, lightnet) in SIZES.items():
        heads = deit
        if variant == "lightnet_":
            heads = lightnet
        name = f"vit_lion_{variant}{size}_patch16_224"
        CONFIGS[name] = ViTConfig(dim=dim, depth=12, num_heads=heads, **settings)
SOURCES = {"lightnet": {"paper_ids": "arXiv:2405.21022", "paper_name": "LightNet"}}


def pretrained_cfg(mixer: str, **facts: Any) -> dict[str, Any]:
    """Return timm's configuration of a model without weights; `facts` override those of ImageNet-1k."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **SOURCES.get(mixer, {"paper_ids": "arXiv:2502.16249", "paper_name": "LION"}),
        **facts,
    }


default_cfgs = generate_default_cfgs({name: pretrained_cfg(config.mixer) for name, config in CONFIGS.items()})


def build(name: str, pretrained: bool = False, **settings: Any) -> nn.Module:
    """Return a model by the name of its configuration, as timm's entrypoints do.

    `settings` are arguments of `LionVisionTransformer` and of timm's `build_model_with_cfg` (`features_only`, ..).
    """
    features = {"out_indices": settings.pop("out_indices", 3), "feature_cls": "getter"}
    return build_model_with_cfg(
        LionVisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=features,
        **settings,
    )


def entrypoint(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds a registered model."""

    def model(pretrained: bool = False, **settings: Any) -> nn.Module:
        settings = {**arguments(CONFIGS[name]), **settings}
        return build(name, pretrained, **settings)

    model.__name__ = name
    model.__qualname__ = name
    return model


for name in CONFIGS:
    register_model(entrypoint(name))
