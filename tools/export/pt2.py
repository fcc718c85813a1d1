"""Programs for `torch.export.load`: one file, with the description and the tokenizer as extra files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram

from lion.runs import LoadedRun
from tools.export.program import Program, export_program


def export(run: LoadedRun, out: Path, overrides: Sequence[str], length: int | None) -> str:
    return export_program(run, out, overrides, length, write=write, load=load)


def write(program: Program, graph: ExportedProgram, path: Path) -> None:
    torch.export.save(graph, path, extra_files=program.files)


def load(path: Path) -> Callable[..., Tensor]:
    return torch.export.load(path).module()
