"""Checkpoints of transformers and nanoGPT become runs with their logits, and runs folders that transformers reads."""

import json

import pytest
import torch

import lion
from data.text.tokenizers import make_tokenizer
from tests.helpers import here, state_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

TEXT = ["The capital of France is Paris.", "Ask not what your country can do for you.", "To be, or not to be: that is."]
SIZES = {"bert": "mlm_base_softmax", "gpt": "gpt2_small_softmax"}
TINY = ["trainer.precision=fp32", "trainer.compile=false", "trainer.micro_batch=4", "data.name=text", "data.length=17"]


@pytest.fixture(scope="module")
def tokenizers():
    """By model, as this package makes them."""
    return {"bert": make_tokenizer("wordpiece", TEXT, 200), "gpt": make_tokenizer("bpe", TEXT, 280)}


def bert(tokenizer, kind=transformers.BertForMaskedLM, **changes):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 28}
    sizes |= {"max_position_embeddings": 32, "initializer_range": 0.4, "vocab_size": tokenizer.vocabulary}
    return made(kind, transformers.BertConfig(**{**sizes, **changes}))


def gpt(tokenizer, **changes):
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16, "n_inner": 28, "initializer_range": 0.4}
    config = transformers.GPT2Config(**{**sizes, "vocab_size": tokenizer.vocabulary, **changes})
    return made(transformers.GPT2LMHeadModel, config)


def made(kind, config):
    """With weights in which every part of the model shows."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name.lower() or "ln_" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


MODELS = {"bert": bert, "gpt": gpt}


def saved(folder, model, tokenizer, **how):
    model.save_pretrained(folder, **how)
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    return folder


def convert(folder, run, *args, kind="bert"):
    assert here("convert", folder, SIZES[kind], run, *TINY, "model.pad_vocabulary=64", *args) == 0
    return run


@torch.no_grad()
def apart(ours, theirs, padded=False):
    """The largest difference of logits in float64, on random tokens; of a BERT on pairs, with padding if asked."""
    ours, theirs = ours.double().eval(), theirs.double().eval()
    tokens = torch.randint(ours.vocabulary, (2, 13), generator=torch.Generator().manual_seed(3))
    segments, types = torch.zeros_like(tokens), None
    inputs = {"input_ids": tokens}
    if padded:
        segments[1, 9:] = -1
        inputs["attention_mask"] = (segments >= 0).long()
    if isinstance(ours, lion.models.bert.Bert) and ours.types is not None:
        types = torch.zeros_like(tokens)
        types[:, 6:] = ours.types.num_embeddings - 1
        inputs["token_type_ids"] = types
    found = ours(tokens, segments, *([] if types is None else [types]))
    expected = theirs(**inputs)
    expected = expected.prediction_logits if "prediction_logits" in expected else expected.logits
    assert expected.std() > 0.3
    return (found - expected[..., : ours.vocabulary])[segments >= 0].abs().max().item()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_are_theirs_and_come_back_the_same(kind, padded, tokenizers, tmp_path, capsys):
    theirs = MODELS[kind](tokenizers[kind])
    run = convert(saved(tmp_path / "their", theirs, tokenizers[kind]), tmp_path / "run", kind=kind)
    said = capsys.readouterr().out
    assert "2 blocks of width 12, 3 heads" in said and "trusted" not in said and "not used" not in said
    ours = lion.load(run, compile=False)
    assert apart(ours, theirs, padded) < 1e-10
    assert len(ours.tokens.weight) % 64 == 0
    assert here("export", run, tmp_path / "back") == 0
    auto = {"bert": transformers.AutoModelForMaskedLM, "gpt": transformers.AutoModelForCausalLM}[kind]
    back, told = auto.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(back) is type(theirs) and not any(told[k] for k in ("missing_keys", "unexpected_keys"))
    assert apart(ours, back, padded) < 1e-10
    wanted = theirs.float().state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in back.float().state_dict().items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "run", "their"]


def test_a_mistake_would_show(tokenizers, tmp_path):
    theirs = gpt(tokenizers["gpt"])
    ours = lion.load(
        convert(saved(tmp_path / "a", theirs, tokenizers["gpt"]), tmp_path / "run", kind="gpt"), compile=False
    )
    for block in ours.encoder.blocks:
        block.mlp.__class__ = lion.layers.block.Mlp  # the exact GELU
    assert apart(ours, theirs) > 1e-6


def test_what_was_pre_trained_has_heads_that_are_left_and_named(tokenizers, tmp_path, capsys):
    theirs = bert(tokenizers["bert"], transformers.BertForPreTraining, type_vocab_size=3, layer_norm_eps=1e-3)
    run = convert(saved(tmp_path / "their", theirs, tokenizers["bert"]), tmp_path / "run")
    said = capsys.readouterr().out
    assert "bert.pooler.dense.bias" in said and "cls.seq_relationship.weight" in said
    assert apart(lion.load(run, compile=False), theirs) < 1e-10


@pytest.mark.parametrize("way", ["bin", "shards", "half", "old", "file", "doubled"])
def test_files_of_every_kind(way, tokenizers, tmp_path):
    tokenizer, folder = tokenizers["bert"], tmp_path / "their"
    theirs = bert(tokenizer)
    checkpoint = saved(folder, theirs, tokenizer, **({"max_shard_size": "4KB"} if way == "shards" else {}))
    weights = theirs.state_dict()
    if way == "shards":
        assert len(list(folder.glob("*.safetensors"))) > 2
    elif way == "half":
        saved(folder, theirs.half(), tokenizer)
        theirs = theirs.float()
    elif way == "file":
        checkpoint = folder / "model.safetensors"
    elif way != "doubled":
        (folder / "model.safetensors").unlink()
        old = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
               for k, v in weights.items()}  # fmt: skip
        position_ids = {"bert.embeddings.position_ids": torch.arange(32)[None]}
        torch.save({**old, **position_ids} if way == "old" else weights, folder / "pytorch_model.bin")
    run = convert(checkpoint, tmp_path / "run")
    assert apart(lion.load(run, compile=False), theirs) < 1e-10
    kept = json.loads((run / "environment.json").read_text())["converted"]["sha256"]
    assert len(kept) == (len(list(folder.glob("*.safetensors"))) if way == "shards" else 1)
    assert all(value.dtype == torch.float32 for value in state_of(run, "best")["model"].values())
