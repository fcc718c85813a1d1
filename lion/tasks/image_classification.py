"""Image classification: soft-target cross-entropy with mixup and cutmix; top-1 and top-5 accuracy.

torchvision is imported inside functions, because the table of tasks imports this file for every task.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import ConfigError, changed, setting
from lion.models import MODELS
from lion.models.base import ImageClassifier
from lion.samples.base import Batch
from lion.samples.images import ImageInfo
from lion.tasks.base import Outcome, Sums, Task, build_or_explain, sums_where, top_answers, unwrapped
from lion.tasks.metrics import ABOVE_CHANCE, LOSS, Mean, Metric, chance_remark

TOP1 = Mean("top1", "top-1", percent=True)
TOP5 = Mean("top5", "top-5", percent=True)


@dataclass
class ImageClassificationConfig:
    """Settings of image classification.

    `mixup` and `cutmix` are the alphas of their Beta distributions (0: off). With both on, a batch uses cutmix with
    probability `switch`. `random_erasing` is the share of images in which noise replaces a rectangle.

    `teacher` is a trained run, or `timm:NAME[:FILE]`, whose predictions are learned, too (DeiT's distillation,
    2012.12877). Its loss has the weight `teacher_share`, and the labels the rest. `distillation: hard` is the
    cross-entropy with the teacher's most likely class. `soft` is T^2 KL(teacher | student) of the distributions at
    temperature T, divided by the number of classes as in DeiT's code. A model with `distilled: true` learns the
    teacher's predictions with its second head, other models with their only head.
    """

    name: str = "image_classification"
    label_smoothing: float = setting(0.0, min=0, max=0.99)
    mixup: float = setting(0.0, min=0, max=1000)
    cutmix: float = setting(0.0, min=0, max=1000)
    switch: float = setting(0.5, min=0, max=1)
    random_erasing: float = setting(0.0, min=0, max=1)
    teacher: str | None = None
    distillation: str = setting("hard", choices=("hard", "soft"))
    teacher_share: float = setting(0.5, min=0, max=1)
    temperature: float = setting(1.0, above=0, max=1000)

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if 0 < getattr(self, name) < 1e-6:
                raise ValueError(f"{name}: expected 0 (off) or at least 1e-06, got {getattr(self, name)}")
        unused = [name for name in ("distillation", "teacher_share", "temperature") if name in changed(self)]
        if self.teacher is None and unused:
            raise ValueError(f"{unused[0]}: has no effect without a teacher, which task.teacher names")
        if self.distillation == "hard" and "temperature" in unused:
            raise ValueError("temperature: has no effect with distillation 'hard', only with 'soft'")


class ImageClassification(Task):
    """Task of image classification.

    Batches hold `image`, uint8 (B, C, H, W), and `label` (B,). Evaluation batches also hold `mask` (B,).

    Training transforms whole batches here, on the device: the model's normalisation, random erasing, mixup and cutmix.

    Attributes:
        teacher: A function from pixels in [0, 1], (B, C, H, W), to logits (B, classes), on the device of the batches.
            The caller sets it before training if `config.teacher` names one (`lion.teachers.open_teacher`).
    """

    title = "Image classification"
    Config = ImageClassificationConfig
    Model = ImageClassifier
    default_model = "vit"
    Info = ImageInfo
    info: ImageInfo
    unit = "images"

    def __init__(self, config: ImageClassificationConfig, info: ImageInfo) -> None:
        from torchvision.transforms import v2

        super().__init__(config, info)
        self.teacher: Callable[[Tensor], Tensor] | None = None
        classes = len(info.classes)
        if classes <= 5:  # every answer is among the first five
            self.metrics = tuple(metric for metric in self.metrics if metric is not TOP5)
        self.mix = None
        if config.mixup and config.cutmix:
            both = [
                v2.MixUp(alpha=config.mixup, num_classes=classes),
                v2.CutMix(alpha=config.cutmix, num_classes=classes),
            ]
            self.mix = v2.RandomChoice(both, p=[1 - config.switch, config.switch])
        elif config.mixup:
            self.mix = v2.RandomChoice([v2.MixUp(alpha=config.mixup, num_classes=classes)])
        elif config.cutmix:
            self.mix = v2.RandomChoice([v2.CutMix(alpha=config.cutmix, num_classes=classes)])

    @staticmethod
    def metrics_of(config: ImageClassificationConfig) -> tuple[Metric, ...]:
        return TOP1, TOP5, LOSS, ABOVE_CHANCE

    @staticmethod
    def remark(values: dict[str, float]) -> str | None:
        return chance_remark(values, TOP1)

    def build_model(self, config: Any) -> ImageClassifier:
        info = self.info
        if getattr(config, "distilled", False) and self.config.teacher is None:
            raise ConfigError("model.distilled: its second head learns from a teacher, set task.teacher")
        return build_or_explain(
            MODELS[config.name],
            config,
            image_size=info.size,
            channels=info.channels,
            num_classes=len(info.classes),
            classes=info.classes,
            mean=info.mean,
            std=info.std,
        )

    def check_micro_batch(self, samples: int) -> None:
        if samples < 2 and self.mix is not None:
            raise ConfigError(
                "trainer.micro_batch: 1 sample in each process, but task.mixup and task.cutmix mix the samples of a "
                "micro-batch: at least 2"
            )

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        images = unwrapped(model, ImageClassifier).normalise(batch["image"])
        labels = batch["label"]
        if self.config.random_erasing:
            images = erase(images, self.config.random_erasing)
        if self.mix is not None:  # shuffle: mixing pairs neighbours, under repeated augmentation views of one image
            order = torch.randperm(len(images), device=images.device)
            images, labels = self.mix(images[order], labels[order])  # labels become (B, classes) shares
        logits = distilled = model(images)
        if isinstance(logits, tuple):
            logits, distilled = logits
        logits = logits.float()
        loss = F.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing, reduction="sum")
        if self.config.teacher is not None:
            own = unwrapped(model, ImageClassifier)
            assert self.teacher is not None  # set by the caller
            taught = self.teacher(images * own.std + own.mean)
            share = self.config.teacher_share
            loss = (1 - share) * loss + share * self.distillation_loss(distilled.float(), taught)
        return Sums(loss, loss.new_full((), len(images)))

    def distillation_loss(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Return the summed loss of logits (B, classes) against the logits of the teacher, see the settings."""
        if self.config.distillation == "hard":
            return F.cross_entropy(logits, taught.argmax(-1), reduction="sum")
        t = self.config.temperature
        own = (logits / t).log_softmax(-1)
        theirs = (taught / t).log_softmax(-1)
        return t**2 * F.kl_div(own, theirs, reduction="sum", log_target=True) / logits.shape[-1]

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = self.outputs(model, batch)
        labels = batch["label"]
        ranked_classes = logits.topk(min(5, logits.shape[1])).indices
        ranked = ranked_classes == labels[:, None]
        values = {
            "top1": ranked[:, 0],
            "top5": ranked.any(1),
            "loss": F.cross_entropy(logits, labels, reduction="none"),
        }
        rows = {"prediction": ranked_classes[:, 0], "label": labels}
        return Outcome(sums_where(values, batch["mask"]), logits, rows)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["image"]).float()

    def describe(self, outputs: Tensor, count: int) -> list[list[str]]:
        """Describe the most likely classes and their probabilities, most likely first."""
        return top_answers(outputs, self.info.classes, count)

    def example(self, size: int, device: torch.device | str) -> Batch:
        height, width = self.info.size
        shape = (size, self.info.channels, height, width)
        image = torch.randint(256, shape, dtype=torch.uint8, device=device)
        return {"image": image, "label": torch.zeros(size, dtype=torch.long, device=device)}

    def preview(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        from torchvision.utils import make_grid

        images = {"inputs": make_grid(batch["image"][:32], nrow=8)}
        for name, order in unwrapped(model, ImageClassifier).scan_orders().items():
            images[f"scan_{name}"] = draw_scan(order)
        return images


def erase(images: Tensor, share: float) -> Tensor:
    """Apply random erasing in pixel mode (1708.04896, as DeiT sets it) to normalised images (B, C, H, W).

    In a share of the images, normal noise replaces a rectangle. Its area is 2 % to a third of the image, and its sides
    have a ratio of 0.3 to 1 / 0.3. A rectangle that does not fit is drawn again, ten times at most; after that the
    image stays unchanged.
    """
    batch, _, height, width = images.shape
    area, ratio, top, left = torch.rand(4, batch, 10, device=images.device)
    area = (0.02 + (1 / 3 - 0.02) * area) * height * width
    ratio = 0.3 ** (1 - 2 * ratio)
    high = (area * ratio).sqrt().round()
    wide = (area / ratio).sqrt().round()
    fits = (high < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    high = high.gather(1, first)[:, :, None]  # (B, 1, 1)
    wide = wide.gather(1, first)[:, :, None]
    top = (top.gather(1, first)[:, :, None] * (height - high + 1)).floor()
    left = (left.gather(1, first)[:, :, None] * (width - wide + 1)).floor()
    chosen = (torch.rand(batch, device=images.device) < share) & fits.any(1)
    row = torch.arange(height, device=images.device)[:, None]
    column = torch.arange(width, device=images.device)
    inside = (row >= top) & (row < top + high) & (column >= left) & (column < left + wide)  # (B, H, W)
    return torch.where((inside & chosen[:, None, None])[:, None], torch.randn_like(images), images)


def draw_scan(order: Tensor, scale: int = 24) -> Tensor:
    """Draw a scan order (2, L), -1 for none, as an image (3, height, width) of a path that goes from blue to red."""
    from PIL import Image, ImageDraw
    from torchvision.transforms.functional import pil_to_tensor

    places = order.T.tolist()
    places = [(scale * x + scale // 2, scale * y + scale // 2) for y, x in places if y >= 0]
    size = [scale * (int(side) + 1) for side in order.amax(1).flip(0)]
    picture = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(picture)
    for i, (a, b) in enumerate(pairwise(places)):
        share = i / max(len(places) - 2, 1)
        pen.line([a, b], fill=(int(255 * share), 0, int(255 * (1 - share))), width=3)
    for place in places:
        pen.circle(place, 3, fill="black")
    return pil_to_tensor(picture)
