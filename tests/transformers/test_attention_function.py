"""Lion-lit and Lion-D as attention functions in models of transformers, against explicit masks."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.clip.modeling_clip import CLIPAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from lion.ops import Settings, linear_attention
from lion.transformers import add_decays, check_attention
from lion.transformers.attention import last_rows, register_attention
from tests.layers.helpers import close, invalid
from tests.ops.helpers import Inputs, oracle_attention
from tests.transformers.tiny import ids, left_padded

NAMES = ["lion_lit", "lion_d"]
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 40}
SIZES |= {"initializer_range": 0.5, "max_position_embeddings": 64}
ROWS = [ids(6), ids(9, seed=1), ids(3, seed=2)]


def made(kind, name, **changes):
    torch.manual_seed(0)
    config, model, layer = {
        "llama": (transformers.LlamaConfig, transformers.LlamaModel, LlamaAttention),
        "bert": (transformers.BertConfig, transformers.BertModel, BertSelfAttention),
        "mistral": (transformers.MistralConfig, transformers.MistralModel, None),
    }[kind]
    groups = {} if kind == "bert" else {"num_key_value_heads": 2}
    found = model(config(**SIZES, **groups, **changes, attn_implementation=name))
    if name == "lion_d":
        add_decays(found, layer)
    return found.double().eval()


def phi(x):
    x = torch.nn.functional.silu(x) + 0.5
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["llama", "bert"])
@torch.no_grad()
def test_every_layer_computes_the_published_attention(kind, name, monkeypatch):
    model, seen = made(kind, name), []
    function = transformers.AttentionInterface()[name]

    def recorded(module, query, key, value, mask, **others):
        found = function(module, query, key, value, mask, **others)
        seen.append((module, query, key, value, found[0]))
        return found

    transformers.AttentionInterface.register(name, recorded)
    try:
        model(ROWS[1][None])
    finally:
        register_attention()
    assert len(seen) == 2
    for module, query, key, value, y in seen:
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        log_decay = None
        if name == "lion_d":
            log_decay = torch.nn.functional.logsigmoid(module.lion_decay)
        direction = "forward" if kind == "llama" else "both"
        wanted = oracle_attention(Inputs(phi(query), phi(key), value, log_decay), direction=direction)
        close(y.transpose(1, 2), wanted, 1e-11)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["llama", "bert"])
@torch.no_grad()
def test_padding_and_packed_rows_change_nothing(kind, name):
    model = made(kind, name)
    alone = [model(row[None]).last_hidden_state[0] for row in ROWS]
    tokens, mask = left_padded(ROWS)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    together = model(tokens, mask, position_ids=places).last_hidden_state
    for found, wanted in zip(together, alone):
        close(found[-len(wanted) :], wanted, 1e-11)
    if kind == "llama":
        packed = torch.cat([torch.arange(len(row)) for row in ROWS])[None]
        for wide in (model, made("mistral", name, sliding_window=64)) if name == "lion_lit" else (model,):
            found = wide(torch.cat(ROWS)[None], position_ids=packed, use_cache=False).last_hidden_state[0]
            close(found, torch.cat(alone), 1e-11)


@torch.no_grad()
def test_a_decoder_generates_and_can_look_both_ways():
    model = made("llama", "lion_d")
    whole = model(ROWS[1][None]).last_hidden_state
    first = model(ROWS[1][None, :5], use_cache=True)
    rest = model(ROWS[1][None, 5:], past_key_values=first.past_key_values).last_hidden_state
    close(torch.cat([first.last_hidden_state, rest], 1), whole, 1e-11)
    model.config.is_causal = False
    changed = ROWS[1].clone()
    changed[-1] = 7
    both = [model(x[None], use_cache=False).last_hidden_state[0, 0] for x in (ROWS[1], changed)]
    assert (both[0] - both[1]).abs().max() > 1e-3


GAP = [-1] * 20 + [0] * 180 + [-1] * 40 + [0] * 60  # a text of several turns
SEGMENTS = torch.tensor([GAP, [0] * 200 + [1] * 97 + [-1] * 3])
HALF = 5e-2  # half precision rounds each gradient


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "masked"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, HALF), (torch.float16, HALF)],
)
def test_last_rows_are_those_of_whole_sequences(dtype, tolerance, segments):
    """Check queries of a cache against attention of all tokens, with padding that holds NaN, and documents."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 3, 300, n, generator=generator, dtype=torch.float64).to(dtype) for n in (8, 8, 5)]
    log_decay = -torch.rand(3, generator=generator)
    real = torch.ones(2, 1, 300, 1, dtype=torch.bool) if segments is None else segments[:, None, :, None] >= 0
    log_decay = log_decay.to(dtype if dtype == torch.float64 else torch.float32)
    for decay, normalize in ((None, "sum"), (log_decay, "sum"), (log_decay, "none")):
        settings = Settings(form="auto", direction="forward", feature_map="silu_shifted", normalize=normalize)
        results = []
        for fn in (last_rows, linear_attention):
            given = [x.detach().clone().requires_grad_() for x in whole]
            q, k, v = (x.where(real, torch.nan) for x in given)
            if fn is last_rows:
                q = q[:, :, -100:]
            y = fn(q, k, v, decay, segments=segments, settings=settings)[:, :, -100:]
            y = y.where(real[:, :, -100:], 0)
            results.append([y, *torch.autograd.grad(y.double().square().sum(), given)])
        for got, want in zip(*results):
            assert (got - want).abs().max() <= tolerance * want.abs().max()


def test_gradients_reach_the_decays():
    model = made("bert", "lion_d").train()
    model(ROWS[0][None]).last_hidden_state.pow(2).sum().backward()
    assert all(p.grad.abs().sum() > 0 for name, p in model.named_parameters() if name.endswith("lion_decay"))


@torch.no_grad()
def test_decays_are_saved_and_loaded(tmp_path):
    model = transformers.LlamaForCausalLM(made("llama", "lion_d").config)
    add_decays(model, LlamaAttention)
    model.save_pretrained(tmp_path, max_shard_size="4kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    wanted = model(ROWS[1][None], output_hidden_states=True)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):  # with and without a head
        again = auto.from_pretrained(tmp_path, attn_implementation="lion_d")
        add_decays(again, LlamaAttention, tmp_path)
        found = again(ROWS[1][None], output_hidden_states=True)
        close(found.hidden_states[-1], wanted.hidden_states[-1], 0)
    again.save_pretrained(tmp_path / "body")
    add_decays(model, LlamaAttention, tmp_path / "body")
    close(model(ROWS[1][None]).logits, wanted.logits, 0)
    with pytest.raises(ValueError, match=r"add_decays: .*other does not have 4 decays for layers.0.self_attn"):
        add_decays(again, LlamaAttention, tmp_path / "other")


def test_each_tower_of_a_model_has_decays_of_its_own_heads():
    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    text = {**tower, "num_attention_heads": 2, "vocab_size": 40}
    vision = {**tower, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    add_decays(model, CLIPAttention)
    assert [p.shape[0] for name, p in model.named_parameters() if name.endswith("lion_decay")] == [2, 4]


def test_what_cannot_be_expressed_is_refused():
    tokens = ROWS[1][None]
    invalid(
        r"documents, causal or in both directions, and no others \(sliding windows",
        made("mistral", "lion_lit", sliding_window=4),
        tokens,
    )
    model = made("llama", "lion_lit")
    for given, message in (
        ({"softcap": 30.0}, "lion_lit: softcap is not available"),
        ({"attention_mask": torch.zeros(1, 1, 9, 9).double()}, r"got float64 \(1, 1, 9, 9\); a mask of pairs"),
        (
            {"attention_mask": torch.ones(1, 9, 9).bool()},
            r"expected padding \(B, L\), got \(1, 9, 9\); a mask of pairs",
        ),
    ):
        invalid(message, model, tokens, **given)
    model.set_attn_implementation("lion_d")
    invalid(r"lion_d: LlamaAttention has no decays, call .*add_decays\(model, LlamaAtt", model, tokens)
    invalid("LlamaModel has no module of the class BertSelfAttention", add_decays, model, BertSelfAttention)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lengths", [(5, 5), (5, 3), (3, 5)])
def test_cross_attention_is_refused_at_equal_lengths_too(name, lengths):
    """Run BART, and the causal decoder of a BART and of a BERT on the outputs of another encoder, padded or not."""
    sizes = {"d_model": 16, "vocab_size": 40, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 16}
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
    bart = transformers.BartConfig(**sizes)
    bert = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    source, target = (ids(2, length) for length in lengths)
    states = torch.randn(2, lengths[0], 16)
    padding = torch.arange(lengths[0]) < torch.tensor([[3], [2]])
    models = [transformers.BartModel(bart), transformers.BartForCausalLM(bart), transformers.BertLMHeadModel(bert)]
    for model in models:
        for module in model.modules():
            if "Attention" in type(module).__name__ and name == "lion_d":
                module.lion_decay = torch.nn.Parameter(torch.randn(2 if "Bart" in type(module).__name__ else 4))
        model.set_attn_implementation(name)
        for mask in (None, padding):
            with pytest.raises(ValueError, match="cross-attention is not available, so that encoder-decoder models"):
                if isinstance(model, transformers.BartModel):
                    model(input_ids=source, decoder_input_ids=target, attention_mask=mask)
                else:
                    model(target, encoder_hidden_states=states, encoder_attention_mask=mask)
    models[1](target)  # a decoder alone, and an encoder alone
    transformers.BertModel(transformers.BertConfig(**SIZES, attn_implementation="lion_lit"))(source)


@pytest.mark.parametrize("kind", ["MPNet", "DebertaV2", "MegatronBert"])
def test_a_model_that_computes_attention_itself_is_refused(kind):
    sizes = {**SIZES, "attn_implementation": "lion_lit"}
    model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**sizes))
    calls = [lambda: check_attention(model), lambda: add_decays(model, torch.nn.Module)]
    if kind != "DebertaV2":  # which asks for no mask
        calls += [lambda: model(ROWS[0][None]), lambda: model(ROWS[0][None], torch.ones(1, 6))]
    for call in calls:
        invalid(f"^attn_implementation: {kind}Model computes attention itself, without", call)
    for name in NAMES:
        check_attention(made("llama", name))
