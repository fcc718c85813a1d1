"""What a run leaves to look at: a progress bar, `metrics.jsonl`, TensorBoard. Rank 0 only."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

log = logging.getLogger("lion")


class RunLog:
    """Metrics of one run, from step `start` on: whatever an earlier process wrote past that step is cut off."""

    def __init__(self, folder: Path, *, start: int, total: int, active: bool = True) -> None:
        self.active = active
        if not active:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self.path = folder / "metrics.jsonl"
        cut_metrics(self.path, start)
        self.file = open(self.path, "a")
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        self.bar = tqdm(total=total, initial=start, desc=folder.name, unit="step", dynamic_ncols=True)
        self.redirect = logging_redirect_tqdm([log])
        self.redirect.__enter__()

    def progress(self, steps: int = 1, **shown: str) -> None:
        if self.active:
            if shown:
                self.bar.set_postfix(shown, refresh=False)
            self.bar.update(steps)

    def write(self, step: int, kind: str, values: dict[str, float], **more: Any) -> None:
        """One line of `metrics.jsonl` and one TensorBoard point a value."""
        if not self.active:
            return
        self.file.write(json.dumps({"step": step, "kind": kind, **more, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.board.add_scalar(f"{kind}/{name}", value, step)

    def histograms(self, step: int, kind: str, values: dict[str, Tensor]) -> None:
        if self.active:
            for name, value in values.items():
                self.board.add_histogram(f"{kind}/{name}", value, step)

    def images(self, values: dict[str, Tensor]) -> None:
        if self.active:
            for name, value in values.items():
                self.board.add_image(name, value, 0)

    def close(self) -> None:
        if self.active:
            self.bar.close()
            self.redirect.__exit__(None, None, None)
            self.board.close()
            self.file.close()


def cut_metrics(path: Path, step: int) -> None:
    """Drop the lines after `step`, and a torn last one."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    path.write_text("".join(kept) if step else "")
