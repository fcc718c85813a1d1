"""Runs as one table beside the paper's numbers: mean and deviation over seeds, what the paper claims, and curves.

    ./run.sh report RUN [RUN ...] [--out reports] [--name vision] [--notes FILE] [--fresh]

Runs whose recipes agree but for the seed are one row. All runs must have the same data and budget (epochs or steps,
batch), and what else differs is listed. The paper's numbers are those that `recipes/cifar100_*.yaml` and
`recipes/deit_small_*.yaml` claim for the same mixer, scans and direction: other data, so only their order compares.
Writes NAME.md, NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from lion.config import ConfigError, flatten, to_dict
from lion.recipe import Recipe, free_keys
from lion.runs import ENVIRONMENT, SUMMARY, build_on_meta, count_parameters, find_run, read_run
from lion.tasks.metrics import Metric
from lion.trainer.checkpoint import save_text, write_atomic
from tools.cli import Parser, run_command, table
from tools.compose import RECIPES, resolve, resolve_run
from tools.evaluate import metric_of
from tools.store import pipes

CLAIMS = (  # what the paper says is better, in names of `label`: Table 16, multi-scan rows of Table 2, Tables 13 and 14
    ("lion_s", "lion_s alternating"),
    ("lion_s alternating", "lion_s forward"),
    ("lion_s alternating", "lion_s backward"),
    ("lion_s", "lion_s forward"),
    ("lion_s", "lion_s backward"),
    ("lion_s multiscan", "lion_s"),
    ("lion_d multiscan", "lion_d"),
    ("lion_s", "lion_lit"),
    ("lion_d", "lion_lit"),
    ("lion_s", "softmax"),
)
SHARED = ("data.", "task.", "optim.", "schedule.")
BUDGET = ("trainer.epochs", "trainer.steps", "trainer.batch_size")
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided 95 %, of 1, 2, .. degrees


class Run(NamedTuple):
    """A finished run: its validation curve as (epoch, metric), and the test metric if it was evaluated."""

    folder: Path
    recipe: Recipe
    metric: Metric
    curve: list[tuple[float, float]]
    test: float | None
    parameters: int
    environment: dict[str, Any]

    @property
    def val(self) -> float:
        return self.metric.best(value for _, value in self.curve)


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the report")
    parser.add_argument("--name", type=file_name, default="vision", help="of its files")
    parser.add_argument("--notes", type=Path, help="Markdown to end the report with")
    parser.add_argument("--fresh", action="store_true", help="write over a report of other runs")
    args = parser.parse_args(argv)
    notes = read_notes(args.notes)
    groups = group([load(run) for run in dict.fromkeys(args.runs)])
    header, rows = result_table(groups)
    path = args.out / f"{args.name}.md"
    if not args.fresh:
        check_earlier(path.with_suffix(".json"), {run.folder.name for runs in groups.values() for run in runs})
    args.out.mkdir(parents=True, exist_ok=True)
    drawn = draw(groups, path.with_suffix(".png"))
    save_text(path, markdown(groups, f"{args.name}.png" if drawn else None, notes))
    save_text(path.with_suffix(".json"), json.dumps({n: as_data(runs) for n, runs in groups.items()}, indent=1) + "\n")
    claims = claim_table(groups)
    print(table(header, rows), *([table(*claims)] if claims[1] else []), sep="\n\n")
    print(f"\nwritten: {path}, {path.with_suffix('.json')}", end="")
    print(f", {path.with_suffix('.png')}" if drawn else "; no picture, which needs matplotlib (pip install matplotlib)")
    return 0


def file_name(text: str) -> str:
    """An option's name of a file, without folders."""
    if text in ("", "..") or text != Path(text).name:
        raise argparse.ArgumentTypeError(f"expected a name without folders (--out has them), got {text!r}")
    return text


def check_earlier(path: Path, runs: set[str]) -> None:
    """Refuse to lose a report.

    Raises:
        ConfigError: There is one of runs that are not among these.
    """
    try:
        earlier = {row["run"] for rows in json.loads(path.read_text()).values() for row in rows}
    except FileNotFoundError:
        return
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        earlier = {path.name}
    if earlier - runs:
        raise ConfigError(
            f"{path}: holds {min(earlier - runs)}, not given here; --name NAME starts another, --fresh this"
        )


def load(name: str) -> Run:
    """Raises ConfigError: no run there, or one that is not finished."""
    folder = find_run(name)
    recipe = resolve_run(folder)
    metric = metric_of(recipe)
    try:
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line["kind"] == "val"]
        curve = [(line["epoch"], line[metric.name]) for line in lines]
        environment = json.loads((folder / ENVIRONMENT).read_text())
        summary = json.loads((folder / SUMMARY).read_text()) if (folder / SUMMARY).exists() else None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder}: its metrics cannot be read ({error})") from None
    if not curve:
        raise ConfigError(f"{folder}: not validated yet, train it first")
    if not finished(recipe, lines[-1]):
        raise ConfigError(f"{folder}: stopped at step {lines[-1]['step']:,}, train it to its end first")
    parameters = count_parameters(build_on_meta(read_run(folder, "best")[1], recipe.model))
    test = summary["value"] if summary and summary["split"] == "test" else None
    return Run(folder, recipe, metric, curve, test, parameters, environment)


def finished(recipe: Recipe, last: dict[str, Any]) -> bool:
    """Whether the last validation was that of the last step."""
    c, step = recipe.trainer, last["step"]
    return step >= (c.steps if c.steps is not None else round(c.epochs * step / last["epoch"]))


def group(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by what they are called, which differ in their seeds only.

    Raises:
        ConfigError: Data or budget differ, or two runs are the same.
    """
    found: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        name, own = run.recipe.model.label(), settings_of(run.recipe)
        first = next(iter(settings.values()), own)
        for key in own:
            if (key.startswith(SHARED) or key in BUDGET) and own[key] != first.get(key):
                raise ConfigError(f"{run.folder}: not comparable with {runs[0].folder}, they differ in {key}")
        if settings.setdefault(name, own) != own:
            odd = next(k for k in own if own[k] != settings[name].get(k))
            raise ConfigError(f"{run.folder}: called {name!r} as {found[name][0].folder}, but differs in {odd}")
        if any(other.recipe.seed == run.recipe.seed for other in found.get(name, ())):
            raise ConfigError(f"{run.folder}: a second run of {name!r} with seed {run.recipe.seed}")
        found.setdefault(name, []).append(run)
    return {name: sorted(found[name], key=lambda r: r.recipe.seed) for name in sorted(found, key=place)}


def place(name: str) -> tuple:
    """Rows in the paper's order: baselines, fixed, selective; plain before more scans and fewer directions."""
    order = ["softmax", "lion_lit", "lion_d", "lion_s"]
    mixer, _, rest = name.partition(" ")
    kinds = ["", "multiscan", "alternating", "forward", "backward"]
    return (order.index(mixer) if mixer in order else 9, mixer, kinds.index(rest) if rest in kinds else 9, rest)


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """All that a row's runs share."""
    left_out = free_keys(recipe) | {"seed", "about.row", "about.expected", "about.hardware"}
    return {k: v for k, v in flatten(to_dict(recipe)).items() if k not in left_out}


def paper() -> dict[str, dict[str, str]]:
    """What the shipped recipes claim, by label: {"CIFAR-100": .., "ImageNet-1k, small": ..}."""
    found: dict[str, dict[str, str]] = {}
    for column, pattern in (("CIFAR-100", "cifar100_*.yaml"), ("ImageNet-1k, small", "deit_small_*.yaml")):
        for path in sorted(RECIPES.glob(pattern)):
            recipe = resolve(path)
            found.setdefault(recipe.model.label(), {})[column] = recipe.about.expected.removesuffix(" top-1")
    return found


def result_table(groups: dict[str, list[Run]]) -> tuple[list[str], list[list[str]]]:
    claimed, metric = paper(), metric_shared(groups)
    header = [
        "model",
        f"test {metric.heading}",
        f"val {metric.heading}",
        "n",
        "parameters",
        "paper: CIFAR-100",
        "paper: ImageNet-1k, small",
    ]
    rows = []
    for name, runs in groups.items():
        columns = [claimed.get(name, {}).get(c.removeprefix("paper: "), "-") for c in header[5:]]
        tests = [run.test for run in runs if run.test is not None]
        spread = [
            mean_and_deviation(v, metric) for v in (tests if len(tests) == len(runs) else [], [r.val for r in runs])
        ]
        rows.append([name, *spread, str(len(runs)), f"{runs[0].parameters:,}", *columns])
    return header, rows


def metric_shared(groups: dict[str, list[Run]]) -> Metric:
    """All runs have one task."""
    return next(iter(groups.values()))[0].metric


def mean_and_deviation(values: list[float], metric: Metric) -> str:
    """As the metric writes them; the deviation is that of a sample."""
    if not values:
        return "-"
    mean = metric.number(statistics.mean(values))
    return f"{mean} ± {metric.number(statistics.stdev(values))}" if len(values) > 1 else mean


def claim_table(groups: dict[str, list[Run]]) -> tuple[list[str], list[list[str]]]:
    """Each claim whose two rows are here, by the differences of runs with the same seed: on test where all of both
    rows have been tested, else on val."""
    rows, metric = [], metric_shared(groups)
    for better, worse in ((a + b, c + b) for b in ("", " with positions") for a, c in CLAIMS):
        if better in groups and worse in groups:
            split = "test" if all(r.test is not None for r in (*groups[better], *groups[worse])) else "val"
            pairs = {r.recipe.seed: getattr(r, split) for r in groups[better]}
            gaps = [
                metric.gain(pairs[r.recipe.seed], getattr(r, split)) for r in groups[worse] if r.recipe.seed in pairs
            ]
            if gaps:
                claim = [f"{better} > {worse}", split, mean_and_deviation(gaps, metric), str(len(gaps)), verdict(gaps)]
                rows.append(claim)
    return ["the paper: ", "on", f"difference{', points' if metric.percent else ''}", "n", "here"], rows


def verdict(gaps: list[float]) -> str:
    """Whether the mean of paired differences is other than 0, by Student's t at 95 %."""
    if len(gaps) < 2:
        return "one seed decides nothing"
    error, gap = statistics.stdev(gaps) / len(gaps) ** 0.5, statistics.mean(gaps)
    if abs(gap) <= T95[min(len(gaps) - 1, len(T95)) - 1] * error:
        return "undecided, within the noise"
    return "so here, too" if gap > 0 else "the other way round here"


def read_notes(path: Path | None) -> str:
    try:
        return "" if path is None else path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--notes: {path} cannot be read ({error})") from None


def markdown(groups: dict[str, list[Run]], picture: str | None, notes: str = "") -> str:
    runs = [run for some in groups.values() for run in some]
    header, rows = result_table(groups)
    parts = ["# Vision: runs at one budget", "Written by `./run.sh report`.", budget(runs)]
    parts += [pipes(header, rows, text=("model",))]
    parts.append(
        "Mean ± standard deviation over n seeds (of the sample). `test` is that of the weights that did best on `val`. "
        "The paper's columns are its numbers on its own data, for the order only."
    )
    header, rows = claim_table(groups)
    if rows:
        parts += ["## What the paper claims", pipes(header, rows, text=("the paper: ", "on", "here"))]
        parts.append(
            "Differences are between runs of one seed; Student's t at 95 % decides whether they are more than noise."
        )
    if picture:
        parts += ["## Curves", f"![validation curves]({picture})", "Mean over seeds, from the lowest to the highest."]
    if notes:
        parts += ["## Notes", notes]
    return "\n\n".join(parts) + "\n"


def budget(runs: list[Run]) -> str:
    """What all runs share, and on what they ran."""
    c, first = runs[0].recipe.trainer, runs[0].recipe
    length = f"{c.epochs:g} epochs" if c.epochs is not None else f"{c.steps:,} steps"
    data = f"{first.data.name} ({getattr(first.data, 'path', None) or first.data.root or 'its usual place'})"
    limit = getattr(first.data, "limit", None)
    environments = dict.fromkeys(
        f"{e.get('device')}, {e.get('threads')} thread(s), torch {e.get('torch')}, commit {str(e.get('commit'))[:9]}"
        for e in (run.environment for run in runs)
    )
    keys = [settings_of(run.recipe) for run in runs]
    differing = sorted(k for k in keys[0] if any(other.get(k) != keys[0][k] for other in keys))
    lines = [
        f"- Data: {data}{f', {limit:,} training pictures' if limit else ''}",
        f"- Model: {first.model.shape()}",
        f"- Budget: {length} in batches of {c.batch_size}, {c.precision}",
        f"- Settings that differ between rows: {', '.join(f'`{k}`' for k in differing) or 'none'}",
        *(f"- Ran on: {text}" for text in environments),
    ]
    return "\n".join(lines)


def as_data(runs: list[Run]) -> list[dict[str, Any]]:
    return [
        {
            "run": run.folder.name,
            "seed": run.recipe.seed,
            "val": run.val,
            "test": run.test,
            "parameters": run.parameters,
            "curve": run.curve,
        }
        for run in runs
    ]


def draw(groups: dict[str, list[Run]], path: Path) -> bool:
    """Validation curves into `path`; False without matplotlib."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        return False
    fig = figure(figsize=(9, 5.2), layout="constrained")
    ax, metric = fig.subplots(), metric_shared(groups)
    for name, runs in groups.items():
        epochs = sorted(set.intersection(*({e for e, _ in run.curve} for run in runs)))
        columns = [[metric.scaled(dict(run.curve)[e]) for run in runs] for e in epochs]
        style = {"color": "black"} if name == "softmax" else {}
        (drawn,) = ax.plot(epochs, [statistics.mean(c) for c in columns], "o-", markersize=3, label=name, **style)
        ax.fill_between(epochs, list(map(min, columns)), list(map(max, columns)), alpha=0.15, color=drawn.get_color())
    ax.set(xlabel="epoch", ylabel=f"val {metric.heading}")
    ax.grid(True, color="0.9")
    ax.spines[["top", "right"]].set_visible(False)
    fig.legend(loc="outside right center", frameon=False)
    write_atomic(path, lambda file: fig.savefig(file, format="png", dpi=120))
    return True


if __name__ == "__main__":
    run_command(main)
