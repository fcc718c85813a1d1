"""Predict the classes of files or sentences, or masked tokens of texts, with a trained run.

./run.sh predict RUN FILE|SENTENCE ... [--form full|chunk|rnn] [--top K]

Image classifiers read image files. Runs on GLUE read sentences; for tasks of sentence pairs, sentences are taken two by
two. A masked language model predicts the masked tokens of texts (`tools.fill_mask`). A file that cannot be read is
named on stderr; the others are still predicted, and the exit code is 2.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from data.base import DataSet
from lion.config import ConfigError
from lion.ops import FORMS
from lion.runs import LoadedRun, open_run
from lion.tasks.base import to_device
from lion.trainer.compilation import compile_blocks
from lion.trainer.runtime import start_runtime
from tools.cli import Parser, choose_form, count, run_command, table
from tools.compose import check_finite, open_data, resolve_run
from tools.fill_mask import fill

Sample = dict[str, Any]
SIZES = (1, 8, 64)  # batch sizes: few, so that compiled code is found in Inductor's cache


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh predict", description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("files", nargs="+", metavar="FILE|SENTENCE")
    parser.add_argument("--form", choices=FORMS, help="form of the model (default: the form it has)")
    parser.add_argument(
        "--eager",
        action="store_true",
        help="do not use torch.compile, as for masked language models; suited to a few files",
    )
    parser.add_argument(
        "--top", type=count, default=3, help="number of predictions to show, the most likely first (default: 3)"
    )
    args = parser.parse_intermixed_args(argv)
    loaded = open_run(args.run)
    choose_form(loaded.model, args.form)
    loaded.model.to(start_runtime("auto", matmul=loaded.recipe.trainer.matmul).device)
    if loaded.task.fills_masks:
        return fill(loaded, args.files, args.top)
    loaded.task.check_prediction()
    recipe = resolve_run(loaded.folder)
    source = open_data(recipe, loaded.folder)
    if "file" not in source.asks and (path := next((word for word in args.files if Path(word).is_file()), None)):
        raise ConfigError(f'predict: {path} is a file; this run expects {" and ".join(source.asks)}: "$(cat {path})"')
    asked, files, read = grouped(args.files, source.asks), [], []
    for paths in asked:
        try:
            read.append(source.load(*paths, info=loaded.task.info))
            files.append(paths)
        except ConfigError as error:  # the other files are still predicted
            print(f"error: {error}", file=sys.stderr)
    code = 0 if files == asked else 2
    if not files:
        return code
    size = next(n for n in SIZES if n >= min(len(files), SIZES[-1]))
    if not args.eager and loaded.recipe.trainer.compile:
        compile_blocks(loaded.model, dynamic=None)  # texts differ in length
    rows = []
    for start in range(0, len(files), size):
        some = slice(start, start + size)
        answers = answer(loaded, source, read[some], size, args.top)
        rows += [[*paths, *words] for paths, words in zip(files[some], answers)]
    print(table([*source.asks, *(f"top {i + 1}" for i in range(len(rows[0]) - len(source.asks)))], rows))
    return code


def grouped(words: list[str], asks: tuple[str, ...]) -> list[list[str]]:
    """Split the arguments into samples, each with one argument per name in `asks`.

    Raises:
        ConfigError: The last sample is incomplete.
    """
    if len(words) % len(asks):
        raise ConfigError(
            f"predict: {words[-1]!r} is incomplete, this run expects {' and '.join(asks)} for each sample"
        )
    return [words[i : i + len(asks)] for i in range(0, len(words), len(asks))]


def answer(loaded: LoadedRun, source: DataSet, samples: list[Sample], size: int, top: int) -> list[list[str]]:
    """Return the `top` predictions for each sample, in words. The batch is filled up to `size` with copies of the first
    sample.

    Raises:
        ConfigError: The outputs are not finite.
    """
    batch = source.collate([*samples, *samples[:1] * (size - len(samples))])
    batch = to_device(batch, next(loaded.model.parameters()).device)
    with torch.inference_mode():
        outputs = loaded.task.outputs(loaded.model, batch)[: len(samples)].float().cpu()
    check_finite(outputs, loaded.folder)
    return loaded.task.describe(outputs, top)


if __name__ == "__main__":
    run_command(main)
