"""Tests of BERT: conventions, and isolation of packed documents, with every mixer.

`tests/tools/test_convert_language.py` compares logits with those of transformers, `tests/test_recipes.py` the sizes.
"""

import pytest
import torch

from lion.layers.blocks.post_norm import PostNorm
from lion.layers.mixers import LINEAR, NONE, SOFTMAX, Attention, AttentionConfig
from lion.layers.mixers.base import forms_of, set_form
from lion.models.bert import Bert, BertClassifier, BertClassifierConfig, BertConfig
from lion.recipe import build
from tests.layers.helpers import close, doubles, invalid
from tests.models.helpers import adapted

VOCABULARY = 40
EVERY = (SOFTMAX, *LINEAR)


def bert(mixer=SOFTMAX, length=24, depth=2, **settings):
    torch.manual_seed(0)
    settings = {"mlp_ratio": 2, "max_positions": 32, "init_std": 0.3, **settings}
    model = Bert(BertConfig(mixer, 12, depth, 3, **settings), vocabulary=VOCABULARY, length=length)
    return model.double().eval()


def documents(lengths=(7, 1, 5, 9)):
    torch.manual_seed(1)
    return [torch.randint(VOCABULARY, (n,)) for n in lengths]


@pytest.mark.parametrize(("mixer", "tpe"), [*((m, None) for m in (*EVERY, NONE)), (SOFTMAX, 3), ("lion_s", 3)])
@torch.inference_mode()
def test_packed_documents_give_the_logits_of_one_a_row(mixer, tpe):
    """Check that packing, and padding in front, between and behind, whatever it holds, leave the logits unchanged."""
    model, texts = bert(mixer, depth=1, token_types=2, tpe=tpe), documents()
    row = torch.randint(VOCABULARY, (24,))
    segments = torch.full((24,), -1)
    begins = (1, 8, 10, 15)  # the first two are adjacent; padding surrounds the others
    for i, (begin, text) in enumerate(zip(begins, texts)):
        row[begin : begin + len(text)], segments[begin : begin + len(text)] = text, i
    for form in forms_of(model):
        set_form(model, form, 4)
        packed = model(row[None], segments[None])[0]
        for begin, text in zip(begins, texts):
            alone = model(text[None])[0]
            close(packed[begin : begin + len(text)], alone, 1e-10)
        other = torch.where(segments < 0, (row + 1) % VOCABULARY, row)
        assert torch.equal(model(other[None], segments[None])[0], packed)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_s", "lightnet", "deltanet"])
@torch.inference_mode()
def test_a_padded_batch_gives_the_logits_of_single_texts(mixer):
    model, texts = bert(mixer), documents()
    tokens, segments = torch.zeros(4, 9, dtype=torch.long), torch.full((4, 9), -1)
    for i, text in enumerate(texts):
        tokens[i, : len(text)], segments[i, : len(text)] = text, 0
    logits = model(tokens, segments)
    assert logits.shape == (4, 9, VOCABULARY)
    for i, text in enumerate(texts):
        close(logits[i, : len(text)], model(text[None])[0], 1e-10)


@pytest.mark.parametrize("mixer", [SOFTMAX, "lion_lit", "lion_s"])
@torch.inference_mode()
def test_the_head_reads_the_places_that_are_asked_for(mixer):
    model, tokens = bert(mixer, pad_vocabulary=64), torch.randint(VOCABULARY, (2, 9))
    places = torch.tensor([[3, 0, 8], [5, 5, 1]])
    whole = model(tokens)
    assert model.tokens.weight.shape == (*model.head.bias.shape, 12) == (64, 12) and whole.shape[-1] == VOCABULARY
    found = model(tokens, places=places)
    close(found, whole[torch.arange(2)[:, None], places], 1e-12)
    for place in (9, -1):  # never the logits of another token
        with pytest.raises((RuntimeError, IndexError)):
            model(tokens, places=torch.full((2, 1), place))


def test_conventions_of_the_mixers():
    """Compare with recipes.md 3.2, 3.3 and 9.8: the conventions of the paper and of the released code."""

    def built(mixer, **settings):
        c = BertConfig(mixer, 12, 2, 3, **settings).resolved()
        a = c.attention
        return c.position_embedding, a.out_norm, a.feature_map, a.normalize

    paper, released = ("silu_shifted", "sum"), ("identity", "none")
    for mixer, around in (("lion_lit", (True, "layernorm")), ("lion_d", (False, "none")), ("lion_s", (False, "none"))):
        assert built(mixer) == (*around, *paper)
        assert built(mixer, preset="released") == (*around, *released)
    assert built(SOFTMAX) == (True, "none", None, None) == built(SOFTMAX, preset="released")
    asked = BertConfig(SOFTMAX, 12, 2, 3)
    assert asked.resolved() != asked == BertConfig(SOFTMAX, 12, 2, 3)  # `resolved` leaves the given settings unchanged
    assert not built("lion_lit", tpe=4)[0] and not built(SOFTMAX, attention=AttentionConfig(rotation="lrpe"))[0]
    assert built("lion_s", position_embedding=True)[0] and not built(SOFTMAX, position_embedding=False)[0]
    bare = AttentionConfig(out_norm="none")
    assert built("lion_lit", attention=bare)[1] == "none"
    assert BertConfig("lion_lit", 12, 2, 3, attention=bare).label() == "lion_lit without output norm"
    for mixer, norms in (("lion_lit", 1), ("lion_s", 0)):
        layers = [m for m in bert(mixer).modules() if isinstance(m, Attention)]
        assert all((m.out_norm is not None) == bool(norms) for m in layers)


@torch.inference_mode()
def test_the_released_attention_is_plain_products():
    """Compare with Y = ((Q K^T / sqrt(d)) * M) V, where M is Eq. 14's mask of a fixed decay."""
    layer = bert("lion_d", preset="released").encoder.blocks[0].attention
    x = doubles(2, 9, 12)
    q, k, v = layer.heads(x)
    decay = torch.sigmoid(layer.decays[0].a)[:, None, None]
    gap = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    mixed = (q @ k.mT / 4**0.5 * decay**gap) @ v
    close(layer(x), layer.proj(mixed.transpose(1, 2).flatten(2)), 1e-10)


def test_another_mixer_keeps_the_dropout():
    config = BertConfig("lion_lit", 12, 2, 3, attention=AttentionConfig(score_dropout=0.1)).with_mixer(SOFTMAX)
    assert config.attention.score_dropout == 0.1 and config.resolved().attention.out_norm == "none"


def test_initialisation():
    model = Bert(BertConfig("lion_s", 64, 2, 4, position_embedding=True, token_types=2), vocabulary=200, length=8)
    for name, parameter in model.named_parameters():
        norm, vector = "norm" in name, name.endswith("bias")
        if norm or vector:
            assert (parameter == (1 if norm and not vector else 0)).all(), name
        else:
            assert abs(parameter.std() - 0.02) < 0.004 and parameter.abs().max() > 0.04, name  # not truncated
    assert all(isinstance(block, PostNorm) for block in model.encoder.blocks)


def test_what_is_wrong_is_named():
    short, long = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 33, dtype=torch.long)
    scanned = {"mixer": "lion_s", "dim": 12, "depth": 1, "num_heads": 3, "attention": {"scans": ["row_snake"]}}
    invalid(r"data.length: 33 tokens, but model.max_positions allows only 32", bert, length=33)
    invalid(r"^length: expected at least 1, got 0$", bert, length=0)
    invalid("tokens: 33 in one row, this model has only 32 position embeddings", bert(), long)
    invalid("no embeddings of token types", bert(), short, types=short)
    invalid("model.attention.scans: text has one order", build, BertConfig, scanned, source=str, key="model")
    longer = torch.zeros(1, 40, dtype=torch.long)
    assert bert("lion_s", length=33)(longer).shape == (1, 40, VOCABULARY)


def test_a_model_with_fewer_positions_takes_the_first():
    source = bert()
    assert torch.equal(adapted(bert(max_positions=24), source), source.positions.weight[:24])


def test_a_model_with_other_positions_keeps_its_own():
    source, model = bert(), bert(position_kind="scaled_sinusoidal")
    weights = source.state_dict()
    assert model.adapt(weights, source) is weights


def test_a_classifier_of_the_first_token_needs_it_first_and_both_directions():
    config = BertClassifierConfig("lion_s", 12, 2, 3)
    model = BertClassifier(config, vocabulary=VOCABULARY, length=9, outputs=3)
    tokens, valid = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 4, dtype=torch.bool)
    valid[1, 0] = False
    invalid(r"segments: the first token of a row, \[CLS\], is read", model, tokens, valid)
    assert model(tokens, valid.flip(1)).shape == (2, 3)
    config.attention.direction = "forward"
    invalid(r"'forward': the first token, \[CLS\], is read and would see no other", config.resolved)


@torch.inference_mode()
def test_a_classifier_maps_the_first_token_as_the_original_bert():
    config = BertClassifierConfig("lion_s", 12, 2, 3, token_types=2, init_std=0.3)
    model = BertClassifier(config, vocabulary=VOCABULARY, length=9, outputs=3).eval()
    tokens, types = torch.randint(VOCABULARY, (2, 9)), torch.arange(9).ge(4).long().expand(2, -1)
    segments = torch.arange(9).lt(torch.tensor([[9], [6]])).long() - 1
    first, w = model.encode(tokens, segments, types)[:, 0], model.state_dict()
    pooled = torch.tanh(first @ w["pooler.weight"].T + w["pooler.bias"])
    close(model(tokens, segments, types), pooled @ w["classifier.weight"].T + w["classifier.bias"])
