"""How commands read what was typed, print, and fail."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from lion.config import ConfigError, nearest
from lion.trainer.faults import RunError, cut_library, full_disk, refusal

if TYPE_CHECKING:
    from torch import nn

NAMED = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}  # no such name: what was given is wrong
PATIENCE = 10  # seconds in which a launcher ends the other processes of one that has failed


class Parser(argparse.ArgumentParser):
    """Refuses a command line as everything else is refused: in one line, with the nearest option."""

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        if settings.get("nargs") == "*":
            settings.setdefault("default", [])  # without one, argparse calls it required
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2]
        if unknown.startswith("-"):
            shown = [a for a in self._actions if a.help != argparse.SUPPRESS]
            hint = nearest(unknown.split()[0].partition("=")[0], [o for a in shown for o in a.option_strings])
            message = f"unknown option {unknown}: {hint}"
        raise ConfigError(f"{self.prog}: {message.removeprefix('argument ')}")


def count(text: str) -> int:
    """An option's number, at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def counts(text: str) -> tuple[int, ...]:
    """An option's several numbers, as 256,512: each once, rising."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def number(least: float, most: float) -> Callable[[str], float]:
    """An option's number in a range."""

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
    """An option's name of a file, without folders."""
    if text in ("", "..") or text != Path(text).name:
        raise argparse.ArgumentTypeError(f"expected a name without folders (--out has them), got {text!r}")
    return text


def choose_form(model: nn.Module, form: str, chunk_size: int | None = None) -> None:
    """`set_form` for what a person typed."""
    from lion.layers.mixer import set_form  # brings PyTorch: a bad command line is refused without it

    try:
        set_form(model, form, chunk_size)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


class Unfailing:
    """A stream that never fails: what cannot be written (the disk is full, the reader is gone) is dropped."""

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
    """Let the standard streams take whatever is printed, also where they were closed or are ASCII."""
    for number in range(3):  # else the next file that is opened would get the number, and what is printed
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        setattr(sys, name, stream)
    if not isinstance(sys.stderr, Unfailing):
        sys.stderr = Unfailing(sys.stderr)


def run_command(main: Callable[[list[str]], int], argv: list[str] | None = None) -> None:
    """Run a command's `main` and exit: 2 with one line for bad input, 1 with one for a run that cannot go on or a
    system that refuses, 130 when interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    debug, launched = "--debug" in argv, "TORCHELASTIC_RUN_ID" in os.environ
    if debug:
        argv.remove("--debug")
    secure_streams()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lion").setLevel(logging.INFO)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of nvcc without a GPU
    try:
        try:
            code = main(argv)
        except SystemExit as ended:  # by argparse's --help, or by a process that has said why
            code = ended.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        code = 141
    except Exception as error:  # printed here: a traceback kept for the interpreter's end keeps loader workers alive
        line, rank = one_line(error), os.environ.get("RANK")
        if launched and rank != "0":  # what all processes meet, the first says: the launcher ends the others here
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(PATIENCE)
        if line is None and rank is not None and any(word in str(error) for word in ("gloo", "NCCL", "TCPStore")):
            line = f"process {rank} lost its connection to the other processes"
        if line is None or debug:
            traceback.print_exc()
        if line is not None:
            print(line, file=sys.stderr)
        code = 2 if isinstance(error, ConfigError) or getattr(error, "errno", None) in NAMED else 1
    try:
        sys.stdout.flush()
    except OSError:  # what could not be printed would fail again at the interpreter's end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    # PyTorch may abort a launched process as it is taken down, its work done: it leaves without that
    if launched:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    sys.exit(code)


def one_line(error: Exception) -> str | None:
    """What to say of an error that is no fault of the program; None where it is one."""
    if isinstance(error, (ConfigError, RunError)):
        return f"error: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"error: {refusal(error)}"
    if (path := cut_library(error)) is not None:
        return f"error: {path} is cut off, left so by a compile that was killed: remove it, and go on"
    return f"error: {str(error).splitlines()[0]}" if full_disk(error) else None


def check_folder(what: str, folder: Path) -> None:
    """Raises ConfigError: Nothing can be written there."""
    if not folder.is_dir():
        raise ConfigError(f"{what}: no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{what}: {folder} cannot be written to")


def say(text: str) -> None:
    """Report progress on stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text whose columns stand below one another, all left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A plain text table: first column left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])
