"""Stand-ins for the processes of commands, which start without a new interpreter."""

import contextlib
from typing import NamedTuple

import pytest

from tests.processes import Command
from tools import __main__ as commands
from tools.cli import run_command


class Ended(NamedTuple):
    """A process that has ended."""

    returncode: int

    def poll(self) -> int:
        return self.returncode


def command_here(*argv, out, env) -> Ended:
    """Stand in for `tools.processes.start_command`: run a command in this process, to its end."""
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
        run_command(commands.main, list(argv))
    return Ended(ended.value.code)


class Forked(Command):
    """Stand in for `tools.processes.start_command`: fork a process that has imported torch and the trainer."""

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def communicate(self) -> tuple[str, None]:
        done = self.wait()
        return done.stdout + done.stderr, None
