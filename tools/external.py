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
ALONE = ("--pdb", "--trace", "-s", "--collect-only", "--co", "no:xdist")  # options that need a single process
NEEDED = 3 * 2**29  # bytes of memory of a process of the tests
LIMIT = Path("/sys/fs/cgroup/memory.max")  # of the memory of a container


def logs(argv: list[str]) -> NoReturn:
    replace_process("tensorboard.main", "--logdir", "runs", *argv)


def test(argv: list[str]) -> NoReturn:
    """Run the test suite, in as many processes with one thread each as there are cores and memory for.

    Raises:
        ConfigError: There is no clone.
    """
    if not (ROOT / "tests").is_dir():
        raise ConfigError("run.sh test: the tests are not installed, use a clone of the repository")
    for option in argv:
        if option.startswith("--") and option not in OPTIONS and get_close_matches(option, OPTIONS, cutoff=0.8):
            raise ConfigError(f"run.sh test: unknown option {option}, {nearest(option, OPTIONS)}")
    os.chdir(ROOT)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not chooses_processes(argv):
        argv = ["-n", str(processes()), "--dist", "worksteal", *argv]
    replace_process("pytest", *argv)


def chooses_processes(argv: list[str]) -> bool:
    """Return whether the options determine the number of processes; one test needs no more than one."""
    for word in argv:
        if word in ALONE or "::" in word or word.startswith(("-n", "--numprocesses")):
            return True
    return False


def processes() -> int:
    """Return the number of test processes that the cores and the free memory of this machine, or container, allow."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, free_memory() // NEEDED))


def free_memory() -> int:
    """Return the free memory in bytes, at most that of the container."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = 1024 * int(line.split()[1])
    for line in read_lines(LIMIT):
        if line.isdigit():  # "max" without a limit
            free = min(free, int(line))
    return free


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file of the system, none where there is no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def replace_process(module: str, *argv: str) -> NoReturn:
    """Replace this process by another Python program."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])
