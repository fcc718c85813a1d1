"""Pathfinder's dashes: what each of them, and the room that it takes, looks like around the pixel where it begins.

A dash begins at a whole pixel, and its direction is one of few: whole degrees for the first of a contour, and towards
a pixel on a circle for the others. So all are drawn once, and a picture is made of copies.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

SEEDS = 360  # directions of a first dash, in degrees; those after them are of the circle
SOLID = 255
TOUCH = 1.8 * SOLID  # sum of two rooms from which on dashes touch
CLEAR = TOUCH - SOLID  # less room touches nothing
DISC_EDGE = 2  # pixels around a disc
NEAR = 1e-9  # sines of right angles are no whole numbers


class Shape(NamedTuple):
    """What dashes of a picture look like: height and width of the picture, length, thickness, the gap at each end, how
    much finer than the picture they are drawn, and how straight they follow one another (1: up to a right angle)."""

    side: int
    length: int
    thickness: float
    margin: int
    scale: int
    continuity: float

    @property
    def half(self) -> int:
        """Pixels from where a dash begins to the edge of its drawing."""
        return self.length + math.ceil(self.thickness) + self.margin

    @property
    def area(self) -> float:
        """Pixels that a dash and its gaps take of a picture."""
        return (self.length + 2 * self.margin) * (self.thickness + 2 * self.margin)

    @property
    def border(self) -> int:
        """Pixels around a picture that no dash leaves, drawn or thought of."""
        return 2 * self.length + 3 * self.margin + self.half + 1


class Copies(NamedTuple):
    """Of each dash the cells (as offsets in a padded picture) that it changes, and their values, (dashes, cells)."""

    cells: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, drawn: np.ndarray, width: int) -> Copies:
        """Of drawings (dashes, S, S), uint8, whose middle is where a dash begins, in pictures of this width."""
        found = [np.nonzero(each) for each in drawn]
        most, middle = max(len(y) for y, _ in found), drawn.shape[1] // 2
        cells, values = np.empty((len(drawn), most), np.int64), np.empty((len(drawn), most), np.uint8)
        for i, (y, x) in enumerate(found):
            y, x = (np.pad(axis, (0, most - len(axis)), mode="edge") for axis in (y, x))  # the last one again
            cells[i], values[i] = (y - middle) * width + (x - middle), drawn[i, y, x]
        return cls(cells, values)


class Dashes(NamedTuple):
    """All dashes of a shape, and how they follow one another. A picture stands in the middle of one that is `border`
    pixels wider on each side; a place of it is a cell, and a way an offset of cells.

    Args:
        ink: What is seen.
        room: What no other dash may touch, 0 to 255.
        wide: The same, and the gap around it.
        check: The cells of `room` where touching is possible.
        solid: The cells where `room` is whole.
        reach: Of the solid cells of seeds: (SEEDS, 4), least and greatest row and column.
        first: From the beginning of a seed to its pivot, (SEEDS, 2) rows and columns, and to its end, (SEEDS, 2).
        move: From a dash's pivot to that of the next one, (dashes,) cells.
        ends: From the next one's pivot to where it may end, (dashes, K) cells.
        weights: How likely each of those is, (dashes, K).
        follow: The dash that it would be, (dashes, K).
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
    """Draw them all."""
    _, length, _, margin, scale, continuity = shape
    circle = ring(length + margin)
    degrees, angles = np.deg2rad(np.arange(SEEDS) - 180), np.arctan2(circle[:, 0], circle[:, 1])
    half, border = shape.half, shape.border
    fine = np.stack([line(angle, half, shape) for angle in [*degrees, *(angles + np.pi)]])  # the others run backwards
    ink, room = (shrunk(each, 2 * half + 1) for each in (fine, dilated(fine, margin * scale)))
    wide = dilated(np.pad(room, ((0, 0), (margin, margin), (margin, margin))), margin)
    solid = np.where(room == SOLID, room, 0)
    solid[:, half, half] = SOLID  # where it begins, at least
    reach = np.array([(y.min(), y.max(), x.min(), x.max()) for y, x in map(np.nonzero, solid[:SEEDS])]) - half
    heads = towards(degrees, length)
    first = np.concatenate([heads + towards(degrees + np.pi, length + margin), heads], 1)

    cells = np.array([shape.side + 2 * border, 1])  # in a row, and in a column
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
    """Pixels (K, 2), about one for each pixel of its length, on a circle around a pixel."""
    angles = np.arange(0, 2 * np.pi - NEAR, 1 / radius)
    places = radius * np.stack([np.sin(angles), np.cos(angles)], 1)
    return np.unique(np.floor(places + NEAR).astype(np.int64), axis=0)


def towards(angles: np.ndarray, distance: float) -> np.ndarray:
    """Whole (rows, columns), (..., 2), at a distance in these directions, rounded up."""
    return np.ceil(distance * np.stack([np.sin(angles), np.cos(angles)], -1) - NEAR).astype(np.int64)


def line(angle: float, half: int, shape: Shape) -> np.ndarray:
    """A dash in this direction, white on black, as fine as it is drawn; it begins in the middle."""
    side, middle = 2 * half * shape.scale + 1, half * shape.scale
    picture = Image.new("L", (side, side))
    row, column = middle + towards(np.asarray(angle), shape.length * shape.scale)
    ends = [(middle, middle), (int(column), int(row))]
    ImageDraw.Draw(picture).line(ends, fill=255, width=max(1, round(shape.thickness * shape.scale)))
    return np.asarray(picture)


def dilated(pictures: np.ndarray, radius: int) -> np.ndarray:
    """Each pixel of (N, H, W) the brightest in a disc around it."""
    side, out = pictures.shape[1], pictures.copy()
    around = np.pad(pictures, ((0, 0), (radius, radius), (radius, radius)))
    for y in range(-radius, radius + 1):
        for x in range(-radius, radius + 1):
            if x * x + y * y <= radius * radius:
                shifted = around[:, radius + y : radius + y + side, radius + x : radius + x + side]
                np.maximum(out, shifted, out=out)
    return out


def shrunk(pictures: np.ndarray, side: int) -> np.ndarray:
    """Squares (N, S, S) as ones of another side, smoothed."""
    resize = functools.partial(Image.Image.resize, size=(side, side), resample=Image.Resampling.LANCZOS)
    return np.stack([np.asarray(resize(Image.fromarray(each))) for each in pictures])


def disc(radius: float, scale: int, width: int) -> Copies:
    """A white disc around a pixel."""
    half = math.ceil(radius) + DISC_EDGE
    y, x = np.ogrid[: scale * (2 * half + 1), : scale * (2 * half + 1)]
    fine = ((y - half * scale) ** 2 + (x - half * scale) ** 2 <= (radius * scale) ** 2) * np.uint8(255)
    return Copies.of(shrunk(fine[None], 2 * half + 1), width)
