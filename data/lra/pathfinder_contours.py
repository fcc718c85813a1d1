"""Drawing of Pathfinder images (arXiv 1805.08315): the label is 1 if two discs mark the ends of one dashed contour.

Many images are drawn in parallel. The random numbers of an image depend on its key alone, so an image does not depend
on the other images drawn with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from data.lra.pathfinder_dashes import SEEDS, SOLID, TOUCH, Copies, Dashes, Shape, dashes, dilated, disc
from lion.config import ConfigError
from lion.samples.seeds import GOLDEN, mix, uniform

MAX_ROOM = 0.3 * SOLID  # maximum room taken at the place of a first dash
DRAWS = 3  # draws of a dash before its contour is abandoned
ATTEMPTS = 5  # attempts at a distractor before it is omitted
PLACES = 64  # places tried for the first dash of a distractor
SLOTS = 512  # images drawn in parallel
MAX_ATTEMPTS = 100_000  # attempts without success before an error
PARALLEL_ATTEMPTS = 32  # parallel attempts at one image
NO_ATTEMPT = 2**62


@dataclass(frozen=True)
class Contours:
    """The appearance of the images.

    Args:
        shape: Shape of the dashes, except their margin.
        margins: Gaps around dashes; each image uses one of them.
        frame: Width of the border that stays free.
        seed_distance: Distance between the first dashes of the two contours.
        radius: Radius of the discs.
        length: Number of dashes of a contour.
        distractors, distractor_length: Maximum number of other contours, and their number of dashes.
        brightness, distractor_brightness: Brightness of the dashes; the brightness of the discs is 1.
    """

    shape: Shape
    margins: tuple[int, ...]
    frame: int
    seed_distance: int
    radius: float
    length: int
    distractors: int
    distractor_length: int
    brightness: float
    distractor_brightness: float


def draw(contours: Contours, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw images uint8 (B, side, side) and labels uint8 (B,) from keys (B,), int64.

    A label is 1 if the discs are on one contour.

    Raises:
        ConfigError: There is no room for two contours.
    """
    side = contours.shape.side
    pictures, labels = np.empty((len(keys), side, side), np.uint8), np.empty(len(keys), np.uint8)
    which = (Chance(keys).draw(np.arange(len(keys)), 1)[:, 0] * len(contours.margins)).astype(int)
    for i, margin in enumerate(contours.margins):
        rows = np.nonzero(which == i)[0]
        if not len(rows):
            continue
        table, chance = dashes(contours.shape._replace(margin=margin)), Chance(keys[rows], 1)
        dash, start = Targets(contours, table, keys[rows]).draw()
        for begin in range(0, len(rows), SLOTS):
            some = np.arange(begin, min(begin + SLOTS, len(rows)))
            canvas = Canvas(contours, table, chance, some, dash[some], start[some])
            canvas.draw_distractors()
            pictures[rows[some]], labels[rows[some]] = canvas.render()
    return pictures, labels


class Chance:
    """Streams of random numbers; each is a function of its key and of the count of numbers already drawn."""

    def __init__(self, keys: np.ndarray, drawn: int = 0) -> None:
        self.keys, self.drawn = keys.copy(), np.full(len(keys), drawn)

    def draw(self, rows: np.ndarray, n: int) -> np.ndarray:
        """Draw the next `n` numbers of some streams: (rows, n) in [0, 1)."""
        found = uniform(torch.from_numpy(self.keys[rows] + self.drawn[rows] * GOLDEN), n)
        self.drawn[rows] += n
        return found.numpy()

    def begin(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Restart streams with other keys."""
        self.keys[rows], self.drawn[rows] = keys, 0


class Field:
    """The cells that dashes occupy, in padded images; each image is a slot.

    Attributes:
        room, wide: Occupied cells (slots * area,), 0 to 255, see `Dashes`.
        taken: Both of them, (2, slots, area), in the same memory.
        base: Index of the first cell of each slot, (slots,).
    """

    def __init__(self, contours: Contours, table: Dashes, slots: int) -> None:
        side, margin = table.shape.side, table.shape.margin
        border = (table.border, table.border)
        around = ((0, 0), border, border)
        frame = np.full((1, side, side), SOLID, np.uint8)
        frame[:, contours.frame : -contours.frame, contours.frame : -contours.frame] = 0
        wide = np.pad(dilated(frame, margin), around, constant_values=SOLID)  # so no dash ends outside
        self.empty = np.stack([np.pad(frame, around), wide]).reshape(2, 1, -1)
        self.table, self.area = table, table.width**2
        self.taken = self.empty.repeat(slots, 1)
        self.room, self.wide = self.taken.reshape(2, -1)
        self.base = np.arange(slots) * self.area

    def reset(self, slots: np.ndarray) -> None:
        self.taken[:, slots] = self.empty

    def keep(self, slots: np.ndarray) -> np.ndarray:
        """Return a copy of the occupied cells of some slots, for `restore`."""
        return self.taken[:, slots]

    def restore(self, slots: np.ndarray, kept: np.ndarray, which: np.ndarray) -> None:
        """Restore the rows `which` of `kept` into these slots."""
        self.taken[:, slots] = kept[:, which]

    def block(self, slots: np.ndarray, dash: np.ndarray, start: np.ndarray) -> None:
        """Mark the cells of one dash in each slot as occupied."""
        begin = (self.base[slots] + start)[:, None]
        for taken, copies in ((self.room, self.table.room), (self.wide, self.table.wide)):
            cells = begin + copies.cells[dash]
            taken[cells] = np.maximum(taken[cells], copies.values[dash])

    def extend(
        self, slots: np.ndarray, streams: np.ndarray, chance: Chance, dash: np.ndarray, pivot: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Draw the dash that follows `dash` with its `pivot` in each slot.

        Returns:
            Arrays (ok, dash, start, pivot); the last three are valid where `ok` is True.
        """
        table, base = self.table, self.base[slots]
        pivot = pivot + table.move[dash]
        starts = pivot[:, None] + table.ends[dash]  # (n, K)
        weights = table.weights[dash] * (SOLID - self.wide[base[:, None] + starts])
        total = weights.cumsum(1)
        ok, new, start = np.zeros(len(slots), bool), np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        todo = np.nonzero(total[:, -1] > 1e-4 * SOLID)[0]
        for _ in range(DRAWS):
            if not len(todo):
                break
            chosen = (total[todo] > chance.draw(streams[todo], 1) * total[todo, -1:]).argmax(1)
            start[todo], new[todo] = starts[todo, chosen], table.follow[dash[todo], chosen]
            near = self.room[(base[todo] + start[todo])[:, None] + table.check.cells[new[todo]]]
            ok[todo] = fits = (near.astype(np.int16) + table.check.values[new[todo]]).max(1) < TOUCH
            todo = todo[~fits]
        return ok, new, start, pivot


def place(table: Dashes, places: np.ndarray) -> np.ndarray:
    """Return the cells of places (rows, columns), shape (.., 2)."""
    return (places[..., 0] + table.border) * table.width + places[..., 1] + table.border


def begin(table: Dashes, tail: np.ndarray, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Begin first dashes at tails (n, 2); return whether each lies inside the image, and the cells of their pivots."""
    ways = table.first[degrees]
    pivot, head = tail + ways[:, :2], tail + ways[:, 2:]
    inside = [((each >= 0) & (each < table.shape.side)).all(1) for each in (tail, head, pivot)]
    return np.logical_and.reduce(inside), place(table, pivot.clip(0, table.shape.side - 1))


class Targets:
    """Parallel attempts, in slots, at the two target contours of images.

    The two contours grow in turn; if one cannot continue, the attempt has failed. An image uses its first successful
    attempt, by number, even if a later attempt finished earlier.

    Attributes:
        dash, start: (slots, 2, dashes), index of each dash in `Dashes`, and the cell where it begins.
        pivot: (slots, 2), cell from which a contour continues.
    """

    def __init__(self, contours: Contours, table: Dashes, keys: np.ndarray) -> None:
        self.contours, self.table = contours, table
        self.keys = mix(torch.from_numpy(keys))
        self.slots = min(SLOTS, PARALLEL_ATTEMPTS * len(keys))
        self.chance = Chance(np.zeros(self.slots, np.int64))
        self.field = Field(contours, table, self.slots)
        self.dash = np.zeros((self.slots, 2, contours.length), np.int64)
        self.start = self.dash.copy()
        self.pivot = np.zeros((self.slots, 2), np.int64)

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Draw the contours of all images; return `dash` and `start`, each (B, 2, dashes).

        Raises:
            ConfigError: There is no room for two contours.
        """
        many, length = len(self.keys), self.contours.length
        best, tried = np.full(many, NO_ATTEMPT), np.zeros(many, np.int64)  # best attempt, number of attempts
        dash = np.zeros((many, 2, length), np.int64)
        start = dash.copy()
        slots, step = np.arange(self.slots), np.full(self.slots, -1)
        picture, attempt, next_one, done = np.zeros(self.slots, np.int64), np.full(self.slots, NO_ATTEMPT), 0, 0
        while len(slots):
            fresh = slots[step[slots] < 0]
            todo = np.nonzero(best == NO_ATTEMPT)[0]
            if not len(todo):
                slots, fresh = slots[step[slots] >= 0], fresh[:0]
            if len(fresh):
                places = next_one + np.arange(len(fresh))
                picture[fresh], next_one = todo[places % len(todo)], (next_one + len(fresh)) % len(todo)
                attempt[fresh] = tried[picture[fresh]] + np.arange(len(fresh)) // len(todo)
                np.add.at(tried, picture[fresh], 1)
                self.check(tried.sum(), done)
                keys = mix(self.keys[picture[fresh]] + torch.from_numpy(attempt[fresh]) * GOLDEN)
                self.chance.begin(fresh, keys.numpy())
                step[fresh] = np.where(self.begin(fresh), 0, -1)
            going = slots[step[slots] >= 0]
            step[going] = np.where(self.extend(going, step[going] % 2, 1 + step[going] // 2), step[going] + 1, -1)
            for slot in going[step[going] == 2 * (length - 1)]:
                if attempt[slot] < best[picture[slot]]:
                    done += best[picture[slot]] == NO_ATTEMPT
                    best[picture[slot]] = attempt[slot]
                    dash[picture[slot]], start[picture[slot]] = self.dash[slot], self.start[slot]
            step[going[attempt[going] >= best[picture[going]]]] = -1
        return dash, start

    def check(self, attempts: int, done: int) -> None:
        if attempts > MAX_ATTEMPTS * (1 + done):
            side, shape = self.table.shape.side, self.table.shape
            raise ConfigError(
                f"data.contour_length: in {MAX_ATTEMPTS:,} attempts there was no room in {side} x {side} pixels for "
                f"two contours of {self.contours.length} dashes of {shape.length} pixels that begin "
                f"{self.contours.seed_distance} apart: use fewer or shorter dashes, or more room (data.paddle_length, "
                "data.paddle_thickness, data.margins, data.continuity, data.frame, data.seed_distance)"
            )

    def begin(self, slots: np.ndarray) -> np.ndarray:
        """Draw the first dashes of both contours, one near the center, the other `seed_distance` away from it.

        Returns:
            Whether both dashes lie inside the image, (slots,).
        """
        distance, table, drawn = self.contours.seed_distance, self.table, self.chance.draw(slots, 5)
        degrees = (SEEDS * drawn[:, [0, 3]]).astype(int)
        top, bottom, left, right = table.reach[degrees[:, 0]].T
        low = 2 * distance - np.stack([top, left], 1)
        room = table.shape.side - 2 * distance - np.stack([bottom, right], 1) - low
        first = low + (drawn[:, 1:3] * room).astype(int)
        angle = np.deg2rad((360 * drawn[:, 4]).astype(int))
        second = first + np.rint(distance * np.stack([np.sin(angle), np.cos(angle)], 1)).astype(int)
        inside = (room > 0).all(1)
        for contour, tail in enumerate((first, second)):
            ok, self.pivot[slots, contour] = begin(table, tail, degrees[:, contour])
            self.dash[slots, contour, 0], self.start[slots, contour, 0] = degrees[:, contour], place(table, tail)
            inside &= ok
        self.field.reset(slots[inside])
        return inside

    def extend(self, slots: np.ndarray, contour: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Draw the next dash of one contour in each slot; return in which slots it was possible."""
        last = self.dash[slots, contour, number - 1]
        ok, dash, start, pivot = self.field.extend(slots, slots, self.chance, last, self.pivot[slots, contour])
        slots, contour, number = slots[ok], contour[ok], number[ok]
        self.field.block(slots, last[ok], self.start[slots, contour, number - 1])
        self.dash[slots, contour, number] = dash[ok]
        self.start[slots, contour, number] = start[ok]
        self.pivot[slots, contour] = pivot[ok]
        return ok


class Canvas:
    """The drawing of B images whose two target contours are known.

    Attributes:
        dash, start: (B, contours, dashes), index of each dash in `Dashes`, and the cell where it begins; the targets
            come first.
        count: (B, contours), number of dashes.
    """

    def __init__(
        self,
        contours: Contours,
        table: Dashes,
        chance: Chance,
        pictures: np.ndarray,
        dash: np.ndarray,
        start: np.ndarray,
    ) -> None:
        self.contours, self.table, self.chance, self.pictures = contours, table, chance, pictures
        self.every = np.arange(len(pictures))
        self.field = Field(contours, table, len(pictures))
        more = max(0, contours.distractor_length - contours.length)
        around = ((0, 0), (0, contours.distractors), (0, more))
        self.dash, self.start = np.pad(dash, around), np.pad(start, around)
        self.count = np.zeros(self.dash.shape[:2], int)
        self.count[:, :2] = contours.length
        for contour in range(2):
            for number in range(contours.length - (contour == 0)):  # the first contour's end is open, as published
                self.field.block(self.every, dash[:, contour, number], start[:, contour, number])

    def draw_distractors(self) -> None:
        """Draw distractors where there is room; a distractor without room after `ATTEMPTS` attempts is omitted."""
        length = self.contours.distractor_length
        for contour in range(2, self.dash.shape[1]):
            todo = self.every
            for _ in range(ATTEMPTS):
                if not len(todo):
                    break
                kept = self.field.keep(todo)
                drawn = self.draw_distractor(todo, contour)
                self.count[drawn, contour] = length
                failed = np.nonzero(~np.isin(todo, drawn))[0]
                todo = todo[failed]
                self.field.restore(todo, kept, failed)

    def draw_distractor(self, rows: np.ndarray, contour: int) -> np.ndarray:
        """Draw a whole distractor in each row; return the rows where it was possible."""
        rows, pivot = self.begin_distractor(rows, contour)
        for number in range(1, self.contours.distractor_length):
            last, start = self.dash[rows, contour, number - 1], self.start[rows, contour, number - 1]
            ok, dash, begins, pivot = self.field.extend(rows, self.pictures[rows], self.chance, last, pivot)
            rows, pivot = rows[ok], pivot[ok]
            self.field.block(rows, last[ok], start[ok])
            self.dash[rows, contour, number] = dash[ok]
            self.start[rows, contour, number] = begins[ok]
        number = self.contours.distractor_length - 1
        self.field.block(rows, self.dash[rows, contour, number], self.start[rows, contour, number])
        return rows

    def begin_distractor(self, rows: np.ndarray, contour: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the first dash of a distractor at the first of `PLACES` random places with room.

        Returns:
            The rows where there was room, and the pivots of their dashes.
        """
        table, side = self.table, self.table.shape.side
        drawn = self.chance.draw(self.pictures[rows], 1 + 2 * PLACES)
        degrees = (SEEDS * drawn[:, 0]).astype(int)
        places = (side * drawn[:, 1:].reshape(-1, PLACES, 2)).astype(int)
        tail, found = np.zeros((len(rows), 2), np.int64), np.zeros(len(rows), bool)
        for number in range(PLACES):
            todo = np.nonzero(~found)[0]
            at = places[todo, number]
            begins = (self.field.base[rows[todo]] + place(table, at))[:, None]
            free = (self.field.room[begins + table.solid.cells[degrees[todo]]] <= MAX_ROOM).all(1)
            tail[todo[free]], found[todo[free]] = at[free], True
        ok, pivot = begin(table, tail, degrees)
        ok &= found
        self.dash[rows, contour, 0], self.start[rows, contour, 0] = degrees, place(table, tail)
        return rows[ok], pivot[ok]

    def render(self) -> tuple[np.ndarray, np.ndarray]:
        """Return images uint8 (B, side, side), whose brightest pixel is 255, and labels (B,)."""
        contours, table, every, side = self.contours, self.table, self.every, self.table.shape.side
        image = np.zeros(len(every) * self.field.area, np.float32)

        def copy(rows: np.ndarray, copies: Copies, which: np.ndarray, start: np.ndarray, brightness: float) -> None:
            cells = (self.field.base[rows] + start)[:, None] + copies.cells[which]
            image[cells] = np.maximum(image[cells], brightness * copies.values[which])

        for contour in range(self.dash.shape[1]):
            brightness = contours.brightness
            if contour >= 2:
                brightness = contours.distractor_brightness
            for number in range(self.count[:, contour].max()):
                rows = every[self.count[:, contour] > number]
                here = (rows, contour, number)
                copy(rows, table.ink, self.dash[here], self.start[here], brightness)
        origin, label = (2 * self.chance.draw(self.pictures, 2)).astype(int).T
        end = np.where(label == 1, origin, 1 - origin)
        white = disc(contours.radius, table.shape.scale, table.width)
        for start in (self.start[every, origin, 0], self.start[every, end, contours.length - 1]):
            copy(every, white, np.zeros(len(every), int), start, 1.0)
        inner = slice(table.border, table.border + side)
        image = image.reshape(-1, table.width, table.width)[:, inner, inner]
        return np.rint(255 / image.max((1, 2), keepdims=True) * image).astype(np.uint8), label.astype(np.uint8)
