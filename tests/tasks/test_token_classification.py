"""Token classification: loss and accuracy by hand, tokens of several ids, and training that learns."""

import json
import math

import pytest
import torch

from lion.models import MODELS
from lion.models.base import Model
from lion.samples.labels import UNLABELLED, TokenLabelsInfo
from lion.tasks import TASKS
from tests.helpers import here
from tests.layers.helpers import close
from tools.compose import build_data, make_task, resolve

INFO = TokenLabelsInfo(classes=3, length=4, longest=6, vocabulary=5, ids=2)


class Fixed(Model):
    """A model with given logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, tokens):
        return self.logits


def task():
    kind = TASKS["token_classification"]
    return kind(kind.Config(), INFO)


def test_only_labelled_tokens_of_real_samples_count():
    logits = torch.zeros(2, 4, 3)
    logits[0, 1, 2] = math.log(2)  # probabilities 1/4, 1/4, 1/2
    labels = torch.full((2, 4), UNLABELLED)
    labels[0, 1], labels[0, 3], labels[1, 0] = 2, 1, 2
    batch = {"tokens": torch.zeros(2, 4, 2, dtype=torch.long), "labels": labels, "mask": torch.tensor([True, False])}
    sums = task().loss(Fixed(logits), batch)
    assert sums.loss.item() == pytest.approx(math.log(2) + 2 * math.log(3)) and sums.weight.item() == 3
    outcome = task().evaluate(Fixed(logits), batch)
    (right, count), (loss, _) = outcome.sums["accuracy"], outcome.sums["loss"]
    assert (right.item(), count.item()) == (1, 2)  # the second sample is padding of the batch
    assert loss.item() == pytest.approx(math.log(2) + math.log(3))


def test_the_embedding_of_a_token_is_the_sum_of_its_ids():
    config = resolve("recall_softmax", ["model.dim=8", "model.num_heads=2"]).model
    model = MODELS["token_classifier"](config, classes=3, length=6, vocabulary=5)
    tokens = torch.tensor([[[1, 2], [3, 0]]])
    w = model.tokens.weight
    close(model.tokens(tokens)[0], torch.stack([w[1] + w[2], w[3] + w[0]]))
    assert model(tokens).shape == (1, 2, 3) and model.longest == 6


def test_examples_have_the_shapes_of_the_data():
    recipe = resolve("recall_softmax", ["data.samples=8", "data.held_out=4"])
    splits = build_data(recipe)
    made = make_task(recipe, splits.info)
    real = splits.train.batch([0, 1], "cpu")
    assert {k: v.shape for k, v in made.example(2, "cpu").items()} == {k: v.shape for k, v in real.items()}


SMALL = """
data.length=16 data.items=[4] data.shapes=[] data.keys=4 data.values=4 data.samples=2000 data.held_out=200
model.mixer=lion_lit model.dim=32 model.depth=1 optim.lr=1e-2
trainer.steps=100 trainer.eval_every=100 trainer.save_every=100 trainer.compile=false
""".split()


@pytest.mark.slow
def test_recall_is_learned_in_one_direction_up_to_half(tmp_path):
    """Train in both directions and in one: half of the pairs stand behind their queries."""
    accuracy = {}
    for direction in ("both", "forward"):
        own = [f"run.root={tmp_path}", f"run.name={direction}", f"model.attention.direction={direction}"]
        assert here("train", "recall_softmax", *SMALL, *own, "--no-eval") == 0
        lines = (tmp_path / direction / "metrics.jsonl").read_text().splitlines()
        held_out = [line for line in map(json.loads, lines) if line["kind"] == "val"]
        accuracy[direction] = held_out[-1]["accuracy"]
    assert accuracy["both"] > 0.95
    assert 0.5 < accuracy["forward"] < 0.75  # 4 values: a guess is right in 1/4
