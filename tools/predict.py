"""Predict the classes of files or sentences, or masked tokens of texts, with a trained run.

./run.sh predict RUN FILE|FOLDER|SENTENCE ... [--form full|chunk|rnn] [--top K] [--out FILE.csv|FILE.json]

Image classifiers read image files, folders of them, and patterns such as "photos/*.jpg". Runs on GLUE read sentences;
for tasks of sentence pairs, sentences are taken two by two. A masked language model predicts the masked tokens of texts
(`tools.fill_mask`). A file that cannot be read is named on stderr; the others are still predicted, and the exit code is
2.
"""

from __future__ import annotations

import csv
import glob
import io
from pathlib import Path
from typing import Any

import torch

from data.base import DataSet, walk
from data.vision.sources import is_picture
from lion.config import ConfigError
from lion.files import save_json, save_text
from lion.runs import LoadedRun
from lion.samples.images import ImageInfo
from lion.tasks.base import to_device
from lion.trainer.compilation import compile_blocks
from lion.trainer.runtime import start_runtime
from tools import options
from tools.cli import choose_form, say
from tools.compose import check_finite, open_data, open_with_data
from tools.fill_mask import fill, print_answers

Sample = dict[str, Any]
SIZES = (1, 8, 64)  # batch sizes: few, so that compiled code is found in Inductor's cache


def main(argv: list[str]) -> int:
    args = options.read("predict", argv)
    if args.out is not None and args.out.suffix not in WRITERS:
        raise ConfigError(f"--out: expected a name that ends in {' or '.join(WRITERS)}, got {str(args.out)!r}")
    loaded = open_with_data(args.run)
    choose_form(loaded.model, args.form)
    loaded.model.to(start_runtime("auto", matmul=loaded.recipe.trainer.matmul).device)
    if loaded.task.fills_masks:
        return fill(loaded, args.files, args.top)
    loaded.task.check_prediction()
    source = open_data(loaded.recipe, loaded.folder)
    if "file" not in source.asks:
        for word in args.files:
            if Path(word).is_file():
                asked_for = " and ".join(source.asks)
                raise ConfigError(f'predict: {word} is a file; this run expects {asked_for}: "$(cat {word})"')
    words = args.files
    if source.asks == ("file",):
        words = expanded(words, pictures=isinstance(loaded.task.info, ImageInfo))
    asked = grouped(words, source.asks)
    if len(asked) >= options.COMPILED_FROM and not args.eager and loaded.recipe.trainer.compile:
        compile_blocks(loaded.model, dynamic=None)  # texts differ in length
    size = next(n for n in SIZES if n >= min(len(asked), SIZES[-1]))
    files: list[list[str]] = []
    answers: list[list[str]] = []
    for start in range(0, len(asked), size):
        known, samples = readable(source, loaded, asked[start : start + size])
        if samples:
            files += known
            answers += answer(loaded, source, samples, size, args.top)
    code = 2
    if files == asked:
        code = 0
    if not files:
        return code
    if args.out is not None:
        WRITERS[args.out.suffix](args.out, records(source.asks, files, answers))
        print(f"{len(files):,} predictions written to {args.out}")
        return code
    print_answers(source.asks, [paths + words for paths, words in zip(files, answers)])
    return code


def readable(source: DataSet, loaded: LoadedRun, asked: list[list[str]]) -> tuple[list[list[str]], list[Sample]]:
    """Return the samples that can be read, with their arguments; the others are named on stderr."""
    known = []
    samples = []
    for paths in asked:
        try:
            samples.append(source.load(*paths, info=loaded.task.info))
            known.append(paths)
        except ConfigError as error:
            say(f"error: {error}")
    return known, samples


def expanded(words: list[str], *, pictures: bool) -> list[str]:
    """Return files, with those of folders and patterns in place of these, in the order of their names.

    Args:
        words: Files, folders and patterns.
        pictures: Whether files of folders count only if they are pictures, by their content.

    Raises:
        ConfigError: A folder without such files, or a pattern without files.
    """
    found = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            files = files_of(path, pictures)
            if not files:
                raise ConfigError(f"predict: {word} is a folder without {'pictures' if pictures else 'files'}")
            found += files
        elif not path.exists() and glob.has_magic(word):
            files = sorted(glob.glob(word, recursive=True))
            if not files:
                raise ConfigError(f"predict: no file matches {word!r}")
            found += files
        else:
            found.append(word)
    return found


def files_of(folder: Path, pictures: bool) -> list[str]:
    """Return all files of a folder and its folders; with `pictures` only these, and a line about the others."""
    files = []
    others = 0
    for inside, names in walk(folder):
        for name in sorted(names):
            file = str(Path(inside) / name)
            if pictures and not is_picture(file):
                others += 1
            else:
                files.append(file)
    if others:
        say(f"{folder}: {others:,} files are not pictures, and left out")
    return sorted(files)


def records(asks: tuple[str, ...], files: list[list[str]], answers: list[list[str]]) -> list[dict[str, str | float]]:
    """Return a record of each sample: its arguments, and the answers with their percent, most likely first."""
    rows = []
    for paths, words in zip(files, answers):
        row: dict[str, str | float] = dict(zip(asks, paths))
        for place, word in enumerate(words, 1):
            name, _, percent = word.rpartition(" ")
            if percent.endswith("%"):
                row[f"top {place}"] = name
                row[f"top {place} percent"] = float(percent[:-1])
            else:
                row[f"top {place}"] = word
        rows.append(row)
    return rows


def write_csv(path: Path, rows: list[dict[str, str | float]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    save_text(path, text.getvalue())


WRITERS = {".csv": write_csv, ".json": save_json}


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
