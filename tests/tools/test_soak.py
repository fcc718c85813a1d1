"""Tests of a few kills at random moments; `./run.sh soak --kills 100` is the long version."""

import pytest
import torch

from tests.helpers import here, tiny_recipe
from tests.tools.queues import Forked
from tools import soak
from tools.soak import differing

pytest.importorskip("sklearn")


@pytest.mark.every  # tests/trainer/test_faults.py and test_writing.py kill runs at chosen moments
@pytest.mark.process
def test_a_run_killed_again_and_again_ends_where_the_other_does(tmp_path, capsys, monkeypatch):
    """Kill a run at a random moment, and in a save."""
    monkeypatch.setattr(soak, "start_command", Forked)
    monkeypatch.setattr(soak, "TRAINING", 0.7)  # the processes start in less than a second
    path = tiny_recipe(tmp_path, trainer={"ema": 0.9})
    report = tmp_path / "soak.md"
    assert here("soak", "--recipe", path, "--kills", 2, "--seed", 6, "--report", report, "trainer.steps=100") == 0
    text = report.read_text()
    for words in ("| result | equal, bit for bit |", "at any time", "in a save"):
        assert words in text, words
    assert "# 2 kills in one run" in capsys.readouterr().out


def test_a_difference_is_found():
    a = {"w": torch.zeros(2), "n": [1, {"x": 2.0}]}
    assert differing(a, {"w": torch.zeros(2), "n": [1, {"x": 2.0}]}) == []
    assert differing(a, {"w": -torch.zeros(2), "n": [1, {"x": 2.5}]}) == [".w", ".n[1].x"]
    assert differing(a, {"w": torch.zeros(3), "n": [1, {"x": 2.0}]}) == [".w"]
    assert differing(a, {"w": torch.zeros(2)}) == [""]
