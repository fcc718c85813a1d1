"""Programs for `torch.export.load`: one file, with the description and the tokenizer as extra files."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from lion.runs import LoadedRun
from tools.export.program import Program


def check(run: LoadedRun, out: Path) -> None:
    """Do nothing: PyTorch writes every program."""


def write(program: Program, graph: ExportedProgram, path: Path) -> None:
    packed = io.BytesIO()  # torch's writer of files ends the process on a full disk
    torch.export.save(graph, packed, extra_files=program.files)
    path.write_bytes(packed.getbuffer())


def load(path: Path) -> Callable[..., Any]:
    return torch.export.load(path).module()
