"""Tests of `bench sequence`: memory of real processes, and the arithmetic of exchanges."""

import json

import pytest
from torch.multiprocessing import start_processes

from tests.helpers import here, refuse
from tests.processes import CONTEXT
from tools.bench import sequence
from tools.bench.sequence import GPUS, Layer, SequenceReport, estimates
from tools.probe import stamp


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
    assert "one row of 1,048,576 tokens" in out
    assert "1,024" in out
    assert "MiB" not in out
    assert "--mixer: expected one of" in refuse(capsys, "bench", "sequence", "--mixer", "softmax")


def test_every_dimension_has_its_arithmetic(tmp_path):
    report = SequenceReport(tmp_path)
    row = {"mixer": "lion_s", "heads": 1, "length": 64, "processes": 1, "bytes": 2**20, "received": 0}
    for dim in (64, 32):
        report.add(row | {"dim": dim} | stamp("./run.sh bench sequence"))
    text = report.markdown()
    for dim in (64, 32):
        assert f"12 x {dim}, forward, one row of 1,048,576 tokens" in text


@pytest.mark.slow
@pytest.mark.process
def test_memory_falls_with_the_number_of_processes(tmp_path, capsys, monkeypatch):
    def fork(*args, **how):
        return start_processes(*args, **how | {"start_method": CONTEXT.get_start_method()})

    monkeypatch.setattr(sequence, "start_processes", fork)
    assert here("bench", "sequence", "--length", "16384", "--processes", "1", "2", "--out", tmp_path) == 0
    one, two = json.loads((tmp_path / "sequence.json").read_text())["rows"]
    assert 0.4 < two["bytes"] / one["bytes"] < 0.65
    assert one["received"] == 0
    assert two["received"] == 4 * Layer(1, 64).exchanged()
    lines = (tmp_path / "sequence.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("| 16,384 | 2 |"))
    assert line.split(" | ")[4:] == ["33.3", "33.3 |"]
    assert "one row of 1,048,576 tokens" in capsys.readouterr().out
