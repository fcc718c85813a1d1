"""Commands that are programs of others: TensorBoard and pytest."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

QUICK = "not slow and not compiled and not process"  # markers of pyproject.toml


def logs(argv: list[str]) -> NoReturn:
    become("tensorboard.main", "--logdir", "runs", *argv)


def test(argv: list[str]) -> NoReturn:
    quick = []
    if "--quick" in argv:  # in two processes that keep to one thread each
        quick = ["-m", QUICK, "-n", "2", "--dist", "worksteal"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    become("pytest", *quick, *(word for word in argv if word != "--quick"))


def become(module: str, *argv: str) -> NoReturn:
    """Go on as another program, in this process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])
