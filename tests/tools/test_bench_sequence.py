"""Tests of `bench sequence`: memory of real processes, and the arithmetic of exchanges."""

import json

import pytest

from tests.helpers import here, refuse
from tools.bench.sequence import GPUS, SETTING, Layer, estimates, markdown
from tools.probe import stamp
from tools.store import Store


def test_arithmetic(capsys):
    layer, length = Layer(12, 64), 2**20
    assert layer.exchanged() == 12 * (2 * 64 * 64 + 2 * 64 + 1)
    rows = estimates(layer, length)
    assert [row["gpus"] for row in rows] == list(GPUS)
    first, last = rows[0], rows[-1]
    assert first["work"] == pytest.approx(last["work"] * 128)
    assert first["exchange"] == pytest.approx(7 * 4 * layer.exchanged() / 450e9 + 3 * 10e-6)
    assert last["ring"] == pytest.approx(4 * 12 * 64 * length * 1023 / 1024 / 50e9 + 1023 * 10e-6)
    assert here("bench", "sequence", "--no-measure") == 0
    out = capsys.readouterr().out
    assert "one row of 1,048,576 tokens" in out and "1,024" in out and "MiB" not in out
    assert "--mixer: expected one of" in refuse(capsys, "bench", "sequence", "--mixer", "softmax")


def test_every_dimension_has_its_arithmetic(tmp_path):
    store = Store(tmp_path / "sequence.json", rows=(*SETTING, "length", "processes"))
    measured = {"bytes": 2**20, "received": 0, **stamp("./run.sh bench sequence")}
    for dim in (64, 32):
        store.add({"mixer": "lion_s", "heads": 1, "dim": dim, "length": 64, "processes": 1, **measured})
    text = markdown(store)
    assert all(f"12 x {dim}, forward, one row of 1,048,576 tokens" in text for dim in (32, 64))


@pytest.mark.slow
@pytest.mark.process
def test_memory_falls_with_the_number_of_processes(tmp_path, capsys):
    assert here("bench", "sequence", "--length", "32768", "--processes", "1", "2", "--out", tmp_path) == 0
    one, two = json.loads((tmp_path / "sequence.json").read_text())["rows"]
    assert 0.4 < two["bytes"] / one["bytes"] < 0.65
    assert one["received"] == 0 and two["received"] == 4 * Layer(1, 64).exchanged()
    cells = next(x for x in (tmp_path / "sequence.md").read_text().splitlines() if x.startswith("| 32,768 | 2 |"))
    assert cells.split(" | ")[4:] == ["33.3", "33.3 |"]
    assert "one row of 1,048,576 tokens" in capsys.readouterr().out
