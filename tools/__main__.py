"""`python -m tools COMMAND ...`: the commands of run.sh."""

from __future__ import annotations

import importlib
import sys

from tools.commands import COMMANDS, called_by, help_for


def main(argv: list[str]) -> int:
    """Run a command, or train a recipe that is named alone.

    Raises:
        ConfigError: Neither of the two; the line names what is nearest.
    """
    if text := help_for(argv):
        print(text)
        return 0
    from lion.config import ConfigError, nearest  # imports PyTorch, which help does without
    from tools.compose import shipped_recipes

    name, rest = called_by(argv)
    if name in shipped_recipes():
        name, rest = "train", argv
    if name not in COMMANDS:
        otherwise = f"valid: {', '.join(COMMANDS)}, or a recipe of ./run.sh list"
        raise ConfigError(f"{name!r} is no command, {nearest(name, [*COMMANDS, *shipped_recipes()], otherwise)}")
    module, _, function = COMMANDS[name].where.partition(":")
    return getattr(importlib.import_module(module), function or "main")(rest)


if __name__ == "__main__":
    if help_for(sys.argv[1:]):
        sys.exit(main(sys.argv[1:]))
    from tools.cli import run_command

    run_command(main, sys.argv[1:])
