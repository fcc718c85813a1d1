"""Command-line handling of all commands: argument parsing, printing, and errors."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from lion.config import ConfigError, nearest
from lion.trainer.faults import RunError, full_disk, os_error_text, truncated_library
from tools.commands import as_called

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("lion")

NAMED = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}  # no such file or folder: the user typed a wrong name
SETTINGS = {  # what other trainers have as options
    "--epochs": "trainer.epochs",
    "--steps": "trainer.steps",
    "--batch-size": "trainer.batch_size",
    "--lr": "optim.lr",
    "--seed": "seed",
}
PATIENCE = 10  # seconds in which the launcher stops the other processes after one has failed


class Parser(argparse.ArgumentParser):
    """An argument parser that reports errors as a one-line ConfigError with the nearest valid option."""

    def flag(self, name: str, help: str) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=help)

    def count(self, name: str, help: str | None = None, default: int | None = None) -> None:
        """Add an option whose value is a whole number of at least 1."""
        self.add_argument(name, type=count, default=default, help=help)

    def path(self, name: str, metavar: str, help: str) -> None:
        """Add an option whose value is a file or a folder."""
        self.add_argument(name, type=Path, metavar=metavar, help=help)

    def several(self, name: str, metavar: str, help: str | None = None) -> None:
        """Add arguments, or none; without a default, argparse lists them as required."""
        self.add_argument(name, nargs="*", default=[], metavar=metavar, help=help)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}, {nearest(value, action.choices)}")

    def format_help(self) -> str:
        return as_called(super().format_help())

    def check_options(self, words: list[str]) -> None:
        """Check that all options of a line are options of the command, also if an argument is missing.

        Raises:
            ConfigError: An unknown option, with the next word unless the command needs that word as an argument.
        """
        options = list(self._option_string_actions)
        arguments = self._get_positional_actions()
        needed = sum(action.required for action in arguments)
        plain = sum(not word.startswith("-") for word in words)
        for word, following in zip(words, [*words[1:], "-"]):
            given = word.partition("=")[0]
            if given == "--":
                return
            if not given.startswith("--") or any(option.startswith(given) for option in options):
                continue
            if not following.startswith("-") and plain > needed:
                word = f"{word} {following}"
            hint = nearest(given, options)
            if any(action.metavar == "key=value" for action in arguments):
                key = SETTINGS.get(given)
                hint = f"write {key}=VALUE" if key else f"{hint} (settings are section.key=value)"
            raise ConfigError(f"{self.prog}: unknown option {word}: {hint}")

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message.removeprefix('argument ')}")


def count(text: str) -> int:
    """Parse the value of an option as a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def counts(text: str) -> tuple[int, ...]:
    """Parse the value of an option as numbers separated by commas, such as 256,512: sorted, without duplicates."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def number(least: float, most: float) -> Callable[[str], float]:
    """Return a parser for an option whose value is a number from `least` to `most`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least} to {most}, got {text}")
        return value

    return read


def file_name(text: str) -> str:
    """Parse the value of an option as a file name without folders."""
    if text in ("", "..") or text != Path(text).name:
        raise argparse.ArgumentTypeError(f"expected a name without folders, got {text!r}")
    return text


def choose_form(model: nn.Module, form: str | None, chunk_size: int | None = None) -> None:
    """Set the form of a model from the options `--form` and `--chunk-size`; without one form, it keeps its own.

    Raises:
        ConfigError: The model does not have the form, or does not take the chunk size.
    """
    if form in (None, "all"):
        return
    from lion.layers.mixers.base import set_form  # imports PyTorch; a bad command line is refused without it

    with of_an_option():
        set_form(model, form, chunk_size)


@contextlib.contextmanager
def of_an_option() -> Iterator[None]:
    """Raise a ValueError inside, whose message begins with the name of an option, as a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


class SafeStream:
    """A stream that never fails: text that cannot be written (disk full, reader gone) is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def secure_streams() -> None:
    """Make printing to the standard streams safe, even if they are closed or accept only ASCII."""
    for number in range(3):  # a file opened later must not get the number of a closed stream, and receive printed text
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream)
    if not isinstance(sys.stderr, SafeStream):
        sys.stderr = SafeStream(sys.stderr)


def run_command(main: Callable[[list[str]], int], argv: list[str] | None = None) -> None:
    """Run the `main` function of a command, then exit the process with its exit code.

    Errors exit with 2 for bad input, 1 for a run that cannot continue or an error of the system (both print one line),
    130 after Ctrl-C or SIGTERM, and 141 if the reader of standard output is gone.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    debug, launched = "--debug" in argv, "TORCHELASTIC_RUN_ID" in os.environ
    others = multiprocessing.active_children()
    if debug:
        argv.remove("--debug")
    secure_streams()
    allow_files()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: modules that a recipe imports, and none in the place of a library
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lion").setLevel(logging.INFO)
    warnings.showwarning = show_warning
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns about nvcc without a GPU
    if not launched:
        interrupt_on_sigterm()
    try:
        try:
            code = main(argv)
        except SystemExit as ended:  # raised by argparse's --help, or by a process that has printed the reason
            code = ended.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    except Exception as error:  # printed here: a traceback kept until the interpreter ends keeps loader workers alive
        line, rank = one_line(error), os.environ.get("RANK")
        if launched and rank != "0":  # rank 0 prints errors common to all ranks; here the launcher stops the others
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(PATIENCE)
        if line is None and rank is not None and any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
            line = f"process {rank} lost its connection to the other processes"
        if line is None or debug:
            traceback.print_exc()
        if line is not None:
            print(as_called(line), file=sys.stderr)
        code = 1
        if isinstance(error, ConfigError) or getattr(error, "errno", None) in NAMED:
            code = 2
    try:
        sys.stdout.flush()
    except OSError:  # a failed write would fail again when the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for child in multiprocessing.active_children():
        if child not in others:  # of this command; the interpreter waits for it, and it may ignore SIGTERM
            child.kill()
    # PyTorch may abort a launched process during its shutdown, after its work is done: skip the shutdown
    if launched:
        sys.stderr.flush()
        if code == 2 and os.environ["LOCAL_RANK"] == "0" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            os.kill(os.getppid(), signal.SIGQUIT)  # a restart would find the same error: stop the launcher
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def allow_files() -> None:
    """Allow this process as many open files as the system lets it have; loader workers need many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print a warning of Python as one line, without the code that it comes from."""
    log.warning("%s: %s", category.__name__, " ".join(str(message).split()))


def interrupt_on_sigterm() -> None:
    """Turn SIGTERM into a KeyboardInterrupt, so that a command that is stopped keeps its results."""
    own = os.getpid()

    def interrupt(number: int, frame: Any) -> None:
        if os.getpid() == own:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)  # a forked process that has inherited the handler
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, interrupt)


def one_line(error: Exception) -> str | None:
    """Return the message for an error of input or system; None for an error of the program itself."""
    if isinstance(error, (ConfigError, RunError)):
        return f"error: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"error: {os_error_text(error)}"
    if (path := truncated_library(error)) is not None:
        return f"error: {path} is truncated by a compilation that was killed: delete it and try again"
    full = full_disk(error)
    if full is None:
        return None
    return f"error: {os_error_text(full)}"


def check_folder(what: str, folder: Path) -> None:
    """Check that a folder exists and is writable.

    Args:
        what: Name of the argument or option that an error message begins with.
        folder: The folder to check.

    Raises:
        ConfigError: The folder does not exist or is not writable.
    """
    if not folder.is_dir():
        raise ConfigError(f"{what}: no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{what}: {folder} cannot be written to")


def say(text: str) -> None:
    """Print a line of progress to stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines of text with left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
