"""Tests of stored reports: rows that grow over several runs, and errors."""

import fcntl
import os

import pytest

from lion.files import read_json
from tests.helpers import ROOT, column, refused
from tools.bench.clock import ClockReport
from tools.bench.generate import GenerateReport
from tools.bench.gpu import GpuReport
from tools.bench.inference import InferenceReport
from tools.bench.ops_report import OpsReport
from tools.bench.train import TrainReport
from tools.plots import widen
from tools.store import Store


def test_rows_grow_and_are_replaced(tmp_path):
    path, key = tmp_path / "r.json", ("a", "b")
    first = Store(path, rows=key)
    for a, ms in ((1, 5), (2, 6), (1, 7)):
        first.add({"a": a, "b": 0, "ms": ms, "date": f"2026-01-0{ms - 4}", "torch": "2", "command": "c"})
    first.save("text", sums=[13])
    assert (tmp_path / "r.md").read_text() == "text"
    assert read_json(path)["sums"] == [13]
    again = Store(path, rows=key).load()
    assert column(again.rows.values(), "ms") == [6, 7]
    assert not again.new
    assert [column(rows, "a") for rows in again.groups(("a",))] == [[1], [2]]  # the latest group first
    assert again.commands(again.rows.values()) == "- 2026-01-02, torch 2: `c`\n- 2026-01-03, torch 2: `c`"
    assert not Store(path, rows=("a",)).load(fresh=True).rows
    for other in ({"rows": ("a", "c")}, {"rows": key, "notes": ("a",)}):
        refused("not a report of this command", Store(path, **other).load)
    later = Store(path, later=("c",), rows=("a", "c")).load()
    assert set(later.rows) == {(1, None), (2, None)}
    assert [len(rows) for rows in later.groups(("c",))] == [2]


def save(store: Store) -> None:
    """Save a store; check that another process could not write at the same time."""
    with store.alone():
        descriptor = os.open(store.path.parent, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        store.save("")


def test_two_processes_keep_the_rows_of_each_other(tmp_path):
    """Check two stores of one file: rows of both are kept, and of one row the value that was saved last."""
    path, keys = tmp_path / "new/r.json", {"rows": ("a",), "rates": ("a",)}
    ours = Store(path, **keys).load()
    theirs = Store(path, **keys).load()
    ours.add({"a": 1, "ms": 5})
    save(ours)
    ours.add({"a": 1, "rate": 2.0}, "rates")
    save(ours)
    theirs.add({"a": 1, "ms": 6})
    theirs.add({"a": 2, "ms": 7})
    save(theirs)
    ours.add({"a": 3, "ms": 8})
    save(ours)
    held = Store(path, **keys).load()
    assert held.tables["rates"] == {(1,): {"a": 1, "rate": 2.0}}
    assert {a: row["ms"] for (a,), row in held.rows.items()} == {1: 6, 2: 7, 3: 8}


def test_fresh_replaces_rows_once(tmp_path):
    first, fresh, other = (Store(tmp_path / "r.json", rows=("a",)) for _ in range(3))
    first.add({"a": 1})
    first.save("")
    fresh.load(fresh=True)
    for a, saver in ((2, fresh), (3, other.load()), (4, fresh)):
        saver.add({"a": a})
        save(saver)
        assert set(saver.rows) == {(n,) for n in range(2, a + 1)}


def test_tables_beside_the_rows(tmp_path):
    store = Store(tmp_path / "r.json", rows=("a",), rates=("a",))
    store.add({"a": 1, "rate": 2.0}, "rates")
    assert not store.new
    assert not store.rows
    store.save("")
    assert Store(store.path, rows=("a",), rates=("a",)).load().tables["rates"] == {(1,): {"a": 1, "rate": 2.0}}


def test_the_reports_of_this_repository_are_made_from_their_rows():
    folder = ROOT / "reports"
    assert len(Store(folder / "vision.json", rows=("model", "seed")).load().rows) > 10
    for kind in (OpsReport, TrainReport, InferenceReport, GenerateReport, GpuReport, ClockReport):
        report = kind(folder).load()
        assert report.rows
        assert report.path.with_suffix(".md").read_text() == report.markdown(), report.name


@pytest.mark.parametrize("values, span", [([5.900, 5.905], 0.59), ([1.0, 9.0], 8.8)])
def test_noise_does_not_fill_an_axis(values, span):
    """Check that an axis spans at least a tenth of the largest value, and is unchanged if values vary more."""
    ax = pytest.importorskip("matplotlib.figure").Figure().subplots()
    ax.plot(values)
    widen(ax)
    low, high = ax.get_ylim()
    assert span * 0.95 <= high - low <= span * 1.05
