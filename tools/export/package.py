"""Programs written to files, loaded again, and compared with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.export import ExportedProgram

from lion.config import ConfigError
from lion.runs import LoadedRun
from tools.compose import check_finite
from tools.export.place import written
from tools.export.ports import LENGTH
from tools.export.program import Program, make_program
from tools.export.step import make_step

LARGEST = 1e-2  # difference between outputs of a program and of the model; rounding makes about 1e-5


class Writer(Protocol):
    """A function that writes a program, and its graph, to a file."""

    def __call__(self, program: Program, graph: ExportedProgram, path: Path) -> None: ...


def export_program(
    run: LoadedRun,
    out: Path,
    overrides: Sequence[str],
    length: int | None,
    step: bool,
    *,
    write: Writer,
    load: Callable[[Path], Callable[..., Any]],
) -> str:
    """Write the program of a run, or of one step, load it again, and return a line that describes it."""
    program = (make_step if step else make_program)(run, overrides, length)
    with written(out) as path:
        write(program, program.graph(), path)
        apart = program.deviation(load(path))
        check_finite(torch.tensor(apart), run.folder)
        if apart > LARGEST:
            raise ConfigError(
                f"{run.folder}: outputs of the program differ from those of the model by up to {apart:.1e}, "
                f"expected at most {LARGEST:.0e}; nothing was written"
            )
    ports = ", ".join(f"{p.name} ({', '.join(map(str, p.shape))})" for p in (*program.inputs, *program.outputs))
    limit = f", at most {program.longest} tokens" if LENGTH in ports and program.longest is not None else ""
    return f"{ports}{limit}; largest deviation of an output: {apart:.1e}"
