"""`bench gpu --clock`: its table beside the estimates, its lock, and what it refuses (`tests/test_cuda.py` runs it)."""

import fcntl

import pytest
import torch

from lion.files import read_json
from tests.helpers import refuse
from tools.bench import clock, gpu
from tools.gpu.cost import fused_softmax
from tools.gpu.targets import TARGETS
from tools.probe import alone_on
from tools.tables import fill

SHAPE = {"heads": 6, "dim": 64, "length": 197, "dtype": "bfloat16", "name": "lion_s", "form": "full"}
COST = {"kernels": 1, "launches": 10, "library": 6, "fallbacks": 0, "moved": 4 * 10**8, "flops": 0}


def estimated(**changes) -> dict:
    softmax = {stage: vars(cost) for stage, cost in fused_softmax((4, 6, 197, 64), torch.bfloat16).items()}
    row = SHAPE | {"kind": "operator", "batch": 4, "target": "h100", "parts": {"forward": COST}, "softmax": softmax}
    return row | changes


def timed(**changes) -> dict:
    row = SHAPE | {"device": "NVIDIA H100 80GB HBM3", "batch": 12, "peak_bytes": 2 * 12 * 6 * 197 * 64 * 20}
    for how, seconds in (("graph", 6e-4), ("launched", 2e-3)):
        row[how] = {"seconds": seconds, "softmax": 2e-4, "ratio": seconds / 2e-4}
    return row | {"date": "2026-11-26", "torch": "2.11", "command": "c"} | changes


ESTIMATES = [estimated()]


@pytest.mark.parametrize("device, target", [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200")])
def test_estimates_are_scaled_to_the_timed_batch_and_the_bandwidth(device, target):
    own, softmax = clock.estimate(timed(device=device), ESTIMATES).values()
    assert own == pytest.approx(3 * 4e8 / TARGETS[target].bandwidth + 16e-6)
    exact = fused_softmax((12, 6, 197, 64), torch.bfloat16).values()
    known = sum(gpu.fused_seconds(cost, TARGETS[target], torch.bfloat16) for cost in exact)
    assert softmax == pytest.approx(known, rel=1e-3)


def test_other_code_and_unknown_gpus_have_no_estimate():
    for other in ({"length": 1024}, {"target": "a100"}, {"form": "chunk"}, {"dtype": "float32"}):
        assert clock.estimate(timed(), [estimated(**other)]) == {}
    assert clock.estimate(timed(device="NVIDIA GeForce RTX 3060"), ESTIMATES) == {}


def cells(row, estimates) -> dict:
    """Return the cells of a timed row by heading."""
    header, (found,) = fill(clock.COLUMNS, [row | {"estimate": clock.estimate(row, estimates)}])
    return dict(zip(header, found))


def test_the_table_compares_times_with_estimates():
    assert cells(timed(), []) == {
        "mixer": "lion_s",
        "form": "full",
        "tokens": "197",
        "batch": "12",
        "us": "600",
        "estimate": "-",
        "x estimate": "-",
        "x softmax": "3.00",
        "estimated": "-",
        "no graphs": "2,000",
        "peak / q": "20.0",
    }
    found = cells(timed(), ESTIMATES)
    assert (found["us"], found["estimate"], found["x estimate"]) == ("600", "374", "1.60")
    assert float(found["estimated"]) > 3


def test_rows_are_reported_by_gpu(tmp_path):
    report = clock.ClockReport(tmp_path)
    tuned = timed(autotune=True)
    for row in (timed(), timed(device="NVIDIA A100"), timed(length=1024), tuned, timed(), tuned):
        report.add(row)
    report.write()
    text = (tmp_path / "clock.md").read_text()
    assert text.count("## ") == 2
    assert "## NVIDIA A100, bfloat16, 6 heads of 64" in text
    assert len(read_json(tmp_path / "clock.json")["rows"]) == 4
    plain = cells(timed(), ESTIMATES)
    other = cells(tuned, ESTIMATES)
    assert (plain.pop("form"), other.pop("form")) == ("full", "full, autotuned")
    assert plain == other


def test_one_benchmark_at_a_time_uses_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with alone_on(torch.device("cpu")):
        assert not list(tmp_path.iterdir())
    with alone_on(torch.device("cuda", 0)):
        (path,) = tmp_path.iterdir()
        with open(path, "a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(path, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_what_it_refuses(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, message in {
        "--clock lion_q": "unknown mixer 'lion_q', did you mean 'lion_s'",
        "--clock --form half": "--form: invalid choice: 'half'",
        "--clock lion_s": "no GPU found; ./run.sh bench gpu estimates without one",
        "--clock --target a100": "--target: belongs to estimates",
        "--kernels triton": "--kernels: nothing is timed, add --clock",
    }.items():
        assert message in refuse(capsys, "bench", "gpu", *words.split())
