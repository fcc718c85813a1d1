"""Image generation by diffusion: the model predicts the noise added to an image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lion.config import ConfigError, setting
from lion.inference.diffusion import SCHEDULES, Process
from lion.models import MODELS
from lion.models.dit import DiT
from lion.samples.base import Batch
from lion.samples.images import ImageInfo
from lion.samples.seeds import mix, normal, place_keys, uniform
from lion.tasks import metrics
from lion.tasks.base import Outcome, Sums, Task, build_or_explain
from lion.tasks.metrics import Mean, Metric

LOSS = replace(metrics.LOSS, digits=4)
TIME_RANGES = 4  # of the range of times, each with a loss: the first has the finest detail, the last nearly only noise
PART_LOSSES = tuple(
    Mean(f"loss_part{i}", f"loss, part {i} of {TIME_RANGES} of times", higher_is_better=False, digits=4, partial=True)
    for i in range(1, TIME_RANGES + 1)
)
HALF_RANGE = 127.5  # half the range of a pixel: [-1, 1] maps to 0 to 255
IMAGE_CHANNELS = (1, 3)  # numbers of channels of images; all others are latents of an autoencoder, without bound


@dataclass
class DiffusionConfig:
    """Settings of the diffusion task.

    `steps` is the number of diffusion times. `label_dropout` is the share of training images whose class is replaced by
    "no class"; guidance needs both kinds. With `label_dropout` 0 only guidance 1 is possible, with 1 only guidance 0.

    At every evaluation TensorBoard shows `shown` samples, generated in `shown_steps` steps with guidance
    `shown_guidance`.
    """

    name: str = "diffusion"
    steps: int = setting(1000, min=1, max=1_000_000)
    schedule: str = setting("linear", choices=SCHEDULES)
    label_dropout: float = setting(0.1, min=0, max=1)
    shown: int = setting(16, min=0, max=1024, free=True)
    shown_steps: int = setting(50, min=1, free=True)
    shown_guidance: float = setting(1.5, min=0, max=100, free=True)

    def __post_init__(self) -> None:
        if self.shown and self.shown_steps > self.steps:
            raise ValueError(f"shown_steps: expected at most task.steps={self.steps}, got {self.shown_steps}")
        if self.shown:
            self.check_guidance(self.shown_guidance, "shown_guidance")

    def check_guidance(self, guidance: float, name: str = "guidance") -> None:
        """Check that training prepared the model for this guidance.

        Raises:
            ValueError: The guidance needs predictions with a class, or without one, that training never makes.
        """
        dropout = self.label_dropout
        only = {0.0: 1, 1.0: 0}.get(dropout)
        if only is not None and guidance != only:
            raise ValueError(f"{name}: task.label_dropout={dropout:g} allows only {only}, got {guidance:g}")


class Diffusion(Task):
    """Task of image generation by diffusion.

    Batches hold `image` (B, C, H, W), either uint8 images or floating-point latents, and `label` (B,). Evaluation
    batches also hold `mask` and `key` (B,).

    The loss is the mean squared error of the predicted noise; variances are not learned. Training draws times and noise
    from PyTorch's generator. Evaluation computes them from the sample's `key`, so that all models, forms and batch
    sizes see the same inputs.
    """

    title = "Image generation"
    Config = DiffusionConfig
    Model = DiT
    default_model = "dit"
    Info = ImageInfo
    info: ImageInfo
    unit = "images"

    def __init__(self, config: DiffusionConfig, info: ImageInfo) -> None:
        super().__init__(config, info)
        self.process = Process(config.schedule, config.steps)
        self.pictures = info.channels in IMAGE_CHANNELS

    @staticmethod
    def metrics_of(config: DiffusionConfig) -> tuple[Metric, ...]:
        return LOSS, *PART_LOSSES

    def build_model(self, config: Any) -> DiT:
        info = self.info
        return build_or_explain(
            MODELS[config.name], config, image_size=info.size, channels=info.channels, classes=info.classes
        )

    def loss(self, model: nn.Module, batch: Batch) -> Sums:
        x = scaled(batch["image"])
        count = len(x)
        times = torch.randint(self.config.steps, (count,), device=x.device)
        unconditional = torch.rand(count, device=x.device) < self.config.label_dropout
        labels = batch["label"].masked_fill(unconditional, len(self.info.classes))
        losses = self.errors(model, x, torch.randn_like(x), times, labels)[0]
        return Sums(losses.sum(), losses.new_full((), count))

    def errors(
        self, model: nn.Module, x: Tensor, noise: Tensor, times: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Predict the noise in images x (B, C, H, W); return the mean squared errors (B,) and the predicted noise."""
        found = model(self.process.noisy(x, noise, times), times, labels).float()
        return (found - noise).square().flatten(1).mean(1), found

    def evaluate(self, model: nn.Module, batch: Batch) -> Outcome:
        x = scaled(batch["image"])
        mask = batch["mask"]
        times = (uniform(batch["key"], 1)[:, 0] * self.config.steps).long()
        noise = normal(mix(batch["key"]), x[0].numel()).view_as(x)
        labels = batch["label"]
        if self.config.label_dropout >= 1:
            labels = self.no_class(x)
        losses, found = self.errors(model, x, noise, times, labels)
        part = times * TIME_RANGES // self.config.steps
        sums = {"loss": ((losses * mask).sum(dtype=torch.float64), mask.sum())}
        for i, metric in enumerate(PART_LOSSES):
            counted = mask & (part == i)
            sums[metric.name] = ((losses * counted).sum(dtype=torch.float64), counted.sum())
        return Outcome(sums, found)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predict the noise (B, C, H, W) in images, at the middle time and without a class."""
        x = scaled(batch["image"])
        half = torch.full((len(x),), self.config.steps // 2, device=x.device)
        return model(x, half, self.no_class(x)).float()

    def no_class(self, x: Tensor) -> Tensor:
        """Return the label "no class" (B,) of a batch x (B, C, H, W)."""
        return torch.full((len(x),), len(self.info.classes), device=x.device)

    def check_prediction(self) -> None:
        raise ConfigError("a run of task 'diffusion' generates images and classifies none: ./run.sh sample RUN")

    def example(self, size: int, device: torch.device | str) -> Batch:
        height, width = self.info.size
        shape = (size, self.info.channels, height, width)
        image = torch.randint(256, shape, dtype=torch.uint8, device=device)
        return {"image": image, "label": torch.zeros(size, dtype=torch.long, device=device)}

    def preview(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        return self.grid("inputs", batch["image"][:32])

    def progress(self, model: nn.Module, batch: Batch) -> dict[str, Tensor | str]:
        """Generate samples of the first images' classes, always from the same noise; show samples and images."""
        c = self.config
        images = batch["image"][: c.shown]
        classes = batch["label"][: c.shown]
        if not len(images):
            return {}
        with torch.compiler.set_stance("force_eager"):  # do not compile: no other call has this batch size
            keys = place_keys(0, torch.arange(len(classes), device=classes.device))
            samples = self.sample(model, classes, keys, steps=c.shown_steps, guidance=c.shown_guidance)
        return {**self.grid("data", images), **self.grid("samples", samples)}

    def grid(self, name: str, pictures: Tensor) -> dict[str, Tensor | str]:
        """Return one image that shows a grid of images, for TensorBoard; nothing for latents."""
        from torchvision.utils import make_grid

        if not self.pictures:
            return {}
        return {name: make_grid(pictures, nrow=8)}

    def sample(
        self, model: nn.Module, classes: Tensor, keys: Tensor, *, steps: int = 50, guidance: float = 1.0
    ) -> Tensor:
        """Run `generate` and return uint8 images (N, channels, height, width); latents are returned unchanged."""
        x = self.generate(model, classes, keys, steps=steps, guidance=guidance)
        if self.pictures:
            return to_bytes(x)
        return x

    @torch.no_grad()
    def generate(
        self,
        model: nn.Module,
        classes: Tensor,
        keys: Tensor,
        *,
        steps: int = 50,
        guidance: float = 1.0,
        eta: float = 0.0,
        after_step: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """Generate images (N, channels, height, width) in [-1, 1], or latents, by DDIM.

        Args:
            model: Model in evaluation mode.
            classes: Integer classes (N,) of the images.
            keys: Integers (N,) that determine the noise (`lion.samples.seeds.place_keys`). An image does not depend on
                how many are generated at once.
            steps: Number of denoising steps.
            guidance: Scale of classifier-free guidance (2207.12598), from the prediction without a class to the
                prediction with the class. 0: no class; 1: the class; more than 1: away from the other classes. Values
                other than 0 and 1 need two predictions per step.
            eta: Noise added in each step, see `Process.denoise`.
            after_step: Function called after each step.

        Raises:
            ValueError: There are more steps than times, or training did not prepare this guidance.
        """
        self.config.check_guidance(guidance)
        none = torch.full_like(classes, len(self.info.classes))
        count = len(classes)
        channels = self.info.channels
        height, width = self.info.size

        def draw(step: int) -> Tensor:
            return normal(mix(keys + step), channels * height * width).view(count, channels, height, width)

        def predict(x: Tensor, times: Tensor) -> Tensor:
            if guidance == 0:
                return model(x, times, none).float()
            if guidance == 1:
                return model(x, times, classes).float()
            both = model(torch.cat([x, x]), torch.cat([times, times]), torch.cat([classes, none]))
            conditional, unconditional = both.float().chunk(2)
            return unconditional + guidance * (conditional - unconditional)

        bound = 1.0 if self.pictures else None
        return self.process.denoise(
            predict, draw(0), steps=steps, eta=eta, draw=draw, bound=bound, after_step=after_step
        )


def scaled(images: Tensor) -> Tensor:
    """Scale uint8 images (B, C, H, W) to [-1, 1]; return floating-point latents unscaled, as float32."""
    if images.dtype == torch.uint8:
        return images.float() / HALF_RANGE - 1
    return images.float()


def to_bytes(x: Tensor) -> Tensor:
    """Convert images in [-1, 1] to uint8, the inverse of `scaled`."""
    return ((x + 1) * HALF_RANGE).round().clamp(0, 255).to(torch.uint8)
