"""Generate images with a diffusion model, as a grid with one row per class.

    ./run.sh sample RUN [--classes 0,1,cat] [--count N] [--steps N] [--guidance G] [--eta E] [--seed S]
        [--form full|chunk|rnn] [--chunk-size N] [--raw] [--checkpoint best|last] [--out FILE.png]

The averaged weights (EMA) are used if the run has them; --raw selects the weights as trained. An image depends on the
seed and its place in the grid, not on --batch. A run on latents writes the latents to FILE.npy, for their decoder.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lion.config import ConfigError, nearest
from lion.files import write_atomic
from lion.progress import progress
from lion.runs import LoadedRun
from lion.samples.seeds import place_keys
from lion.tasks.diffusion import to_bytes
from lion.trainer.compilation import compile_blocks
from tools import options
from tools.cli import check_folder, choose_form, of_an_option, say
from tools.compose import check_finite, runtime_of
from tools.image_sources import open_diffusion

SIDE = 64  # smallest side of an image in the grid, in pixels


def main(argv: list[str]) -> int:
    args = options.read("sample", argv)
    if args.chunk_size and args.form in (None, "full"):
        raise ConfigError("--chunk-size: add --form chunk or rnn, the forms that have chunks")
    loaded = open_diffusion(args.run, args.checkpoint, args.raw)
    out = where(args.out, loaded)
    classes = chosen(args.classes, loaded.task.info.classes)
    choose_form(loaded.model, args.form, args.chunk_size)
    started = time.perf_counter()
    x = make(loaded, [label for label in classes for _ in range(args.count)], args)
    check_finite(x, loaded.folder)
    keep(out, x, args.count)
    each = f"{args.steps} steps, guidance {args.guidance:g}" + (f", form {args.form}" if args.form else "")
    say(f"{len(x)} sample{'s' * (len(x) != 1)} in {time.perf_counter() - started:.1f} s: {each}")
    print(f"{out}, by row: {', '.join(loaded.task.info.classes[label] for label in classes)}")
    return 0


def where(out: Path | None, loaded: LoadedRun) -> Path:
    """Return the file to write.

    Raises:
        ConfigError: The folder is not writable, or the file name has the wrong suffix.
    """
    kind = ".npy"
    if loaded.task.pictures:
        kind = ".png"
    given, out = out, out or loaded.folder / f"samples{kind}"
    check_folder("--out" if given else "RUN", out.parent)
    if out.suffix != kind or out.is_dir():
        what = "latents"
        if loaded.task.pictures:
            what = "images"
        raise ConfigError(f"--out: {what} are written to FILE{kind}, got {out}")
    return out


def chosen(asked: str | None, names: Sequence[str]) -> list[int]:
    """Return the labels of the classes in `asked`, given by number or name; by default of the first ones.

    Raises:
        ConfigError: A class is unknown.
    """
    if asked is None:
        return list(range(min(options.FEW, len(names))))
    labels = []
    for part in [asked] if asked in names else map(str.strip, asked.split(",")):  # a name may contain commas
        if part in names:
            labels.append(names.index(part))
        elif part.isdecimal() and int(part) < len(names):
            labels.append(int(part))
        else:
            hint = nearest(part, names, f"valid: 0 to {len(names) - 1}, or names such as {names[0]!r}")
            raise ConfigError(f"--classes: unknown class {part!r}, {hint}")
    return labels


def make(loaded: LoadedRun, labels: list[int], args: Any) -> Tensor:
    """Generate samples (N, channels, height, width) of these labels, in batches of one size."""
    runtime = runtime_of(loaded.recipe)
    model = loaded.model.to(runtime.device)
    if args.compile:
        compile_blocks(model)
    size = min(args.batch, len(labels))
    batches = math.ceil(len(labels) / size)
    padded = torch.tensor(labels + labels[:1] * (batches * size - len(labels)), device=runtime.device)
    keys = place_keys(args.seed, torch.arange(len(padded), device=runtime.device))
    generate = partial(loaded.task.generate, model, steps=args.steps, guidance=args.guidance, eta=args.eta)
    with (
        progress(total=batches * args.steps, desc="sampling", unit="step") as bar,
        of_an_option(),
        runtime.autocast(loaded.recipe.trainer.precision),
    ):
        pairs = zip(padded.split(size), keys.split(size))
        parts = [generate(*pair, after_step=bar.update) for pair in pairs]
    return torch.cat(parts)[: len(labels)].cpu()


def keep(out: Path, x: Tensor, columns: int) -> None:
    """Write images (N, channels, height, width) as a grid, enlarged if they are small; write latents unchanged."""
    if out.suffix == ".npy":
        write_atomic(out, lambda file: np.save(file, x.numpy()))
        return
    from torchvision.transforms.v2.functional import to_pil_image
    from torchvision.utils import make_grid

    times = max(1, SIDE // min(x.shape[-2:]))
    large = to_bytes(x).repeat_interleave(times, -1).repeat_interleave(times, -2)
    grid = to_pil_image(make_grid(large, nrow=columns, pad_value=255))
    write_atomic(out, lambda file: grid.save(file, "PNG"))
