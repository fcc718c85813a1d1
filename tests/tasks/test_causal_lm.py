"""Tests of causal language modelling: the tokens that count, and the loss as a mean over them in every batch."""

import math

import pytest
import torch
import torch.nn.functional as F

from lion.models.gpt import GPT, GPTConfig
from lion.samples.text import TextInfo
from lion.tasks.causal_lm import CausalLM, CausalLMConfig
from tests.helpers import refused
from tests.layers.helpers import close

INFO = TextInfo(vocabulary=7, length=9, tokenizer="characters", fingerprint="f")


def task(**changes):
    return CausalLM(CausalLMConfig(), TextInfo(**{**vars(INFO), **changes}))


def model(mixer="lion_s"):
    torch.manual_seed(0)
    return task().build_model(GPTConfig(mixer, 12, 1, 2))


def tokens(size=4, length=9):
    return torch.randint(7, (size, length), generator=torch.Generator().manual_seed(1))


def test_a_window_of_n_tokens_is_a_context_of_one_less():
    m = model("softmax")
    assert isinstance(m, GPT) and (m.length, m.vocabulary) == (8, 7)
    assert task().outputs(m, {"tokens": tokens()}).shape == (4, 8, 7)


def test_the_loss_is_of_the_next_tokens():
    m, t = model(), tokens()
    sums = task().loss(m, {"tokens": t})
    expected = [F.cross_entropy(m(t[i : i + 1, :n])[0, -1:], t[i, n : n + 1]) for i in range(4) for n in range(1, 9)]
    assert sums.weight == 32
    close(sums.loss, torch.stack(expected).sum())


def test_borders_and_padding_do_not_count():
    m, t = model(), tokens(2)
    segments = torch.tensor([[0] * 5 + [1] * 4, [0] * 3 + [-1] * 6])
    sums = task().loss(m, {"tokens": t, "segments": segments})
    alone = [task().loss(m, {"tokens": part}) for part in (t[:1, :5], t[:1, 5:], t[1:, :3])]
    assert sums.weight == sum(s.weight for s in alone) == 9
    close(sums.loss, sum(s.loss for s in alone))
    garbage = t.clone()
    garbage[1, 3:] = 0
    close(task().loss(m, {"tokens": garbage, "segments": segments}).loss, sums.loss)


def test_an_evaluation_is_a_mean_over_tokens_of_real_samples():
    m, t = model(), tokens()
    batch = {"tokens": t, "mask": torch.tensor([True, False, True, True])}
    outcome = task().evaluate(m, batch)
    total, weight = outcome.sums["loss"]
    expected = task().loss(m, {"tokens": t[batch["mask"]]})
    assert weight == 24 == expected.weight
    close(total.float(), expected.loss)
    perplexity, loss = task().metrics
    means = {"loss": (total / weight).item()}
    assert perplexity.value(means, {}) == pytest.approx(math.exp(loss.value(means, {})))
    assert task().metric is perplexity and not loss.higher_is_better and not perplexity.higher_is_better


def test_a_uniform_guess_has_the_perplexity_of_its_vocabulary():
    m = model()
    torch.nn.init.zeros_(m.tokens.weight)
    total, weight = task().evaluate(m, {"tokens": tokens(), "mask": torch.ones(4, dtype=torch.bool)}).sums["loss"]
    assert task().metric.value({"loss": (total / weight).item()}, {}) == pytest.approx(7)


def test_the_example_is_a_batch():
    t = task()
    batch = t.example(3, "cpu")
    assert batch.keys() == {"tokens"}
    assert batch["tokens"].shape == (3, 9) and batch["tokens"].max() < 7
    loss = t.loss(model(), batch)
    assert loss.loss.isfinite() and loss.weight == 24


def test_nothing_to_predict():
    refused("sequences of 1 token leave nothing to predict", task(length=1).build_model, GPTConfig("lion_s", 12, 1, 2))
