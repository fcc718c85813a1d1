"""`python -m tools COMMAND ...`: the commands of run.sh."""

from __future__ import annotations

import importlib
import sys

from lion.config import ConfigError, nearest
from tools.cli import run_command
from tools.compose import RECIPES, shipped_recipes

COMMANDS = {
    "train": "tools.train",
    "eval": "tools.evaluate",
    "show": "tools.show",
    "list": "tools.show",
    "predict": "tools.predict",
    "bench": "tools.bench",
    "consolidate": "tools.consolidate",
    "convert": "tools.convert",
    "report": "tools.report",
    "soak": "tools.soak",
}


def main(argv: list[str]) -> int:
    name = argv[0] if argv else ""
    if (RECIPES / f"{name}.yaml").is_file():
        argv = ["train", *argv]
    elif name not in COMMANDS:
        otherwise = f"valid: {', '.join(sorted(COMMANDS))}, or a recipe of ./run.sh list"
        raise ConfigError(f"{name!r} is no command, {nearest(name, [*COMMANDS, *shipped_recipes()], otherwise)}")
    return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    run_command(main, sys.argv[1:])
