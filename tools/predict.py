"""The answers of a trained run for files, as the classes of pictures.

python -m tools.predict RUN FILE [FILE ...] [--form full|chunk|rnn] [--top K]

A file that cannot be read is named on stderr; the others are answered, and the exit code is 2.
"""

from __future__ import annotations

import sys

import torch

from lion.config import ConfigError
from lion.ops import FORMS
from lion.runs import open_run
from lion.trainer.runtime import compile_blocks
from tools.cli import Parser, choose_form, count, run_command, table
from tools.compose import open_data, resolve_run

SIZES = (1, 8, 64)  # of batches: few, so that compiled code comes out of Inductor's cache


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh predict", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--form", choices=FORMS, default="full")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, for a few files only")
    parser.add_argument("--top", type=count, default=3, help="answers to show, the likeliest first")
    args = parser.parse_args(argv)
    loaded = open_run(args.run)
    choose_form(loaded.model, args.form)
    recipe = resolve_run(loaded.folder)
    source = open_data(recipe)
    files, read = [], []
    for path in args.files:
        try:
            read.append(source.load(path, loaded.task.info))
            files.append(path)
        except ConfigError as error:  # keeps no other file from its answer
            print(f"error: {error}", file=sys.stderr)
    code = 0 if files == args.files else 2
    if not files:
        return code
    size = next(n for n in SIZES if n >= min(len(files), SIZES[-1]))
    if not args.eager:
        compile_blocks(loaded.model)
    missing = [torch.zeros_like(read[0])] * (-len(files) % size)  # batches of one shape
    with torch.inference_mode():
        parts = torch.stack([*read, *missing]).split(size)
        outputs = torch.cat([loaded.model(part) for part in parts])[: len(files)]
    if not outputs.isfinite().all():
        raise ConfigError(f"{loaded.folder}: its model gives no finite outputs, the run has diverged: train it anew")
    rows = [[path, *words] for path, words in zip(files, loaded.task.describe(outputs.float(), args.top))]
    print(table(["file", *(f"top {i}" for i in range(1, len(rows[0])))], rows))
    return code


if __name__ == "__main__":
    run_command(main)
