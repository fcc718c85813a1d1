"""The command `lion`: what ./run.sh runs, in any folder, from a clone or from an installed wheel."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import lion
from lion.distribution import NAME, clone_folder

SETTINGS = {
    # Threads that wait for each other spin briefly, then sleep: left to spin, sharing the cores with one other process
    # slows small models down fifty times over.
    "GOMP_SPINCOUNT": "1000",
    # Steps of one shape free and take the same buffers: keep them instead of asking the kernel for new pages.
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}


def main() -> NoReturn:
    """Replace this process by `python -m tools`, with the `data`, `tools` and `recipes` of the wheel or the clone."""
    if "linear_attention" not in vars(lion).get("__all__", ()):  # the last of two installed packages wins
        sys.stderr.write(
            "error: another project named 'lion' has replaced this package: pip uninstall lion, "
            f"then pip install --force-reinstall --no-deps {NAME}\n"
        )
        sys.exit(2)
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write("error: the current folder has been deleted, change to another one\n")
        sys.exit(2)
    env = SETTINGS | os.environ
    path = str(clone_folder())
    if env.get("PYTHONPATH"):
        path += os.pathsep + env["PYTHONPATH"]
    env |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}  # `run_command` appends the current folder, after all others
    os.execve(sys.executable, [sys.executable, "-m", "tools", *sys.argv[1:]], env)


if __name__ == "__main__":
    main()
