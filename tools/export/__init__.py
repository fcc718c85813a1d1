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

from lion.config import ConfigError
from lion.runs import open_run
from tools import options
from tools.export.package import export_program
from tools.show import gigabytes

# End of the name of OUT. A format with an end has one program: its module in this folder has `check`, `write` and
# `load`. The module of any other format has `export(run, out, overrides)`, which writes a folder and describes it.
FORMATS = {"hub": "", "run": "", "pt2": ".pt2", "onnx": ".onnx", "aoti": ".pt2"}


def main(argv: list[str]) -> int:
    args = options.read("export", argv)
    suffix = FORMATS[args.format]
    if not suffix:
        for name in ("length", "step"):
            if getattr(args, name):
                raise ConfigError(f"--{name}: not for --format {args.format}")
        fits = [name for name, other in FORMATS.items() if other and other == args.out.suffix]
        if fits:
            raise ConfigError(f"{args.out}: --format {args.format} writes a folder; add --format {' or '.join(fits)}")
    if not args.out.name.endswith(suffix):
        raise ConfigError(f"{args.out}: expected a name that ends with {suffix}")
    if os.path.lexists(args.out):
        raise ConfigError(f"{args.out}: exists already, choose a new {'file' if suffix else 'folder'}")
    form = importlib.import_module(f"tools.export.{args.format}")
    run = open_run(args.run, checkpoint=args.checkpoint, ema=args.ema)
    if suffix:
        described = export_program(run, args.out, args.overrides, args.length, args.step, form)
    else:
        described = form.export(run, args.out, args.overrides)
    print(f"{args.out}: {described}; {gigabytes(size_of(args.out))}")
    return 0


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
