"""Templates of Pathfinder's dashes: the drawing of each dash and the room around it, relative to its first pixel.

A dash begins at a whole pixel and has one of a few directions: whole degrees for the first dash of a contour, and
towards a pixel on a circle for the others. So all dashes are drawn once, and an image is made of copies.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

SEEDS = 360  # directions of a first dash, in degrees; the directions after them belong to the circle
SOLID = 255
TOUCH = 1.8 * SOLID  # dashes touch if the sum of their rooms reaches this value
CLEAR = TOUCH - SOLID  # smaller values of room touch nothing
DISC_EDGE = 2  # pixels around a disc
NEAR = 1e-9  # tolerance: computed sines of right angles are not whole numbers


class Shape(NamedTuple):
    """The shape of the dashes of an image.

    side: height and width of the image.
    length, thickness: size of a dash in pixels.
    margin: gap at each end of a dash.
    scale: factor by which the drawing is finer than the image.
    continuity: straightness of contours; 1 allows turns of up to a right angle.
    """

    side: int
    length: int
    thickness: float
    margin: int
    scale: int
    continuity: float

    @property
    def half(self) -> int:
        """Pixels from the beginning of a dash to the edge of its drawing."""
        return self.length + math.ceil(self.thickness) + self.margin

    @property
    def area(self) -> float:
        """Area in pixels of a dash with its gaps."""
        return (self.length + 2 * self.margin) * (self.thickness + 2 * self.margin)

    @property
    def border(self) -> int:
        """Width in pixels of the padding around an image, which contains every drawn or attempted dash."""
        return 2 * self.length + 3 * self.margin + self.half + 1


class Copies(NamedTuple):
    """Cells that each dash changes (offsets in a padded image) and their values, both (dashes, cells)."""

    cells: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, drawn: np.ndarray, width: int) -> Copies:
        """Build the copies from drawings (dashes, S, S), uint8, for padded images of this width.

        A dash begins at the center of its drawing.
        """
        found = [np.nonzero(each) for each in drawn]
        most, middle = max(len(y) for y, _ in found), drawn.shape[1] // 2
        cells, values = np.empty((len(drawn), most), np.int64), np.empty((len(drawn), most), np.uint8)
        for i, (y, x) in enumerate(found):
            y, x = (np.pad(axis, (0, most - len(axis)), mode="edge") for axis in (y, x))  # repeat the last cell
            cells[i], values[i] = (y - middle) * width + (x - middle), drawn[i, y, x]
        return cls(cells, values)


class Dashes(NamedTuple):
    """All dashes of a shape, and the transitions between them.

    An image is padded by `border` pixels on each side. A place in the padded image is the index of a cell, and a
    displacement is an offset of cells. Seeds are the first dashes of contours.

    Args:
        ink: The visible drawing.
        room: The area that no other dash may touch, 0 to 255.
        wide: The area of `room` with the gap around it.
        check: The cells of `room` where touching is possible.
        solid: The cells where `room` is 255.
        reach: Bounds of the solid cells of seeds, (SEEDS, 4): least and greatest row, least and greatest column.
        first: Displacement from the beginning of a seed to its pivot and to its end, (SEEDS, 4) rows and columns.
        move: Offset from the pivot of a dash to the pivot of the next dash, (dashes,) cells.
        ends: Offsets from the next pivot to the far ends of the K candidates for the next dash, where their drawings
            begin, (dashes, K) cells.
        weights: Unnormalized probabilities of the candidates, (dashes, K).
        follow: Indices of the candidate dashes, (dashes, K).
    """

    shape: Shape
    border: int
    ink: Copies
    room: Copies
    wide: Copies
    check: Copies
    solid: Copies
    reach: np.ndarray
    first: np.ndarray
    move: np.ndarray
    ends: np.ndarray
    weights: np.ndarray
    follow: np.ndarray

    @property
    def width(self) -> int:
        return self.shape.side + 2 * self.border


@functools.lru_cache(maxsize=8)
def dashes(shape: Shape) -> Dashes:
    """Draw all dashes of a shape."""
    _, length, _, margin, scale, continuity = shape
    circle = ring(length + margin)
    degrees, angles = np.deg2rad(np.arange(SEEDS) - 180), np.arctan2(circle[:, 0], circle[:, 1])
    half, border = shape.half, shape.border
    # dashes after the first of a contour are drawn backwards
    fine = np.stack([line(angle, half, shape) for angle in np.concatenate([degrees, angles + np.pi])])
    ink = shrunk(fine, 2 * half + 1)
    room = shrunk(dilated(fine, margin * scale), 2 * half + 1)
    wide = dilated(np.pad(room, ((0, 0), (margin, margin), (margin, margin))), margin)
    solid = np.where(room == SOLID, room, 0)
    solid[:, half, half] = SOLID  # at least the first pixel of the dash
    reach = np.array([(y.min(), y.max(), x.min(), x.max()) for y, x in map(np.nonzero, solid[:SEEDS])]) - half
    heads = towards(degrees, length)
    first = np.concatenate([heads + towards(degrees + np.pi, length + margin), heads], 1)

    cells = np.array([shape.side + 2 * border, 1])  # offset of one row, and of one column
    directions = np.concatenate([degrees, angles])
    turn = np.abs(directions[:, None] - angles)
    turn = np.minimum(turn, 2 * np.pi - turn) * continuity  # (dashes, circle)
    weights = np.where(turn < np.pi / 2, np.cos(turn) ** 2, 0)
    most = (weights > NEAR).sum(1).max()
    follow = np.argsort(-weights, 1, kind="stable")[:, :most]
    copies = (Copies.of(each, cells[0]) for each in (ink, room, wide, np.where(room >= CLEAR, room, 0), solid))
    return Dashes(
        shape,
        border,
        *copies,
        reach,
        first,
        move=towards(directions, length + 2 * margin) @ cells,
        ends=(circle @ cells)[follow],
        weights=np.take_along_axis(weights, follow, 1).astype(np.float32),
        follow=SEEDS + follow,
    )


def ring(radius: int) -> np.ndarray:
    """Return pixels (K, 2) on a circle around a pixel, about one per pixel of its circumference."""
    angles = np.arange(0, 2 * np.pi - NEAR, 1 / radius)
    places = radius * np.stack([np.sin(angles), np.cos(angles)], 1)
    return np.unique(np.floor(places + NEAR).astype(np.int64), axis=0)


def towards(angles: np.ndarray, distance: float) -> np.ndarray:
    """Return whole (rows, columns), shape (..., 2), at a distance in these directions, rounded up."""
    return np.ceil(distance * np.stack([np.sin(angles), np.cos(angles)], -1) - NEAR).astype(np.int64)


def line(angle: float, half: int, shape: Shape) -> np.ndarray:
    """Draw a dash in this direction at the fine scale, white on black; it begins at the center."""
    side, middle = 2 * half * shape.scale + 1, half * shape.scale
    picture = Image.new("L", (side, side))
    row, column = middle + towards(np.asarray(angle), shape.length * shape.scale)
    ends = [(middle, middle), (int(column), int(row))]
    ImageDraw.Draw(picture).line(ends, fill=255, width=max(1, round(shape.thickness * shape.scale)))
    return np.asarray(picture)


def dilated(pictures: np.ndarray, radius: int) -> np.ndarray:
    """Dilate images (N, H, H): each pixel becomes the maximum over a disc around it."""
    side, out = pictures.shape[1], pictures.copy()
    around = np.pad(pictures, ((0, 0), (radius, radius), (radius, radius)))
    for y in range(-radius, radius + 1):
        for x in range(-radius, radius + 1):
            if x * x + y * y <= radius * radius:
                shifted = around[:, radius + y : radius + y + side, radius + x : radius + x + side]
                np.maximum(out, shifted, out=out)
    return out


def shrunk(pictures: np.ndarray, side: int) -> np.ndarray:
    """Resize square images (N, S, S) to another side, with smoothing."""
    resize = functools.partial(Image.Image.resize, size=(side, side), resample=Image.Resampling.LANCZOS)
    return np.stack([np.asarray(resize(Image.fromarray(each))) for each in pictures])


def disc(radius: float, scale: int, width: int) -> Copies:
    """Draw a white disc around a pixel."""
    half = math.ceil(radius) + DISC_EDGE
    y, x = np.ogrid[: scale * (2 * half + 1), : scale * (2 * half + 1)]
    fine = ((y - half * scale) ** 2 + (x - half * scale) ** 2 <= (radius * scale) ** 2) * np.uint8(255)
    return Copies.of(shrunk(fine[None], 2 * half + 1), width)
