"""How far the pictures of a run of diffusion are from real ones: Frechet distance, score of classes, precision, recall.

    ./run.sh distance RUN|FOLDER|FILE.npz --features CLASSIFIER_RUN|FILE.pt [--reference train|val|test|FOLDER|FILE.npz]
        [--samples N] [--real N] [--steps N] [--guidance G] [--seed S] [--keep FOLDER] [--out FILE.json]

The figures of a run are kept in its folder, distance.json, where `./run.sh report` finds them; --out names another
file.

Features are what the head of a classifier of ours is given: the figures are FD-own and IS-own, and compare with no
published FID. FILE.pt is a TorchScript module from uint8 pictures (N, 3, height, width) to features (N, D), as
Inception's; an .npz may hold features, and then both do. Below stand, to compare, as many real pictures of
another split, or all that it has. A distance falls as pictures get more: compare it at the same number alone. +- is the
half of a 95 % interval, of a jackknife over the first set. --keep: samples go there, and are not made again.
"""

from __future__ import annotations

import hashlib
import shlex
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.files import save_json
from lion.progress import progress
from lion.runs import RECIPE, LoadedRun, find_run, open_run
from lion.tasks.distances import (
    GROUPS,
    NEIGHBOURS,
    Gaussian,
    frechet_distance,
    inception_score,
    jackknife,
    precision_recall,
    radii,
)
from lion.tasks.image_classification import ImageClassification
from lion.trainer.runtime import Runtime, compile_blocks, start_runtime
from tools.bench.probe import device_name, stamp
from tools.cli import Parser, check_folder, count, number, run_command, say, table
from tools.compose import build_data, check_finite, digest, resolve_run
from tools.pictures import SPLITS, Pictures, of_path, of_run, of_split, open_diffusion

FIGURES = "distance.json"
FEWEST = 2 * GROUPS  # pictures of a set
SHARES = ("precision", "recall")
NEAREST = 10_000  # pictures of each set whose neighbours are looked for, at most


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh distance", description=__doc__.splitlines()[0])
    parser.add_argument("samples_of", metavar="RUN|FOLDER|FILE.npz", help="what is judged")
    parser.add_argument("overrides", nargs="*", metavar="data.root=PATH", help="where the real pictures are now")
    parser.add_argument("--features", metavar="RUN|FILE.pt", help="a classifier of ours, or TorchScript")
    parser.add_argument("--reference", default="train", help="train, val or test of the data; a folder or FILE.npz")
    parser.add_argument("--samples", type=count, default=10_000, help="to make, or to read at most")
    parser.add_argument("--real", type=count, default=50_000, help="real pictures at most")
    parser.add_argument("--steps", type=count, default=50, help="of DDIM")
    parser.add_argument("--guidance", type=number(0, 100), default=1.0, help="1: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=count, default=128, help="pictures at once")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of samples, which are then made only once")
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best")
    parser.add_argument("--raw", action="store_true", help="the weights as trained, not their average")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help=f"default, of a run: {FIGURES} in its folder")
    args = parser.parse_intermixed_args(argv)
    for name in ("samples", "real"):
        if getattr(args, name) < FEWEST:
            raise ConfigError(f"--{name}: expected at least {FEWEST}, got {getattr(args, name)}")
    if args.out:
        check_folder("--out", args.out.parent)
    runtime, features = start_runtime(), None
    if args.features:
        features = (Scripted if Path(args.features).suffix == ".pt" else Own)(args, runtime)
    made, run = open_samples(args, runtime, features)
    if run and not args.out:
        check_folder("RUN", run.folder)
    out = args.out or (run and run.folder / FIGURES)
    real, floor = open_reference(args, made.count, run.folder if run else features and features.run, features)
    for pictures in filter(None, (made, real, floor)):
        check(pictures, features)
    read = partial(read_features, features=features, runtime=runtime)
    reference = read(real)
    kind = features.name if features else "file"
    rows = [compare(read(made), reference, made.name, kind)]
    if floor is None:  # two halves of the same
        floor, reference = (reference.part(half) for half in (slice(None, None, 2), slice(1, None, 2)))
        rows.append(compare(floor, reference, "real, in halves", kind))
    else:
        rows.append(compare(read(floor), reference, f"real, {floor.name}", kind))
    show(rows, features, real)
    if out:
        about = {"reference": args.reference, "features": args.features, "judge": features and features.digest}
        if args.reference not in SPLITS:
            about["reference"] = str(Path(args.reference).resolve())
        if run:
            about |= {name: getattr(args, name) for name in ("checkpoint", "raw", "steps", "guidance", "seed")}
            about["step"] = run.checkpoint["step"]
        typed = shlex.join(["./run.sh", "distance", *argv])
        save_json(out, {**about, "device": device_name(), **stamp(typed), "rows": [row._asdict() for row in rows]})
        say(f"written: {out}")
    return 0


class Own:
    """Features of a classifier of ours: what its head is given, and the shares of its classes."""

    name = "own"

    def __init__(self, args: Any, runtime: Runtime) -> None:
        loaded = open_run(args.features)
        if not isinstance(loaded.task, ImageClassification):
            raise ConfigError(f"--features: {loaded.folder} is of task {loaded.recipe.task.name!r}, no classifier")
        self.run, self.about, self.model = loaded.folder, str(loaded.folder), loaded.model.to(runtime.device)
        self.shape, self.given, self.digest = loaded.model.image_shape, [], digest(loaded.model)
        loaded.model.head.register_forward_pre_hook(lambda _, given: self.given.append(given[0]))
        if loaded.recipe.trainer.compile and not args.eager:
            compile_blocks(loaded.model, dynamic=None)  # the last batch is smaller

    @property
    def channels(self) -> int:
        return self.shape[0]

    def check(self, pictures: tuple[int, ...], whose: str) -> None:
        """Raises ConfigError: They are of another size."""
        if pictures != self.shape:
            here, there = (" x ".join(map(str, shape)) for shape in (pictures, self.shape))
            raise ConfigError(f"{whose}: pictures of {here}, the classifier {self.about} reads {there}")

    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        self.given.clear()
        shares = self.model(pictures).double().softmax(1)
        return self.given[0], shares


class Scripted:
    """Features of a TorchScript module, with NVIDIA's `return_features` where it has such a switch; no classes."""

    run, channels = None, 3

    def __init__(self, args: Any, runtime: Runtime) -> None:
        path = Path(args.features)
        try:
            with warnings.catch_warnings(action="ignore"):  # deprecated, but what Inception comes as
                self.module = torch.jit.load(path, map_location=runtime.device).eval()
        except (RuntimeError, ValueError, OSError):
            raise ConfigError(f"--features: {path} is no TorchScript module") from None
        self.name, self.about, self.digest = path.stem, str(path), hashlib.blake2b(path.read_bytes()).hexdigest()[:32]
        named = {argument.name for argument in self.module.forward.schema.arguments}
        self.how = {"return_features": True} if "return_features" in named else {}

    def check(self, pictures: tuple[int, ...], whose: str) -> None:
        """It says itself what it cannot read."""

    def __call__(self, pictures: Tensor) -> tuple[Tensor, None]:
        try:
            found = self.module(pictures.expand(-1, 3, -1, -1), **self.how)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"--features: {self.about} cannot read {tuple(pictures.shape)} ({reason})") from None
        if not torch.is_tensor(found) or found.dim() != 2:
            raise ConfigError(f"--features: {self.about} gives no features (N, D)")
        return found, None


def open_samples(args: Any, runtime: Runtime, features: Any) -> tuple[Pictures, LoadedRun | None]:
    """What is judged; and the run that it is of, if any."""
    path, channels = Path(args.samples_of), features.channels if features else 3
    if path.suffix == ".npz" or (path.is_dir() and not (path / RECIPE).is_file()):
        if args.keep:
            raise ConfigError(f"--keep: {path} is no run, nothing is made")
        return of_path(path, args.samples, args.batch, args.seed, channels), None
    folder = find_run(args.samples_of)
    loaded = open_diffusion(folder, args.checkpoint, args.raw)
    if loaded.recipe.trainer.compile and not args.eager:
        compile_blocks(loaded.model)
    return of_run(loaded, args, runtime), loaded


def open_reference(args: Any, samples: int, run: Path | None, features: Any) -> tuple[Pictures, Pictures | None]:
    """The real pictures, and as many of another split as there are samples: a run's own data, else the classifier's."""
    if args.reference not in SPLITS:
        if args.overrides:
            raise ConfigError(f"{args.overrides[0]}: no data set is read, --reference names the real pictures")
        channels = features.channels if features else 3
        return of_path(Path(args.reference), args.real, args.batch, args.seed, channels), None
    if run is None:
        raise ConfigError("--reference: without a run there are no data to take it from, name a folder or FILE.npz")
    recipe = resolve_run(run, args.overrides)
    splits = build_data(recipe)
    other = next(s for s in ("test", "val", "train") if s != args.reference and getattr(splits, s) is not None)
    most = {args.reference: args.real, other: samples}
    return tuple(of_split(recipe, splits, s, most[s], args.batch, args.seed) for s in (args.reference, other))


def check(pictures: Pictures, features: Any) -> None:
    """Raises ConfigError: They are too few, or the classifier cannot read them."""
    if pictures.count < FEWEST:
        raise ConfigError(f"{pictures.name}: {pictures.count} pictures, expected at least {FEWEST}")
    if features and pictures.shape and len(pictures.shape) == 3:
        features.check(pictures.shape, pictures.name)


class Features(NamedTuple):
    """Of a set of pictures: features (N, D), and the shares of the classes (N, classes) where they are known."""

    values: Tensor
    shares: Tensor | None

    def part(self, some: Any) -> Features:
        return Features(self.values[some], None if self.shares is None else self.shares[some])


def read_features(pictures: Pictures, features: Any, runtime: Runtime) -> Features:
    """Of all pictures, with a progress bar.

    Raises:
        ConfigError: They are of another size than the classifier's, or there is no classifier for pictures.
    """
    values, shares = [], []
    with progress(total=pictures.count, desc=pictures.name, unit="pictures") as bar:
        for batch in pictures.batches:
            batch = batch.to(runtime.device)
            if batch.dim() == 2:  # features already
                values.append(batch.double())
            elif features is None:
                raise ConfigError("--features: missing, a classifier's run or FILE.pt: these are pictures")
            else:
                features.check(tuple(batch.shape[1:]), pictures.name)
                with torch.inference_mode():
                    found, own = features(batch)
                values.append(found.double())
                shares += [] if own is None else [own]
            bar.update(len(batch))
    values = torch.cat(values)
    check_finite(values, features.about if features else pictures.name)
    return Features(values, torch.cat(shares) if shares else None)


class Row(NamedTuple):
    """Figures of a set against another, by name, each with half its interval."""

    name: str
    samples: int
    reference: int
    nearest: int
    figures: dict[str, tuple[float, float]]


def compare(made: Features, real: Features, name: str, kind: str) -> Row:
    """Every figure of a set, by a name that says which features it is of (`kind`).

    Raises:
        ConfigError: The sets have other features.
    """
    if made.values.shape[1] != real.values.shape[1]:
        sizes = [x.values.shape[1] for x in (made, real)]
        raise ConfigError(f"{name}: {sizes[0]} features a picture, the reference has {sizes[1]}")
    nearest = min(len(made.values), len(real.values), NEAREST)
    goal, near = Gaussian.of(real.values), real.values[:nearest]
    reach = radii(near)

    def figures(some: Tensor) -> Tensor:
        values = made.values[some]
        found = [frechet_distance(Gaussian.of(values), goal)]
        found += [] if made.shares is None else [inception_score(made.shares[some])]
        found += precision_recall(near, made.values[:nearest][some[:nearest]], reach)
        return torch.stack(found).cpu()

    say(f"{name}: figures of {len(made.values):,} pictures")
    names = (f"FD-{kind}", *([] if made.shares is None else [f"IS-{kind}"]), *SHARES)
    pairs = zip(*(x.tolist() for x in jackknife(figures, len(made.values))))
    return Row(name, len(made.values), len(real.values), nearest, dict(zip(names, pairs)))


def show(rows: list[Row], features: Any, real: Pictures) -> None:
    """Print them, and what they are of."""
    names = list(max((row.figures for row in rows), key=len))  # features from a file tell no classes
    body = []
    for row in rows:
        cells = (as_text(*row.figures[name], name in SHARES) if name in row.figures else "-" for name in names)
        body.append([row.name, f"{row.samples:,}", f"{row.reference:,}", *cells])
    heads = (f"{name} %" if name in SHARES else name for name in names)
    print(table(["pictures", "samples", "reference", *heads], body))
    where = f"features of {features.about}" if features else "features as they are given"
    print(f"reference: {real.name}; {where}; ±: 95 %, jackknife of {GROUPS} groups")
    print(f"precision and recall: k = {NEIGHBOURS}, as many of both sets as the smaller has, at most {NEAREST:,}")


def as_text(value: float, half: float, percent: bool) -> str:
    scale = 100 if percent else 1
    return f"{scale * value:.2f} ± {scale * half:.2f}"


if __name__ == "__main__":
    run_command(main)
