"""Export of a run as a small run: its settings, tokenizer and results, and the weights of one checkpoint.

Every command that reads a run, `lion.load` and `init_from` take it. The state of the optimizer is left out, so that
training cannot resume from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from lion.runs import LoadedRun, count_parameters
from tools.place import save_best, written

LEFT_OUT = ("events.", ".")  # beginnings of the names of TensorBoard's files and of hidden files


def export(run: LoadedRun, out: Path, overrides: Sequence[str]) -> str:
    """Write the folder `out`, and return a line that describes it; where the data are does not matter."""
    with written(out) as folder:
        save_best(folder, run.checkpoint | {"model": run.model.state_dict(), "ema": None})
        for path in run.folder.iterdir():
            if path.is_file() and not path.name.startswith(LEFT_OUT):
                shutil.copyfile(path, folder / path.name)
    return f"{run.recipe.model.mixer}, {count_parameters(run.model):,} parameters, without the state of the optimizer"
