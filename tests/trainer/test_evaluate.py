"""Tests of evaluation: the collected values, in one process and several, and the selection of the best one."""

import math
from functools import partial

import pytest
import torch

from lion.samples.seeds import derive
from lion.tasks.base import Outcome
from lion.tasks.metrics import MetricOfPass
from lion.trainer.checkpoint_files import newest
from lion.trainer.evaluate import StoppableBatches, Stopped, Totals, evaluate
from lion.trainer.runtime import Runtime
from tests.helpers import state_of
from tests.processes import in_processes
from tests.trainer import toys
from tests.trainer.helpers import are_same, assert_close, before_steps, events_of, lines, logged

CPU = Runtime(torch.device("cpu"))


def test_every_kind_of_metric_against_all_samples_at_once():
    """Check 23 samples in batches of 4, the last of which is padded."""
    got = toys.measure(CPU)
    assert list(got) == ["perplexity", "matthews", "order", "loss", "pass"]
    torch.manual_seed(0)
    model, points = toys.Net().eval(), toys.Points(23, 1)
    with torch.no_grad():
        logits = model(points.x)
    loss = torch.nn.functional.cross_entropy(logits, points.label).item()
    first = points.x[:, 0].double()
    assert got["loss"] == pytest.approx(loss) and got["perplexity"] == math.exp(got["loss"])
    assert got["matthews"] == toys.matthews(logits.argmax(1), points.label) != 0
    assert got["order"] == (first * torch.arange(1, 24)).sum() and got["pass"] == pytest.approx(first.sum())


def test_the_batch_size_changes_no_metric_of_all_samples():
    small, large = (toys.measure(CPU, micro) for micro in (4, 16))
    assert small["matthews"] == large["matthews"] and small["order"] == large["order"]


def test_rows_are_kept_only_where_a_metric_needs_them():
    totals = Totals([toys.METRICS["perplexity"], toys.METRICS["pass"]])
    task = toys.Sides(toys.Config(), toys.Info())
    batch = {"x": torch.randn(3, 4), "label": torch.tensor([0, 1, 0]), "mask": torch.tensor([True, True, False])}
    totals.add(task.evaluate(toys.Net(), batch), batch["mask"])
    assert not totals.rows and list(totals.sums) == ["loss"] and list(totals.values(CPU)) == ["perplexity"]


def test_a_mean_of_no_samples_is_not_a_number():
    totals = Totals([toys.METRICS["perplexity"]])
    totals.add(Outcome({"loss": (torch.tensor(0.0), torch.tensor(0))}, torch.zeros(1)), torch.tensor([False]))
    assert math.isnan(totals.values(CPU)["perplexity"])


class Sampler(toys.Sides):
    """A task that draws random numbers wherever an evaluation calls it."""

    def __init__(self, config, info):
        super().__init__(config, info)
        self.metrics = (*self.metrics, MetricOfPass("drawn", measure=self.measure))
        self.draws = {"rows": [], "pass": [], "shown": []}

    def measure(self, task, model, batches, gather):
        self.draws["pass"].append(torch.rand(()).item())
        return self.draws["pass"][-1]

    def evaluate(self, model, batch):
        self.draws["rows"].append(torch.rand(()).item())
        return super().evaluate(model, batch)

    def progress(self, model, batch):
        self.draws["shown"].append(torch.rand(()).item())
        return {}


def test_what_an_evaluation_draws_is_the_same_for_every_model_and_not_missed_in_training(tmp_path):
    """Check that evaluations always draw the same numbers, and do not change those of training.

    Every training step draws too. The model and its average are evaluated twice each, in batches of 16 of 23 samples.
    """
    states = []
    for kind in (toys.Sides, Sampler):
        t = before_steps(toys.trainer(tmp_path / kind.__name__, kind=kind, steps=4), partial(torch.rand, 3))
        assert t.fit()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    first, second = t.task.draws["rows"][:2]
    assert t.task.draws["rows"] == 4 * [first, second] and first != second
    (value,) = set(t.task.draws["pass"])
    assert len(t.task.draws["pass"]) == 4 and len(t.task.draws["shown"]) == 2 == 2 * len(set(t.task.draws["shown"]))
    torch.manual_seed(5)
    val = toys.RunData(toys.splits(), t.plan, CPU).held_out()["val"]
    assert evaluate(toys.Net(), val, t.task, CPU, seed=derive(0, "val"))["drawn"] == value
    assert evaluate(toys.Net(), val, t.task, CPU, seed=derive(1, "val"))["drawn"] != value


def test_it_stops_in_any_pass_and_leaves_the_mode_alone():
    """Stop in one of 6 batches, or in one of the 6 of the separate pass."""
    model, task = toys.Net().train(), toys.Sides(toys.Config(), toys.Info())
    data = toys.RunData(toys.splits(), toys.make_plan(toys.settings(batch_size=4), samples=64, world=1), CPU)
    for after in (0, 3, 8):
        answers = iter([False] * after + [True, "not asked again"])
        with pytest.raises(Stopped):
            evaluate(model, StoppableBatches(data.held_out()["val"], answers.__next__), task, CPU)
        assert model.training and next(answers) == "not asked again"


def test_a_lower_perplexity_is_the_better_one(tmp_path):
    t = toys.trainer(tmp_path / "run", steps=12)
    assert t.fit()
    values = dict(logged(tmp_path / "run", "val", "step", "perplexity"))
    best = min(values, key=values.get)
    assert values[best] < values[2] and t.state.best == {"value": values[best], "step": best}
    assert state_of(tmp_path / "run", "best")["step"] == best


def test_more_splits_are_measured_and_choose_nothing(tmp_path):
    class Broken(toys.Points):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "x": torch.full((4,), math.nan)}

    more = {"far": toys.Points(9, 2), "same": toys.Points(23, 1), "off": Broken(5, 3)}
    folder = tmp_path / "more"
    alone, both = toys.trainer(tmp_path / "alone"), toys.trainer(folder, more=more)
    assert alone.fit() and both.fit() and both.state.best == alone.state.best and both.state.best["step"] > 0
    assert {x["kind"] for x in lines(tmp_path / "alone")} == {"train", "val", "val_ema"}
    assert len({x["kind"] for x in lines(folder)}) == 3 + 2 * len(more)
    for ema in ("", "_ema"):
        expected = logged(tmp_path / "alone", f"val{ema}", "step", "loss")
        assert [step for step, _ in expected] == [2, 4, 6]
        assert logged(folder, f"val{ema}", "step", "loss") == expected
        assert logged(folder, f"val_same{ema}", "step", "loss") == expected
        for (_, loss), far in zip(expected, logged(folder, f"val_far{ema}", "loss"), strict=True):
            assert far != loss
        assert logged(folder, f"val_off{ema}", "loss") == [None, None, None]
    assert are_same(alone.model, both.model)


def test_text_and_images_of_progress_are_shown(tmp_path):
    class Writer(toys.Sides):
        def progress(self, model, batch):
            return {"said": f"{len(batch['x'])} points", "drawn": torch.zeros(3, 2, 2)}

    assert toys.trainer(tmp_path / "run", kind=Writer).fit()
    events = events_of(tmp_path / "run")
    said = events.Tensors("said/text_summary")
    assert [(e.step, e.tensor_proto.string_val[0]) for e in said] == [(step, b"16 points") for step in (2, 4, 6)]
    assert [e.step for e in events.Images("drawn")] == [2, 4, 6]


@pytest.mark.parametrize(
    ("metric", "values", "steps"),
    [
        ("perplexity", [5.0, 3.0, 4.0, 3.0, math.inf, 3.5], [1, 2, 2, 4, 4, 4]),
        ("matthews", [0.1, 0.5, 0.2, 0.5, -math.inf, 0.4], [1, 2, 2, 4, 4, 4]),
    ],
)
def test_of_equals_the_longer_trained_is_kept(tmp_path, metric, values, steps):
    t = toys.trainer(tmp_path / "run", metrics=(metric,))
    for step, value in enumerate(values, 1):
        t.state.step = step
        t.keep_if_best(value)
        assert t.state.best == {"value": values[steps[step - 1] - 1], "step": steps[step - 1]}
        assert newest(tmp_path / "run", "best").step == steps[step - 1]


def test_rates_keep_their_factors_and_buffers_are_averaged(tmp_path):
    t = toys.trainer(tmp_path / "run")
    assert t.fit()
    last = logged(tmp_path / "run", "train", "lr")[-1]
    groups = [(g["lr"], g["weight_decay"]) for g in t.optimizer.param_groups]
    assert groups == [(last, 0.1), (last, 0.0), (0.1 * last, 0.0)]
    averaged = sum(0.1 * step * 0.9 ** (6 - step) for step in range(1, 7))
    assert t.model.steps.eq(6).all() and t.ema.steps.tolist() == pytest.approx([averaged] * 4)


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_measure_the_same_and_shards_keep_their_marks(tmp_path):
    (found, groups), _ = in_processes(2, toys.train_sharded, tmp_path)
    one = toys.measure(CPU)
    assert found["matthews"] == one["matthews"] and found["order"] == one["order"]
    assert found == pytest.approx(one, rel=1e-12)

    alone = toys.trainer(tmp_path / "alone")
    assert alone.fit()
    lr = alone.optimizer.param_groups[0]["lr"]
    assert groups == [(lr, 0.1, 3), (lr, 0.0, 3), (0.1 * lr, 0.0, 2)]
    a, b = (state_of(tmp_path / run, "best") for run in ("alone", "run"))
    assert a["step"] == b["step"]
    for part in ("model", "ema"):
        assert "steps" in a[part]
        assert_close(b[part], a[part], rtol=1e-4, atol=1e-6)
