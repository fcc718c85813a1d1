"""Compare generated images with real ones: Frechet distance, inception score, precision, recall.

    ./run.sh distance RUN|FOLDER|FILE.npz --features CLASSIFIER_RUN|FILE.pt [--reference train|val|test|FOLDER|FILE.npz]
        [--samples N] [--real N] [--steps N] [--guidance G] [--seed S] [--keep FOLDER] [--out FILE.json]

The scores of a run are stored in its folder as distance.json, where `./run.sh report` finds them. --out writes another
file.

With --features CLASSIFIER_RUN, features are the inputs of the head of that classifier. The scores are then called
FD-own and IS-own, and cannot be compared with any published FID. FILE.pt is a TorchScript module, such as Inception,
that maps uint8 images (N, 3, height, width) to features (N, D). An .npz file may hold features instead of images;
without --features, both sets must be features.

For comparison, a second row shows the scores of real images of another split: as many as there are samples, or the
whole split if it is smaller. If the reference is a folder or a file, the second row compares its two halves. A distance
decreases with the number of images, so compare distances only at the same number. +- is half of a 95 % interval, from a
jackknife over the first set. --keep stores the generated images, and reuses them in later calls.
"""

from __future__ import annotations

import hashlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lion.config import ConfigError
from lion.evaluation.distances import (
    GROUPS,
    NEIGHBOURS,
    Gaussian,
    frechet_distance,
    inception_score,
    jackknife,
    precision_recall,
    radii,
)
from lion.files import keep_aside, read_json, save_json
from lion.progress import progress
from lion.recipe_files import RECIPE
from lion.runs import LoadedRun, open_run
from lion.tasks.image_classification import ImageClassification
from lion.trainer.compilation import compile_blocks
from lion.trainer.runtime import Runtime, start_runtime
from tools import options
from tools.bench.engine import typed
from tools.cli import check_folder, say
from tools.compose import build_data, check_finite, digest, resolve_run
from tools.image_sources import (
    SPLITS,
    Drawing,
    Pictures,
    images_of_path,
    images_of_run,
    images_of_split,
    open_diffusion,
)
from tools.probe import device_name, stamp
from tools.tables import Cell, fill, table

FEWEST = 2 * GROUPS  # smallest number of images in a set
SHARES = ("precision", "recall")
COUNTS = ("samples", "reference", "nearest")  # fields of `Row`
NEAREST = 10_000  # most images of each set whose neighbours are searched


def main(argv: list[str]) -> int:
    args = options.read("distance", argv)
    for name in ("samples", "real"):
        if getattr(args, name) < FEWEST:
            raise ConfigError(f"--{name}: expected at least {FEWEST}, got {getattr(args, name)}")
    if args.out:
        check_folder("--out", args.out.parent)
    runtime = start_runtime()
    features = open_features(args, runtime)
    made, run = open_samples(args, runtime, features)
    if run and not args.out:
        check_folder("RUN", run.folder)
    out = args.out or (run and run.folder / options.FIGURES)
    real, floor = open_reference(args, made.count, run.folder if run else features.run, features)
    for pictures in (made, real, floor):
        if pictures is not None:
            check(pictures, features)
    read = partial(read_features, features=features, runtime=runtime)
    reference = read(real)
    rows = [compare(read(made), reference, made.name, features.name)]
    if floor is None:  # compare two halves of the same set
        even, odd = reference.part(slice(None, None, 2)), reference.part(slice(1, None, 2))
        rows.append(compare(even, odd, "real, in halves", features.name))
    else:
        rows.append(compare(read(floor), reference, f"real, {floor.name}", features.name))
    show(rows, features, real)
    if out:
        about = {"reference": args.reference, "features": args.features, "judge": features.digest}
        if args.reference not in SPLITS:
            about["reference"] = str(Path(args.reference).resolve())
        if run:
            for name in ("checkpoint", "raw", "steps", "guidance", "seed"):
                about[name] = getattr(args, name)
            about["step"] = run.checkpoint["step"]
        about["rows"] = [row._asdict() for row in rows]
        if run and not args.out and has_other(out, about):
            say(f"the scores of other settings are kept as {keep_aside(out)}")
        save_json(out, about | {"device": device_name()} | stamp(typed("distance", argv)))
        say(f"written: {out}")
    return 0


def open_features(args: Any, runtime: Runtime) -> FeatureSource:
    """Return what computes the features of images, or stands for features that are there already."""
    if not args.features:
        return StoredFeatures()
    if Path(args.features).suffix == ".pt":
        return TorchScriptFeatures(args, runtime)
    return ClassifierFeatures(args, runtime)


class FeatureSource:
    """Base of the sources of features.

    Attributes:
        name: Name of the features, in the names of scores.
        about: The network, as messages name it; None without one.
        run: Folder of the classifier run, if there is one.
        channels: Channels of the images that are read.
        digest: A digest of the network, or None.
    """

    name = "file"
    about = None
    run = None
    channels = 3
    digest = None

    def check(self, pictures: tuple[int, ...], whose: str) -> None:
        """Check the shape of images (channels, height, width); `whose` names them in messages.

        Raises:
            ConfigError: The network reads images of another shape.
        """

    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the features (B, D) of images, and their class probabilities if they are known."""
        raise NotImplementedError


class StoredFeatures(FeatureSource):
    """Features that files hold in place of images."""

    def __call__(self, pictures: Tensor) -> tuple[Tensor, None]:
        raise ConfigError("--features: missing, images need a classifier run or FILE.pt")


class ClassifierFeatures(FeatureSource):
    """Features from a classifier run: the inputs of its head, and its class probabilities."""

    name = "own"

    def __init__(self, args: Any, runtime: Runtime) -> None:
        loaded = open_run(args.features)
        if not isinstance(loaded.task, ImageClassification):
            raise ConfigError(
                f"--features: {loaded.folder} is of task {loaded.recipe.task.name!r}, expected a classifier of images"
            )
        self.run = loaded.folder
        self.about = str(loaded.folder)
        self.model = loaded.model.to(runtime.device)
        self.shape = loaded.model.image_shape
        self.channels = self.shape[0]
        self.digest = digest(loaded.model)
        self.given: list[Tensor] = []
        loaded.model.head.register_forward_pre_hook(lambda _, given: self.given.append(given[0]))
        if loaded.recipe.trainer.compile and not args.eager:
            compile_blocks(loaded.model, dynamic=None)  # the last batch is smaller

    def check(self, pictures: tuple[int, ...], whose: str) -> None:
        if pictures != self.shape:
            here = " x ".join(map(str, pictures))
            there = " x ".join(map(str, self.shape))
            raise ConfigError(f"{whose}: images of {here}, but the classifier {self.about} reads {there}")

    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        self.given.clear()
        shares = self.model(pictures).double().softmax(1)
        return self.given[0], shares


class TorchScriptFeatures(FeatureSource):
    """Features from a TorchScript module, without class probabilities; it reports itself what it cannot read.

    NVIDIA's argument `return_features` is set if the module has it.
    """

    def __init__(self, args: Any, runtime: Runtime) -> None:
        path = Path(args.features)
        try:
            with warnings.catch_warnings(action="ignore"):  # deprecated, but Inception is distributed so
                self.module = torch.jit.load(path, map_location=runtime.device).eval()
        except (RuntimeError, ValueError, OSError):
            raise ConfigError(f"--features: {path} is not a TorchScript module") from None
        self.name = path.stem
        self.about = str(path)
        self.digest = hashlib.blake2b(path.read_bytes()).hexdigest()[:32]
        self.options = {}
        if "return_features" in [argument.name for argument in self.module.forward.schema.arguments]:
            self.options["return_features"] = True

    def __call__(self, pictures: Tensor) -> tuple[Tensor, None]:
        try:
            found = self.module(pictures.expand(-1, 3, -1, -1), **self.options)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"--features: {self.about} cannot read {tuple(pictures.shape)} ({reason})") from None
        if not torch.is_tensor(found) or found.dim() != 2:
            raise ConfigError(f"--features: {self.about} returns no features (N, D)")
        return found, None


def open_samples(args: Any, runtime: Runtime, features: FeatureSource) -> tuple[Pictures, LoadedRun | None]:
    """Return the images to evaluate, and the run that generates them, or None.

    Raises:
        ConfigError: Images of a folder or file, with an option of generation.
    """
    path = Path(args.samples_of)
    if path.suffix == ".npz" or (path.is_dir() and not (path / RECIPE).is_file()):
        usual = options.read("distance", [args.samples_of])
        for name in ("keep", "checkpoint", "raw", "steps", "guidance"):
            if getattr(args, name) != getattr(usual, name):
                raise ConfigError(f"--{name}: {path} is not a run, nothing is generated")
        return images_of_path(path, Drawing(args.samples, args.batch, args.seed), features.channels), None
    loaded = open_diffusion(args.samples_of, args.checkpoint, args.raw)
    if loaded.recipe.trainer.compile and not args.eager:
        compile_blocks(loaded.model)
    return images_of_run(loaded, args, runtime), loaded


def open_reference(
    args: Any, samples: int, run: Path | None, features: FeatureSource
) -> tuple[Pictures, Pictures | None]:
    """Return the reference images, and up to `samples` images of another split of the same data, or None.

    The data are those of the generating run, or else those of the classifier.
    """
    drawing = Drawing(args.real, args.batch, args.seed)
    if args.reference not in SPLITS:
        if args.overrides:
            raise ConfigError(f"{args.overrides[0]}: no data set is read, because --reference is a folder or file")
        return images_of_path(Path(args.reference), drawing, features.channels), None
    if run is None:
        raise ConfigError("--reference: there is no run whose data could be used, give a folder or FILE.npz")
    recipe = resolve_run(run, args.overrides)
    splits = build_data(recipe)
    there = [split for split in ("test", "val", "train") if getattr(splits, split) is not None]
    other = next(split for split in there if split != args.reference)
    real = images_of_split(recipe, splits, args.reference, drawing)
    return real, images_of_split(recipe, splits, other, drawing._replace(most=samples))


def check(pictures: Pictures, features: FeatureSource) -> None:
    """Check the number and the shape of images.

    Raises:
        ConfigError: There are too few images, or the classifier cannot read them.
    """
    if pictures.count < FEWEST:
        raise ConfigError(f"{pictures.name}: {pictures.count} images, expected at least {FEWEST}")
    if pictures.shape and len(pictures.shape) == 3:
        features.check(pictures.shape, pictures.name)


def has_other(path: Path, about: dict[str, Any]) -> bool:
    """Return whether a file holds scores that are not those of `about`, measured again."""

    def settings(held: dict[str, Any]) -> list[Any]:
        found = [held.get(key) for key in about if key != "rows"]
        return found + [held["rows"][0][key] for key in COUNTS]

    try:
        return path.exists() and settings(read_json(path)) != settings(about)
    except (ValueError, LookupError, TypeError, AttributeError):
        return True


class Features(NamedTuple):
    """Features of a set of images: `values` (N, D), and `shares`, the class probabilities (N, classes) if known."""

    values: Tensor
    shares: Tensor | None

    def part(self, some: Any) -> Features:
        shares = None
        if self.shares is not None:
            shares = self.shares[some]
        return Features(self.values[some], shares)


def read_features(pictures: Pictures, features: FeatureSource, runtime: Runtime) -> Features:
    """Compute the features of all images, with a progress bar.

    Raises:
        ConfigError: The classifier reads images of another shape, or there is no classifier for images.
    """
    values, shares = [], []
    with progress(total=pictures.count, desc=pictures.name, unit="images") as bar:
        for batch in pictures.batches:
            batch = batch.to(runtime.device)
            if batch.dim() == 2:  # the source holds features
                values.append(batch.double())
            else:
                features.check(tuple(batch.shape[1:]), pictures.name)
                with torch.inference_mode():
                    found, own = features(batch)
                values.append(found.double())
                if own is not None:
                    shares.append(own)
            bar.update(len(batch))
    values = torch.cat(values)
    check_finite(values, features.about or pictures.name)
    return Features(values, torch.cat(shares) if shares else None)


class Row(NamedTuple):
    """Scores of a set against a reference set: by name, each with half of its 95 % interval."""

    name: str
    samples: int
    reference: int
    nearest: int
    figures: dict[str, tuple[float, float]]


def compare(made: Features, real: Features, name: str, kind: str) -> Row:
    """Compute all scores of a set; `kind` names the features in the names of the scores.

    Raises:
        ConfigError: The two sets have different numbers of features.
    """
    if made.values.shape[1] != real.values.shape[1]:
        there = real.values.shape[1]
        raise ConfigError(f"{name}: {made.values.shape[1]} features per image, but the reference has {there}")
    nearest = min(len(made.values), len(real.values), NEAREST)
    goal = Gaussian.of(real.values)
    near = real.values[:nearest]
    reach = radii(near)

    def figures(some: Tensor) -> Tensor:
        values = made.values[some]
        found = [frechet_distance(Gaussian.of(values), goal)]
        if made.shares is not None:
            found.append(inception_score(made.shares[some]))
        found += precision_recall(near, made.values[:nearest][some[:nearest]], reach)
        return torch.stack(found).cpu()

    say(f"{name}: computing the scores of {len(made.values):,} images")
    names = [f"FD-{kind}", *SHARES]
    if made.shares is not None:
        names.insert(1, f"IS-{kind}")
    values, halves = jackknife(figures, len(made.values))
    pairs = zip(values.tolist(), halves.tolist())
    return Row(name, len(made.values), len(real.values), nearest, dict(zip(names, pairs)))


def show(rows: list[Row], features: FeatureSource, real: Pictures) -> None:
    """Print a table of the scores, and notes about features and reference."""
    columns: dict[str, Cell] = {
        "images": lambda row: row.name,
        "samples": lambda row: f"{row.samples:,}",
        "reference": lambda row: f"{row.reference:,}",
    }
    figures = [row.figures for row in rows]
    for name in max(figures, key=len):  # features from a file have no class probabilities
        heading = name
        if name in SHARES:
            heading = f"{name} %"
        columns[heading] = partial(figure_cell, name=name)
    header, cells = fill(columns, rows)
    print(table(header, cells))
    where = "features as stored in the files"
    if features.about:
        where = f"features of {features.about}"
    print(f"reference: {real.name}; {where}; ±: 95 %, jackknife of {GROUPS} groups")
    print(f"precision and recall: k = {NEIGHBOURS}, equally many images of both sets, at most {NEAREST:,}")


def figure_cell(row: Row, name: str) -> str:
    if name not in row.figures:
        return "-"
    value, half = row.figures[name]
    scale = 1
    if name in SHARES:
        scale = 100
    return f"{scale * value:.2f} ± {scale * half:.2f}"
