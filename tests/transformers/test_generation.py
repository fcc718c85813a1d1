"""`generate` of transformers: greedy, sampling, beams, left padding, in a state of constant size."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import lion
from lion.inference.text import Sampling
from lion.transformers import LionCache, LionForCausalLM
from tests.layers.helpers import close, invalid
from tests.transformers.tiny import ids, left_padded, made

PARTS = {"attention": {"block": "published"}}  # short convolutions or a token shift, which have states
MIXERS = [(name, {}) for name in ("lion_s", "lion_lit", "lightnet", "rwkv7", "softmax")]
MIXERS += [("gated_deltanet", PARTS), ("rwkv7", PARTS)]
ROWS = [ids(5), ids(9, seed=1), ids(2, seed=2)]
COUNT = 8


def gpt(mixer="lion_s", **fields):
    return made(LionForCausalLM, "gpt", mixer, pad_token_id=0, **fields)


def new(model, **how):
    """Return the new tokens of left-padded rows."""
    tokens, mask = left_padded(ROWS)
    how = {"max_new_tokens": COUNT, "do_sample": False, "output_logits": True, "return_dict_in_generate": True} | how
    found = model.generate(tokens, attention_mask=mask, **how)
    return found.sequences[:, tokens.shape[1] :], found


@pytest.mark.parametrize(("mixer", "settings"), MIXERS)
def test_greedy_generation_is_ours(mixer, settings):
    model = gpt(mixer, model=settings)
    found, first = new(model)
    rows = lion.generate(model.model, [row.tolist() for row in ROWS], COUNT, sampling=Sampling(temperature=0))
    wanted = torch.tensor([row[-COUNT:] for row in rows])
    assert torch.equal(found, wanted) and found.unique().numel() > 3
    without, again = new(model, use_cache=False)
    assert torch.equal(without, found)
    close(first.logits, again.logits, 1e-5)


def test_beams_and_samples_do_not_depend_on_the_cache():
    model = gpt()
    for how in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "top_k": 5}):
        found = []
        for cached in (True, False):
            torch.manual_seed(0)
            found.append(new(model, use_cache=cached, **how)[0])
        assert torch.equal(*found), how
    assert not torch.equal(new(model)[0], new(model, num_beams=3)[0])  # beams have been reordered


@torch.no_grad()
def test_the_state_has_a_constant_size_and_continues():
    model, tokens = gpt(), ids(2, 12)
    cache = LionCache()

    def size():
        return sum(x.numel() for x in torch.utils._pytree.tree_leaves(cache.state))

    first = model(tokens[:, :3], past_key_values=cache, use_cache=True)
    assert first.past_key_values is cache and (cache.get_seq_length(), cache.batch_size, len(cache)) == (3, 2, 2)
    before = size()
    parts = [first.logits]
    for piece in (tokens[:, 3:8], tokens[:, 8:9], tokens[:, 9:]):
        parts.append(model(piece, past_key_values=cache).logits)
    close(torch.cat(parts, 1), model(tokens).logits, 1e-11)
    assert size() == before and cache.get_seq_length() == 12
    invalid("LionCache: a recurrent state cannot forget", cache.crop, -1)
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)


def test_embeddings_are_a_prompt_and_hidden_states_are_returned():
    model, prompt = gpt(), ids(2, 5)
    whole = model.generate(prompt, max_new_tokens=4, do_sample=False)
    how = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_hidden_states": True}
    found = model.generate(inputs_embeds=model.get_input_embeddings()(prompt), **how)
    assert torch.equal(found.sequences, whole[:, 5:])
    assert [states[0].shape[1] for states in found.hidden_states] == [5, 1, 1, 1]


@pytest.mark.parametrize("mixer", ["lion_s", "lion_lit", "softmax"])
def test_a_returned_cache_continues_a_text(mixer):
    model, prompt = gpt(mixer), ids(2, 5)
    whole = model.generate(prompt, max_new_tokens=9, do_sample=False)
    half = model.generate(prompt, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    cache, seen = half.past_key_values, half.past_key_values.seen
    assert seen == half.sequences.shape[1] - 1  # the last token has not been read
    rest = model.generate(half.sequences, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert torch.equal(rest, whole) and cache.seen == seen + 5


@torch.no_grad()
def test_rows_of_a_cache_are_selected_and_repeated():
    model, tokens = gpt(), ids(3, 6)
    cache = model(tokens[:, :5], use_cache=True).past_key_values
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    order = [2, 2, 0, 0]
    found = model(tokens[order, 5:], past_key_values=cache).logits
    close(found[:, 0], model(tokens[order]).logits[:, -1], 1e-11)


PACKED = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]])}


def test_what_a_cache_cannot_do_is_refused():
    model, tokens = gpt("lion_lit"), ids(1, 6)
    cache = model(tokens, use_cache=True).past_key_values
    other = transformers.DynamicCache()
    calls = [
        (tokens, {"use_cache": True, name: x}, "use_cache: a cache holds one document") for name, x in PACKED.items()
    ]
    calls += [
        (
            tokens[:, :2],
            {"position_ids": torch.tensor([[0, 1]]), "past_key_values": cache},
            "position_ids: expected positions that count on from the tokens of the cache",
        ),
        (
            tokens[:, :1],
            {"attention_mask": torch.ones(1, 1, dtype=torch.long), "past_key_values": cache},
            r"attention_mask: expected .* \(1, 7\), got int64 \(1, 1\)",
        ),
        (tokens, {"past_key_values": other}, "cache: expected a LionCache, got DynamicCache, which holds keys and val"),
        (tokens, {"cache": other}, "cache: expected a LionCache, got DynamicCache, which holds keys and val"),
        (ids(1, 33), {"use_cache": True}, "tokens: 33 in one row, this model has only 32 position embeddings"),
        (ids(1, 27), {"past_key_values": cache}, "tokens: more than the 32 position embeddings"),
    ]
    for given, how, message in calls:
        invalid(message, model, given, **how)
    for how, message in (
        ({"past_key_values": other}, "cache: expected a LionCache, got DynamicCache"),
        ({"assistant_model": gpt()}, "assisted generation is not supported with stateful models"),
    ):
        invalid(message, model.generate, tokens, max_new_tokens=2, **how)
