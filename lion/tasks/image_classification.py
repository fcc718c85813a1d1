"""Image classification: soft-target cross-entropy with mixup and cutmix; top-1 and top-5."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.utils import make_grid

from lion.config import setting
from lion.models.vit import ViT, ViTConfig
from lion.tasks.base import Batch, ImageInfo, Sums, Task, build_or_explain


@dataclass
class ImageClassificationConfig:
    """`mixup` and `cutmix` are the alphas of their Beta distributions (0: off); with both on, each batch takes
    cutmix with probability `switch`."""

    name: str = "image_classification"
    label_smoothing: float = setting(0.0, min=0, max=0.99)
    mixup: float = setting(0.0, min=0, max=1000)
    cutmix: float = setting(0.0, min=0, max=1000)
    switch: float = setting(0.5, min=0, max=1)

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if 0 < getattr(self, name) < 1e-6:
                raise ValueError(f"{name}: expected 0 (off) or at least 1e-06, got {getattr(self, name)}")


class ImageClassification(Task):
    """Batches hold `image` (B, C, H, W) and `label` (B,); evaluation batches also `mask` (B,)."""

    Config = ImageClassificationConfig
    ModelConfig = ViTConfig
    Info = ImageInfo
    metric = "top1"
    unit = "images"

    def __init__(self, config: ImageClassificationConfig, info: ImageInfo) -> None:
        super().__init__(config, info)
        classes = len(info.classes)
        choices = [(v2.MixUp, config.mixup, 1 - config.switch), (v2.CutMix, config.cutmix, config.switch)]
        active = [(kind(alpha=alpha, num_classes=classes), p) for kind, alpha, p in choices if alpha]
        kinds, shares = [k for k, _ in active], [p for _, p in active]
        self.mix = v2.RandomChoice(kinds, p=shares if len(kinds) > 1 else None) if kinds else None

    def build_model(self, config: ViTConfig) -> ViT:
        info = self.info
        return build_or_explain(
            ViT, config, image_size=info.size, channels=info.channels, num_classes=len(info.classes)
        )

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        images, labels = batch["image"], batch["label"]
        if self.mix is not None:
            images, labels = self.mix(images, labels)  # labels become (B, classes) shares
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing, reduction="sum")
        return Sums(loss, loss.new_full((), len(images)))

    def evaluate(self, model: nn.Module, batch: Batch) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
        logits = model(batch["image"]).float()
        mask, labels = batch["mask"], batch["label"]
        count = mask.sum()
        ranked = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
        sums = {
            "top1": ranked[:, 0],
            "top5": ranked.any(1),
            "loss": F.cross_entropy(logits, labels, reduction="none"),
        }
        return {name: ((value * mask).sum(), count) for name, value in sums.items()}, logits

    def example(self, size: int, device: torch.device | str) -> Batch:
        image = torch.zeros(size, self.info.channels, *self.info.size, device=device)
        return {"image": image, "label": torch.zeros(size, dtype=torch.long, device=device)}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        return {"inputs": make_grid(batch["image"][:32].float(), nrow=8, normalize=True, scale_each=True)}
