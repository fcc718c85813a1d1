"""Tests of converting checkpoints of transformers and nanoGPT to runs, and runs back to transformers."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

import lion
from data.text.tokenizers import make_tokenizer, open_tokenizer
from lion.models.bert import Bert, BertConfig
from lion.runs import init_from, open_run
from tests.helpers import here, refuse, state_of
from tools.compose import make_task, resolve
from tools.convert import write_run
from tools.convert.bert import BertConverter
from tools.convert.language import ratio
from tools.export import transformers as classes

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
transformers.utils.logging.disable_progress_bar()

TEXT = ["The capital of France is Paris.", "Ask not what your country can do for you.", "To be, or not to be: that is."]
SIZES = {"bert": "mlm_base_softmax", "gpt": "gpt2_small_softmax"}
TINY = ["trainer.precision=fp32", "trainer.compile=false", "trainer.micro_batch=4", "data.name=text", "data.length=17"]


@pytest.fixture(scope="module")
def tokenizers():
    """Make the tokenizers of this package, by model."""
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
    """Build a model with random weights, so that every part of the model affects the logits."""
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
    """Return the largest difference of float64 logits, on random tokens; for BERT on pairs, with optional padding."""
    ours, theirs = ours.double().eval(), theirs.double().eval()
    tokens = torch.randint(ours.vocabulary, (2, 13), generator=torch.Generator().manual_seed(3))
    segments, types = torch.zeros_like(tokens), None
    inputs = {"input_ids": tokens}
    if padded:
        segments[1, 9:] = -1
        inputs["attention_mask"] = (segments >= 0).long()
    if isinstance(ours, Bert) and ours.types is not None:
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
    assert "2 blocks of width 12, 3 heads" in said and "taken from" not in said and "not used" not in said
    ours = lion.load(run, compile=False)
    assert apart(ours, theirs, padded) < 1e-10
    assert len(ours.tokens.weight) % 64 == 0
    assert here("export", run, tmp_path / "back") == 0
    auto = {"bert": transformers.AutoModelForMaskedLM, "gpt": transformers.AutoModelForCausalLM}[kind]
    back, info = auto.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(back) is type(theirs) and not any(info[k] for k in ("missing_keys", "unexpected_keys"))
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
        block.mlp.__class__ = lion.layers.blocks.base.Mlp  # the exact GELU
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


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoints(bias, tokenizers, tmp_path, capsys):
    """Convert a checkpoint with PyTorch's layout of linear weights, exact GELU, and the prefix of compiled models."""
    theirs = gpt(tokenizers["gpt"], activation_function="gelu", n_inner=None)
    if not bias:
        for name, weight in theirs.named_parameters():
            weight.data.mul_(not name.endswith("bias"))
    weights = {n: w.T.contiguous() if ".c_" in n and w.dim() == 2 else w for n, w in theirs.state_dict().items()}
    if not bias:
        weights = {n: w for n, w in weights.items() if not n.endswith("bias")}
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 16, "bias": bias, "dropout": 0.0}
    held = {"model": {f"_orig_mod.{n}": w for n, w in weights.items()}, "optimizer": {}, "iter_num": 5}
    torch.save({**held, "model_args": {**args, "vocab_size": 280}, "config": {"dataset": "x"}}, tmp_path / "ckpt.pt")
    tokenizers["gpt"].inner.save(str(tmp_path / "bpe.json"))
    run = convert(tmp_path / "ckpt.pt", tmp_path / "run", f"data.tokenizer={tmp_path / 'bpe.json'}", kind="gpt")
    assert "taken from the recipe: data.tokenizer=" in capsys.readouterr().out
    ours = lion.load(run, compile=False)
    assert (ours.encoder.norm.bias is not None) is bias
    assert apart(ours, theirs) < 1e-10
    assert here("export", run, tmp_path / "back") == 0
    assert apart(ours, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back")) < 1e-10


def test_a_file_without_its_config_is_what_the_recipe_says(tokenizers, tmp_path, capsys):
    theirs = gpt(tokenizers["gpt"])
    saved(tmp_path, theirs, tokenizers["gpt"])
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    settings = [f"data.tokenizer={tmp_path / 'tokenizer.json'}", "model.num_heads=3"]
    run = convert(tmp_path / "weights.safetensors", tmp_path / "run", *settings, kind="gpt")
    said = capsys.readouterr().out
    assert "taken from the recipe: model.num_heads=3, model.norm_eps=1e-05, data.tokenizer=" in said
    assert apart(lion.load(run, compile=False), theirs) < 1e-10


def test_embeddings_that_are_padded_there(tokenizers, tmp_path):
    theirs = bert(tokenizers["bert"], vocab_size=256)
    assert tokenizers["bert"].vocabulary < 250
    run = convert(saved(tmp_path / "their", theirs, tokenizers["bert"]), tmp_path / "run", "model.pad_vocabulary=1")
    ours = lion.load(run, compile=False)
    assert len(ours.tokens.weight) == tokenizers["bert"].vocabulary
    assert apart(ours, theirs) < 1e-10


@pytest.mark.parametrize("hidden", range(100, 140))
def test_any_width_of_an_mlp_has_its_ratio(hidden):
    assert all(int(dim * ratio(hidden, dim)) == hidden for dim in (12, 49, 312))


def test_fewer_positions_are_the_first(tokenizers, tmp_path):
    theirs = gpt(tokenizers["gpt"])
    folder = saved(tmp_path / "their", theirs, tokenizers["gpt"])
    ours = lion.load(convert(folder, tmp_path / "run", "data.length=14", kind="gpt"), compile=False)
    assert ours.longest == 13 and apart(ours, theirs) < 1e-10


def test_others_start_from_it(tokenizers, tmp_path):
    theirs = bert(tokenizers["bert"])
    run = convert(saved(tmp_path / "their", theirs, tokenizers["bert"]), tmp_path / "run")
    loaded = open_run(run)
    other = loaded.task.build_model(loaded.recipe.model.with_mixer("lion_s"))
    init_from(other, run, loaded.task.info)
    kept, mine = loaded.model.state_dict(), other.state_dict()
    fresh = {name for name in mine if ".decays." in name}
    assert fresh and mine.keys() - kept.keys() == fresh and kept.keys() - mine.keys() == {"positions.weight"}
    assert all(torch.equal(mine[name], kept[name]) for name in mine.keys() - fresh)


def test_the_run_keeps_its_tokenizer_and_gives_it_back(tokenizers, tmp_path, capsys):
    tokenizer = tokenizers["bert"]
    folder = saved(tmp_path / "their", bert(tokenizer), tokenizer)
    run = convert(folder, tmp_path / "run", "data.document=line")
    folder.rename(tmp_path / "gone")
    assert open_run(run).task.info.fingerprint == tokenizer.fingerprint
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 20))
    assert here("eval", run, f"data.path={tmp_path / 'text.txt'}", f"data.root={tmp_path / 'data'}", "--eager") == 0
    assert "MLM accuracy" in capsys.readouterr().out
    run = run.rename(tmp_path / "moved")
    assert here("predict", run, "the capital of [MASK] is paris.") == 0
    assert here("export", run, tmp_path / "named", f"data.tokenizer={run / 'their.json'}") == 0
    assert here("export", run, tmp_path / "back") == 0
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    cls, sep, mask = (tokenizer.special[name] for name in ("cls", "sep", "mask"))
    words = [tokenizer.encode(text) for text in ("the capital of", "is paris.")]
    assert auto("the capital of [MASK] is paris.").input_ids == [cls, *words[0], mask, *words[1], sep]
    pair = auto("the capital of", "is paris.")
    assert pair.input_ids == [cls, *words[0], sep, *words[1], sep]
    assert pair.token_type_ids == [0] * (2 + len(words[0])) + [1] * (1 + len(words[1]))
    assert (auto.mask_token_id, auto.pad_token_id, auto.model_max_length) == (mask, tokenizer.special["pad"], 32)


def test_gpts_generate_and_are_given_back_with_their_tokenizer(tokenizers, tmp_path, capsys):
    tokenizer = tokenizers["gpt"]
    run = convert(saved(tmp_path / "their", gpt(tokenizer), tokenizer), tmp_path / "run", kind="gpt")
    assert here("generate", run, "--prompt", "To be", "--tokens", 3, "--temperature", 0) == 0
    text = capsys.readouterr().out.splitlines()[-1]
    assert here("export", run, tmp_path / "back") == 0
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    ids = model.generate(**auto("To be", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert auto.decode(ids[0]) == text and auto.eos_token == auto.pad_token == "<|endoftext|>"
    batch = auto(["To be", "To be, or not"], padding=True, return_tensors="pt")  # padded before the prompts
    ids = model.generate(**batch, max_new_tokens=3, do_sample=False, pad_token_id=auto.pad_token_id)
    assert auto.decode(ids[0], skip_special_tokens=True) == text


def test_cased_vocabularies_stay_cased(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "Paris", "paris"]))
    assert open_tokenizer(str(tmp_path)).encode("Paris paris") == [6, 6]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert open_tokenizer(str(tmp_path)).encode("Paris paris") == [5, 6]


@torch.no_grad()
def test_what_our_models_leave_out_is_zero_there():
    config = BertConfig(mixer="softmax", dim=12, depth=2, num_heads=3, token_types=0, pad_vocabulary=64)
    config.attention.qkv_bias = False
    ours, converter = Bert(config, vocabulary=90, length=8).eval(), BertConverter()
    held = converter.config(ours, SimpleNamespace(special={"pad": 0}))
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**held)).eval()
    assert not theirs.load_state_dict(converter.restored(ours), strict=False).unexpected_keys
    theirs.tie_weights()
    tokens = torch.arange(16).view(2, 8)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


OTHER = [  # settings of a run whose model transformers' own BERT cannot be
    "model.mixer=lion_s",
    "model.norm=rmsnorm",
    "model.block=pre_norm",
    "model.mlp=glu",
    "model.position_embedding=false",
    "model.attention.out_norm=layernorm",
    "model.attention.feature_map=elu1",
    "model.attention.key_heads=1",
    "model.attention.value_ratio=2",
    "model.attention.value_map=silu",
]


def untrained(recipe, info):
    """Write an untrained run of a recipe."""
    weights = make_task(recipe, info).build_model(recipe.model).state_dict()
    write_run(recipe.folder, recipe, {"info": info.to_dict(), "model": weights, "ema": None}, {}, {})


@pytest.mark.parametrize("change", OTHER)
def test_runs_of_other_models_become_classes_of_ours(change, tokenizers, tmp_path):
    run = convert(saved(tmp_path / "their", bert(tokenizers["bert"]), tokenizers["bert"]), tmp_path / "run")
    untrained(resolve(run / "recipe.yaml", [change, "run.name=other"]), open_run(run).task.info)
    assert here("export", tmp_path / "other", tmp_path / "back") == 0
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["LionForMaskedLM"]
    assert sorted(os.listdir(tmp_path)) == ["back", "other", "run", "their"]


CONFIGS = [  # model, changes of config.json, settings of the recipe, expected message
    ("bert", {"model_type": "roberta"}, [], "model_type 'roberta', but the model of the recipe is a bert"),
    ("bert", {"is_decoder": True}, [], "its config.json has is_decoder True, our model supports only False"),
    ("bert", {"add_cross_attention": True}, [], "add_cross_attention True"),
    ("bert", {"position_embedding_type": "relative_key"}, [], "position_embedding_type 'relative_key'"),
    ("bert", {"tie_word_embeddings": False}, [], "tie_word_embeddings False"),
    ("bert", {"hidden_act": "relu"}, [], "its activation is 'relu', our model supports gelu"),
    ("bert", {"hidden_size": 24}, [], "hidden_size is 24 in its config, 12 by its weights"),
    ("bert", {"num_hidden_layers": 3}, [], "num_hidden_layers is 3 in its config, 2 by its weights"),
    ("bert", {"vocab_size": 99}, [], "vocab_size is 99 in its config"),
    ("bert", {"num_attention_heads": 5}, [], "num_heads 5 does not divide dim 12"),
    ("bert", {}, ["model.num_heads=6"], "its config: model.num_heads is 3, not 6; try model.num_heads=3"),
    ("bert", {}, ["model.depth=3"], "its weights: model.depth is 2, not 3; try model.depth=2"),
    ("bert", {}, ["model.mixer=lion_s"], "the recipe has mixer 'lion_s': convert it with the softmax recipe"),
    ("bert", {}, ["data.tokenizer=bytes"], "tokenizer 'bytes' has 261 ids: another vocabulary"),
    ("bert", {}, ["data.length=40"], "data.length: 40 tokens, but model.max_positions allows only 32"),
    ("bert", {}, ["--ema"], "--ema: a checkpoint of transformers holds no averaged weights"),
    ("gpt", {"scale_attn_by_inverse_layer_idx": True}, [], "scale_attn_by_inverse_layer_idx True"),
    ("gpt", {"reorder_and_upcast_attn": True}, [], "reorder_and_upcast_attn True"),
    ("gpt", {"scale_attn_weights": False}, [], "scale_attn_weights False"),
    ("gpt", {"activation_function": "relu"}, [], "its activation is 'relu', our model supports gelu_new"),
    ("gpt", {}, ["data.length=40"], "16 positions: at most 17"),
]


@pytest.mark.parametrize(("kind", "changes", "settings", "message"), CONFIGS)
def test_other_models_are_refused(kind, changes, settings, message, tokenizers, tmp_path, capsys):
    folder = saved(tmp_path / "their", MODELS[kind](tokenizers[kind]), tokenizers[kind])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    capsys.readouterr()
    source = [f"data.{name}" for name in ("name=text", "length=17")]
    assert message in refuse(capsys, "convert", folder, SIZES[kind], tmp_path / "run", *source, *settings)
    assert os.listdir(tmp_path) == ["their"]


WORDS, QUERY = "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.1.attention.self.query.weight"
DAMAGE = {
    WORDS: (None, f"{WORDS} is missing: not a BERT with its masked-LM head"),
    "cls.predictions.transform.dense.bias": (None, "cls.predictions.transform.dense.bias is missing"),
    QUERY: (None, f"{QUERY} is missing"),
    "bert.encoder.layer.1.attention.self.key.weight": (torch.ones(11, 12), "have different shapes"),
    "bert.encoder.layer.1.output.dense.weight": (torch.ones(12, 27), "mlp.fc2.weight is (12, 27) there, (12, 28)"),
    "bert.encoder.layer.0.crossattention.self.query.weight": (torch.ones(12, 12), "no place for bert.encoder.layer.0."),
    "classifier.weight": (torch.ones(2, 12), "no place for classifier.weight"),
    "cls.predictions.decoder.weight": (torch.ones(2, 12), f"cls.predictions.decoder.weight differs from {WORDS}"),
    "bert.embeddings.LayerNorm.weight": (torch.full((12,), torch.nan), "holds NaN or infinity"),
    "bert.embeddings.LayerNorm.bias": ("text", "no place for bert.embeddings.LayerNorm.bias"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_other_weights_are_refused(name, tokenizers, tmp_path, capsys):
    folder, (value, message) = tmp_path / "their", DAMAGE[name]
    theirs = saved(folder, bert(tokenizers["bert"]), tokenizers["bert"])
    held = {**transformers.BertForMaskedLM.from_pretrained(theirs).state_dict(), name: value}
    if name == WORDS:
        held.pop("cls.predictions.decoder.weight")
    (folder / "model.safetensors").unlink()
    torch.save({k: v for k, v in held.items() if v is not None}, folder / "pytorch_model.bin")
    capsys.readouterr()
    assert message in refuse(capsys, "convert", folder, SIZES["bert"], tmp_path / "run", "data.length=17")
    assert os.listdir(tmp_path) == ["their"]


def test_folders_that_hold_no_checkpoint_are_refused(tokenizers, tmp_path, capsys, monkeypatch):
    def line():
        capsys.readouterr()
        found = refuse(capsys, "convert", folder, SIZES["bert"], tmp_path / "run", "data.length=17")
        assert os.listdir(tmp_path) == ["their"]
        return found

    (folder := tmp_path / "their").mkdir()
    assert "their: no checkpoint in this folder, expected model.safetensors or pytorch_model.bin" in line()
    (folder / "model.safetensors").write_bytes(b"no weights at all")
    assert "model.safetensors: not a readable safetensors file" in line()
    saved(folder, bert(tokenizers["bert"]), tokenizers["bert"])
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-40])
    assert "model.safetensors: not a readable safetensors file" in line()
    (folder / "model.safetensors").write_bytes(whole)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config[:-9])
    assert "config.json: cannot be read" in line()
    (folder / "config.json").unlink()
    assert "config.json: no such file" in line()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert "model-1.safetensors: no such checkpoint" in line()
    for held in ("{}", *(json.dumps({"weight_map": {"a": name}}) for name in ("", "/", "a\0b", "\ud800", 3))):
        index.write_text(held)
        assert "index.json: not an index of weights" in line()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    index.rename(folder / "model.safetensors")
    assert "model.safetensors: needs safetensors: pip install safetensors" in line()


def test_giving_back_writes_all_or_nothing(tokenizers, tmp_path, capsys, monkeypatch):
    run = convert(saved(tmp_path / "their", bert(tokenizers["bert"]), tokenizers["bert"]), tmp_path / "run")
    assert "their: exists already" in refuse(capsys, "export", run, tmp_path / "their")
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in refuse(capsys, "export", run, tmp_path / "file" / "back")
    monkeypatch.setattr(classes, "save_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        here("export", run, tmp_path / "back")
    assert sorted(os.listdir(tmp_path)) == ["file", "run", "their"]
