"""`paper`: statistics against SciPy, tables as data, raw results bound to their runs, the page, and the queue."""

import itertools
import json
import os
import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from scipy import stats

from lion.config import build, changed
from lion.files import read_json
from tests.helpers import ROOT, TINY, assert_in, glue_folder, here, refuse, refused, tiny_recipe
from tests.tools.queues import command_here
from tools import claims, jobs, paper
from tools import statistics as ours
from tools.compose import metric_of, resolve
from tools.finished import load
from tools.options import SCALES
from tools.paper import drawings, figures, measured, page, parts, results, tables
from tools.paper.finetune import missing
from tools.paper.results import add_row, lengths_of, open_store, results_of, rows_of
from tools.paper.tables import Table, cells, read_tables

TABLES = read_tables()


# statistics


def by_seed(values):
    return dict(enumerate(values))


def assert_agree(found, known):
    """Compare a difference with SciPy's result of a test."""
    interval = found.mean - found.half, found.mean + found.half
    assert found.p == pytest.approx(known.pvalue)
    assert interval == pytest.approx(tuple(known.confidence_interval()))


def test_paired_differences_are_students_t():
    rng = np.random.default_rng(0)
    a = rng.normal(1, 1, 5)
    b = rng.normal(0, 1, 5)
    values = {"a": by_seed(a), "b": by_seed(b) | {9: 100.0}}  # seed 9 has no partner
    found = ours.paired(values, "a", "b")
    assert_agree(found, stats.ttest_rel(a, b))
    assert found.mean == pytest.approx((a - b).mean())
    assert ours.paired({"a": {0: 1.0}, "b": {0: 0.0}}, "a", "b") is None
    complete = {"a": by_seed(a), "b": by_seed(b)}
    assert ours.paired(values, "a", "b") == pytest.approx(ours.two_way(complete, "a", "b"))


def test_rows_with_noise_of_their_own_are_compared_by_welch():
    rng = np.random.default_rng(5)
    a = rng.normal(1, 1, 5)
    b = rng.normal(0, 9, 3)
    values = {"a": by_seed(a), "b": by_seed(b), "c": {0: 100.0, 1: -100.0}}
    found = ours.welch(values, "a", "b")
    assert_agree(found, stats.ttest_ind(a, b, equal_var=False))
    assert found.runs == 3
    assert ours.welch({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0}}, "a", "b") is None


ALWAYS = {row: by_seed([value] * 2) for row, value in {"a": 100.0, "b": 100.0, "c": 99.9}.items()}
RIGHT = {"a": (265, 263, 260), "b": (263, 261, 258), "c": (260.1, 258.1, 255.1)}  # equal gaps, but for rounding
EQUAL = {row: by_seed(100 * k / 270 for k in some) for row, some in RIGHT.items()}


@pytest.mark.parametrize("row", "bc")
def test_without_any_spread_the_noise_is_not_known(row):
    for compare, values in ((ours.welch, ALWAYS), (ours.two_way, ALWAYS), (ours.paired, EQUAL), (ours.two_way, EQUAL)):
        found = compare(values, "a", row)
        assert found.p == 1
        assert found.seeds() is None


def test_the_two_way_model_is_the_analysis_of_variance():
    rng = np.random.default_rng(2)
    y = rng.normal(0, 1, (3, 4)) + np.array([[0], [1], [3]])
    values = dict(zip("abc", map(by_seed, y)))
    residual = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    error = np.sqrt(2 / 4 * (residual**2).sum() / 6)  # balanced: (3 - 1) (4 - 1) degrees of freedom
    found = ours.two_way(values, "c", "a")
    assert found.mean == pytest.approx(y[2].mean() - y[0].mean())
    assert found.p == pytest.approx(2 * stats.t(6).sf(found.mean / error))
    del values["b"][2]  # with gaps the means are adjusted for the seeds
    del values["c"][0]
    plain = np.mean(list(values["c"].values())) - y[0].mean()
    assert ours.two_way(values, "c", "a").mean != pytest.approx(plain)
    assert ours.two_way({"a": {0: 1.0}, "b": {1: 2.0}}, "a", "b") is None  # row and seed cannot be separated
    assert ours.two_way({"a": {0: 1.0, 1: 2.0}, "b": {}}, "a", "b") is None


def test_holm_corrects_in_order():
    assert ours.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert ours.holm([0.9, 0.8]) == [1.0, 1.0]
    assert ours.holm([]) == []


def test_power_is_that_of_simulated_runs():
    rng = np.random.default_rng(4)
    gaps = rng.normal(2, 1, (20_000, 3))
    seen = (stats.ttest_1samp(gaps, 0, axis=1).pvalue < 0.05).mean()
    assert ours.power(3, 2) == pytest.approx(seen, abs=0.01) == pytest.approx(0.47, abs=0.01)
    assert ours.seeds_needed(2) == 5
    assert ours.power(4, 2) < 0.8 <= ours.power(5, 2)
    assert ours.power(1, 2) == 0


def test_an_undecided_difference_names_the_seeds_that_would_decide_it():
    found, _ = shown([1.0, 3.0, 2.0], [0.0, 1.0, 1.5])
    gaps = [1.0, 2.0, 0.5]
    needed = ours.seeds_needed(statistics.mean(gaps) / statistics.stdev(gaps))
    assert found.seeds() == needed == 6
    equal, _ = shown([1.0, 2.0], [2.0, 1.001])
    assert equal.seeds() == ours.MOST + 1


@pytest.mark.parametrize("level", [0.05, 0.001])
def test_the_smallest_visible_difference_is_seen_in_simulated_runs(level):
    """Draw pairs of runs with a true difference, and count those that show it at a corrected level, too."""
    rng = np.random.default_rng(6)
    error = 1 / np.sqrt(5)
    smallest = ours.Difference(0.0, error, 4, 5).smallest(level)
    gaps = rng.normal(smallest, 1, (20_000, 5))
    seen = (stats.ttest_1samp(gaps, 0, axis=1).pvalue < level).mean()
    assert seen == pytest.approx(ours.POWER, abs=0.02)
    assert ours.Difference(1.001 * smallest, error, 4, 5).seeds(level) == 5


def shown(a, b):
    """Return a difference of rows with these values by seed, and its cells."""
    found = ours.paired({"a": by_seed(a), "b": by_seed(b)}, "a", "b")
    return found, claims.row_of(claims.Comparison("claim", ("a", "b"), found, "", "points"), "undecided", 0.05)


def test_a_difference_of_nothing_has_no_sign_and_one_without_spread_no_probability():
    found, row = shown([0.0, 0.0], [1e-9, 2e-9])
    assert found.mean < 0
    assert row[1] == "+0.00 ± 0.00"
    _, row = shown([3.0, 4.0], [1.0, 2.0])
    assert row == ["a > b", "+2.00, without spread", "-", "undecided", "-", "-"]


# tables


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TABLES)
def test_the_runs_of_every_table_resolve(name, scale):
    """Resolve all rows; the settings of different rows differ."""
    found = cells(name, TABLES[name], scale)
    keys = {cell.row: cell.key for cell in found}
    assert len(set(keys.values())) == len(keys) == len({(cell.row, cell.key) for cell in found})
    if scale == "published":  # the value of the table is the claim of its recipe
        for cell in found:
            value = TABLES[name].rows[cell.row].published.get(TABLES[name].columns[0])
            claim = cell.recipe.about.expected
            assert value is None or claim.startswith((value, value.rstrip("0"))), (cell.row, claim)


def test_a_student_has_the_teacher_of_its_seed():
    found = [cell for cell in cells("lion-15", TABLES["lion-15"], "mini") if cell.row == "lion_s distilled"]
    assert [cell.seed for cell in found] == [cell.after.seed for cell in found] == [0, 1, 2]
    for cell in found:
        assert cell.recipe.task.teacher == str(cell.after.run)
        assert cell.after.row == "softmax, the teacher"


def test_equal_settings_share_their_runs():
    both = {name: TABLES[name] for name in ("lion-13", "lion-14")}
    found = paper.make_jobs(both, "mini", open_store(Path("none.json")), {})
    every = [cell for name, table in both.items() for cell in cells(name, table, "mini")]
    assert len(found) == len({(cell.key, cell.seed) for cell in every}) < len(every)  # lion_s is in both
    assert [job.cell.seed for job in found[:3]] == [0, 0, 0]  # all rows of a seed first


def test_the_key_ignores_what_does_not_change_results():
    def key(*overrides):
        return tables.short_hash(tables.settings_of(resolve("quickstart", overrides)))

    for same in ("seed=3", "run.name=x", "trainer.log_every=7", "data.root=elsewhere"):
        assert key(same) == key(), same
    others = ("optim.lr=1", "model.mixer=gla", "data.val_split=0.2")
    assert len({key(), *map(key, others)}) == 4


def test_settings_that_are_default_are_left_out():
    found = changed(resolve("quickstart"))
    assert "model.norm" not in found
    assert (found["model.mixer"], found["data.name"]) == ("lion_s", "digits")
    assert "model.norm" in changed(resolve("quickstart", ["model.norm=rmsnorm"]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"claims": [["a", "c"]]}, "claims: unknown row 'c'"),
        ({"rows": {"a": {"published": {"top-2": "1"}}, "b": {}}}, "unknown column 'top-2'"),
        ({"glue": {"recipes": ["m2_bas"]}}, "glue: unknown recipe 'm2_bas', did you mean 'm2_base'?"),
        ({"rows": {"a": {"glue": ["m2_bas"]}, "b": {}}}, "did you mean 'm2_base'?"),
        ({"claims": [["a", "b"]], "notes": {"a > c": "no"}}, "notes: unknown claim 'a > c', did you mean 'a > b'"),
        ({"ordre": 3}, "ordre"),
        ({"mini": {"recipe": "quickstart", "seeds": 0}}, "seeds"),
    ],
)
def test_a_table_with_errors_is_refused(tmp_path, change, message):
    good = {"title": "T", "order": 1, "columns": ["top-1"], "rows": {"a": {}, "b": {}}}
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(good | change))
    refused(message, tables.read_table, path)


# the page

CLOSE = {"a": (0.60, 0.64, 0.66), "b": (0.58, 0.60, 0.63)}  # values by row, in the order of seeds
APART = {"a": (0.9, 0.91, 0.92), "b": (0.5, 0.51, 0.53)}
STEADY = {"a": (0.5, 0.52, 0.51), "b": (0.4, 0.43, 0.42)}


def cells_of(made):
    return cells("t", made, "mini")


def row_of(mixer, **more):
    return tables.Row(set={"model.mixer": mixer}, **more)


def table(**changes):
    values = {"title": "T", "order": 1, "rows": {"a": tables.Row(), "b": row_of("lion_d")}}
    values["mini"] = {"recipe": "quickstart", "seeds": 3}
    return build(Table, values | changes, source=lambda _: "test")


def raw(cell, value, data="d1"):
    """Return the row of a run, with its environment."""
    row = dict.fromkeys(results.MADE_BY)
    row |= {"key": cell.key, "seed": cell.seed, "data": data, "val": value, "test": value}
    return row | {"parameters": 7, "seconds": 60.0}


def filled(tmp_path, made, values):
    """Return a store with values by row, in the order of seeds."""
    store = open_store(tmp_path / "paper.json")
    for cell in cells_of(made):
        for value in values.get(cell.row, ())[cell.seed : cell.seed + 1]:
            add_row(store, raw(cell, value))
    return store


def markdown(store, *made):
    """Return the page of some tables, which are called t, u, .."""
    return page.markdown(dict(zip("tuvwxyzabcd", made)), store, {})


def page_of(tmp_path, made, values):
    return markdown(filled(tmp_path, made, values), made)


def lines_of(text, name):
    """Return the lines of a row, a claim or a question."""
    return [line for line in text.splitlines() if line.startswith(f"| {name} |")]


@pytest.mark.parametrize(
    "a, b, kind, verdict",
    [
        ([0.9, 0.91, 0.92], [0.5, 0.51, 0.53], "claims", "confirmed"),
        ([0.5, 0.51, 0.53], [0.9, 0.91, 0.92], "claims", "contradicted"),
        ([0.5, 0.7, 0.6], [0.6, 0.5, 0.7], "claims", "undecided"),
        ([0.5], [0.9], "claims", "incomplete"),
        ([0.9, 0.91, 0.92], [0.5, 0.51], "claims", "incomplete"),
        ([0.9, 0.91, 0.92], [], "claims", "not run"),
        ([0.9, 0.91, 0.92], [0.5, 0.51, 0.53], "open", "yes"),
    ],
)
def test_verdicts(tmp_path, a, b, kind, verdict):
    text = page_of(tmp_path, table(**{kind: [["a", "b"]]}), {"a": a, "b": b})
    lines = lines_of(text, "a > b")
    assert f"| {verdict} |" in lines[-1]
    judged = verdict not in ("incomplete", "not run")
    assert len(lines) == 1 + judged, "the first table holds what is judged"
    shown = "not run"
    if b:
        half = f" ± {100 * ours.interval(b):.2f}" if len(b) > 1 else ""
        shown = f"{100 * statistics.mean(b):.2f}{half} ({len(b)})"
    (row,) = lines_of(text, "b")
    assert row.split(" | ")[1] == shown


def test_a_row_with_a_run_at_chance_is_not_judged_and_is_remarked(tmp_path):
    made = table(claims=[["a", "b"]])
    store = filled(tmp_path, made, APART)
    stuck = cells_of(made)[-1]
    store.rows[stuck.key, stuck.seed]["remark"] = "stuck at chance: 53 %"
    text = markdown(store, made)
    assert "| incomplete |" in text
    assert "| confirmed |" not in text.partition("## T")[2]
    assert f"\n- {stuck.row}, seed {stuck.seed}: stuck at chance: 53 %\n" in text


def verdict_of(tmp_path, values, *made):
    """Return the verdict of a > b on a page of tables, whose first table has these values."""
    text = markdown(filled(tmp_path, made[0], values), *made)
    return lines_of(text, "a > b")[-1].split(" | ")[3]


@pytest.mark.parametrize("have_runs", [True, False])
def test_all_claims_are_corrected_together(tmp_path, have_runs):
    """Add claims, with and without runs, until one that was decided alone is not decided any more."""
    for others, verdict in ((0, "confirmed"), (9, "undecided")):
        more = {str(i): tables.Row(set={"optim.lr": 1e-3 * (2 + i)}) for i in range(others)}
        rows = {"a": tables.Row(), "b": row_of("lion_d")} | more
        values = CLOSE | dict.fromkeys(more, CLOSE["b"]) if have_runs else CLOSE
        made = table(rows=rows, noise="pairs", claims=[["a", name] for name in rows if name != "a"])
        assert verdict_of(tmp_path, values, made) == verdict


def test_a_comparison_of_several_tables_counts_once_in_the_correction(tmp_path):
    rows = {"first": tables.Row(), "second": row_of("lion_d")}
    same = []
    for i in range(9):
        pair = ["second", "first"] if i % 2 else ["first", "second"]  # in both orders
        same.append(table(rows=rows, noise="pairs", open=[pair], title=f"T{i}"))
    made = table(noise="pairs", claims=[["a", "b"]])
    assert verdict_of(tmp_path, CLOSE, made, *same) == "confirmed"
    text = markdown(filled(tmp_path, made, CLOSE), made, same[0])
    assert lines_of(text, "first > second")[-1].split(" | ")[3] == "yes"


def test_a_row_has_the_seeds_of_all_tables(tmp_path):
    few = table(mini={"recipe": "cifar10_mini", "seeds": 2})
    many = table(mini={"recipe": "cifar10_mini", "seeds": 4})
    values = {"a": (0.5, 0.52, 0.51, 0.53), "b": (0.4,)}
    found = results_of(few, cells_of(few), filled(tmp_path, many, values))
    assert list(found.values["a"]) == [0, 1, 2, 3]
    assert found.made == 3, "of the four runs that the table asks for"


def test_single_runs_decide_nothing_and_are_incomplete(tmp_path):
    made = table(mini={"recipe": "cifar10_mini", "seeds": 1}, claims=[["a", "b"]])
    assert verdict_of(tmp_path, {"a": (0.7,), "b": (0.5,)}, made) == "incomplete"


def test_the_overview_begins_with_contradictions_beside_the_papers_difference(tmp_path):
    """Check the order, the sign of perplexities of a paper, and a question whose runs are those of a claim."""
    rows = {
        "a": tables.Row(published={"top-1": "70.5", "time": "×1"}, called="Transformer"),
        "b": row_of("lion_d", published={"top-1": "71.0 ± 0.2"}),
        "c": row_of("lion_lit", published={"top-1": "fails"}),
    }
    values = CLOSE | {"c": (0.2, 0.21, 0.22)}
    common = {"rows": rows, "noise": "pairs", "columns": ["top-1", "time"]}
    made = table(**common, claims=[["a", "b"], ["c", "a"]], title="LION, Table 99: x")
    asked = table(**common, open=[["b", "a"], ["b", "c"]], title="Own")
    text = markdown(filled(tmp_path, made, values), made, asked)
    found, questions = text.split("\n## ")[1:3]
    first, second = (line.split(" | ") for line in found.splitlines() if line.startswith("| "))
    assert (first[0], first[4]) == ("| c > a", "-")
    assert second[:5] == ["| a > b", "LION, Table 99", "digits", "+3.00 ± 2.48 points", "-0.50"]
    assert "| b > c |" in questions
    assert "b > a" not in questions
    assert "| a (Transformer) |" in text
    assert "Of 2: 1 contradicted, 1 confirmed, 0 undecided" in found
    assert "Of 1: " in questions


def test_a_page_without_runs_has_its_tables(tmp_path):
    text = page_of(tmp_path, table(claims=[["a", "b"]]), {})
    assert "|claim|table|data|here|paper|p|verdict|smallest visible|parameters|note|" in text


def test_runs_stand_in_the_order_of_their_seeds(tmp_path):
    made = table()
    store = filled(tmp_path, made, STEADY)
    first = next(iter(store.rows.values()))
    store.add(dict(first))  # stored again, as with the scores on GLUE
    for own in results_of(made, cells_of(made), store).runs.values():
        assert list(own) == sorted(own)


def test_solved_runs_are_counted_where_rows_have_noise_of_their_own(tmp_path):
    values = {"a": (0.995, 1.0, 0.5), "b": (0.3, 0.4, 0.989)}
    text = page_of(tmp_path, table(noise="own", claims=[["a", "b"]]), values)
    (row,) = lines_of(text, "a")
    assert "| 2 of 3 |" in row
    assert "|solved|" in text.replace(" ", "")


def test_a_shared_run_is_evaluated_at_the_lengths_of_all_its_tables():
    short = table(rows={"b": row_of("lion_d")}, lengths=[64, 32])
    every = {"t": table(), "u": short, "v": table(rows={"c": row_of("gla")}, lengths=[99])}
    a, b = cells_of(every["t"])[:2]
    assert lengths_of(a, every) == []
    assert lengths_of(b, every) == [32, 64]


@pytest.mark.parametrize("budget", [{}, {"set": {"trainer.epochs": 7}}])
def test_tables_of_one_frame_and_data_share_their_noise(tmp_path, budget):
    """Compare two rows alone and beside a third one whose runs are wide apart, of the same and of another budget."""
    made = table(claims=[["a", "b"]])
    store = filled(tmp_path, made, STEADY)
    other = table(rows={"c": row_of("gla")}, title="O", mini={"recipe": "quickstart", "seeds": 3} | budget)
    for cell, value in zip(cells_of(other), (0.1, 0.9, 0.4)):
        add_row(store, raw(cell, value))
    alone = parts.parts_of({"t": made}, store)
    beside = parts.parts_of({"t": made, "o": other}, store)
    (first,) = parts.comparisons(alone[0], alone)
    (second,) = parts.comparisons(beside[0], beside)
    assert first.found == ours.two_way(alone[0].results.values, "a", "b")
    if budget:
        assert second == first
    else:
        three = alone[0].results.values | {"c": beside[1].results.values["c"]}
        assert second.found == ours.two_way(three, "a", "b")
        assert second.found.half > first.found.half


@pytest.mark.parametrize(
    "values, text",
    [
        ([50.0, 51.0, 52.0], "51.00 ± 2.48 (3)"),
        ([99.6, 35.6, 100.0], "78.40 [35.60, 100.00] (3)"),
        ([0.1, 0.3], "0.20 [0.10, 0.30] (2)"),
        ([100.0, 100.0], "100.00 ± 0.00 (2)"),
        ([40.0], "40.00 (1)"),
    ],
)
def test_intervals_that_would_leave_the_percentages_are_ranges(values, text):
    assert page.spread(metric_of(resolve("quickstart")), values, count=True) == text


def test_published_tables_without_runs_are_on_the_page(tmp_path):
    made = table(mini=None, columns=["top-1"], rows={"a": tables.Row(recipe="quickstart", published={"top-1": "98"})})
    text = markdown(open_store(tmp_path / "none.json"), made)
    assert_in(text, "## T (published)", "| a | 98 | not run |", "--scale published")


def test_the_page_says_how_its_runs_were_made(tmp_path):
    made = table()
    store = filled(tmp_path, made, {"a": (0.5,)})
    for row in store.rows.values():
        row["replaced"] = ["data.name=hf", "data.path=digits"]
    text = markdown(store, made)
    assert "`./run.sh paper --table t --data digits data.name=hf data.path=digits`" in text
    assert "read with `data.name=hf data.path=digits`" in text
    assert "All runs on CPUs so far took 0.017 core hours. The hours" in text
    add_row(store, raw(cells_of(made)[2], 0.5) | {"device": "NVIDIA H200", "seconds": 3.6})
    text = markdown(store, made)
    assert "took 0.017 core hours. 1 on a GPU took 0.001 hours" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| t, mini"))
    assert line.endswith("| 0.067 |"), line  # a minute for each of four runs


@pytest.mark.slow
def test_plots_show_what_the_runs_say(tmp_path, monkeypatch):
    """Draw a table by length and one by state, and remove the plot of a table whose runs are gone."""
    made = table(lengths=[32, 64])
    store = filled(tmp_path, made, {"a": (0.5,), "b": (0.7,)})
    for row in store.rows.values():
        row["more"] = {f"{n} tokens": row["val"] for n in (32, 64)}
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "gone.png").touch()
    found = figures.draw({"t": made, "gone": replace(table(), mini=None)}, store)
    assert {"t", "t-lengths", "masks", "scans"} == set(found) == {path.stem for path in folder.iterdir()}
    assert set(figures.draw({"t": table(state=True)}, store)) == {"t", "masks", "scans"}
    sizes = []
    monkeypatch.setattr(store, "draw", lambda path, size, draw: sizes.append(size))  # as without matplotlib
    assert figures.draw({"t": made}, store) == {}
    (_, height), *_ = sizes
    assert height > 1.4, "each row has its own height"
    assert (folder / "t.png").is_file()


def test_decays_are_those_of_layers():
    assert figures.by_layer([[1], [2], [3], [4]], depth=2) == [[1, 2], [3, 4]]  # two scans
    assert figures.by_layer([[1, 2], [3, 4]], depth=2) == [[1, 2], [3, 4]]


def test_the_size_of_a_state():
    def size(*overrides):
        return figures.state_numbers(resolve("recall_lion_s", overrides))

    dim, heads = 64, 2
    assert size("model.attention.normalize=none") == pytest.approx(dim * dim // heads, abs=2 * dim)
    assert size("model.num_heads=8") < size() / 3
    assert size("model.mixer=softmax") == 2 * dim * 64


def test_masks_are_products_of_decays():
    log_decay = -torch.rand(5, dtype=torch.float64)
    decay = log_decay.exp()
    mask = drawings.mask(log_decay)
    assert mask[3, 1] == pytest.approx(decay[1:3].prod().item())
    assert mask[1, 3] == pytest.approx(decay[2:4].prod().item())
    assert torch.equal(mask.diagonal(), torch.ones(5, dtype=torch.float64))


def test_times_of_steps_are_those_measured_last(tmp_path):
    def row(mixer, date, ratio, **more):
        common = {"model": "vit", "size": 224, "shape": "dim 384, depth 12", "against": None, "device": "AMD EPYC"}
        return common | {"mixer": mixer, "date": date, "ratio": ratio} | more

    rows = [
        row("lion_s", "2", 1.1),
        row("lion_s", "1", 1.5),
        row("lion_s", "3", 1.4, device="NVIDIA H100 80GB HBM3"),
        row("vim with positions", "1", 2.5, against={"ratio": 2.1}),
        row("lion_d", "1", 9.0, size=512),
    ]
    (tmp_path / "train.json").write_text(json.dumps({"rows": rows}))
    assert measured.step_times(tmp_path) == {"lion_s": 1.1, "vim": 2.1}


def cell_of(made, row, seed):
    return next(cell for cell in cells_of(made) if (cell.row, cell.seed) == (row, seed))


def test_runs_on_other_data_are_left_out(tmp_path):
    made = table()
    store = filled(tmp_path, made, {"a": (0.5, 0.6), "b": (0.7,)})
    add_row(store, raw(cell_of(made, "b", 1), 0.9, data="d2"))
    found = results_of(made, cells_of(made), store)
    assert found.values == {"a": {0: 50.0, 1: 60.0}, "b": {0: 70.0}}
    assert (found.left_out, found.data) == (1, "d1")
    assert "Left out, on other data: 1 of the stored runs" in markdown(store, made)


def test_a_run_without_a_test_makes_val_the_split(tmp_path):
    made = table()
    store = filled(tmp_path, made, {"a": (0.5, 0.6)})
    add_row(store, raw(cell_of(made, "b", 0), 0.7) | {"test": None})
    found = results_of(made, cells_of(made), store)
    assert found.split == "val"
    assert found.values["b"] == {0: 70.0}


@pytest.mark.slow
def test_the_report_is_what_its_raw_rows_say():
    """Check the stored report: every row is one of a table, and the page was not edited by hand."""
    store = open_store(ROOT / "reports/paper.json")
    assert store.rows
    asked = set()
    for name, each in TABLES.items():
        for scale in SCALES:
            for cell in cells(name, each, scale):
                asked.add(cell.key)
                if cell.after:
                    asked.add(cell.after.key)
    for row in rows_of(store).values():
        assert row["key"] in asked
        assert row["commit"]
    plots = {path.stem: f"paper/{path.name}" for path in (ROOT / "reports/paper").glob("*.png")}
    assert (ROOT / "reports/paper.md").read_text() == page.markdown(TABLES, store, plots)


def test_the_stored_runs_are_lines_in_the_order_of_their_keys(tmp_path):
    """Check that a line is a run, and that the file is what the command would write."""
    path = ROOT / "reports/paper.json"
    store = open_store(path)
    places = []
    for line in path.read_text().splitlines():
        if '"key"' in line:
            row = json.loads(line.removesuffix(","))
            places.append((row["key"], row["seed"]))
    assert places == sorted(store.rows)
    store.path = tmp_path / "paper.json"
    store.save_rows()
    assert store.path.read_text() == path.read_text()


def test_runs_share_their_environments_and_leave_out_what_they_do_not_have(tmp_path):
    made = table()
    store = filled(tmp_path, made, APART)
    (environment,) = store.tables["environments"].values()
    row = raw(cell_of(made, "a", 0), 0.9)
    kept = {name: value for name, value in row.items() if name not in results.MADE_BY}
    assert store.rows[row["key"], 0] == {**kept, "environment": environment["environment"]}
    assert rows_of(store)[row["key"], 0] == {**results.LEFT_OUT, **environment, **row}
    add_row(store, row | {"device": "NVIDIA H200", "test": None, "more": {}})
    assert len(store.tables["environments"]) == 2
    assert "test" not in store.rows[row["key"], 0]


def test_only_data_that_a_cell_does_not_name_are_replaced():
    cell = cell_of(table(mini={"recipe": "quickstart", "set": {"data.val_split": 0.2}}), "b", 0)
    command = f"./run.sh {' '.join(cell.argv)} data.name=hf 'data.path=two words' seed=0"
    assert results.replaced(cell, command) == ["data.name=hf", "data.path=two words"]
    assert results.replaced(cell, "") == []


def test_a_distance_replaces_the_metric_of_the_task(tmp_path):
    """Check that rows share one classifier, which is trained before them, and that smaller distances are better."""
    plain = table(open=[["a", "b"]])
    made = table(open=[["a", "b"]], distance={"features": "quickstart", "samples": 50})
    judge, *rest = paper.make_jobs({"t": made}, "mini", open_store(tmp_path / "none.json"), {})
    assert judge.after is None
    assert [job.after for job in rest] == [judge] * 6
    assert {job.cell.key for job in rest}.isdisjoint({cell.key for cell in cells("t", plain, "mini")})
    store = filled(tmp_path, made, {"a": (0.1, 0.1, 0.2), "b": (0.9, 0.8, 0.9)})
    for row in store.rows.values():
        row["distance"] = 10 * row["val"]
    text = markdown(store, made)
    assert_in(text, "|row|test FD-own|", "| a > b | +7.33", "| b | 8.67 ±")


def test_the_best_rows_are_fine_tuned_when_all_runs_are_finished(tmp_path):
    made = table(glue={"recipes": ["m2_base", "modified"], "best": 1, "mini": ["--seeds=1"]})
    values = {"a": (0.1, 0.1, 0.2), "b": (0.9, 0.8)}
    assert not missing("t", made, "mini", filled(tmp_path, made, values))
    store = filled(tmp_path, made, values | {"b": (0.9, 0.8, 0.9)})
    ((cell, recipe, options),) = missing("t", made, "mini", store)
    assert (cell.row, cell.seed, recipe, options) == ("b", 0, "m2_base", ("--seeds=1",))
    store.rows[cell.key, 0]["glue"] = {"m2_base": {"rte": [50.0, 60.0], "cola": [10.0]}}
    assert not missing("t", made, "mini", store)
    assert "| b | m2_base | 55.00 | 10.00 | 32.50 | 1-2 |" in markdown(store, made)


def test_every_published_run_is_fine_tuned_with_the_recipes_of_its_row(tmp_path):
    store = open_store(tmp_path / "paper.json")
    for cell in cells("lightnet-5", TABLES["lightnet-5"], "published")[:2]:
        add_row(store, raw(cell, 0.5))
    found = missing("lightnet-5", TABLES["lightnet-5"], "published", store)
    assert [(cell.row, recipe) for cell, recipe, _ in found] == [("softmax", "cramming"), ("lightnet", "lightnet")]


# the command

MODEL = {"mixer": "lion_s", "dim": 16, "depth": 1, "num_heads": 2}


class Own:
    """A table of two rows, with runs of a few steps, in place of those of the papers."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "reports"
        self.table = {"title": "T", "order": 1}
        self.table |= {"mini": {"recipe": str(folder / "tiny.yaml"), "seeds": 1}}
        (folder / "tables").mkdir()
        self.write(rows={"lion_s": {}, "lion_d": {"set": {"model.mixer": "lion_d"}}}, claims=[["lion_s", "lion_d"]])
        self.train()

    def write(self, **changes):
        """Change the table."""
        self.table |= changes
        (self.folder / "tables/own.yaml").write_text(yaml.safe_dump(self.table))

    def train(self, **sections):
        """Change sections of the recipe."""
        (self.folder / "tiny.yaml").write_text(yaml.safe_dump(TINY | sections))

    def run(self, *args):
        assert here("paper", "--out", self.out, *args) == 0

    def rows(self):
        """Return the stored row of each row of the table."""
        names = {cell.key: cell.row for cell in cells("own", read_tables()["own"], "mini")}
        held = read_json(self.out / "paper.json")["rows"]
        return {names[row["key"]]: row for row in held}

    def page(self):
        return (self.out / "paper.md").read_text()


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(tables, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(jobs, "start_command", command_here)
    return Own(tmp_path)


@pytest.mark.slow
def test_runs_are_made_once_and_stored_when_they_end(own, capsys):
    runs = own.folder / "runs"
    own.run("--dry-run")
    plan = capsys.readouterr().out
    assert_in(plan, "jobs left", "weights", " free; a run")
    assert "whose data are missing" not in plan
    assert re.search(r"^own +2 +2 +[\d.]+ \w+ +[\d.]+ \w+ +0\.057 MB$", plan, re.M)
    assert not runs.exists()
    assert not own.out.exists()
    own.run("--dry-run", "--save")
    assert read_json(own.out / "paper.json")["estimates"]
    assert "paper.md" in capsys.readouterr().out
    own.run("--jobs", 2)
    rows = own.rows()
    assert set(rows) == {"lion_s", "lion_d"}
    (folder,) = runs.glob("lion_d*")
    row = rows["lion_d"]
    assert [len(layer) for layer in row["decays"]] == [2, 2]
    for decay in itertools.chain(*row["decays"]):
        assert 0 < decay < 1
    assert row["test"] == load(str(folder)).test
    assert row["data"] == load(str(folder)).data
    before = own.page()
    assert "| lion_s > lion_d |" in before
    assert "undecided" in before
    for path in runs.rglob("summary.json"):
        path.unlink()  # the runs are not needed any more
    own.run()
    assert own.page() == before


def test_pictures_of_others_are_kept(own):
    folder = own.out / "paper"
    folder.mkdir(parents=True)
    for name in ("mine", "own", "scans"):  # the last two have the names of a table and of a drawing
        (folder / f"{name}.png").touch()
    own.run("--no-runs")
    assert [path.name for path in folder.iterdir()] == ["mine.png"]


def test_bad_input_is_one_line(capsys, tmp_path):
    (tmp_path / "paper.json").write_text("[]")
    for words, message in {
        "--table lion-161 --dry-run": "did you mean 'lion-16'?",
        "--data cifar data.name=hf --dry-run": "--data: no run reads data set 'cifar', did you mean 'cif",
        "--save": "--save: writes the estimates of --dry-run",
        f"--no-runs --out {tmp_path}": "not a report",
    }.items():
        assert message in refuse(capsys, "paper", *words.split())


def test_tables_have_the_names_of_the_papers():
    known = tables.read_tables()
    for name, found in {
        "lion-16": ["lion-16"],
        "Table 16": ["lion-16"],
        "LION, Table 2": ["lion-2"],
        "LightNet Table 2": ["lightnet-2"],
        "lightnet 7": ["lightnet-7"],
        "Table 10": ["mlm-tiny"],
        "Figure 5": ["lion-figure-5"],
        "recall": ["recall"],
    }.items():
        assert [*tables.choose(known, [name])] == found, name
    arena = tables.choose(known, ["Table 7"])
    assert len(arena) == 6
    assert arena == tables.choose(known, ["LION, Table 5"])
    for name in ("Table", "", "lion-161", "Table 99", "recall 2"):
        refused("unknown table", tables.choose, known, [name])


@pytest.mark.slow
def test_text_is_evaluated_at_other_lengths_and_missing_data_are_named(own, capsys):
    text = own.folder / "book.txt"
    text.write_text("\n".join(f"line {i} of a text" for i in range(1000)))
    data = {"name": "text", "path": str(text), "root": str(own.folder / "text"), "tokenizer": "bytes", "length": 16}
    own.train(task={"name": "causal_lm"}, model=MODEL, data=data)
    rows = {"lion_s": {}, "softmax": {"set": {"model.mixer": "softmax"}}}
    own.write(rows=rows, claims=[["lion_s", "softmax"]], lengths=[15, 30])
    own.run()
    rows = own.rows()
    assert set(rows["lion_s"]["more"]) == {"15 tokens", "30 tokens"}
    assert set(rows["softmax"]["more"]) == {"15 tokens"}  # positions
    assert "|30 tokens|" in own.page()
    own.write(claims=[], mini={"recipe": "cifar10_mini"}, lengths=[])
    capsys.readouterr()
    own.run("--data", "cifar10", f"data.root={own.folder}")
    assert "runs left out: 6; --data cifar10 key=value .." in capsys.readouterr().err
    own.run("--dry-run", "--data", "cifar10", "data.name=hf", "--data", "cifar10", f"data.path={own.folder / 'gone'}")
    plan = capsys.readouterr().out
    assert "gone" in plan
    assert "here: --data cifar10 KEY=VALUE" in plan
    assert ", without 1 table whose data are missing" in plan
    own.run("--dry-run", "--data", "cifar10", f"data.root={own.folder / 'gone'}")
    plan = capsys.readouterr().out
    assert "own: estimated with the published number of samples; data set 'cifar10': no folder" in plan
    assert "whose data are missing" not in plan


@pytest.mark.slow
def test_masked_language_models_are_fine_tuned(own, capsys):
    """Check that GLUE follows the training, is stored once, and may be missing."""
    text = own.folder / "text.txt"
    text.write_text("\n".join(f"abcdef xyz zyx {i % 7} yz" for i in range(200)))
    data = {"name": "text", "path": str(text), "root": str(own.folder / "text"), "document": "line"}
    data |= {"tokenizer": "wordpiece", "vocabulary": 300, "length": 32}
    model = MODEL | {"token_types": 2, "max_positions": 32}
    own.train(task={"name": "masked_lm"}, data=data, model=model, trainer=TINY["trainer"] | {"batch_size": 8})
    mini = ["--seeds=1", "--tasks=stsb", "--no-mnli", "trainer.epochs=1", "trainer.batch_size=8", "data.length=32"]
    own.write(rows={"lion_s": {}}, claims=[], glue={"recipes": ["m2_base"], "best": 1, "mini": mini})
    own.run()  # GLUE is not there
    assert "GLUE is left out, --data glue data.path=FOLDER names its data" in capsys.readouterr().err
    glue = "--data", "glue", f"data.path={glue_folder(own.folder / 'glue', ['stsb'])}"
    own.run(*glue)
    (row,) = own.rows().values()
    (score,) = row["glue"]["m2_base"].pop("stsb")
    assert not row["glue"]["m2_base"]
    assert f"| lion_s | m2_base | {score:.2f} | {score:.2f} | 1 |" in own.page()
    capsys.readouterr()
    own.run(*glue)
    assert "reading stsb" not in capsys.readouterr().err


def test_a_run_without_a_full_form_is_evaluated_in_its_first(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(jobs, "start_command", lambda *argv, **_: started.append(argv))
    for recipe, form in {"vim_tiny": "chunk", "deit_tiny_softmax": "full", "hydra_small": "full"}.items():
        with open(tmp_path / "log", "a") as log:
            jobs.start(jobs.Job((recipe,), resolve(recipe), None), 0, 1, log)
        assert started[-1][:4] == ("train", recipe, "--form", form)


@pytest.mark.slow
def test_interruptions_do_not_count_as_training(tmp_path):
    assert here("train", tiny_recipe(tmp_path), "--form", "full") == 0
    run = load(str(tmp_path / "runs/tiny"))
    assert run.seen > 0 < run.speed
    assert results.seconds(run) == pytest.approx(run.seen / run.speed, abs=0.1)
    os.utime(run.folder / "recipe.yaml", (0, 0))
    assert results.seconds(run) < 1000 < results.seconds(run._replace(speed=None))


# what the papers print

BASELINES = {"softmax", "hydra", "vim"}
LOWER = {"lion-figure-5", "lightnet-2", "lightnet-3", "lightnet-4", "lightnet-6", "lightnet-8"}  # is better


def printed(value):
    """Return a printed value as a number; None: there is none."""
    number = re.match(r"[\d.]+", value)
    if number:
        return float(number[0])
    return 0.0 if value == "fails" else None


def numbers_of(table, row):
    """Return the printed values of a row, without times and what is judged otherwise."""
    found = {}
    for column, value in table.rows[row].published.items():
        timed = column.startswith("time") or (column == "GLUE" and table.judged)
        if not timed:
            found[column] = printed(value)
    return found


def differ_in_one(row, other):
    """Return whether two rows differ in one setting of their small runs."""
    if row.set is None or other.set is None:
        return False
    return sum(row.set.get(key) != other.set.get(key) for key in {*row.set, *other.set}) == 1


def better_in_all(values, others, lower):
    """Return whether the values of all shared columns are better than others."""
    pairs = [(values[column], others[column]) for column in values.keys() & others.keys()]
    for x, y in pairs:
        if x is None or y is None or x == y or (x < y) != lower:
            return False
    return bool(pairs)


def test_no_pair_that_a_paper_prints_in_one_order_is_left_out():
    asked = {frozenset(pair) for each in TABLES.values() for pair in each.open}
    left_out = []
    for name, each in TABLES.items():
        listed = asked | set(map(frozenset, each.claims))
        values = {row: numbers_of(each, row) for row in each.rows}
        for a, b in itertools.permutations(each.rows, 2):
            one = differ_in_one(each.rows[a], each.rows[b]) or (a in BASELINES) != (b in BASELINES)
            if one and frozenset((a, b)) not in listed and better_in_all(values[a], values[b], name in LOWER):
                left_out.append((name, a, b))
    assert not left_out
