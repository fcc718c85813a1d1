"""Commands that run other programs: TensorBoard and pytest."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from lion.config import ConfigError, nearest

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ("--quick", "--every")  # of the tests; others are pytest's


def logs(argv: list[str]) -> NoReturn:
    replace_process("tensorboard.main", "--logdir", "runs", *argv)


def test(argv: list[str]) -> NoReturn:
    """Run the test suite.

    Raises:
        ConfigError: There is no clone.
    """
    if not (ROOT / "tests").is_dir():
        raise ConfigError("run.sh test: the tests are not installed, use a clone of the repository")
    for option in argv:
        if option.startswith("--") and option not in OPTIONS and get_close_matches(option, OPTIONS, cutoff=0.8):
            raise ConfigError(f"run.sh test: unknown option {option}, {nearest(option, OPTIONS)}")
    os.chdir(ROOT)
    if "--quick" in argv:  # two processes with one thread each
        argv = ["-n", "2", "--dist", "worksteal", *argv]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    replace_process("pytest", *argv)


def replace_process(module: str, *argv: str) -> NoReturn:
    """Replace this process by another Python program."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])
