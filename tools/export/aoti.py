"""Programs compiled by AOTInductor for the CPU of this machine: one package, for loaders in C++ and Python.

The description and the tokenizer are in the metadata of the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from lion.config import ConfigError
from lion.runs import LoadedRun
from lion.trainer.compilation import missing_compiler
from tools.export.package import export_program
from tools.export.program import Program


def export(run: LoadedRun, out: Path, overrides: Sequence[str], length: int | None, step: bool) -> str:
    """Write the program of a run, see `export_program`.

    Raises:
        ConfigError: There is no compiler.
    """
    if missing := missing_compiler():
        raise ConfigError(f"--format aoti compiles C++: {missing}, or use --format pt2")
    return export_program(run, out, overrides, length, step, write=write, load=load)


def write(program: Program, graph: ExportedProgram, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package  # takes seconds to import

    aoti_compile_and_package(
        graph, package_path=str(path), inductor_configs={"aot_inductor.metadata": dict(program.files)}
    )


def load(path: Path) -> Callable[..., Any]:
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))
