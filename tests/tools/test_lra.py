"""Tests of small recipes of the Long Range Arena: self-pretraining, a run that starts from it, and a report."""

import pytest

from lion.files import read_json
from tests.helpers import here, printed, refuse

SHRINK = """
model.dim=8 model.depth=1 model.num_heads=2
data.samples=64 data.val_samples=32 data.test_samples=32 data.workers=1
data.min_length=3 data.max_length=30 data.max_depth=3 data.length=32
trainer.steps=2 trainer.batch_size=16 trainer.eval_every=2 trainer.save_every=2
trainer.compile=false trainer.device=cpu schedule.warmup=1
""".split()


@pytest.mark.slow
def test_from_its_own_inputs_to_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LION_DATA", f"{tmp_path}/data")
    monkeypatch.chdir(tmp_path)
    assert here("train", "lra_listops_lion_s_masked", *SHRINK, "--no-eval") == 0
    started = ["run.name=started", "init_from=lra_listops_lion_s_masked"]
    assert here("train", "lra_listops_lion_s", *SHRINK, *started) == 0
    summary = read_json(tmp_path / "runs/started/summary.json")
    assert summary["remark"].startswith("stuck at chance: accuracy ")
    assert summary["remark"] in capsys.readouterr().out
    assert len(summary["forms"]) == 4
    for form in summary["forms"].values():
        assert form["deviation"] < 1e-4
    assert here("train", "lra_listops_softmax_window", *SHRINK, "model.window=8") == 0
    output = printed(capsys, "report", "started", "lra_listops_softmax_window")
    assert "softmax rope rotation window 8" in output
    assert "lion_s_hippo pre-trained, seed 6554595: stuck at chance" in output


def test_a_window_of_nothing(capsys):
    line = refuse(capsys, "show", "lra_listops_softmax_window", "model.window=0")
    assert "model.window: expected at least 1, got 0" in line
