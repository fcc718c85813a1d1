"""Tests of masked language modelling: masking, its random numbers, the loss of a global batch, and training."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from lion.config import ConfigError
from lion.layers.mixers import SOFTMAX
from lion.layers.mixers.base import forms_of, set_form
from lion.models.base import Model
from lion.models.bert import Bert, BertConfig
from lion.recipe import build
from lion.samples.base import Splits
from lion.samples.seeds import derive
from lion.samples.text import TextInfo
from lion.tasks.masked_lm import MaskedLM, MaskedLMConfig
from lion.trainer.runtime import seed_everything
from tests.helpers import refused
from tests.layers.helpers import close
from tests.tasks.helpers import fit, measured, rows_of, stacked

INFO = TextInfo(30, 20, "toy", "f" * 64, {"pad": 0, "mask": 1, "cls": 2, "sep": 3, "unk": 4})


class Text(Dataset):
    """Documents of letters in alphabetical order, so that visible letters determine the masked ones."""

    def __init__(self, size, seed=0):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(derive(self.seed, index))
        length, start = (int(torch.randint(high, (), generator=chance)) for high in (10, 25))
        tokens = torch.zeros(20, dtype=torch.long)
        tokens[: 10 + length] = 5 + (start + torch.arange(10 + length)) % 25
        tokens[0], tokens[9 + length] = 2, 3
        return {"tokens": tokens, "segments": -(tokens == 0).long()}


def task(info=INFO, **config):
    return MaskedLM(MaskedLMConfig(**config), info)


def model(mixer="lion_s", **config):
    torch.manual_seed(0)
    return task().build_model(BertConfig(mixer, 12, 2, 3, mlp_ratio=2, init_std=0.3, **config)).eval()


def batch(size=4):
    text = Text(100)
    key = torch.tensor([derive(0, "key", i) for i in range(size)])
    return {**stacked([text[i] for i in range(size)]), "key": key, "mask": torch.ones(size, dtype=torch.bool)}


def hidden_of(own, data, rate):
    return own.mask_tokens(data, rate, torch.rand(*data["tokens"].shape, 3))


def test_shares_of_what_is_hidden():
    """Check the shares over 20,000 rows: 30 % of letters chosen; of these 80 % mask, 10 % any token, 10 % unchanged."""
    torch.manual_seed(0)
    own, data = task(), batch(1)
    data = {name: data[name].expand(20_000, -1) for name in ("tokens", "segments")}
    masked = hidden_of(own, data, 0.3)
    letters = int((data["tokens"][0] > 4).sum())
    assert (masked.chosen.sum(1) == round(0.3 * letters)).all()
    at = masked.tokens.gather(1, masked.places)[masked.chosen]
    before = masked.targets[masked.chosen]
    assert ((at == 1).double().mean() - (0.8 + 0.1 / 30)).abs() < 0.005
    assert ((at == before).double().mean() - (0.1 + 0.1 / 30)).abs() < 0.005
    others = at[(at != 1) & (at != before)]
    assert others.unique().tolist() == [i for i in range(30) if i != 1]  # any token, including special tokens
    counts = torch.bincount(masked.places[masked.chosen], minlength=20)[data["tokens"][0] > 4]
    assert (counts / 20_000 - masked.chosen[0].sum() / letters).abs().max() < 0.02  # every place is equally likely


def test_specials_and_padding_are_left_alone():
    torch.manual_seed(0)
    own = task(rate=0.9, masked=1.0, random=0.0)
    data = batch(50)
    data["tokens"][:, 4], data["segments"][:, 5] = 4, -1  # an unknown word; a letter at a padded place
    masked = hidden_of(own, data, 0.9)
    usable = (data["tokens"] > 4) & (data["segments"] >= 0)
    changed = masked.tokens != data["tokens"]
    assert not (changed & ~usable).any()
    assert (changed.sum(1) == masked.chosen.sum(1)).all()
    assert (masked.chosen.sum(1) == (0.9 * usable.sum(1)).round()).all()
    assert torch.equal(masked.targets, data["tokens"].gather(1, masked.places))
    assert all(len(p[c].unique()) == c.sum() for p, c in zip(masked.places, masked.chosen))


def test_a_row_of_any_length_has_as_many_slots():
    torch.manual_seed(0)
    own, data = task(), {"tokens": torch.zeros(3, 20, dtype=torch.long), "segments": torch.full((3, 20), -1)}
    data["tokens"][1:, 0], data["segments"][1:, 0] = 7, 0  # one letter
    data["tokens"][2:], data["segments"][2:] = 7, 0  # all letters
    masked = hidden_of(own, data, 0.15)
    assert masked.places.shape == (3, 3) and masked.chosen.sum(1).tolist() == [0, 1, 3]
    loss, weight = own.loss(model(), rows_of(data, slice(1)))
    assert loss == weight == 0
    assert hidden_of(own, data, 0.01).chosen.sum(1).tolist() == [0, 1, 1]


def test_loss_is_per_hidden_token_of_the_global_batch():
    """Compare sums over ragged micro-batches with those of the whole batch, and with PyTorch's cross-entropy."""
    own, net, data = task(rate=0.9), model().double(), batch(6)
    torch.manual_seed(3)
    draws = torch.rand(6, 20, 3)
    masked = own.mask_tokens(data, 0.9, draws)
    targets = torch.full((6, 20), -100)
    for row in range(6):
        for place, chosen in zip(masked.places[row], masked.chosen[row]):
            if chosen:
                targets[row, place] = data["tokens"][row, place]
    logits = net(masked.tokens, data["segments"])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    parts = []
    for rows in (slice(0, 1), slice(1, 6)):
        own.mask_tokens = lambda data, rate, _, rows=rows: MaskedLM.mask_tokens(own, data, rate, draws[rows])
        parts.append(own.loss(net, rows_of(data, rows)))
    assert parts[0].weight != parts[1].weight / 5
    total = sum(p.loss for p in parts) / sum(p.weight for p in parts)
    close(total.double(), expected, atol=1e-5, rtol=1e-5)


def test_training_noise_is_pytorchs_own():
    own, net, data = task(), model(), batch()
    torch.manual_seed(1)
    first, second = own.loss(net, data).loss, own.loss(net, data).loss
    torch.manual_seed(1)
    assert own.loss(net, data).loss == first != second


def shown_to(net, own, data):
    """Return what a model sees in an evaluation: tokens and places."""
    seen = []
    hook = net.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((*args, *kwargs.values())), with_kwargs=True
    )
    own.evaluate(net, data)
    hook.remove()
    return seen[0]


@torch.no_grad()
def test_evaluation_asks_all_the_same():
    """Check that every evaluation masks the same tokens, whatever the random state, model, batching and padding."""
    own, data = task(), batch(6)
    tokens, _, places = shown_to(model(), own, data)
    assert (tokens != data["tokens"]).any(1).all() and places.shape == (6, 3)
    torch.rand(3)
    again = shown_to(model(SOFTMAX), own, data)
    assert torch.equal(again[0], tokens) and torch.equal(again[2], places)
    for row in range(6):
        alone = shown_to(model(), own, rows_of(data, slice(row, row + 1)))
        assert torch.equal(alone[0][0], tokens[row]) and torch.equal(alone[2][0], places[row])
    padded = {**data, "tokens": F.pad(data["tokens"], (0, 5)), "segments": F.pad(data["segments"], (0, 5), value=-1)}
    assert torch.equal(shown_to(model(), own, padded)[0][:, :20], tokens)
    other = shown_to(model(), own, {**data, "key": data["key"] + 1})
    assert not torch.equal(other[0], tokens)


@torch.no_grad()
def test_metrics_of_a_model_that_knows():
    """Check that accuracy, loss and perplexity are means over the masked tokens of real samples."""
    own, data = task(), batch(4)
    data["mask"][3] = False

    class Sage(Model):
        def forward(self, tokens, segments, places):
            truth = data["tokens"].gather(1, places)
            truth[1] = (truth[1] + 1) % 30  # always wrong in one row
            return 2.0 * F.one_hot(truth, 30)

    outcome = own.evaluate(Sage(), data)
    count = [round(0.15 * int((row > 4).sum())) for row in data["tokens"]]
    means = {name: (total / weight).item() for name, (total, weight) in outcome.sums.items()}
    assert outcome.sums["accuracy"][1] == sum(count[:3])
    share = (count[0] + count[2]) / sum(count[:3])
    right, wrong = (math.log(math.exp(2) + 29) - hit for hit in (2, 0))
    found = {metric.name: metric.value(means, {}) for metric in own.metrics}
    assert found["accuracy"] == pytest.approx(share)
    assert found["loss"] == pytest.approx(share * right + (1 - share) * wrong)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert own.metric.name == "accuracy" and own.metric.text(0.6705) == "67.05 %"


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_lit", "lion_s", "mamba", "deltanet"])
@torch.no_grad()
def test_every_form_and_batch_size_measures_the_same(mixer):
    own, net, data = task(), model(mixer).double(), batch(6)
    whole = own.evaluate(net, data)
    assert whole.outputs.shape == (6, 3, 30)
    for form in forms_of(net):
        set_form(net, form, 4)
        parts = [own.evaluate(net, rows_of(data, slice(i, i + 2))) for i in (0, 2, 4)]
        close(torch.cat([p.outputs for p in parts]), whole.outputs, 1e-5)
        for name, pair in whole.sums.items():
            for i in range(2):
                close(sum(p.sums[name][i] for p in parts), pair[i], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_outputs_are_of_tokens_as_they_stand():
    own, net, data = task(), model(), batch()
    assert torch.equal(own.outputs(net, data), net(data["tokens"], data["segments"]).float())
    assert own.outputs(net, data).shape == (4, 20, 30)


def test_examples_are_padded_rows_and_need_no_memory():
    own = task()
    example = own.example(5, "cpu")
    assert example["tokens"].shape == (5, 20) and example["tokens"].max() < 30
    assert (example["segments"] == -1).sum(1).tolist() == [0, 0, 0, 10, 0]  # padded like real rows, to time a step
    with torch.device("meta"):
        net = own.build_model(BertConfig("lion_s", 12, 2, 3))
    assert own.loss(net, own.example(3, "meta")).loss.device.type == "meta"


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match=r"task.masked: with random=0.4, expected at most 0.6, got 0.8"):
        build(MaskedLMConfig, {"random": 0.4}, source=lambda key: "recipe", key="task")
    refused("tokenizer 'toy' has no token 'mask', it has pad", task, TextInfo(30, 20, "toy", "f" * 64, {"pad": 0}))
    refused(
        r"data.length: 20 tokens, but model.max_positions allows only 16",
        task().build_model,
        BertConfig(SOFTMAX, 12, 1, 3, max_positions=16),
    )


@pytest.mark.parametrize(("mixer", "steps"), [(SOFTMAX, 150), ("lion_s", 60)])
@pytest.mark.slow
def test_it_learns(mixer, steps, tmp_path):
    """Train with micro-batches and reach far more accuracy than always predicting the commonest letter."""
    own = task()
    seed_everything(0)
    net = own.build_model(BertConfig(mixer, 24, 2, 3, mlp_ratio=2, init_std=0.1, dropout=0.0))
    splits = Splits(Text(256), Text(40, seed=1), None, INFO)
    lengths = {"steps": steps, "eval_every": steps, "save_every": steps // 2}
    trainer = fit(own, net, splits, tmp_path, batch_size=32, micro_batch=16, **lengths)
    found = measured(own, net, *trainer.data.held_out()["val"])
    assert found["accuracy"] > 0.3
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert isinstance(trainer.model, Bert)


def test_weights_of_another_vocabulary_mean_nothing_here():
    INFO.check_transfer("it", dataclasses.replace(INFO, length=999).to_dict())
    with pytest.raises(ConfigError, match="init_from: run was trained with another vocabulary: its tokenizer was"):
        INFO.check_transfer("init_from: run", dataclasses.replace(INFO, fingerprint="e" * 64).to_dict())


def test_parts_of_a_row_are_hidden_as_rows():
    tokens, keys = torch.randint(5, 30, (2, 60)), torch.tensor([[1, 2, 3], [4, 5, 6]])
    segments = torch.zeros_like(tokens)
    segments[0, 50:] = -1
    long = task().mask_by_key({"tokens": tokens, "key": keys, "segments": segments})
    rows = {"tokens": tokens.view(6, 20), "key": keys.flatten(), "segments": segments.view(6, 20)}
    short = task().mask_by_key(rows)
    assert torch.equal(long.tokens.view(6, 20), short.tokens) and not torch.equal(long.tokens, tokens)
    assert torch.equal(long.targets.view(6, -1), short.targets) and torch.equal(long.chosen.view(6, -1), short.chosen)
    assert torch.equal(tokens.gather(1, long.places), long.targets)
