"""Programs compiled by AOTInductor for the CPU of this machine: one package, for loaders in C++ and Python.

The description and the tokenizer are in the metadata of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram

from lion.config import ConfigError
from lion.runs import LoadedRun
from lion.trainer.compilation import missing_compiler
from tools.export.program import Program


def check(run: LoadedRun, out: Path) -> None:
    """Check that there is a compiler.

    Raises:
        ConfigError: There is none.
    """
    if missing := missing_compiler():
        raise ConfigError(f"--format aoti compiles C++: {missing}, or use --format pt2")


def write(program: Program, graph: ExportedProgram, path: Path) -> None:
    from torch._inductor import aoti_compile_and_package  # takes seconds to import

    aoti_compile_and_package(
        graph, package_path=str(path), inductor_configs={"aot_inductor.metadata": dict(program.files)}
    )


def load(path: Path) -> Callable[..., Any]:
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))
