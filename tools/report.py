"""Runs as one table beside the paper's numbers: mean and deviation over seeds, what the paper claims, and curves.

    ./run.sh report RUN [RUN ...] [--out reports] [--name vision] [--notes FILE] [--fresh]

Runs whose recipes agree but for the seed are one row. All runs must have the same data and budget (epochs or steps,
batch), and what else differs is listed. The paper's numbers, as `recipes/paper/TASK.yaml` has them, are those that our
recipes claim for the same mixer, scans and direction: other data, so only their order compares.
Writes NAME.md, NAME.json and NAME.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lion.config import ConfigError, flatten, to_dict
from lion.recipe import Recipe, free_keys
from lion.runs import ENVIRONMENT, SUMMARY, build_on_meta, count_parameters, find_run, read_run
from lion.tasks.data import Info
from lion.tasks.metrics import Metric
from tools.cli import Parser, run_command, table
from tools.compose import RECIPES, metric_of, resolve, resolve_run
from tools.store import Row, Store, pipes

SHARED = ("data.", "task.", "optim.", "schedule.")
NO_NUMBER = "no number yet"  # what a recipe claims that the paper does not have
BUDGET = ("trainer.epochs", "trainer.steps", "trainer.batch_size")
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t, two-sided 95 %, of 1, 2, .. degrees


@dataclass(frozen=True)
class Paper:
    """What the paper says of a task, a file of `recipes/paper/`: its title and the name of the report's files, columns
    of numbers (a pattern of our recipes each, that claim them), the order of its rows, which row is better than which,
    and what may be said of both rows at once."""

    title: str
    name: str
    columns: dict[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    better: tuple[tuple[str, str], ...] = ()
    alike: tuple[str, ...] = ()


class Run(NamedTuple):
    """A finished run: its validation curve as (epoch, metric), and the test metric if it was evaluated."""

    folder: Path
    recipe: Recipe
    metric: Metric
    curve: list[tuple[float, float]]
    test: float | None
    parameters: int
    environment: dict[str, Any]
    info: Info
    remark: str | None

    @property
    def val(self) -> float:
        return self.metric.best(value for _, value in self.curve)


def main(argv: list[str]) -> int:
    parser = Parser(prog="run.sh report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--out", type=Path, default=Path("reports"), help="folder of the report")
    parser.add_argument("--name", type=file_name, help="of its files (default: that of the task)")
    parser.add_argument("--notes", type=Path, help="Markdown to end the report with")
    parser.add_argument("--fresh", action="store_true", help="write over a report of other runs")
    args = parser.parse_args(argv)
    notes = read_notes(args.notes)
    runs = [load(run) for run in dict.fromkeys(args.runs)]
    paper = read_paper(runs[0].recipe.task.name)
    groups = group(runs, paper)
    store = Store(args.out / f"{args.name or paper.name}.json", rows=("model", "seed")).load(args.fresh)
    check_earlier(store, {run.folder.name for run in runs})
    store.rows.clear()
    for row in (as_row(name, run) for name, some in groups.items() for run in some):
        store.add(row)
    picture = store.draw(store.path.with_suffix(".png"), (9, 5.2), lambda fig: curves(fig, groups))
    store.save(markdown(groups, paper, picture and picture.name, notes))
    tables = [table(*rows) for rows in (result_table(groups, paper), claim_table(groups, paper)) if rows[1]]
    print(*tables, *filter(None, [remarks(groups)]), store.files_and(picture), sep="\n\n")
    return 0


def file_name(text: str) -> str:
    """An option's name of a file, without folders."""
    if text in ("", "..") or text != Path(text).name:
        raise argparse.ArgumentTypeError(f"expected a name without folders (--out has them), got {text!r}")
    return text


def check_earlier(store: Store, runs: set[str]) -> None:
    """Refuse to lose a report.

    Raises:
        ConfigError: There is one of runs that are not among these.
    """
    lost = {row["run"] for row in store.rows.values()} - runs
    if lost:
        raise ConfigError(f"{store.path}: holds {min(lost)}, not given here; --name NAME starts another, --fresh this")


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
    task = read_run(folder, "best")[1]
    parameters = count_parameters(build_on_meta(task, recipe.model))
    test = summary["value"] if summary and summary["split"] == "test" else None
    remark = summary.get("remark") if summary else task.remark(lines[-1])
    return Run(folder, recipe, metric, curve, test, parameters, environment, task.info, remark)


def finished(recipe: Recipe, last: dict[str, Any]) -> bool:
    """Whether the last validation was that of the last step."""
    c, step = recipe.trainer, last["step"]
    return step >= (c.steps if c.steps is not None else round(c.epochs * step / last["epoch"]))


def group(runs: list[Run], paper: Paper) -> dict[str, list[Run]]:
    """Runs by what they are called, which differ in their seeds only; rows in the paper's order.

    Raises:
        ConfigError: Data or budget differ, or two runs are the same.
    """
    found: dict[str, list[Run]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for run in runs:
        run.info.check_same(f"{run.folder}: not comparable, {runs[0].folder}", runs[0].info.to_dict())
        name, own = name_of(run.recipe), settings_of(run.recipe)
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
    return {
        name: sorted(found[name], key=lambda r: r.recipe.seed)
        for name in sorted(found, key=lambda name: place(name, paper.order))
    }


def name_of(recipe: Recipe) -> str:
    """What a run's row is called."""
    return recipe.model.label() + ("" if recipe.init_from is None else " pre-trained")


def place(name: str, order: Sequence[str]) -> tuple[int, bool, str]:
    """Where a row stands; one that the paper does not have comes after the others of its mixer."""
    if name in order:
        return order.index(name), False, name
    kin = [i for i, row in enumerate(order) if row.split()[0] == name.split()[0]]
    return max(kin, default=len(order)), True, name


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """All that a row's runs share."""
    left_out = free_keys(recipe) | {"seed", "init_from", "about.row", "about.expected", "about.hardware"}
    return {k: v for k, v in flatten(to_dict(recipe)).items() if k not in left_out}


def read_paper(task: str) -> Paper:
    """What the paper says of a task; of some it says nothing."""
    path = RECIPES / "paper" / f"{task}.yaml"
    return Paper(**yaml.safe_load(path.read_text())) if path.is_file() else Paper(task, task)


def claimed(paper: Paper) -> dict[str, dict[str, str]]:
    """The paper's numbers, by the names of rows: {"lion_s": {"CIFAR-100": "77.56", ..}, ..}."""
    found: dict[str, dict[str, str]] = {}
    for column, pattern in paper.columns.items():
        for recipe in map(resolve, sorted(RECIPES.glob(pattern))):
            if recipe.about.expected == NO_NUMBER:
                continue
            number = recipe.about.expected.removesuffix(f" {metric_of(recipe).title}")
            found.setdefault(recipe.model.label(), {})[column] = number
    return found


def result_table(groups: dict[str, list[Run]], paper: Paper) -> tuple[list[str], list[list[str]]]:
    numbers, metric = claimed(paper), metric_shared(groups)
    header = ["model", f"test {metric.heading}", f"val {metric.heading}", "n", "parameters"]
    rows = []
    for name, runs in groups.items():
        columns = [numbers.get(name, {}).get(column, "-") for column in paper.columns]
        tests = [run.test for run in runs if run.test is not None]
        spread = [
            mean_and_deviation(v, metric) for v in (tests if len(tests) == len(runs) else [], [r.val for r in runs])
        ]
        rows.append([name, *spread, str(len(runs)), f"{runs[0].parameters:,}", *columns])
    return [*header, *(f"paper: {column}" for column in paper.columns)], rows


def remarks(groups: dict[str, list[Run]]) -> str:
    """What must be told of single runs (that they are stuck at chance)."""
    told = [(name, run) for name, runs in groups.items() for run in runs if run.remark]
    return "\n".join(f"- {name}, seed {run.recipe.seed}: {run.remark}" for name, run in told)


def metric_shared(groups: dict[str, list[Run]]) -> Metric:
    """All runs have one task."""
    return next(iter(groups.values()))[0].metric


def mean_and_deviation(values: list[float], metric: Metric) -> str:
    """As the metric writes them; the deviation is that of a sample."""
    if not values:
        return "-"
    mean = metric.number(statistics.mean(values))
    return f"{mean} ± {metric.number(statistics.stdev(values))}" if len(values) > 1 else mean


def claim_table(groups: dict[str, list[Run]], paper: Paper) -> tuple[list[str], list[list[str]]]:
    """Each claim whose two rows are here, by the differences of runs with the same seed: on test where all of both
    rows have been tested, else on val."""
    rows, metric = [], metric_shared(groups)
    claims = [(f"{a} {so}".strip(), f"{b} {so}".strip()) for so in ("", *paper.alike) for a, b in paper.better]
    for better, worse in claims:
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


def markdown(groups: dict[str, list[Run]], paper: Paper, picture: str | None, notes: str = "") -> str:
    runs = [run for some in groups.values() for run in some]
    header, rows = result_table(groups, paper)
    parts = [f"# {paper.title}: runs at one budget", "Written by `./run.sh report`.", budget(runs)]
    parts += [pipes(header, rows, text=("model",))]
    parts.append(
        "Mean ± standard deviation over n seeds (of the sample). `test` is that of the weights that did best on `val`. "
        "The paper's columns are its numbers on its own data, for the order only."
    )
    parts += [remarks(groups)] if remarks(groups) else []
    header, rows = claim_table(groups, paper)
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
    environments = dict.fromkeys(
        f"{e.get('device')}, {e.get('threads')} thread(s), torch {e.get('torch')}, commit {str(e.get('commit'))[:9]}"
        for e in (run.environment for run in runs)
    )
    keys = [settings_of(run.recipe) for run in runs]
    differing = sorted(k for k in keys[0] if any(other.get(k) != keys[0][k] for other in keys))
    lines = [
        f"- Data: {first.data.describe()}",
        f"- Model: {first.model.shape()}",
        f"- Budget: {length} in batches of {c.batch_size}, {c.precision}",
        f"- Settings that differ between rows: {', '.join(f'`{k}`' for k in differing) or 'none'}",
        *(f"- Ran on: {text}" for text in environments),
    ]
    return "\n".join(lines)


def as_row(name: str, run: Run) -> Row:
    return {
        "model": name,
        "run": run.folder.name,
        "seed": run.recipe.seed,
        "val": run.val,
        "test": run.test,
        "parameters": run.parameters,
        "curve": run.curve,
    }


def curves(fig: Any, groups: dict[str, list[Run]]) -> None:
    """Validation over epochs."""
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


if __name__ == "__main__":
    run_command(main)
