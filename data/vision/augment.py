"""RandAugment of DeiT (timm's `rand-m9-mstd0.5-inc1`) on torchvision's kernels.

torchvision's `RandAugment` is different: its magnitudes are bins of other ranges, it has other ops, and it always
applies them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image, new
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

EXAMPLE = "rand-m9-mstd0.5-inc1"
SECTION = re.compile(r"(mstd|m|inc|n|p)(\d{1,6}(\.\d{1,6})?)", re.ASCII)
FIELDS = {"m": "magnitude", "mstd": "std", "n": "num_ops", "p": "p"}
WHOLE = ("m", "inc", "n")
IMAGENET_FILL = (124, 116, 104)  # mean colour of ImageNet
BICUBIC = InterpolationMode.BICUBIC

# timm 0.3.2 of 2020, which DeiT pinned, and today's timm have the same policy here, except that `p` was always 0.5.
# Pillow changed: it now refuses to keep 0 bits, which DeiT's magnitude 10 requests; at that time the result was black.


def posterize(picture: Image, bits: int) -> Image:
    if bits:
        return F.posterize(picture, bits)
    return F.adjust_brightness(picture, 0.0)


def solarize_add(picture: Image, amount: int) -> Image:
    """Add `amount`, 0 to 127, to all pixel values below 128."""
    table = list(range(256))
    table[:128] = range(amount, 128 + amount)
    return picture.point(table * len(picture.getbands()))


def affine(picture: Image, fill: Any, shift: tuple = (0.0, 0.0), slope: tuple = (0.0, 0.0)) -> Image:
    """Shift and shear an image about its top left corner.

    `shift` is in pixels; `slope` is in source pixels per row or column; both are (x, y).
    """
    shear = [math.degrees(math.atan(s)) for s in slope]
    return F.affine(picture, 0.0, list(shift), 1.0, shear, interpolation=BICUBIC, fill=fill, center=[0.0, 0.0])


def scaled(top: float) -> Callable[[float], float]:
    """Return a function from magnitude to level, linear, with level `top` at magnitude 10."""
    return lambda m: m / 10 * top


def no_level(m: float) -> None:
    """Return None, the level of an op without a strength."""


def enhancement(m: float) -> float:
    """Return the factor of an enhancement; 1 leaves the image unchanged."""
    return 1 + m / 10 * 0.9


# name: (signed magnitude in [-10, 10] -> level, (image, level, fill) -> image); the sign has no effect on levels
# without a direction
OPS: dict[str, tuple[Callable[[float], Any], Callable[[Image, Any, Any], Image]]] = {
    "AutoContrast": (no_level, lambda picture, _, fill: F.autocontrast(picture)),
    "Equalize": (no_level, lambda picture, _, fill: F.equalize(picture)),
    "Invert": (no_level, lambda picture, _, fill: F.invert(picture)),
    "Rotate": (scaled(30), lambda picture, degrees, fill: F.rotate(picture, degrees, BICUBIC, fill=fill)),
    "PosterizeIncreasing": (lambda m: 4 - int(abs(m) / 10 * 4), lambda picture, bits, fill: posterize(picture, bits)),
    "SolarizeIncreasing": (lambda m: 256 - int(abs(m) / 10 * 256), lambda picture, at, fill: F.solarize(picture, at)),
    "SolarizeAdd": (lambda m: int(abs(m) / 10 * 110), lambda picture, amount, fill: solarize_add(picture, amount)),
    "ColorIncreasing": (enhancement, lambda picture, factor, fill: F.adjust_saturation(picture, factor)),
    "ContrastIncreasing": (enhancement, lambda picture, factor, fill: F.adjust_contrast(picture, factor)),
    "BrightnessIncreasing": (enhancement, lambda picture, factor, fill: F.adjust_brightness(picture, factor)),
    "SharpnessIncreasing": (enhancement, lambda picture, factor, fill: F.adjust_sharpness(picture, factor)),
    "ShearX": (scaled(0.3), lambda picture, slope, fill: affine(picture, fill, slope=(slope, 0.0))),
    "ShearY": (scaled(0.3), lambda picture, slope, fill: affine(picture, fill, slope=(0.0, slope))),
    "TranslateXRel": (scaled(0.45), lambda picture, x, fill: affine(picture, fill, shift=(-x * picture.width, 0.0))),
    "TranslateYRel": (scaled(0.45), lambda picture, y, fill: affine(picture, fill, shift=(0.0, -y * picture.height))),
}


@dataclass(frozen=True)
class RandAugment:
    """RandAugment: `num_ops` ops, drawn with replacement, each applied with probability `p`.

    The magnitude of an op is drawn from N(`magnitude`, `std`), clipped to [0, 10]. `fill` (RGB or one grey value, 0 to
    255) is the colour of the area that rotation, shear and translation uncover. Draws come from torch's default
    generator.

    Raises:
        ValueError: A value is out of its range.
    """

    magnitude: float = 9
    std: float = 0.5
    num_ops: int = 2
    p: float = 0.5
    fill: tuple[int, ...] = IMAGENET_FILL

    def __post_init__(self) -> None:
        for valid, expected in (
            (0 <= self.magnitude <= 10, f"m{self.magnitude:g} is outside 0 to 10"),
            (0 <= self.std <= 100, f"mstd{self.std:g} is outside 0 to 100"),
            (1 <= self.num_ops <= 15, f"n{self.num_ops:g} is outside 1 to 15"),
            (0 < self.p <= 1, f"p{self.p:g} is not above 0 and at most 1"),
            (len(self.fill) in (1, 3), f"fill {self.fill} is neither RGB nor one grey value"),
        ):
            if not valid:
                raise ValueError(expected)

    @classmethod
    def from_string(cls, text: str, fill: tuple[int, ...] = IMAGENET_FILL) -> RandAugment:
        """Parse timm's notation: `rand-m<M>-inc1`, with any of `-mstd<S>`, `-n<N>`, `-p<P>`, in any order after `rand`.

        The defaults are S = 0, N = 2 and P = 0.5.

        Raises:
            ValueError: The text is malformed; the message is one line.
        """

        def wrong(why: object) -> ValueError:
            return ValueError(f"{text!r}: {why}; expected for example {EXAMPLE!r}")

        variant, *sections = text.split("-")
        if variant != "rand":
            raise wrong("only 'rand' is supported")
        values: dict[str, float] = {}
        for section in sections:
            match = SECTION.fullmatch(section)
            if not match or (match[3] and match[1] in WHOLE):
                raise wrong(f"{section!r} is none of m<integer>, mstd<number>, inc1, n<integer>, p<number>")
            if match[1] in values:
                raise wrong(f"{match[1]!r} appears twice")
            values[match[1]] = float(match[2])
            if match[1] in WHOLE:
                values[match[1]] = int(match[2])
        if "m" not in values:
            raise wrong("the magnitude, m<0 to 10>, is missing")
        if values.pop("inc", 0) != 1:
            raise wrong("only the ops of 'inc1', whose strength grows with the magnitude, are supported")
        try:
            return cls(**{"std": 0.0, **{FIELDS[key]: value for key, value in values.items()}}, fill=fill)
        except ValueError as error:
            raise wrong(error) from None

    def draw(self) -> list[tuple[str, float]]:
        """Draw the names and signed magnitudes of the ops to apply, in order."""
        names = list(OPS)
        chosen = torch.randint(len(names), (self.num_ops,)).tolist()
        applied = (torch.rand(self.num_ops) < self.p).tolist()
        magnitudes = (self.magnitude + self.std * torch.randn(self.num_ops)).clamp(0, 10)
        signed = torch.where(torch.rand(self.num_ops) < 0.5, -magnitudes, magnitudes).tolist()
        return [(names[i], m) for i, keep, m in zip(chosen, applied, signed) if keep]

    def __call__(self, picture: Image) -> Image:
        """Augment a PIL image, RGB or L; return an image of the same size and mode.

        Raises:
            TypeError: The input is not a PIL image of one of these modes.
        """
        kind = type(picture).__name__
        if isinstance(picture, Image):
            kind = picture.mode
        if kind not in ("RGB", "L"):
            raise TypeError(f"expected a PIL image, RGB or L, got {kind}")
        fill = self.fill
        if picture.mode == "L" and len(fill) == 3:
            fill = new("RGB", (1, 1), fill).convert("L").getpixel((0, 0))
        for name, magnitude in self.draw():
            level, apply = OPS[name]
            picture = apply(picture, level(magnitude), fill)
        return picture
