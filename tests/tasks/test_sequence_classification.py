"""Tests of sequence classification: metrics, loss, independence of padding, and training."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from lion.config import build
from lion.layers.mixers import SOFTMAX
from lion.models.bert import BertClassifierConfig
from lion.samples.base import Splits
from lion.samples.text import LabelledTextInfo, TextInfo
from lion.tasks.sequence_classification import (
    METRICS,
    SequenceClassification,
    SequenceClassificationConfig,
    f1,
    matthews,
    pearson,
    spearman,
)
from lion.trainer.plan import make_plan
from lion.trainer.runtime import seed_everything
from lion.trainer.state import RunData
from tests.helpers import refusal, refused
from tests.layers.helpers import close
from tests.tasks.helpers import CPU, fit, measured, rows_of, stacked
from tests.trainer.toys import settings

SPECIAL = {"pad": 0, "cls": 1, "sep": 2}
INFO = LabelledTextInfo(20, 16, "toy", "f" * 64, SPECIAL, ("no", "yes"))
NUMBERS = LabelledTextInfo(20, 16, "toy", "f" * 64, SPECIAL)


class Pairs(Dataset):
    """Samples [CLS] letters [SEP] letters [SEP] of any length; the label says whether the letter 5 occurs."""

    def __init__(self, size, info=INFO, length=16):
        self.size, self.info, self.length = size, info, length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        first, second = (int(torch.randint(1, 6, (), generator=chance)) for _ in range(2))
        letters = torch.randint(6, 20, (first + second,), generator=chance)
        label = index % 2
        if label:
            letters[int(torch.randint(len(letters), (), generator=chance))] = 5
        cls, sep = torch.tensor([1]), torch.tensor([2])
        row = torch.cat([cls, letters[:first], sep, letters[first:], sep])
        types = (torch.arange(len(row)) > first + 1).long()
        pad = (0, self.length - len(row))
        sample = {"tokens": F.pad(row, pad), "types": F.pad(types, pad)}
        sample["segments"] = F.pad(torch.zeros(len(row), dtype=torch.long), pad, value=-1)
        return {**sample, "label": torch.tensor(label if self.info.classes else 2.5 * label)}


def task(info=INFO, *metrics):
    return SequenceClassification(SequenceClassificationConfig(metrics=metrics or ("accuracy",)), info)


def model(own=None, mixer="lion_s", **config):
    torch.manual_seed(0)
    config = BertClassifierConfig(mixer, 12, 2, 3, mlp_ratio=2, init_std=0.3, **config)
    return (own or task()).build_model(config).eval()


def batch(indices, data=None):
    pairs = data or Pairs(100)
    return stacked([pairs[i] for i in indices])


def test_metrics_are_those_of_their_definitions():
    label, prediction = torch.tensor([1, 1, 1, 0, 0, 1, 0, 1]), torch.tensor([1, 0, 1, 1, 0, 1, 0, 1])
    tp, fp, fn, tn = 4, 1, 1, 2
    assert f1(prediction, label) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(prediction, label) == pytest.approx(expected)
    x, y = torch.tensor([0.1, 3.0, 2.0, 9.0]), torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert pearson(x, y) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item())
    assert spearman(x, y) == pytest.approx(1 - 6 * 2 / (4 * 15))


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("value", [0, 1])
def test_metrics_are_finite_where_all_predictions_are_alike(name, value):
    kind, label = METRICS[name], torch.tensor([0, 1, 1, 0])
    rows = {"prediction": torch.full((4,), value), "label": label}
    if name in ("spearman", "pearson"):
        rows = {key: x.float() for key, x in rows.items()}
    found = kind.value({"accuracy": 0.5}, rows)
    assert math.isfinite(found) and found in (0, 0.5, pytest.approx(2 / 3))


def test_loss_is_a_mean_over_the_samples_of_the_global_batch():
    for info in (INFO, NUMBERS):
        own, data = task(info, "accuracy" if info.classes else "pearson"), batch(range(6), Pairs(9, info))
        net = model(own)
        with torch.no_grad():
            outputs = own.outputs(net, data)
            parts = [own.loss(net, rows_of(data, rows)) for rows in (slice(1), slice(1, 6))]
        if info.classes:
            expected = F.cross_entropy(outputs, data["label"])
        else:
            expected = F.mse_loss(outputs[:, 0], data["label"])
        assert outputs.shape == (6, 2 if info.classes else 1)
        total = sum(p.loss for p in parts) / sum(p.weight for p in parts)
        close(total, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_lit", "lion_s", "mamba", "deltanet"])
@torch.inference_mode()
def test_padding_changes_no_logit(mixer):
    """Check that neither the amount nor the content of padding changes a logit."""
    own, data = task(), batch([3, 4, 8])
    net = model(own, mixer, token_types=2).double()
    longest = int((data["segments"] == 0).sum(1).max())
    short = {name: x if name == "label" else x[:, :longest] for name, x in data.items()}
    noise = {**data, "tokens": torch.where(data["segments"] < 0, 7, data["tokens"])}
    whole = own.outputs(net, data)
    assert longest < 16 and whole.std() > 0.01
    for other in (short, noise):
        close(own.outputs(net, other), whole, 1e-6)


@torch.inference_mode()
def test_types_reach_a_model_that_has_embeddings_for_them():
    own, data = task(), batch([3, 4])
    other = {**data, "types": 1 - data["types"]}
    with_types, without, single = (model(own, token_types=types) for types in (2, 0, 1))
    assert not torch.allclose(own.outputs(with_types, data), own.outputs(with_types, other))
    for net in (without, single):
        assert torch.equal(own.outputs(net, data), own.outputs(net, other))


def test_an_evaluation_counts_real_samples_alone():
    own, net = task(INFO, "matthews", "accuracy", "f1"), model()
    plan = make_plan(settings(batch_size=4), samples=8, world=1)
    batches = RunData(Splits(Pairs(8), Pairs(7), None, INFO), plan, CPU).held_out()["val"]
    found = measured(own, net, *batches)
    with torch.no_grad():
        prediction = own.outputs(net, batch(range(7))).argmax(-1)
    label = torch.tensor([i % 2 for i in range(7)])
    assert found["accuracy"] == pytest.approx((prediction == label).double().mean().item())
    assert found["f1"] == pytest.approx(f1(prediction, label))
    assert " ".join(found) == "matthews accuracy f1 loss above_chance"


@pytest.mark.slow
def test_training_finds_the_letter(tmp_path):
    """Train to classify, and check that other held-out data are measured together with `val`."""
    seed_everything(0)
    own = task()
    net = own.build_model(BertClassifierConfig("lion_lit", 16, 1, 2, mlp_ratio=2))
    splits = Splits(Pairs(64), Pairs(32), None, INFO, more={"other": Pairs(20)})
    trainer = fit(own, net, splits, tmp_path, steps=60, eval_every=60, save_every=60, ema=None)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert trainer.state.best["value"] > 0.9 and '"val_other"' in text


def test_labels_of_others_are_no_data_for_a_run():
    then = LabelledTextInfo(20, 16, "toy", "f" * 64, SPECIAL, ("a", "b", "c"))
    assert LabelledTextInfo.from_dict(then.to_dict()) == then
    refused(
        "was trained on other labels: they were a, b, c, and are no, yes now", INFO.check_same, "run", then.to_dict()
    )
    refused("they were no, yes, and are numbers now", NUMBERS.check_same, "run", INFO.to_dict())
    INFO.check_same("run", {**INFO.to_dict(), "length": 99})
    INFO.check_transfer("run", then.to_dict())  # the head is initialised again
    INFO.check_transfer("run", TextInfo(20, 16, "toy", "f" * 64, SPECIAL).to_dict())
    assert not INFO.shares_heads(then.to_dict()) and INFO.shares_heads(INFO.to_dict())
    for check in (INFO.check_same, INFO.check_transfer):
        refused("was trained with another vocabulary", check, "run", {**INFO.to_dict(), "fingerprint": "0" * 64})


def test_metrics_that_do_not_fit_are_refused():
    def make(info, *metrics):
        config = build(SequenceClassificationConfig, {"metrics": list(metrics)}, source=lambda key: "r", key="task")
        SequenceClassification(config, info)

    three = LabelledTextInfo(20, 16, "toy", "f" * 64, SPECIAL, ("a", "b", "c"))
    assert "task.metrics: unknown metric 'f', did you mean 'f1'?" in refusal(make, INFO, "f")
    assert "expected at least one" in refusal(make, INFO)
    assert "'spearman' does not apply to 2 classes" in refusal(make, INFO, "spearman")
    assert "'accuracy' does not apply to numbers, valid: pearson, spearman" in refusal(make, NUMBERS, "accuracy")
    assert "'f1' needs two classes, got 3" in refusal(make, three, "f1")


def test_answers_in_words():
    assert task().describe(torch.tensor([[0.0, math.log(3)]]), 5) == [["yes 75.0%", "no 25.0%"]]
    assert task(NUMBERS, "pearson").describe(torch.tensor([[2.5]]), 5) == [["2.50"]]
