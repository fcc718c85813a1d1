"""Tests of tasks on long sequences: losses, metrics, pairs, chance level, self-pretraining, and starting from it."""

import math

import pytest
import torch
import yaml
from torch.utils.data import Dataset

from lion.config import ConfigError, to_dict
from lion.models.lra import LRAConfig, LRAMaskedConfig
from lion.runs import init_from
from lion.samples.base import Splits
from lion.samples.sequences import SequenceInfo
from lion.tasks import TASKS
from lion.tasks.image_classification import ImageClassification
from lion.tasks.lra import LRATask, LRATaskConfig
from lion.tasks.lra_masked import LRAMaskedTask, LRAMaskedTaskConfig
from lion.tasks.metrics import above_chance
from lion.tasks.sequence_classification import SequenceClassification
from lion.trainer.loop import Trainer
from tests.layers.helpers import close
from tests.tasks.helpers import fit, measured, rows_of

LENGTH = 24
INFOS = {
    "ids": SequenceInfo(classes=3, length=LENGTH, vocabulary=7),
    "pixels": SequenceInfo(classes=2, length=25, mean=0.5, std=0.3),
    "pairs": SequenceInfo(classes=2, length=LENGTH, vocabulary=7, parts=2),
}
every_info = pytest.mark.parametrize("info", INFOS.values(), ids=INFOS)


class Made(Dataset):
    """Padded samples like those of the data sets. The class is that of the first token, or random."""

    def __init__(self, info: SequenceInfo, seed: int = 0, noise: bool = False) -> None:
        rng = torch.Generator().manual_seed(seed)
        shape = (48, info.length) if info.parts == 1 else (48, 2, info.length)
        if info.vocabulary is None:
            self.inputs = {"pixels": torch.randint(256, shape, generator=rng, dtype=torch.uint8)}
            first = self.inputs["pixels"][:, 0].long()
        else:
            tokens = torch.randint(info.vocabulary, shape, generator=rng)
            lengths = torch.randint(1, info.length + 1, shape[:-1], generator=rng)
            segments = torch.where(torch.arange(info.length) < lengths[..., None], 0, -1)
            self.inputs = {"tokens": tokens, "segments": segments}
            first = tokens.flatten(1)[:, 0]
        label = torch.randint(info.classes, (48,), generator=rng) if noise else first % info.classes
        self.inputs["label"] = label

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict:
        return rows_of(self.inputs, index)

    def batch(self) -> dict:
        return {**self.inputs, "mask": torch.ones(48, dtype=torch.bool), "key": torch.arange(48)}


def classifier(info: SequenceInfo, **settings):
    return with_model(LRATask(LRATaskConfig(**settings), info), LRAConfig)


def masked(info: SequenceInfo, **settings):
    return with_model(LRAMaskedTask(LRAMaskedTaskConfig(**settings), info), LRAMaskedConfig)


def with_model(task, kind):
    torch.manual_seed(0)
    return task, task.build_model(kind("lion_s_hippo", 16, 2, 2))


def trained(task, model, folder, steps, noise=False) -> Trainer:
    folder.mkdir(exist_ok=True)
    splits = Splits(Made(task.info, noise=noise), Made(task.info, seed=1, noise=noise), None, task.info)
    return fit(task, model, splits, folder, steps=steps, eval_every=steps, save_every=steps, ema=None)


@every_info
def test_a_batch_is_judged_sample_by_sample(info):
    task, model = classifier(info)
    model.eval()
    batch = Made(info).batch()
    values = measured(task, model, batch)
    logits = model(batch.get("pixels", batch.get("tokens")), batch.get("segments"))
    right = logits.argmax(1) == batch["label"]
    assert values["accuracy"] == pytest.approx(right.double().mean().item())
    assert values["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, batch["label"]).item(), rel=1e-5)
    halves = [rows_of(batch, rows) for rows in (slice(0, 20), slice(20, None))]
    assert measured(task, model, *halves) == pytest.approx(values, rel=1e-5)
    batch["mask"] = torch.arange(48) < 20
    assert measured(task, model, batch) == pytest.approx(measured(task, model, halves[0]), rel=1e-5)


def test_examples_are_batches():
    for info in INFOS.values():
        for task, model in (classifier(info), masked(info)):
            example = task.example(3, "cpu")
            loss, weight = task.loss(model, example)
            assert loss.isfinite() and 0 < weight <= 3 * info.parts * info.length
            assert not any("mask" in name for name in example)


def test_label_smoothing():
    info, batch = INFOS["ids"], Made(INFOS["ids"]).batch()
    (task, model), (plain, _) = classifier(info, label_smoothing=0.3), classifier(info)
    model.eval()
    logits = plain.outputs(model, batch)
    share = torch.nn.functional.one_hot(batch["label"], 3) * 0.7 + 0.1
    want = -(share * logits.log_softmax(1)).sum()
    close(task.loss(model, batch).loss, want)


# Chance


def test_chance_is_the_commonest_class_within_its_noise():
    label = torch.tensor([0] * 60 + [1] * 40)
    assert above_chance(torch.zeros(100), label) == 0
    assert above_chance(label, label) == pytest.approx(0.4 / math.sqrt(0.6 * 0.4 / 100))
    assert above_chance(1 - label, label) < 0
    assert math.isfinite(above_chance(torch.zeros(9), torch.zeros(9)))
    label, prediction = torch.arange(40_000) % 2, torch.arange(40_000) % 2
    prediction[: 40_000 - 800] = 0  # 51 %: four standard deviations, but only one point
    assert above_chance(prediction, label) == pytest.approx(2)


def test_accuracy_at_chance_is_remarked():
    remark = LRATask.remark({"accuracy": 0.504, "above_chance": 1.1})
    assert remark.startswith("stuck at chance: accuracy 50.40 % is 1.1 standard deviations")
    assert LRATask.remark({"accuracy": 0.62, "above_chance": 5.0}) is None
    assert SequenceClassification.remark({"accuracy": 0.495, "above_chance": -0.2}).startswith("stuck at chance: acc")
    remark = ImageClassification.remark({"top1": 0.495, "top5": 1.0, "above_chance": -0.2})
    assert remark.startswith("stuck at chance: top-1 49.50 % is -0.2 standard deviations")
    assert ImageClassification.remark({"top1": 0.495}) is None  # of a run from before
    assert LRATask.remark({"accuracy": None, "above_chance": None}) is None
    assert TASKS["image_classification"].remark({"top1": 0.1}) is None


@pytest.mark.parametrize("noise", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_says_at_its_end_that_it_is_stuck(tmp_path, caplog, noise):
    info = SequenceInfo(classes=2, length=3, vocabulary=2)
    task, model = classifier(info)
    with caplog.at_level("WARNING", logger="lion"):
        trained(task, model, tmp_path, steps=2 if noise else 40, noise=noise)
    assert any("val: stuck at chance" in line for line in caplog.messages) == noise


# Self-pretraining


@every_info
def test_hidden_inputs_are_those_that_count(info):
    task, model = masked(info, rate=0.4)
    model.eval()
    batch = Made(info).batch()
    outcome = task.evaluate(model, batch)
    total, weight = outcome.sums["loss"]
    inputs, segments = task.rows(batch)
    valid = torch.ones_like(inputs, dtype=torch.bool) if segments is None else segments >= 0
    assert 0.3 < weight / valid.sum() < 0.5 and outcome.outputs.shape[0] == 48
    assert torch.equal(task.evaluate(model, batch).outputs, outcome.outputs)  # every evaluation masks the same inputs
    values = measured(task, model, batch)
    assert values == {"loss": pytest.approx((total / weight).item())}
    close(task.evaluate(model, rows_of(batch, slice(5, 6))).outputs[0], outcome.outputs[5])
    assert not info.vocabulary or values["loss"] == pytest.approx(math.log(info.vocabulary), rel=0.5)
    first = rows_of(batch, slice(20))
    batch["mask"] = torch.arange(48) < 20  # the rest pads the last batch
    close(task.evaluate(model, batch).sums["loss"], task.evaluate(model, first).sums["loss"])
    if info.parts == 2:  # with `data.pad=batch`, the length of a row depends on its batch
        first["segments"][..., 10:] = -1
        short = first | {name: first[name][..., :10] for name in ("tokens", "segments")}
        close(task.evaluate(model, short).sums["loss"], task.evaluate(model, first).sums["loss"])


def test_hidden_pixels_are_asked_for_normalised():
    info = INFOS["pixels"]
    task, model = masked(info, rate=1.0)
    batch = Made(info).batch()
    with torch.no_grad():
        model.decoder.weight.zero_(), model.decoder.bias.zero_()
    loss, weight = task.loss(model, batch)
    pixels = (batch["pixels"].double() / 255 - 0.5) / 0.3
    assert (loss / weight).item() == pytest.approx(pixels.abs().mean().item(), rel=1e-5)


@every_info
def test_a_task_starts_from_its_own_inputs(info, tmp_path):
    """Check that `init_from` takes the encoder, starts a new head, and drops the decoder."""
    task, source = masked(info)
    assert trained(task, source, tmp_path / "run", steps=2).state.best["step"] == 2
    recipe = {"task": {"name": "lra_masked"}, "model": to_dict(source.config), "data": {"name": "any"}}
    recipe |= {"optim": {"lr": 1e-2}, "trainer": {"batch_size": 16, "steps": 2}}
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    _, model = classifier(info)
    head = {name: p.clone() for name, p in model.named_parameters() if name.startswith("head.")}
    init_from(model, tmp_path / "run", info)
    wanted = dict(source.named_parameters()) | dict(source.named_buffers()) | head
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(value, wanted[name]), name
    with pytest.raises(ConfigError, match=r"was trained on other inputs: they were (pixels|7 ids), and are 9 ids now"):
        init_from(model, tmp_path / "run", SequenceInfo(classes=2, length=8, vocabulary=9))


# Metadata of the data


@every_info
def test_infos_read_back(info):
    assert SequenceInfo.from_dict(info.to_dict()) == info
    assert info.resized(9).length == info.resized(9).sample_size == 9


@pytest.mark.parametrize(
    "values",
    [
        {"classes": 0, "length": 8},
        {"classes": 2, "length": 8, "vocabulary": 0},
        {"classes": 2, "length": 8, "vocabulary": 5, "parts": 3},
        {"classes": 2, "length": 8, "parts": 2},
        {"classes": 2, "length": 8, "std": 0.0},
    ],
)
def test_no_such_data(values):
    with pytest.raises(ValueError):
        SequenceInfo.from_dict(values)


def test_images_are_shown_with_predictions():
    task, model = classifier(INFOS["pixels"])
    assert task.preview(model, Made(INFOS["pixels"]).batch())["inputs"].ndim == 3
    assert classifier(INFOS["ids"])[0].preview(model, {}) == {}
    said = task.describe(torch.tensor([[0.0, 2.0]]), 2)
    assert said == [["class 1 88.1%", "class 0 11.9%"]]
