"""Weights of runs in models of timm; `./run.sh convert` goes the other way."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from torch import Tensor

from lion.config import ConfigError
from lion.models.vit import ViT
from lion.runs import open_run
from lion.samples.images import evaluation_crop
from lion.timm.vision_transformer import LionVisionTransformer, arguments, build, pretrained_cfg

NAMES = {  # prefix of our names: prefix in timm
    "patch.": "patch_embed.proj.",
    "cls": "cls_token",
    "position": "pos_embed",
    "encoder.": "",
    "head.": "head.",
}


def timm_name(name: str) -> str:
    """Return the name in timm of a weight of our ViT."""
    ours = next(prefix for prefix in NAMES if name.startswith(prefix))
    return (NAMES[ours] + name.removeprefix(ours)).replace(".attention.", ".attn.")


def timm_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of our ViT under their names in timm."""
    return {timm_name(name): value for name, value in weights.items()}


def from_run(run: str | Path, *, checkpoint: str = "best", ema: bool = False) -> LionVisionTransformer:
    """Load a run of an image classifier as a model of timm, in evaluation mode on the CPU.

    Its logits for normalised images equal those of `lion.load`. `timm.data.resolve_model_data_config` returns the size,
    mean, standard deviation, crop and interpolation of the run's evaluation.

    Args:
        run: Run folder, or the name of one under `runs/`.
        checkpoint: "best" (on the validation split) or "last".
        ema: Load the averaged weights instead of the raw weights.

    Raises:
        ConfigError: There is no such run, or its model has no place in timm's `VisionTransformer`.
    """
    loaded = open_run(run, checkpoint=checkpoint, ema=ema)
    ours = loaded.model
    config = loaded.recipe.model
    if not isinstance(ours, ViT):
        raise ConfigError(f"{loaded.folder}: a run of model {config.name!r}, expected 'vit'")
    try:
        settings = arguments(config)
    except ValueError as error:
        raise ConfigError(f"{loaded.folder}: model.{error}") from None
    channels, height, width = ours.image_shape
    classes = len(ours.classes)
    crop = evaluation_crop(loaded.recipe.data)
    cfg = pretrained_cfg(
        config.mixer,
        num_classes=classes,
        input_size=ours.image_shape,
        crop_pct=crop or 1.0,
        crop_mode="center" if crop else "squash",
        mean=tuple(ours.mean.flatten().tolist()),
        std=tuple(ours.std.flatten().tolist()),
        label_names=ours.classes,
    )
    settings |= {"img_size": (height, width), "in_chans": channels, "num_classes": classes}
    model = cast("LionVisionTransformer", build("vit_lion", pretrained_cfg=cfg, **settings))
    model.load_state_dict(timm_weights(ours.state_dict()))
    return model.eval()
