"""Progress bars of long work, for a terminal and for a log file, and lines about other waits."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tqdm import tqdm

log = logging.getLogger("lion")
UNSAID = 2.0  # seconds that work may take before a line says what it is
IN_A_FILE = 10.0  # seconds between updates when stderr is not a terminal: a log file keeps every line


class Progress(tqdm):
    """A progress bar whose rate and remaining time are averaged over steady work only."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent inside (compilation, evaluation, saving) from the rate and the remaining time."""
        began = time.time()
        yield
        if self.disable:  # such a bar has no clock
            return
        lost = time.time() - began
        self.start_t += lost
        self.last_print_t += lost

    def display(self, *args: Any, **options: Any) -> Any:
        """Show the bar; from now on `close` ends its line, also after `restart_clock`."""
        self.delay = 0
        return super().display(*args, **options)

    def restart_clock(self) -> None:
        """Measure the rate from now on, because the work so far was not steady (compilation)."""
        self.initial = self.n
        self.start_t = self.last_print_t = time.time()

    def label(self, description: str, shown: Callable[[], dict[str, str]]) -> None:
        """Set the description and the values of the bar; `shown` is only called when the bar is due for an update."""
        self.set_description(description, refresh=False)
        if not self.disable and time.time() - self.last_print_t >= self.mininterval:
            self.set_postfix(shown(), refresh=sys.stderr.isatty())


def progress(items: Iterable[Any] | None = None, **options: Any) -> Progress:
    """Return a bar over `items`, or over a `total` that `update` counts; `options` are arguments of tqdm."""
    usual = dict(dynamic_ncols=True, mininterval=0.1, smoothing=0, leave=False)
    if not sys.stderr.isatty():  # shorter work leaves no line
        usual |= dict(mininterval=IN_A_FILE, maxinterval=IN_A_FILE, delay=IN_A_FILE, leave=True)
    return Progress(items, **usual | options)


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Log what the work inside is, and since when, once it takes longer than `UNSAID`; only the first process does."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    timer = threading.Timer(UNSAID, log.info, ("%s, since %s", what, time.strftime("%H:%M:%S")))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def rate(count: float, seconds: float) -> str:
    """Format `count / seconds` with at least two significant digits: 3175, 12, 0.42."""
    value = count / seconds if seconds else 0.0
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2g}"
