"""Tests of a few kills at random moments; `./run.sh soak --kills 100` is the long version."""

import pytest
import torch

from tests.helpers import here, tiny_recipe
from tools.soak import differing

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_where_the_other_does(tmp_path, capsys):
    """Kill a run at a random moment, and in a save."""
    path = tiny_recipe(tmp_path, trainer={"ema": 0.9})
    report, kills = tmp_path / "soak.md", 2
    flags = ["--kills", kills, "--seed", 6, "--report", report]
    assert here("soak", "--recipe", path, *flags, "trainer.steps=100") == 0
    text = report.read_text()
    assert "| result | equal, bit for bit |" in text and "at any time" in text and "in a save" in text
    assert f"# {kills} kills in one run" in capsys.readouterr().out


def test_a_difference_is_found():
    a = {"w": torch.zeros(2), "n": [1, {"x": 2.0}]}
    assert differing(a, {"w": torch.zeros(2), "n": [1, {"x": 2.0}]}) == []
    assert differing(a, {"w": -torch.zeros(2), "n": [1, {"x": 2.5}]}) == [".w", ".n[1].x"]
    assert differing(a, {"w": torch.zeros(3), "n": [1, {"x": 2.0}]}) == [".w"]
    assert differing(a, {"w": torch.zeros(2)}) == [""]
