"""Associative recall and selective copying: labels are what the definitions say, and what one direction can find."""

import numpy as np
import pytest
import torch

from data import dataset
from data.synthetic.base import Shape
from lion.samples.labels import UNLABELLED
from tests.helpers import refused
from tools.compose import build_data, resolve

RECIPES = ("recall_softmax", "selective_copy_softmax")
SMALL = "data.samples=60 data.held_out=20 data.length=24 data.items=[2,5] data.shapes=[40x7]".split()


def splits(recipe, *overrides):
    return build_data(resolve(recipe, [*SMALL, *overrides]))


def samples(recipe, *overrides):
    """Return (tokens (L, ids), labels (L,)) of all samples of all splits, as lists."""
    made = splits(recipe, *overrides)
    for each in (made.train, made.val, made.test, *made.more.values()):
        batch = each.batch(range(len(each)), "cpu")
        yield from zip(batch["tokens"].tolist(), batch["labels"].tolist())


def solve_recall(tokens):
    """Solve a sample by looking up every key that stands alone among the pairs."""
    values = {key: value for key, value in tokens if value}
    return [values[key] - 33 if key and not value else UNLABELLED for key, value in tokens]  # 32 keys before values


def solve_copy(tokens):
    symbols = iter([i - 2 for (i,) in tokens if i > 1])
    return [next(symbols) if i == 1 else UNLABELLED for (i,) in tokens]


@pytest.mark.parametrize("sides", ["both", "before"])
@pytest.mark.parametrize("recipe, solve", list(zip(RECIPES, (solve_recall, solve_copy))))
def test_labels_follow_from_the_definition(recipe, solve, sides):
    seen = set()
    for tokens, labels in samples(recipe, f"data.sides={sides}"):
        assert solve(tokens) == labels
        seen.add((len(labels), sum(label != UNLABELLED for label in labels)))
    assert seen == {(24, 2), (24, 5), (40, 7)}  # tokens and items


def place_of_answer(tokens, recipe, i):
    """Return the place of the item that the question at place i asks for."""
    if recipe == "recall_softmax":
        return next(j for j, (key, value) in enumerate(tokens) if value and key == tokens[i][0])
    questions = [j for j, (symbol,) in enumerate(tokens) if symbol == 1]
    return [j for j, (symbol,) in enumerate(tokens) if symbol > 1][questions.index(i)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_direction_finds_half_of_the_items_or_all(recipe):
    for sides, before in (("both", {2 // 2, 5 // 2, 7 // 2}), ("before", {2, 5, 7})):
        for tokens, labels in samples(recipe, f"data.sides={sides}"):
            asked = [i for i, label in enumerate(labels) if label != UNLABELLED]
            assert sum(place_of_answer(tokens, recipe, i) < i for i in asked) in before


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_seed_determines_the_samples(recipe):
    one, again, other = (splits(recipe, f"data.seed={seed}") for seed in (0, 0, 1))
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert not np.array_equal(one.train.tokens[:20], one.val.tokens)
    assert one.info.length == 24 and one.info.longest == 40


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["data.length=8", "data.items=[5]"], "nearest: 4"),
        (["data.shapes=[8x5]"], "nearest: 4"),
        (["data.shapes=[8y2]"], "expected LENGTHxITEMS"),
        (["data.items=[]"], "at least one"),
        (["data.keys=4"], "up to 7 pairs"),
        (["data.sides=left"], "valid: before, both"),
        (["data.shapes=[900000x2]"], "at most 65,536"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(overrides, message):
    refused(message, resolve, "recall_softmax", [*SMALL, *overrides])


def test_a_batch_is_int64():
    made = dataset("recall")(resolve("recall_softmax", SMALL).data)
    batch = made.build().val[3]
    assert batch["tokens"].shape == (24, 2) and batch["labels"].shape == (24,)
    assert batch["tokens"].dtype == batch["labels"].dtype == torch.int64
    tokens, labels = made.draw(np.random.default_rng(0), 3, Shape(24, 5))
    assert tokens.shape == (3, 24, 2) and labels.shape == (3, 24)
