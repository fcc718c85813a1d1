"""Programs written to files, loaded again, and compared with the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from lion.config import ConfigError
from lion.runs import LoadedRun
from tools.compose import check_finite
from tools.export.ports import LENGTH
from tools.export.program import make_program
from tools.export.step import make_step
from tools.place import written

LARGEST = 1e-2  # difference between outputs of a program and of the model; rounding makes about 1e-5


def export_program(
    run: LoadedRun, out: Path, overrides: Sequence[str], length: int | None, step: bool, form: ModuleType
) -> str:
    """Write the program of a run, or of one step, load it again, and return a line that describes it.

    Args:
        run: The run.
        out: The file to write.
        overrides: Places of the data of the run, for its tokenizer.
        length: Tokens of the longest input, or of a step, see `make_program` and `make_step`.
        step: Whether to write one step.
        form: The module of the format: `check(run, out)` raises an error if it cannot write the run,
            `write(program, graph, path)` writes a program, and `load(path)` returns it as a function.
    """
    form.check(run, out)
    make = make_program
    if step:
        make = make_step
    program = make(run, overrides, length)
    with written(out) as path:
        form.write(program, program.graph(), path)
        apart = program.deviation(form.load(path))
        check_finite(torch.tensor(apart), run.folder)
        if apart > LARGEST:
            raise ConfigError(
                f"{run.folder}: outputs of the program differ from those of the model by up to {apart:.1e}, "
                f"expected at most {LARGEST:.0e}; nothing was written"
            )
    ports = ", ".join(f"{p.name} ({', '.join(map(str, p.shape))})" for p in (*program.inputs, *program.outputs))
    limit = ""
    if LENGTH in ports and program.longest is not None:
        limit = f", at most {program.longest} tokens"
    return f"{ports}{limit}; largest deviation of an output: {apart:.1e}"
