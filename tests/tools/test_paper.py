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

from lion.config import ConfigError, build, changed
from tests.helpers import ROOT, TINY, glue_folder, here, refuse, tiny_recipe
from tools import claims, jobs, paper
from tools import statistics as ours
from tools.compose import metric_of, resolve
from tools.finished import load
from tools.paper import drawings, figures, measured, page, parts, results, tables
from tools.paper.finetune import missing
from tools.paper.results import hash_of, lengths_of, open_store, results_of
from tools.paper.tables import SCALES, Table, cells, read_tables

TABLES = read_tables()


# statistics


def test_paired_differences_are_students_t():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 1, 5), rng.normal(0, 1, 5)
    values = {"a": dict(enumerate(a)), "b": {**dict(enumerate(b)), 9: 100.0}}  # seed 9 has no partner
    found, known = ours.paired(values, "a", "b"), stats.ttest_rel(a, b)
    low, high = known.confidence_interval()
    assert found.p == pytest.approx(known.pvalue) and found.mean == pytest.approx((a - b).mean())
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert ours.paired({"a": {0: 1.0}, "b": {0: 0.0}}, "a", "b") is None


def test_two_rows_without_gaps_agree_with_paired_differences():
    """Compare both methods on two complete rows, where the linear model is the paired test."""
    rng = np.random.default_rng(1)
    values = {row: dict(enumerate(rng.normal(i, 1, 4))) for i, row in enumerate("ab")}
    assert ours.paired(values, "a", "b") == pytest.approx(ours.two_way(values, "a", "b"))


def test_rows_with_noise_of_their_own_are_compared_by_welch():
    rng = np.random.default_rng(5)
    a, b = rng.normal(1, 1, 5), rng.normal(0, 9, 3)
    values = {"a": dict(enumerate(a)), "b": dict(enumerate(b)), "c": {0: 100.0, 1: -100.0}}
    found, known = ours.welch(values, "a", "b"), stats.ttest_ind(a, b, equal_var=False)
    low, high = known.confidence_interval()
    assert found.p == pytest.approx(known.pvalue) and found.runs == 3
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    assert ours.welch({"a": {0: 1.0, 1: 2.0}, "b": {0: 1.0}}, "a", "b") is None
    always = {"a": {0: 100.0, 1: 100.0}, "b": {0: 100.0, 1: 100.0}, "c": {0: 99.9, 1: 99.9}}
    right = {"a": (265, 263, 260), "b": (263, 261, 258), "c": (260.1, 258.1, 255.1)}  # equal gaps, but for rounding
    equal = {row: {seed: 100 * k / 270 for seed, k in enumerate(some)} for row, some in right.items()}
    for row in "bc":  # without any spread the noise is not known
        for values, compare in (
            (always, ours.welch),
            (always, ours.two_way),
            (equal, ours.paired),
            (equal, ours.two_way),
        ):
            assert compare(values, "a", row).p == 1 and compare(values, "a", row).seeds() is None


def test_the_two_way_model_is_the_analysis_of_variance():
    rng = np.random.default_rng(2)
    y = rng.normal(0, 1, (3, 4)) + np.array([[0], [1], [3]])
    values = {row: dict(enumerate(y[i])) for i, row in enumerate("abc")}
    residual = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    error = np.sqrt(2 / 4 * (residual**2).sum() / 6)  # balanced: (3 - 1) (4 - 1) degrees of freedom
    found = ours.two_way(values, "c", "a")
    assert found.mean == pytest.approx(y[2].mean() - y[0].mean())
    assert found.p == pytest.approx(2 * stats.t(6).sf(found.mean / error))
    del values["b"][2], values["c"][0]  # with gaps the means are adjusted for the seeds
    assert ours.two_way(values, "c", "a").mean != pytest.approx(np.mean([*values["c"].values()]) - y[0].mean())
    assert ours.two_way({"a": {0: 1.0}, "b": {1: 2.0}}, "a", "b") is None  # row and seed cannot be separated
    assert ours.two_way({"a": {0: 1.0, 1: 2.0}, "b": {}}, "a", "b") is None


def test_holm_corrects_in_order():
    assert ours.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert ours.holm([0.9, 0.8]) == [1.0, 1.0] and ours.holm([]) == []
    rng, wrong = np.random.default_rng(3), 0
    for _ in range(2000):  # no true difference: any claim is decided in 5 % of all reports
        wrong += min(ours.holm(rng.random(10))) < ours.LEVEL
    assert wrong / 2000 == pytest.approx(0.05, abs=0.015)


def test_power_is_that_of_simulated_runs():
    rng = np.random.default_rng(4)
    gaps = rng.normal(2, 1, (20_000, 3))
    seen = (stats.ttest_1samp(gaps, 0, axis=1).pvalue < 0.05).mean()
    assert ours.power(3, 2) == pytest.approx(seen, abs=0.01) == pytest.approx(0.47, abs=0.01)
    assert ours.seeds_needed(2) == 5 and ours.power(4, 2) < 0.8 <= ours.power(5, 2) and ours.power(1, 2) == 0


def test_an_undecided_difference_names_the_seeds_that_would_decide_it():
    values = {"a": {0: 1.0, 1: 3.0, 2: 2.0}, "b": {0: 0.0, 1: 1.0, 2: 1.5}}
    found = ours.paired(values, "a", "b")
    gaps = [1.0, 2.0, 0.5]
    assert found.seeds() == ours.seeds_needed(statistics.mean(gaps) / statistics.stdev(gaps)) == 6
    equal = {"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 1.001}}
    assert ours.paired(equal, "a", "b").seeds() == ours.MOST + 1


@pytest.mark.parametrize("level", [0.05, 0.001])
def test_the_smallest_visible_difference_is_seen_in_simulated_runs(level):
    """Draw pairs of runs with a true difference, and count those that show it at a corrected level, too."""
    rng = np.random.default_rng(6)
    smallest = ours.Difference(0.0, 1 / np.sqrt(5), 4, 5).smallest(level)
    gaps = rng.normal(smallest, 1, (20_000, 5))
    assert (stats.ttest_1samp(gaps, 0, axis=1).pvalue < level).mean() == pytest.approx(ours.POWER, abs=0.02)
    assert ours.Difference(1.001 * smallest, 1 / np.sqrt(5), 4, 5).seeds(level) == 5


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
    assert [cell.recipe.task.teacher for cell in found] == [str(cell.after.run) for cell in found]
    assert {cell.after.row for cell in found} == {"softmax, the teacher"}


def test_equal_settings_share_their_runs():
    names = ["lion-13", "lion-14"]
    jobs = paper.make_jobs({n: TABLES[n] for n in names}, "mini", open_store(Path("none.json")), {})
    every = [cell for n in names for cell in cells(n, TABLES[n], "mini")]
    assert len(jobs) == len({(cell.key, cell.seed) for cell in every}) < len(every)  # lion_s is in both
    assert [job.cell.seed for job in jobs[:3]] == [0, 0, 0]  # all rows of a seed first


def test_the_key_ignores_what_does_not_change_results():
    key = lambda *overrides: tables.short_hash(tables.settings_of(resolve("quickstart", overrides)))  # noqa: E731
    assert key() == key("seed=3") == key("run.name=x") == key("trainer.log_every=7") == key("data.root=/x")
    assert len({key(), key("optim.lr=1"), key("model.mixer=gla"), key("data.val_split=0.2")}) == 4


def test_settings_that_are_default_are_left_out():
    recipe = resolve("quickstart")
    found = changed(recipe)
    assert "model.norm" not in found and found["model.mixer"] == "lion_s" and found["data.name"] == "digits"
    assert "model.norm" in changed(resolve("quickstart", ["model.norm=rmsnorm"]))


@pytest.mark.parametrize(
    ("change", "message"),
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
    path.write_text(yaml.safe_dump({**good, **change}))
    with pytest.raises(ConfigError, match=message):
        tables.read_table(path)


# the page


def table(**changes):
    values = {"title": "T", "order": 1, "rows": {"a": tables.Row(), "b": tables.Row(set={"model.mixer": "lion_d"})}}
    return build(Table, {**values, "mini": {"recipe": "quickstart", "seeds": 3}, **changes}, source=lambda _: "test")


def raw(cell, value, data="d1"):
    settings = tables.settings_of(cell.recipe)
    return {
        **{name: None for name in ("remark", "curve", "step", *paper.results.MADE_BY)},
        **{"key": cell.key, "seed": cell.seed, "settings": settings, "data": data, "made": hash_of(settings, data)},
        **{"metric": "top1", "val": value, "test": value, "beside": {}, "more": {}, "parameters": 7, "seconds": 60.0},
    }


def filled(tmp_path, made, values):
    """Return a store with values by row and seed."""
    store = open_store(tmp_path / "paper.json")
    for cell in cells("t", made, "mini"):
        if cell.seed in values.get(cell.row, {}):
            store.add(raw(cell, values[cell.row][cell.seed]))
    return store


@pytest.mark.parametrize(
    ("a", "b", "kind", "verdict"),
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
    made = table(**{kind: [["a", "b"]]})
    store = filled(tmp_path, made, {"a": dict(enumerate(a)), "b": dict(enumerate(b))})
    text = page.markdown({"t": made}, store, {})
    first, *own = (line for line in text.splitlines() if line.startswith("| a > b |"))
    assert f"| {verdict} |" in (own or [first])[-1]
    assert bool(own) == (verdict not in ("incomplete", "not run")), "the first table holds what is judged"
    (row,) = (line for line in text.splitlines() if line.startswith("| b |"))
    half = f" ± {100 * ours.interval(b):.2f}" if len(b) > 1 else ""
    assert row.split(" | ")[1] == (f"{100 * statistics.mean(b):.2f}{half} ({len(b)})" if b else "not run")


def test_a_row_with_a_run_at_chance_is_not_judged_and_is_remarked(tmp_path):
    made = table(claims=[["a", "b"]])
    store = filled(tmp_path, made, {"a": dict(enumerate([0.9, 0.91, 0.92])), "b": dict(enumerate([0.5, 0.51, 0.53]))})
    assert "| confirmed |" in page.markdown({"t": made}, store, {}).partition("## T")[2]
    stuck = cells("t", made, "mini")[-1]
    store.rows[stuck.key, stuck.seed]["remark"] = "stuck at chance: 53 %"
    text = page.markdown({"t": made}, store, {})
    assert "| incomplete |" in text and "| confirmed |" not in text.partition("## T")[2]
    assert f"\n- {stuck.row}, seed {stuck.seed}: stuck at chance: 53 %\n" in text


CLOSE = {"a": dict(enumerate([0.60, 0.64, 0.66])), "b": dict(enumerate([0.58, 0.60, 0.63]))}


def rows_with(others):
    """Return rows a and b, and further rows whose settings all differ."""
    more = {str(i): tables.Row(set={"optim.lr": 1e-3 * (2 + i)}) for i in range(others)}
    return {"a": tables.Row(), "b": tables.Row(set={"model.mixer": "lion_d"}), **more}


def verdict_of(tmp_path, values, *made):
    text = page.markdown({f"t{i}": each for i, each in enumerate(made)}, filled(tmp_path, made[0], values), {})
    return line_of(text, "a > b").split(" | ")[3]


def line_of(text, name):
    """Return the line of a claim or question below its table."""
    return [line for line in text.splitlines() if line.startswith(f"| {name} |")][-1]


def test_all_claims_are_corrected_together(tmp_path):
    """Add claims until one that was decided alone is not decided any more."""
    verdict = {}
    for others in (0, 9):
        rows = rows_with(others)
        values = CLOSE | {name: CLOSE["b"] for name in rows if name not in "ab"}
        made = table(rows=rows, noise="pairs", claims=[["a", name] for name in rows if name != "a"])
        verdict[others] = verdict_of(tmp_path, values, made)
    assert verdict == {0: "confirmed", 9: "undecided"}


def test_claims_without_runs_count_in_the_correction(tmp_path):
    verdict = {}
    for others in (0, 9):
        rows = rows_with(others)
        made = table(rows=rows, noise="pairs", claims=[["a", name] for name in rows if name != "a"])
        verdict[others] = verdict_of(tmp_path, CLOSE, made)
    assert verdict == {0: "confirmed", 9: "undecided"}


def test_a_comparison_of_several_tables_counts_once_in_the_correction(tmp_path):
    rows = {"first": tables.Row(), "second": tables.Row(set={"model.mixer": "lion_d"})}
    pair = ["first", "second"]  # in both orders
    same = [table(rows=rows, noise="pairs", open=[pair[:: (-1) ** i]], title=f"T{i}") for i in range(9)]
    made = table(noise="pairs", claims=[["a", "b"]])
    assert verdict_of(tmp_path, CLOSE, made, *same) == "confirmed"
    text = page.markdown({"t": made, "u": same[0]}, filled(tmp_path, made, CLOSE), {})
    assert line_of(text, "first > second").split(" | ")[3] == "yes"


def test_a_row_has_the_seeds_of_all_tables(tmp_path):
    few, many = (table(mini={"recipe": "cifar10_mini", "seeds": n}) for n in (2, 4))
    values = {"a": dict(enumerate([0.5, 0.52, 0.51, 0.53])), "b": {0: 0.4}}
    found = results_of(few, cells("t", few, "mini"), filled(tmp_path, many, values))
    assert list(found.values["a"]) == [0, 1, 2, 3] and found.made == 3, "of the four runs that the table asks for"


def test_a_difference_of_nothing_has_no_sign():
    found = ours.paired({"a": {0: 0.0, 1: 0.0}, "b": {0: 1e-9, 1: 2e-9}}, "a", "b")
    compared = claims.Comparison("claim", ("a", "b"), found, "", "points")
    assert found.mean < 0 and claims.row_of(compared, "undecided")[1] == "+0.00 ± 0.00"


def test_a_difference_without_spread_has_no_probability():
    found = ours.paired({"a": {0: 3.0, 1: 4.0}, "b": {0: 1.0, 1: 2.0}}, "a", "b")
    row = claims.row_of(claims.Comparison("claim", ("a", "b"), found, "", "points"), "undecided")
    assert row == ["a > b", "+2.00, without spread", "-", "undecided", "-", "-"]


def test_single_runs_decide_nothing_and_are_incomplete(tmp_path):
    made = table(mini={"recipe": "cifar10_mini", "seeds": 1}, claims=[["a", "b"]])
    assert verdict_of(tmp_path, {"a": {0: 0.7}, "b": {0: 0.5}}, made) == "incomplete"


def test_the_overview_begins_with_contradictions_beside_the_papers_difference(tmp_path):
    """Check the order, the sign of perplexities of a paper, and a question whose runs are those of a claim."""
    rows = {
        "a": tables.Row(published={"top-1": "70.5", "time": "×1"}, called="Transformer"),
        "b": tables.Row(published={"top-1": "71.0 ± 0.2"}, set={"model.mixer": "lion_d"}),
        "c": tables.Row(published={"top-1": "fails"}, set={"model.mixer": "lion_lit"}),
    }
    values = CLOSE | {"c": dict(enumerate([0.2, 0.21, 0.22]))}
    pairs = [["a", "b"], ["c", "a"]]
    made = table(rows=rows, noise="pairs", columns=["top-1", "time"], claims=pairs, title="LION, Table 99: x")
    asked = table(rows=rows, noise="pairs", columns=["top-1", "time"], open=[["b", "a"], ["b", "c"]], title="Own")
    text = page.markdown({"t": made, "u": asked}, filled(tmp_path, made, values), {})
    found, questions = (part.partition("\n## ")[0] for part in text.split("\n## ")[1:3])
    lines = [line for line in found.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| c > a", "| a > b"]
    assert lines[1].split(" | ")[1:5] == ["LION, Table 99", "digits", "+3.00 ± 2.48 points", "-0.50"]
    assert lines[0].split(" | ")[4] == "-"
    assert "| b > c |" in questions and "b > a" not in questions
    assert "| a (Transformer) |" in text
    assert "Of 2: 1 contradicted, 1 confirmed, 0 undecided" in found and "Of 1: " in questions


def test_solved_runs_are_counted_where_rows_have_noise_of_their_own(tmp_path):
    made = table(noise="own", claims=[["a", "b"]])
    values = {"a": {0: 0.995, 1: 1.0, 2: 0.5}, "b": {0: 0.3, 1: 0.4, 2: 0.989}}
    text = page.markdown({"t": made}, filled(tmp_path, made, values), {})
    (row,) = (line for line in text.splitlines() if line.startswith("| a |"))
    assert "| 2 of 3 |" in row and "|solved|" in text.replace(" ", "")


def test_a_shared_run_is_evaluated_at_the_lengths_of_all_its_tables():
    short = table(rows={"b": tables.Row(set={"model.mixer": "lion_d"})}, lengths=[64, 32])
    every = {"t": table(), "u": short, "v": table(rows={"c": tables.Row(set={"model.mixer": "gla"})}, lengths=[99])}
    a, b = cells("t", every["t"], "mini")[:2]
    assert lengths_of(a, every) == [] and lengths_of(b, every) == [32, 64]


def test_tables_of_one_frame_and_data_share_their_noise(tmp_path):
    """Compare a table of two rows alone and beside one with a third row, whose runs are wide apart."""
    made = table(claims=[["a", "b"]])
    values = {"a": {0: 0.5, 1: 0.52, 2: 0.51}, "b": {0: 0.4, 1: 0.43, 2: 0.42}}
    store = filled(tmp_path, made, values)
    other = table(rows={"c": tables.Row(set={"model.mixer": "gla"})}, title="O")
    for cell, value in zip(cells("o", other, "mini"), (0.1, 0.9, 0.4)):
        store.add(raw(cell, value))
    alone, beside = (parts.parts_of(each, store) for each in ({"t": made}, {"t": made, "o": other}))
    (first,), (second,) = parts.comparisons(alone[0], alone), parts.comparisons(beside[0], beside)
    three = {**alone[0].results.values, "c": beside[1].results.values["c"]}
    assert first.found == ours.two_way(alone[0].results.values, "a", "b")
    assert second.found == ours.two_way(three, "a", "b") and second.found.half > first.found.half


@pytest.mark.parametrize(
    ("values", "text"),
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
    text = page.markdown({"t": made}, open_store(tmp_path / "none.json"), {})
    assert "## T (published)" in text and "| a | 98 | not run |" in text and "--scale published" in text


def test_the_page_says_how_its_runs_were_made(tmp_path):
    made = table()
    store = filled(tmp_path, made, {"a": {0: 0.5}})
    for row in store.rows.values():
        row["command"] = "./run.sh quickstart data.name=hf data.path=digits seed=0"
    text = page.markdown({"t": made}, store, {})
    assert "`./run.sh paper --table t --data digits data.name=hf data.path=digits`" in text
    assert "read with `data.name=hf data.path=digits`" in text
    assert "All runs on CPUs so far took 0.017 core hours. The hours" in text
    store.add(raw(cells("t", made, "mini")[2], 0.5) | {"device": "NVIDIA H200", "seconds": 3.6})
    text = page.markdown({"t": made}, store, {})
    assert "took 0.017 core hours. 1 on a GPU took 0.001 hours" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| t, mini"))
    assert line.endswith("| 0.067 |"), line  # a minute for each of four runs


@pytest.mark.slow
def test_plots_show_what_the_runs_say(tmp_path, monkeypatch):
    """Draw a table by length and one by state, and remove the plot of a table whose runs are gone."""
    made = table(lengths=[32, 64])
    store = filled(tmp_path, made, {"a": {0: 0.5}, "b": {0: 0.7}})
    for row in store.rows.values():
        row["more"] = {f"{n} tokens": {"top1": row["val"]} for n in (32, 64)}
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "gone.png").touch()
    found = figures.draw({"t": made, "gone": replace(table(), mini=None)}, store)
    assert {"t", "t-lengths", "masks", "scans"} == set(found) == {p.stem for p in (tmp_path / "paper").iterdir()}
    assert set(figures.draw({"t": table(state=True)}, store)) == {"t", "masks", "scans"}
    monkeypatch.setattr(store, "draw", lambda *_: None)  # without matplotlib
    assert figures.draw({"t": made}, store) == {} and (tmp_path / "paper" / "t.png").is_file()


def test_the_size_of_a_state_and_decays_by_layer():
    two_scans = {"settings": {"model.attention.scans": ["row_snake", "column_snake"]}, "decays": [[1], [2], [3], [4]]}
    assert figures.by_layer(two_scans) == [[1, 2], [3, 4]]
    assert figures.by_layer({"settings": {}, "decays": [[1, 2], [3, 4]]}) == [[1, 2], [3, 4]]
    size = lambda *overrides: figures.state_numbers(resolve("recall_lion_s", overrides))  # noqa: E731
    dim, heads = 64, 2
    assert size("model.attention.normalize=none") == pytest.approx(dim * dim // heads, abs=2 * dim)
    assert size("model.num_heads=8") < size() / 3 and size("model.mixer=softmax") == 2 * dim * 64


def test_masks_are_products_of_decays():
    log_decay = -torch.rand(5, dtype=torch.float64)
    mask, decay = drawings.mask(log_decay), log_decay.exp()
    assert mask[3, 1] == pytest.approx(float(decay[1:3].prod())) and mask[1, 3] == pytest.approx(
        float(decay[2:4].prod())
    )
    assert torch.equal(mask.diagonal(), torch.ones(5, dtype=torch.float64))


def test_times_of_steps_are_those_measured_last(tmp_path):
    row = {"model": "vit", "size": 224, "shape": "dim 384, depth 12", "against": None, "device": "AMD EPYC"}
    rows = [row | {"mixer": "lion_s", "date": date, "ratio": ratio} for date, ratio in (("2", 1.1), ("1", 1.5))]
    rows.append(row | {"mixer": "lion_s", "date": "3", "ratio": 1.4, "device": "NVIDIA H100 80GB HBM3"})
    rows.append(row | {"mixer": "vim with positions", "date": "1", "ratio": 2.5, "against": {"ratio": 2.1}})
    rows.append(row | {"mixer": "lion_d", "date": "1", "ratio": 9.0, "size": 512})
    (tmp_path / "train.json").write_text(json.dumps({"rows": rows}))
    assert measured.step_times(tmp_path) == {"lion_s": 1.1, "vim": 2.1}


def test_runs_on_other_data_are_left_out(tmp_path):
    made = table()
    store = filled(tmp_path, made, {"a": {0: 0.5, 1: 0.6}, "b": {0: 0.7}})
    other = next(cell for cell in cells("t", made, "mini") if (cell.row, cell.seed) == ("b", 1))
    store.add(raw(other, 0.9, data="d2"))
    found = results_of(made, cells("t", made, "mini"), store)
    assert found.values == {"a": {0: 50.0, 1: 60.0}, "b": {0: 70.0}} and found.left_out == 1 and found.data == "d1"
    assert "Left out, on other data: 1 of the stored runs" in page.markdown({"t": made}, store, {})


@pytest.mark.slow
def test_the_report_is_what_its_raw_rows_say():
    """Check the stored report: every row is bound to its settings and data, and the page was not edited by hand."""
    store = open_store(ROOT / "reports" / "paper.json")
    assert store.rows
    for row in store.rows.values():
        assert row["made"] == hash_of(row["settings"], row["data"]) and row["commit"]
    figures = {path.stem: f"paper/{path.name}" for path in (ROOT / "reports" / "paper").glob("*.png")}
    assert (ROOT / "reports" / "paper.md").read_text() == page.markdown(TABLES, store, figures)


def test_a_distance_replaces_the_metric_of_the_task(tmp_path):
    """Check that rows share one classifier, which is trained before them, and that smaller distances are better."""
    plain = table(open=[["a", "b"]])
    made = table(open=[["a", "b"]], distance={"features": "quickstart", "samples": 50})
    jobs = paper.make_jobs({"t": made}, "mini", open_store(tmp_path / "none.json"), {})
    assert len(jobs) == 1 + 6 and all(job.after is jobs[0] for job in jobs[1:]) and jobs[0].after is None
    assert {job.cell.key for job in jobs[1:]}.isdisjoint({cell.key for cell in cells("t", plain, "mini")})
    store = filled(tmp_path, made, {"a": {0: 0.1, 1: 0.1, 2: 0.2}, "b": {0: 0.9, 1: 0.8, 2: 0.9}})
    for row in store.rows.values():
        row["beside"] = {"FD-own": 10 * row["val"]}
    text = page.markdown({"t": made}, store, {})
    assert "|row|test FD-own|" in text and "| a > b | +7.33" in text and "| b | 8.67 ±" in text


def test_the_best_rows_are_fine_tuned_when_all_runs_are_finished(tmp_path):
    made = table(glue={"recipes": ["m2_base", "modified"], "best": 1, "mini": ["--seeds=1"]})
    values = {"a": {0: 0.1, 1: 0.1, 2: 0.2}, "b": {0: 0.9, 1: 0.8}}
    assert not missing("t", made, "mini", filled(tmp_path, made, values))
    store = filled(tmp_path, made, values | {"b": values["b"] | {2: 0.9}})
    ((cell, recipe, options),) = missing("t", made, "mini", store)
    assert (cell.row, cell.seed, recipe, options) == ("b", 0, "m2_base", ("--seeds=1",))
    store.rows[cell.key, 0]["glue"] = {"m2_base": {"rte": [50.0, 60.0], "cola": [10.0]}}
    assert not missing("t", made, "mini", store)
    assert "| b | m2_base | 55.00 | 10.00 | 32.50 | 1-2 |" in page.markdown({"t": made}, store, {})


def test_every_published_run_is_fine_tuned_with_the_recipes_of_its_row(tmp_path):
    store = open_store(tmp_path / "paper.json")
    for cell in cells("lightnet-5", TABLES["lightnet-5"], "published")[:2]:
        store.add(raw(cell, 0.5))
    found = missing("lightnet-5", TABLES["lightnet-5"], "published", store)
    assert [(cell.row, recipe) for cell, recipe, _ in found] == [("softmax", "cramming"), ("lightnet", "lightnet")]


# the command


@pytest.fixture
def own_tables(tmp_path, monkeypatch):
    """Replace the tables by one of two rows, with runs of a few steps."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    held = {"title": "T", "order": 1, "rows": {"lion_s": {}, "lion_d": {"set": {"model.mixer": "lion_d"}}}}
    held |= {"mini": {"recipe": str(tmp_path / "tiny.yaml"), "seeds": 1}, "claims": [["lion_s", "lion_d"]]}
    (tmp_path / "tables" / "own.yaml").write_text(yaml.safe_dump(held))
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(tables, "RUNS", tmp_path / "runs")
    return tmp_path


@pytest.mark.slow
@pytest.mark.process
def test_runs_are_made_once_and_stored_when_they_end(own_tables, capsys):
    out = own_tables / "reports"
    assert here("paper", "--dry-run", "--out", str(out)) == 0
    plan = capsys.readouterr().out
    assert "jobs left" in plan and "weights" in plan and " free; a run" in plan
    assert not (own_tables / "runs").exists() and not out.exists()
    assert here("paper", "--dry-run", "--save", "--out", str(out)) == 0
    assert json.loads((out / "paper.json").read_text())["estimates"] and "paper.md" in capsys.readouterr().out
    assert here("paper", "--jobs", "2", "--out", str(out)) == 0
    rows = json.loads((out / "paper.json").read_text())["rows"]
    assert len(rows) == 2 and {row["settings"]["model.mixer"] for row in rows} == {"lion_s", "lion_d"}
    folder = next(p for p in (own_tables / "runs").iterdir() if p.name.startswith("lion_d"))
    (row,) = (row for row in rows if row["settings"]["model.mixer"] == "lion_d")
    assert [len(layer) for layer in row["decays"]] == [2, 2] and all(0 < x < 1 for each in row["decays"] for x in each)
    assert row["test"] == load(str(folder)).test and row["made"] == hash_of(row["settings"], row["data"])
    before = (out / "paper.md").read_text()
    assert "| lion_s > lion_d |" in before and "undecided" in before
    for path in (own_tables / "runs").rglob("summary.json"):
        path.unlink()  # the runs are not needed any more
    assert here("paper", "--out", str(out)) == 0
    assert (out / "paper.md").read_text() == before


def test_pictures_of_others_are_kept(own_tables):
    folder = own_tables / "reports" / "paper"
    folder.mkdir(parents=True)
    for name in ("mine", "own", "scans"):  # the last two have the names of a table and of a drawing
        (folder / f"{name}.png").write_bytes(b"")
    assert here("paper", "--no-runs", "--out", str(folder.parent)) == 0
    assert [path.name for path in folder.iterdir()] == ["mine.png"]


def test_bad_input_is_one_line(capsys, tmp_path):
    assert "did you mean 'lion-16'?" in refuse(capsys, "paper", "--table", "lion-161", "--dry-run")
    (tmp_path / "paper.json").write_text("[]")
    bad = refuse(capsys, "paper", "--data", "cifar", "data.name=hf", "--dry-run")
    assert "--data: no run reads data set 'cifar', did you mean 'cifar10'" in bad
    assert "--save: writes the estimates of --dry-run" in refuse(capsys, "paper", "--save")
    assert "not a report" in refuse(capsys, "paper", "--no-runs", "--out", tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_text_is_evaluated_at_other_lengths_and_missing_data_are_named(own_tables, capsys):
    (own_tables / "book.txt").write_text("\n".join(f"line {i} of a text" for i in range(3000)))
    values = {"data": {"name": "text", "path": str(own_tables / "book.txt"), "tokenizer": "bytes", "length": 16}}
    values |= {"data": values["data"] | {"root": str(own_tables / "text")}}
    values |= {"task": {"name": "causal_lm"}, "model": {"mixer": "lion_s", "dim": 16, "depth": 1, "num_heads": 2}}
    (own_tables / "tiny.yaml").write_text(yaml.safe_dump({**TINY, **values}))
    held = yaml.safe_load((own_tables / "tables" / "own.yaml").read_text())
    held |= {"lengths": [15, 30], "rows": {"lion_s": {}, "softmax": {"set": {"model.mixer": "softmax"}}}}
    (own_tables / "tables" / "own.yaml").write_text(yaml.safe_dump({**held, "claims": [["lion_s", "softmax"]]}))
    out = own_tables / "reports"
    assert here("paper", "--jobs", "2", "--out", str(out)) == 0
    rows = json.loads((out / "paper.json").read_text())["rows"]
    more = {row["settings"]["model.mixer"]: row["more"] for row in rows}
    assert set(more["lion_s"]) == {"15 tokens", "30 tokens"} and set(more["softmax"]) == {"15 tokens"}  # positions
    assert "|30 tokens|" in (out / "paper.md").read_text()
    (own_tables / "tables" / "own.yaml").write_text(
        yaml.safe_dump({**held, "claims": [], "mini": {"recipe": "cifar10_mini"}, "lengths": []})
    )
    capsys.readouterr()
    assert here("paper", "--out", str(out), "--data", "cifar10", f"data.root={own_tables}") == 0
    assert "runs left out: 6; --data cifar10 key=value .." in capsys.readouterr().err
    other = ("--data", "cifar10", "data.name=hf", "--data", "cifar10", f"data.path={own_tables / 'gone'}")
    assert here("paper", "--out", str(out), "--dry-run", *other) == 0
    assert "gone" in (plan := capsys.readouterr().out) and "here: --data cifar10 KEY=VALUE" in plan


@pytest.mark.slow
@pytest.mark.process
def test_masked_language_models_are_fine_tuned(own_tables, capsys):
    """Check that GLUE follows the training, is stored once, and may be missing."""
    (own_tables / "text.txt").write_text("\n".join(f"abcdef xyz zyx {i % 7} yz" for i in range(200)))
    model = {"mixer": "lion_s", "dim": 16, "depth": 1, "num_heads": 2, "token_types": 2, "max_positions": 32}
    text = {"name": "text", "path": str(own_tables / "text.txt"), "root": str(own_tables / "text"), "document": "line"}
    text |= {"tokenizer": "wordpiece", "vocabulary": 300, "length": 32}
    values = {"task": {"name": "masked_lm"}, "data": text, "model": model}
    values["trainer"] = TINY["trainer"] | {"batch_size": 8}
    (own_tables / "tiny.yaml").write_text(yaml.safe_dump({**TINY, **values}))
    held = yaml.safe_load((own_tables / "tables" / "own.yaml").read_text())
    mini = ["--seeds=1", "--tasks=stsb", "--no-mnli", "trainer.epochs=1", "trainer.batch_size=8", "data.length=32"]
    held |= {"rows": {"lion_s": {}}, "claims": [], "glue": {"recipes": ["m2_base"], "best": 1, "mini": mini}}
    (own_tables / "tables" / "own.yaml").write_text(yaml.safe_dump(held))
    out = own_tables / "reports"
    assert here("paper", "--out", out) == 0  # GLUE is not there
    assert "GLUE is left out, --data glue data.path=FOLDER names its data" in capsys.readouterr().err
    glue = glue_folder(own_tables / "glue", ["stsb"])
    assert here("paper", "--out", out, "--data", "glue", f"data.path={glue}") == 0
    (row,) = json.loads((out / "paper.json").read_text())["rows"]
    ((task, (score,)),) = row["glue"]["m2_base"].items()
    assert task == "stsb" and f"| lion_s | m2_base | {score:.2f} | {score:.2f} | 1 |" in (out / "paper.md").read_text()
    capsys.readouterr()
    assert here("paper", "--out", out, "--data", "glue", f"data.path={glue}") == 0
    assert "reading stsb" not in capsys.readouterr().err


def test_runs_of_another_budget_have_another_noise(tmp_path):
    made = table(claims=[["a", "b"]])
    store = filled(tmp_path, made, {"a": {0: 0.5, 1: 0.52, 2: 0.51}, "b": {0: 0.4, 1: 0.43, 2: 0.42}})
    mini = {"recipe": "quickstart", "seeds": 3, "set": {"trainer.epochs": 7}}
    other = table(rows={"c": tables.Row(set={"model.mixer": "gla"})}, title="O", mini=mini)
    for cell, value in zip(cells("o", other, "mini"), (0.1, 0.9, 0.4)):
        store.add(raw(cell, value))
    alone, beside = (parts.parts_of(each, store) for each in ({"t": made}, {"t": made, "o": other}))
    assert parts.comparisons(beside[0], beside) == parts.comparisons(alone[0], alone)


def test_a_run_without_a_test_makes_val_the_split(tmp_path):
    made = table()
    store = filled(tmp_path, made, {"a": {0: 0.5, 1: 0.6}})
    (last,) = (cell for cell in cells("t", made, "mini") if (cell.row, cell.seed) == ("b", 0))
    store.add({**raw(last, 0.7), "test": None})
    found = results_of(made, cells("t", made, "mini"), store)
    assert found.split == "val" and found.values["b"] == {0: 70.0}


def test_a_run_without_a_full_form_is_evaluated_in_its_first(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(jobs, "start_command", lambda *argv, **_: started.append(argv))
    for recipe, form in (("vim_tiny", "chunk"), ("deit_tiny_softmax", "full"), ("hydra_small", "full")):
        with open(tmp_path / "log", "a") as log:
            jobs.start(jobs.Job((recipe,), resolve(recipe), None), 0, 1, log)
        assert started[-1][:4] == ("train", recipe, "--form", form)


@pytest.mark.slow
def test_interruptions_do_not_count_as_training(tmp_path):
    assert here("train", tiny_recipe(tmp_path), "--form", "full") == 0
    run = load(str(tmp_path / "runs" / "tiny"))
    assert results.seconds(run) == pytest.approx(run.seen / run.speed, abs=0.1) and run.seen > 0 < run.speed
    os.utime(run.folder / "recipe.yaml", (0, 0))
    assert results.seconds(run) < 1000 < results.seconds(run._replace(speed=None))


BASELINES = {"softmax", "hydra", "vim"}
LOWER = {"lion-figure-5", "lightnet-2", "lightnet-3", "lightnet-4", "lightnet-6", "lightnet-8"}  # is better


def printed(value):
    """Return a printed value as a number; None: there is none."""
    number = re.match(r"[\d.]+", value)
    return float(number[0]) if number else 0.0 if value == "fails" else None


def differ_in_one(row, other):
    """Return whether two rows differ in one setting of their small runs."""
    if row.set is None or other.set is None:
        return False
    return sum(row.set.get(key) != other.set.get(key) for key in {*row.set, *other.set}) == 1


def test_no_pair_that_a_paper_prints_in_one_order_is_left_out():
    every = read_tables()
    asked = {frozenset(pair) for each in every.values() for pair in each.open}
    missing = []
    for name, each in every.items():
        listed, rows = asked | set(map(frozenset, each.claims)), each.rows.items()
        timed = {column for column in each.columns if column.startswith("time") or (column == "GLUE" and each.judged)}
        values = {row: {c: printed(v) for c, v in r.published.items() if c not in timed} for row, r in rows}
        for a, b in itertools.permutations(each.rows, 2):
            shared = values[a].keys() & values[b].keys()
            pairs = [(values[a][c], values[b][c]) for c in shared]
            ordered = pairs and all(x is not None and y is not None and x != y for x, y in pairs)
            if not ordered or not all((x < y) == (name in LOWER) for x, y in pairs):
                continue
            one = differ_in_one(each.rows[a], each.rows[b]) or (a in BASELINES) != (b in BASELINES)
            if one and frozenset((a, b)) not in listed:
                missing.append((name, a, b))
    assert not missing
