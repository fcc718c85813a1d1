"""Pathfinder (arXiv 1805.08315, 2011.04006): the label is 1 if two discs mark the ends of one dashed contour."""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.folders import user_path
from data.lra.pathfinder_contours import Contours, draw
from data.lra.pathfinder_dashes import DISC_EDGE, Shape
from data.lra.pixels import PixelConfig, PixelSet, arrays_of, grey
from data.lra.sequences import GeneratedConfig
from data.lra.store import Arrays, Part, Source, in_parts
from data.manifest import stamps
from data.vision.images import open_or_explain
from lion.config import ConfigError, setting
from lion.samples.seeds import derive
from lion.samples.sequences import SequenceInfo

log = logging.getLogger("lion")

FIRST = 16  # images that are drawn before all others, enough to use all slots of the drawing

# folders by dashes per contour; the last one is LRA's task
FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
EMPTY, EMPTY_SIDE = "curv_baseline/imgs/0/sample_172.png", 32  # an empty file among LRA's images of 32 x 32


@dataclass
class PathfinderConfig(GeneratedConfig, PixelConfig):
    """Settings of Pathfinder; the defaults of the generator are LRA's for images of 32 x 32.

    contour_length: Dashes of a contour; 14 is LRA's task, 6 and 9 are its easier variants.
    paddle_length, paddle_thickness: Size of a dash in pixels.
    margins: Gaps around dashes in pixels; each image uses one of them.
    antialias: Factor by which dashes are drawn finer than the image.
    continuity: Straightness of contours; 1 allows turns of up to a right angle.
    frame: Width of the border that stays free.
    seed_distance: Distance between the beginnings of the two contours.
    marker_radius: Radius of the discs.
    distractor_length: Dashes of a distractor contour; null: a third of `contour_length`.
    distractors: Maximum number of distractors; null: `distractor_dashes` divided by their length, rounded down.
    contrast, distractor_contrast: Brightness of dashes; the brightness of the discs is 1.
    path: LRA's folder of images and metadata, which replace generated samples; one tenth becomes `val`, and
        another tenth `test`.
    """

    name: str = "pathfinder"
    contour_length: int = setting(14, min=2, max=100)
    paddle_length: int = setting(2, min=1, max=64)
    paddle_thickness: float = setting(0.5, above=0, max=16)
    margins: tuple[int, ...] = (1,)
    antialias: int = setting(2, min=1, max=8)
    continuity: float = setting(1.0, min=0.5, max=10)
    frame: int = setting(1, min=1)
    seed_distance: int = setting(7, min=1)
    marker_radius: float = setting(1.5, above=0, max=32)
    distractor_length: int | None = setting(None, min=1, max=100)
    distractors: int | None = setting(None, min=0, max=100)
    distractor_dashes: int = setting(20, min=0, max=1000)
    contrast: float = setting(1.5, above=0, max=10)
    distractor_contrast: float = setting(2.0, above=0, max=10)

    def __post_init__(self) -> None:
        thickness = self.paddle_thickness * self.antialias
        if not self.margins or min(self.margins) < 1 or max(self.margins) > 32:
            raise ValueError(f"margins: expected gaps of 1 to 32 pixels, got {list(self.margins)}")
        if thickness != round(thickness):
            raise ValueError(
                f"paddle_thickness: {self.paddle_thickness} is not a whole number of pixels drawn {self.antialias} "
                f"times finer (antialias), nearest: {max(1, round(thickness)) / self.antialias}"
            )
        if 2 * self.frame >= self.side:
            raise ValueError(
                f"frame: {self.frame} leaves nothing of {self.side} pixels, nearest: {(self.side - 1) // 2}"
            )
        if self.side < 5:
            raise ValueError(f"side: {self.side} pixels have no room for two contours, nearest: 5")
        if 4 * self.seed_distance >= self.side:
            raise ValueError(
                f"seed_distance: contours begin twice {self.seed_distance} pixels from every border, but {self.side} "
                f"pixels (side) have no room for this, nearest: {(self.side - 1) // 4}"
            )
        room = min(shape.border for shape in self.shapes()) - DISC_EDGE
        if math.ceil(self.marker_radius) > room:
            raise ValueError(
                f"marker_radius: {self.marker_radius:g} is more than dashes of {self.paddle_length} pixels leave room "
                f"for, nearest: {room}"
            )

        room = min((self.side - 2 * self.frame + 2 * shape.margin) ** 2 // (2 * shape.area) for shape in self.shapes())
        if self.contour_length > room:
            raise ValueError(
                f"contour_length: two contours of {self.contour_length} dashes and their margins take more than "
                f"{self.side} x {self.side} pixels, at most {int(room)} fit"
            )

    def shapes(self) -> list[Shape]:
        """Return the shape of the dashes for each of the margins."""
        shape = Shape(self.side, self.paddle_length, self.paddle_thickness, 0, self.antialias, self.continuity)
        return [shape._replace(margin=margin) for margin in self.margins]

    def contours(self) -> Contours:
        length = self.distractor_length or max(1, self.contour_length // 3)
        others = self.distractors
        if others is None:
            others = self.distractor_dashes // length
        return Contours(
            shape=self.shapes()[0],
            margins=self.margins,
            frame=self.frame,
            seed_distance=self.seed_distance,
            radius=self.marker_radius,
            length=self.contour_length,
            distractors=others,
            distractor_length=length,
            brightness=self.contrast,
            distractor_brightness=self.distractor_contrast,
        )


class Pathfinder(PixelSet):
    """Pathfinder, generated or read from LRA's files."""

    Config = PathfinderConfig
    held_out = {"val": 0.1, "test": 0.1}  # noqa: RUF012  # for LRA's files, which have no splits

    def identity(self) -> Any:
        if self.config.path:
            return {"files": stamps(self.metadata()), "side": self.config.side}
        return self.config.decided()

    def source(self) -> Source:
        if self.config.path:
            return Folder(self.config, self.metadata())
        return Generator(self.config)

    def metadata(self) -> list[Path]:
        """Return LRA's metadata files of the task with this contour length, in order.

        Raises:
            ConfigError: There are no such files.
        """
        config, root = self.config, user_path(self.config.path)
        name = FOLDERS.get(config.contour_length)
        if name is None:
            raise ConfigError(
                f"data.contour_length: LRA's images have {', '.join(map(str, FOLDERS))} dashes per contour"
            )
        places = (root, root / name, root / f"pathfinder{config.side}" / name)
        for place in places:
            folder = place / "metadata"
            if place.name == name and folder.is_dir():
                break
        else:
            raise ConfigError(
                f"data set '{config.name}': no folder {places[1] / 'metadata'}; data.path must be LRA's folder "
                f"pathfinder{config.side}, the task needs its {name} (data.contour_length={config.contour_length})"
            )
        files = []
        for path in folder.glob("*.npy"):
            if path.stem.isdecimal():
                files.append(path)
        if not files:
            raise ConfigError(f"data set '{config.name}': no metadata in {folder}, expected 0.npy, 1.npy, ..")
        return sorted(files, key=lambda path: int(path.stem))

    def info(self, manifest: dict[str, Any] | None = None) -> SequenceInfo:
        return SequenceInfo(classes=2, length=self.config.side**2, mean=0.5, std=0.5)

    def published(self) -> tuple[SequenceInfo, int]:
        samples = self.config.samples
        if self.config.path:
            samples = 160_000
        return self.info(), min(samples, self.config.limit or samples)


@dataclass
class PathXConfig(PathfinderConfig):
    """Settings of Path-X: those of LRA for images of 128 x 128."""

    name: str = "pathx"
    side: int = setting(128, min=4, max=1024)
    paddle_length: int = setting(5, min=1, max=64)
    paddle_thickness: float = setting(1.5, above=0, max=16)
    margins: tuple[int, ...] = (2, 3)
    continuity: float = setting(1.8, min=0.5, max=10)
    seed_distance: int = setting(20, min=1)
    marker_radius: float = setting(3.0, above=0, max=32)
    distractor_dashes: int = setting(35, min=0, max=1000)
    contrast: float = setting(0.9, above=0, max=10)
    distractor_contrast: float = setting(0.9, above=0, max=10)


class PathX(Pathfinder):
    """Path-X: Pathfinder with 16,384 pixels."""

    Config = PathXConfig


class Generator(Source):
    """A source of generated images; an image depends only on (seed, split, number)."""

    def __init__(self, config: PathfinderConfig) -> None:
        self.config, self.contours = config, config.contours()
        self.make(Part("train", 0, 0, FIRST))  # without room, this fails at once, and not in every process

    def parts(self) -> list[Part]:
        return in_parts(self.config.counts(), self.config.part)

    def make(self, part: Part) -> Arrays:
        numbers = range(part.first, part.first + part.count)
        keys = np.array([derive(self.config.seed, part.split, number) for number in numbers])
        pictures, labels = draw(self.contours, keys)
        return {"pixels": pictures.reshape(len(pictures), -1), "label": labels}


class Folder(Source):
    """A source of LRA's images, all of them as `train`, in the order of their metadata."""

    def __init__(self, config: PathfinderConfig, metadata: list[Path]) -> None:
        self.side, self.size = config.side, config.part
        self.samples = once(list(itertools.chain.from_iterable(map(read_metadata, metadata))))
        if self.side == EMPTY_SIDE:
            self.samples = [sample for sample in self.samples if not is_empty(sample[0])]
        if not self.samples:
            raise ConfigError(f"{metadata[0]}: no rows, there are no samples")

    def parts(self) -> list[Part]:
        return in_parts({"train": len(self.samples)}, self.size)

    def make(self, part: Part) -> Arrays:
        some = self.samples[part.first : part.first + part.count]
        return arrays_of([(grey(open_or_explain(str(path)), self.side, str(path)), label) for path, label in some])


def read_metadata(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield (path, label) of the images that a metadata file lists.

    Raises:
        ConfigError: The file cannot be read, or a row is invalid.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(6) != b"\x93NUMPY"
        if text:
            rows = [line.split() for line in path.read_text().splitlines()]
        else:
            rows = np.load(path).tolist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a metadata file ({error})") from None
    root = path.parent.parent
    for number, row in enumerate(rows, 1):
        if not row:
            continue
        if len(row) < 4 or str(row[3]) not in ("0", "1"):
            found = " ".join(map(str, row))[:60]
            raise ConfigError(f"{path}, row {number}: expected folder, file, number and label 0 or 1, got {found!r}")
        picture = Path(os.path.normpath(root / str(row[0]) / str(row[1])))
        if not picture.is_relative_to(os.path.normpath(root)):
            raise ConfigError(f"{path}, row {number}: {picture} lies outside of {root}")
        yield picture, int(row[3])


def once(samples: list[tuple[Path, int]]) -> list[tuple[Path, int]]:
    """Return each image once, although metadata may list it repeatedly.

    A repeated image would count twice, and could be both a training and a held-out sample.

    Raises:
        ConfigError: An image has two labels.
    """
    labels: dict[Path, int] = {}
    for picture, label in samples:
        if labels.setdefault(picture, label) != label:
            raise ConfigError(f"{picture}: its metadata list both labels {labels[picture]} and {label}")
    if len(labels) < len(samples):
        log.info("%d repeated entries of images are ignored", len(samples) - len(labels))
    return list(labels.items())


def is_empty(picture: Path) -> bool:
    """Return whether a file is the one of LRA's images that is known to be empty; log a line if so."""
    if not picture.as_posix().endswith(EMPTY):
        return False
    log.info("%s: skipped, the file is known to be empty", picture)
    return True
