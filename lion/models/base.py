"""The interface of models, which training, loading, measuring and fine-tuning use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lion.config import Section
from lion.layers.constants import Constants
from lion.ops import Part


class ModelConfig(Section):
    """The `model` section of a recipe: a dataclass with these fields and methods, and any fields of its model.

    A field that is None follows the conventions of the model. Stored recipes keep the section unresolved, including
    every None.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: str  # a key of `MODELS`
    mixer: str  # a key of `lion.layers.mixers.MIXERS`

    def resolved(self) -> Self:
        """Return the config with every None replaced by its convention: the settings of the model that is built.

        Raises:
            ValueError: Settings that cannot be combined.
        """
        return self

    def with_mixer(self, mixer: str) -> Self:
        """Return the config of this model with another mixer, and with the conventions of that mixer."""
        raise NotImplementedError

    def label(self) -> str:
        """Return the label that identifies this model in the rows of a paper's tables."""
        return self.mixer

    def shape(self) -> str:
        """Return the settings that models must share if their mixers are to be compared."""
        return ""


class Model(nn.Module):
    """A model that a recipe selects by `model.name`. A new model is one file and its line in `MODELS`.

    Attributes:
        Config: The recipe's `model` section.
        heads: Prefixes of the parameters that depend on the classes of the data. Fine-tuning on other classes
            initialises these parameters again.
        length: Number of tokens of a sample in the encoder.
        part: The part of every row that this process computes, if the tokens of rows are split over processes. The
            inputs are whole rows; outputs of tokens are those of the part, and outputs of rows are those of whole rows.
    """

    Config: ClassVar[type[ModelConfig]]
    heads: ClassVar[tuple[str, ...]] = ("head.",)
    length: int
    part: Part | None = None

    def units(self) -> list[nn.Module]:
        """Return the parts that are compiled and sharded one by one: usually the blocks of the encoder."""
        raise NotImplementedError

    def own(self, x: Tensor, fill: float | bool = 0) -> Tensor:
        """Return the tokens of this process of whole rows x (B, L, ..); `fill` is the value of padding."""
        if self.part is None:
            return x
        return self.part.own(x, fill=fill)

    def token(self, x: Tensor, place: int) -> Tensor:
        """Return token `place` (B, dim) of whole rows, from the tokens x (B, L, dim) of this process."""
        if self.part is None:
            return x[:, place]
        return self.part.token(x, place)

    def total(self, x: Tensor) -> Tensor:
        """Return the sum (B, dim) over the tokens of whole rows, from x (B, L, dim) of this process; padding is 0."""
        own = x.sum(1)
        if self.part is None:
            return own
        return self.part.sum(own)

    def check_split(self, count: int) -> None:
        """Check that the tokens of a row may be split over `count` processes.

        Raises:
            ValueError: They may not, with this model or these settings.
        """
        raise ValueError(f"model.name: {type(self).__name__} does not split its rows over processes")

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """Return the weights of `source`, the same model for samples of another size, adapted to this model."""
        return weights

    @property
    def streams(self) -> bool:
        """Return whether `prefill` and `step` are available, because the whole model is causal."""
        return False

    def initial_state(self, batch: int) -> Any:
        """Return the state before the first token."""
        raise self._no_stream()

    def prefill(self, inputs: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the outputs for prompts (B, L, ..), and the state after them; `valid` (B, L) is False for padding."""
        raise self._no_stream()

    def step(self, inputs: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the outputs for the next inputs (B, C, ..), and the state after them.

        `valid` (B, C) is False for padding.
        """
        raise self._no_stream()

    def _no_stream(self) -> ValueError:
        return ValueError(f"{type(self).__name__} does not stream: it processes a sample as a whole")


def statistics_of_pixels(channels: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Tensor]:
    """Return mean and standard deviation (channels, 1, 1)."""
    statistics = {}
    for name, values in (("mean", mean), ("std", std)):
        each = torch.tensor(values, dtype=torch.float32).expand(channels)
        statistics[name] = each[:, None, None].clone()
    return statistics


class ImageClassifier(Model, Constants):
    """A model from images (B, channels, height, width) to logits (B, classes).

    Args:
        image_size: (height, width) in pixels.
        channels: Number of image channels.
        classes: Class names in the order of the logits, if known.
        mean, std: Mean and standard deviation of each channel (or one value for all), for pixels in [0, 1]. They
            describe the data and are not learned, so they are not among the weights of a checkpoint.

    The constructor of a subclass is `Kind(config, num_classes=.., **args)`, where `args` are the arguments above.

    Raises:
        ValueError: `mean` or `std` has the wrong number of channels, or `std` is not above 0.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        channels: int,
        classes: Sequence[str] = (),
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        self.image_shape = (channels, *image_size)
        self.classes = tuple(classes)
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(f"{name}: expected one number per channel, {channels}, got {list(values)}")
        if min(std) <= 0:
            raise ValueError(f"std: expected numbers above 0, got {list(std)}")
        self.hold(partial(statistics_of_pixels, channels, tuple(mean), tuple(std)))

    def scan_orders(self) -> dict[str, Tensor]:
        """Return the scan orders of an image by name: rows and columns of the visited patches, (2, L)."""
        return {}

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return uint8 images (B, channels, height, width) as float32, normalised by `mean` and `std`.

        Each channel then has mean 0 and standard deviation 1.
        """
        mean = self.mean.to(pixels.device)
        std = self.std.to(pixels.device)
        return (pixels.float() - 255 * mean) / (255 * std)

    def normalised(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Return images (B, channels, height, width) as input of the model.

        uint8 images are normalised and converted to `dtype`. Floating-point images must be normalised already, and are
        returned unchanged.

        Raises:
            ValueError: Images of the wrong size, number of channels or dtype.
        """
        raw = images.dtype == torch.uint8
        if images.shape[1:] != self.image_shape or not (raw or images.is_floating_point()):
            shape = ", ".join(map(str, self.image_shape))
            expected = f"(B, {shape}), uint8 or normalised floating point"
            raise ValueError(f"images: expected {expected}, got {tuple(images.shape)}, {str(images.dtype)[6:]}")
        if not raw:
            return images
        return self.normalise(images).to(dtype)
