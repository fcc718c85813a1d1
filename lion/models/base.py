"""What every model promises to those who train, load, measure and fine-tune it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from lion.config import Section


class ModelConfig(Section):
    """The recipe's `model` section: a dataclass with these fields and methods, and whatever else its model has.

    A field that is None is left to the conventions of the model; the section is stored as it was asked for.
    """

    name: str  # in `MODELS`
    mixer: str  # in `lion.layers.KINDS`

    def resolved(self) -> Self:
        """The same with every None filled in: the model that is built.

        Raises:
            ValueError: Settings that do not go together.
        """
        return self

    def with_mixer(self, mixer: str) -> Self:
        """The same model around another mixer, which has its own conventions."""
        raise NotImplementedError

    def label(self) -> str:
        """What a paper tells the rows of its tables apart by."""
        return self.mixer

    def shape(self) -> str:
        """What models must share to be compared by their mixers."""
        return ""


class Model(nn.Module):
    """A model that a recipe names as `model.name`. A new one is one file and its line in `MODELS`.

    Attributes:
        Config: The recipe's `model` section.
        heads: Prefixes of the parameters that belong to its data's classes: fine-tuning on others starts them anew.
        length: Tokens of a sample, as its encoder sees them.
    """

    Config: ClassVar[type[ModelConfig]]
    heads: ClassVar[tuple[str, ...]] = ("head.",)
    length: int

    def units(self) -> list[nn.Module]:
        """The parts that are compiled, and sharded over processes, one by one: usually the blocks of its encoder."""
        raise NotImplementedError

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """Weights of `source`, the same model for samples of another size, for this one."""
        return weights

    @property
    def streams(self) -> bool:
        """Whether `prefill` and `step` go on from a state: the model is causal as a whole."""
        return False

    def initial_state(self, batch: int) -> Any:
        """The state before the first token."""
        raise self._no_stream()

    def prefill(self, inputs: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """The outputs for prompts (B, L, ..), and the state to go on from; `valid` (B, L) is False for padding."""
        raise self._no_stream()

    def step(self, inputs: Tensor, state: Any, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        """The outputs for the next inputs (B, C, ..), and the state after them; `valid` (B, C) as in `prefill`."""
        raise self._no_stream()

    def _no_stream(self) -> ValueError:
        return ValueError(f"{type(self).__name__} does not stream: it sees a sample as a whole")


class ImageClassifier(Model):
    """A model from images (B, channels, height, width) to logits (B, classes).

    Args:
        image_size: (height, width) in pixels.
        channels: Of the images.
        classes: Their names, in the order of the logits, where they are known.
        mean, std: Of each channel (or one for all), of pixels in [0, 1]; what is known of the data, not learned, and
            so in no checkpoint's weights.

    A subclass is made as `Kind(config, num_classes=.., **these)`.

    Raises:
        ValueError: `mean` or `std` is for other channels.
    """

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
        self.image_shape, self.classes = (channels, *image_size), tuple(classes)
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise ValueError(f"{name}: expected one number a channel, {channels}, got {list(values)}")
            each = torch.tensor(values, dtype=torch.float32).expand(channels)[:, None, None]
            self.register_buffer(name, each.clone(), persistent=False)  # (channels, 1, 1)

    def scan_orders(self) -> dict[str, Tensor]:
        """The ways on which an image is scanned, by name: rows and columns of patches (2, L) as they are visited."""
        return {}

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 (B, channels, height, width) as float32, each channel to mean 0 and deviation 1."""
        return (pixels.float() - 255 * self.mean) / (255 * self.std)

    def normalised(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images (B, channels, height, width), uint8 as pictures have it, as the model takes them; floating point went
        through `normalise` already.

        Raises:
            ValueError: Images of another size, number of channels or type.
        """
        if images.shape[1:] != self.image_shape or not (images.dtype == torch.uint8 or images.is_floating_point()):
            expected = f"(B, {', '.join(map(str, self.image_shape))}), uint8 or normalised floating point"
            raise ValueError(f"images: expected {expected}, got {tuple(images.shape)}, {str(images.dtype)[6:]}")
        return self.normalise(images).to(dtype) if images.dtype == torch.uint8 else images
