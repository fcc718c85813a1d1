"""Progress bars: one look for all long work, at a terminal and in a log file."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm import tqdm

IN_A_FILE = 10.0  # seconds between two states of a bar where nobody watches it: a log file keeps every one


class Progress(tqdm):
    """A bar whose rate and time left are means over the steady work alone."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time spent inside (compilation, evaluation, saving) out of the rate and of the time left."""
        began = time.time()
        yield
        lost = time.time() - began
        self.start_t += lost
        self.last_print_t += lost

    def restart_clock(self) -> None:
        """Take the rate from here on: what was done so far is no measure of what follows."""
        self.initial = self.n
        self.start_t = self.last_print_t = time.time()

    def label(self, description: str, shown: Callable[[], dict[str, str]]) -> None:
        """Name what is worked on, and what `shown` gives, which is asked where the bar's next state is due alone."""
        self.set_description(description, refresh=False)
        if time.time() - self.last_print_t >= self.mininterval:
            self.set_postfix(shown(), refresh=sys.stderr.isatty())


def progress(items: Iterable[Any] | None = None, **how: Any) -> Progress:
    """Return a bar over `items`, or over a `total` that is counted by `update`; `how` is tqdm's."""
    usual = dict(dynamic_ncols=True, mininterval=0.1, smoothing=0, leave=False)
    if not sys.stderr.isatty():  # what is done sooner leaves no line
        usual |= dict(mininterval=IN_A_FILE, maxinterval=IN_A_FILE, delay=IN_A_FILE, leave=True)
    return Progress(items, **usual | how)


def rate(count: float, seconds: float) -> str:
    """Write a count a second with at least two digits that mean something: 3175, 12, 0.42."""
    value = count / seconds if seconds else 0.0
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
