"""Export a run to files that other programs load without this package, or to a small run.

    python -m tools export RUN OUT [--format hub|run|pt2|onnx|aoti] [--length N] [--step] [data.path=PATH]
        [--checkpoint best|last]

`hub` writes a folder of transformers, and `run` a small copy of the run. The other formats write one program for any
number of samples, with its preprocessing, class names and tokenizer inside: `pt2` for `torch.export.load`, `onnx` for
ONNX Runtime, and `aoti` for AOTInductor's loader in C++ and Python. OUT appears in one step, when it is complete.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import NamedTuple

from lion.config import ConfigError
from lion.runs import open_run
from tools import options
from tools.show import gigabytes


class Format(NamedTuple):
    """A format of exported files.

    Attributes:
        module: Module whose `export(run, out, overrides)` writes `out`, and returns a line that describes it.
        suffix: End of the name of `out`.
        program: Whether `out` is a program; `export` then has the arguments `length` and `step` as well.
    """

    module: str
    suffix: str = ""
    program: bool = True


FORMATS = {
    "hub": Format("tools.export.hub", program=False),
    "run": Format("tools.export.run", program=False),
    "pt2": Format("tools.export.pt2", ".pt2"),
    "onnx": Format("tools.export.onnx", ".onnx"),
    "aoti": Format("tools.export.aoti", ".pt2"),
}


def main(argv: list[str]) -> int:
    args = options.export(argv)
    form = FORMATS[args.format]
    given = {"length": args.length, "step": args.step}
    for name in given if not form.program else ():
        if given[name]:
            raise ConfigError(f"--{name}: not for --format {args.format}")
    if not args.out.name.endswith(form.suffix):
        raise ConfigError(f"{args.out}: expected a name that ends with {form.suffix}")
    if not form.suffix and (fits := [name for name, other in FORMATS.items() if args.out.suffix == other.suffix != ""]):
        raise ConfigError(f"{args.out}: --format {args.format} writes a folder; add --format {' or '.join(fits)}")
    if os.path.lexists(args.out):
        raise ConfigError(f"{args.out}: exists already, choose a new {'file' if form.suffix else 'folder'}")
    module = importlib.import_module(form.module)
    run = open_run(args.run, checkpoint=args.checkpoint, ema=args.ema)
    described = module.export(run, args.out, args.overrides, **(given if form.program else {}))
    print(f"{args.out}: {described}; {gigabytes(size_of(args.out))}")
    return 0


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
