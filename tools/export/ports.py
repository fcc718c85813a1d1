"""Inputs and outputs of exported programs, by task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lion.runs import LoadedRun
from lion.samples.images import ImageInfo, evaluation_crop
from lion.samples.sequences import PIXELS
from lion.tasks.diffusion import Diffusion

BATCH, LENGTH, SEEN = "batch", "length", "seen"  # names of the sizes that may vary; `SEEN`: tokens before a step
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Port:
    """An input or output of a program.

    Attributes:
        name: Name.
        dtype: Data type.
        shape: Sizes; `BATCH`, `LENGTH` and `SEEN` may vary.
        about: Meaning of the values, for the description of the program.
        below: For inputs: all values are from 0 to `below` - 1.
        start: For states: the value of all numbers before the first token.
    """

    name: str
    dtype: torch.dtype
    shape: Shape
    about: str
    below: int = 2
    start: float | None = None

    def example(self, sizes: dict[str, int]) -> Tensor:
        """Return random values, or the start of a state; in a mask, the second half of the second row is padding."""
        shape = []
        for size in self.shape:
            shape.append(sizes.get(size, 0) if isinstance(size, str) else size)
        if self.start is not None:
            return torch.full(shape, self.start, dtype=self.dtype)
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype)
        if self.dtype != torch.bool:
            return torch.randint(self.below, shape, dtype=self.dtype)
        mask = torch.ones(shape, dtype=self.dtype)
        mask[1:2, ..., shape[-1] // 2 + 1 :] = False
        return mask

    def described(self) -> dict[str, Any]:
        """Return the description as plain data."""
        port = {"name": self.name, "dtype": str(self.dtype)[6:], "shape": list(self.shape), "about": self.about}
        if self.start is not None:
            port["start"] = str(self.start)  # JSON has no infinity
        return port


Ports = tuple[tuple[Port, ...], Port]  # the inputs, and the output


def pixels(*shape: int) -> tuple[Port, ...]:
    """Return the input of a model of pixels (batch, *shape)."""
    about = "intensities from 0 to 255, at this size; the program normalises them"
    return (Port("pixels", torch.uint8, (BATCH, *shape), about, PIXELS),)


def tokens(
    vocabulary: int, *shape: int | str, ids: tuple[int, ...] = (), types: int = 0, where: str = ""
) -> tuple[Port, ...]:
    """Return the inputs of a model of tokens (batch, *shape): ids, mask of padding, and types if there are any.

    `ids` is the number of ids of a token, where a token has several; `where` is the place of padding.
    """
    shape = (BATCH, *shape)
    read = Port("tokens", torch.int64, shape + ids, f"ids of tokens, from 0 to {vocabulary - 1}", vocabulary)
    mask = Port("mask", torch.bool, shape, f"false for padding{where}, on which no token depends")
    if not types:
        return read, mask
    return read, mask, Port("types", torch.int64, shape, "number of the sentence of a pair, from 0", types)


def logits(*shape: int | str, about: str = "logits of the classes") -> Port:
    return Port("logits", torch.float32, (BATCH, *shape), about)


def of_diffusion(run: LoadedRun) -> Ports:
    info = run.task.info
    steps = run.task.process.count
    image = (BATCH, info.channels, *info.size)
    labels = len(info.classes)
    inputs = (
        Port("images", torch.float32, image, "noisy images, without noise from -1 to 1"),
        Port("times", torch.int64, (BATCH,), f"diffusion times, from 0 to {steps - 1}, the most noise", steps),
        Port("labels", torch.int64, (BATCH,), f"numbers of the classes; {labels} means no class", labels + 1),
    )
    return inputs, Port("noise", torch.float32, image, "the noise in the images, of mean 0 and deviation 1")


def of_images(run: LoadedRun) -> Ports:
    info = run.task.info
    return pixels(info.channels, *info.size), logits(len(info.classes))


def of_sequences(run: LoadedRun) -> Ports:
    info = run.task.info
    if info.vocabulary is None:
        inputs = pixels(info.length)
    elif info.parts == 2:
        inputs = tokens(info.vocabulary, 2, LENGTH)
    else:
        inputs = tokens(info.vocabulary, LENGTH)
    return inputs, logits(info.classes)


def of_masked_sequences(run: LoadedRun) -> Ports:
    info = run.task.info
    if info.vocabulary is None:
        inputs = pixels(info.length)
        output = logits(info.length, 1, about="the normalised intensity at each place")
    else:
        inputs = tokens(info.vocabulary, LENGTH)
        output = logits(LENGTH, info.vocabulary, about="logits of the id at each place")
    hidden = Port("hidden", torch.bool, inputs[0].shape, "true for inputs that the model predicts without reading them")
    return (*inputs, hidden), output


def of_labelled_tokens(run: LoadedRun) -> Ports:
    info = run.task.info
    return tokens(info.vocabulary, LENGTH, ids=(info.ids,)), logits(LENGTH, info.classes)


def of_causal_text(run: LoadedRun) -> Ports:
    ids = run.task.info.vocabulary
    return tokens(ids, LENGTH), logits(LENGTH, ids, about="logits of the token after each token")


def of_masked_text(run: LoadedRun) -> Ports:
    ids = run.task.info.vocabulary
    about = "logits of the token at each place"
    return tokens(ids, LENGTH, types=run.model.config.token_types), logits(LENGTH, ids, about=about)


def of_labelled_text(run: LoadedRun) -> Ports:
    info = run.task.info
    output = logits(1, about="the predicted number")
    if info.classes:
        output = logits(len(info.classes))
    return tokens(info.vocabulary, LENGTH, types=run.model.config.token_types, where=" behind the tokens"), output


PORTS: dict[str, Callable[[LoadedRun], Ports]] = {  # by `task.name`
    "causal_lm": of_causal_text,
    "diffusion": of_diffusion,
    "image_classification": of_images,
    "lra": of_sequences,
    "lra_masked": of_masked_sequences,
    "masked_lm": of_masked_text,
    "sequence_classification": of_labelled_text,
    "token_classification": of_labelled_tokens,
}


def facts_of(run: LoadedRun, data: dict[str, Any]) -> dict[str, Any]:
    """Return what the description of a program says beyond its inputs and outputs, as plain data.

    `data` are the settings of the run's data.
    """
    info = run.task.info
    facts: dict[str, Any] = {"data": info.to_dict()}
    if isinstance(run.task, Diffusion):
        facts["alphas_cumprod"] = run.task.process.alphas_cumprod.tolist()
    elif isinstance(info, ImageInfo):
        facts["prepare"] = {"mode": "L" if info.channels == 1 else "RGB"}
        facts["prepare"] |= scaling(info, data) | {"resample": "bicubic"}
    return facts


def scaling(info: ImageInfo, data: dict[str, Any]) -> dict[str, Any]:
    """Return how evaluation scales an image, and cuts out its center, in the words of image processors.

    They have none for `cover`: the image keeps its proportions, and is as small as covers this height and width.
    """
    height, width = info.size
    crop = evaluation_crop(data)
    size = {"height": height, "width": width}
    if crop is None:
        return {"size": size}
    if height != width:
        return {"cover": {name: n / crop for name, n in size.items()}, "crop_size": size}
    return {"size": {"shortest_edge": max(int(height / crop), height)}, "crop_size": size}
