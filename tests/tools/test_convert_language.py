"""Tests of converting checkpoints of transformers and nanoGPT to runs, and runs back to transformers."""

import json
import logging
import os
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lion
from data.text.tokenizers import make_tokenizer, open_tokenizer
from lion.files import read_json
from lion.models.bert import Bert, BertConfig
from lion.runs import init_from, open_run
from tests.helpers import assert_equal, here, printed, refuse, state_of
from tests.tools.untrained import untrained
from tools.compose import resolve
from tools.convert.bert import BertConverter
from tools.convert.language import ratio
from tools.export import transformers as classes

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
transformers.utils.logging.disable_progress_bar()

TEXT = ["The capital of France is Paris.", "Ask not what your country can do for you.", "To be, or not to be: that is."]
SIZES = {"bert": "mlm_base_softmax", "gpt": "gpt2_small_softmax"}
TINY = "trainer.precision=fp32 trainer.compile=false trainer.micro_batch=4 data.name=text data.length=17".split()


TOKENIZERS = {"bert": make_tokenizer("wordpiece", TEXT, 200), "gpt": make_tokenizer("bpe", TEXT, 280)}


def bert(kind=transformers.BertForMaskedLM, **changes):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 28}
    sizes |= {"max_position_embeddings": 32, "initializer_range": 0.4, "vocab_size": TOKENIZERS["bert"].vocabulary}
    return made(kind, transformers.BertConfig(**(sizes | changes)))


def gpt(**changes):
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16, "n_inner": 28, "initializer_range": 0.4}
    sizes |= {"vocab_size": TOKENIZERS["gpt"].vocabulary}
    return made(transformers.GPT2LMHeadModel, transformers.GPT2Config(**(sizes | changes)))


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


def saved(folder, model, **how):
    """Save a model and its tokenizer as transformers does, and return the folder."""
    model.save_pretrained(folder, **how)
    kind = "gpt" if isinstance(model, transformers.GPT2LMHeadModel) else "bert"
    TOKENIZERS[kind].inner.save(str(folder / "tokenizer.json"))
    return folder


def convert(folder, run, *args, kind="bert"):
    assert here("convert", folder, SIZES[kind], run, *TINY, "model.pad_vocabulary=64", *args) == 0
    return run


def converted(folder, theirs, *args):
    """Save a model as transformers does, and convert it to a run in the folder."""
    kind = "gpt" if isinstance(theirs, transformers.GPT2LMHeadModel) else "bert"
    return convert(saved(folder / "their", theirs), folder / "run", *args, kind=kind)


def loaded(run):
    return lion.load(run, compile=False)


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
    given = [tokens, segments] if types is None else [tokens, segments, types]
    found = ours(*given)
    expected = theirs(**inputs)
    expected = expected.prediction_logits if "prediction_logits" in expected else expected.logits
    assert expected.std() > 0.3
    return (found - expected[..., : ours.vocabulary])[segments >= 0].abs().max().item()


@pytest.mark.parametrize("kind", MODELS)
def test_the_logits_are_theirs_and_come_back_the_same(kind, tmp_path, capsys):
    theirs = MODELS[kind]()
    run = converted(tmp_path, theirs)
    said = capsys.readouterr().out
    assert "2 blocks of width 12, 3 heads" in said and "taken from" not in said and "not used" not in said
    ours = loaded(run)
    assert len(ours.tokens.weight) % 64 == 0
    assert here("export", run, tmp_path / "back") == 0
    auto = {"bert": transformers.AutoModelForMaskedLM, "gpt": transformers.AutoModelForCausalLM}[kind]
    back, info = auto.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(back) is type(theirs) and not info["missing_keys"] and not info["unexpected_keys"]
    assert_equal(back.state_dict(), theirs.state_dict())
    for padded in (False, True):
        assert apart(ours, theirs, padded) < 1e-10
        assert apart(ours, back, padded) < 1e-10
    assert sorted(os.listdir(tmp_path)) == ["back", "run", "their"]


def test_what_was_pre_trained_has_heads_that_are_left_and_named(tmp_path, capsys):
    theirs = bert(transformers.BertForPreTraining, type_vocab_size=3, layer_norm_eps=1e-3)
    run = converted(tmp_path, theirs)
    said = capsys.readouterr().out
    assert "bert.pooler.dense.bias" in said and "cls.seq_relationship.weight" in said
    assert apart(loaded(run), theirs) < 1e-10


def test_a_bert_without_head_gets_a_new_one(tmp_path, capsys):
    """Check the states before the head, and the bias of the head."""
    theirs = bert(transformers.BertModel)
    run = converted(tmp_path, theirs)
    assert "without a masked-LM head: ours is new" in capsys.readouterr().out
    ours = loaded(run)
    tokens = torch.randint(ours.vocabulary, (2, 13), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = theirs(input_ids=tokens).last_hidden_state
        found = ours.encode(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ours.head.bias.count_nonzero() == 0


@pytest.mark.parametrize("way", ["bin", "shards", "half", "old", "file"])
def test_files_of_every_kind(way, tmp_path):
    theirs = bert()
    how = {"max_shard_size": "4KB"} if way == "shards" else {}
    checkpoint = folder = saved(tmp_path / "their", theirs, **how)
    weights = theirs.state_dict()
    if way == "shards":
        assert len(list(folder.glob("*.safetensors"))) > 2
    elif way == "half":
        saved(folder, theirs.half())
        theirs = theirs.float()
    elif way == "file":
        checkpoint = folder / "model.safetensors"
    elif way == "old":
        weights = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for name, value in weights.items()
        }
        weights["bert.embeddings.position_ids"] = torch.arange(32)[None]
    if way in ("bin", "old"):
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    run = convert(checkpoint, tmp_path / "run")
    assert apart(loaded(run), theirs) < 1e-10
    kept = read_json(run / "environment.json")["converted"]["sha256"]
    assert kept.keys() == {path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")}
    assert all(value.dtype == torch.float32 for value in state_of(run, "best")["model"].values())


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpts_checkpoints(bias, tmp_path, capsys):
    """Convert a checkpoint with PyTorch's layout of linear weights, exact GELU, and the prefix of compiled models."""
    theirs = gpt(activation_function="gelu", n_inner=None)
    weights = {}
    for name, weight in theirs.state_dict().items():
        if name.endswith("bias") and not bias:
            weight.zero_()
        else:
            weights[f"_orig_mod.{name}"] = weight.T.contiguous() if ".c_" in name and weight.dim() == 2 else weight
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
    args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 16, "bias": bias, "dropout": 0.0, "vocab_size": 280}
    held = {"model": weights, "optimizer": {}, "iter_num": 5, "model_args": args, "config": {"dataset": "x"}}
    torch.save(held, tmp_path / "ckpt.pt")
    TOKENIZERS["gpt"].inner.save(str(tmp_path / "bpe.json"))
    run = convert(tmp_path / "ckpt.pt", tmp_path / "run", f"data.tokenizer={tmp_path / 'bpe.json'}", kind="gpt")
    assert "taken from the recipe: data.tokenizer=" in capsys.readouterr().out
    ours = loaded(run)
    assert (ours.encoder.norm.bias is not None) is bias
    assert apart(ours, theirs) < 1e-10
    assert here("export", run, tmp_path / "back") == 0
    assert apart(ours, transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "back")) < 1e-10


def test_a_file_without_its_config_is_what_the_recipe_says(tmp_path, capsys):
    theirs = gpt()
    saved(tmp_path, theirs)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    settings = [f"data.tokenizer={tmp_path / 'tokenizer.json'}", "model.num_heads=3"]
    run = convert(tmp_path / "weights.safetensors", tmp_path / "run", *settings, kind="gpt")
    said = capsys.readouterr().out
    assert "taken from the recipe: model.num_heads=3, model.norm_eps=1e-05, data.tokenizer=" in said
    assert apart(loaded(run), theirs) < 1e-10


def test_embeddings_that_are_padded_there(tmp_path):
    theirs = bert(vocab_size=256)
    ours = loaded(converted(tmp_path, theirs, "model.pad_vocabulary=1"))
    assert len(ours.tokens.weight) == TOKENIZERS["bert"].vocabulary < 250
    assert apart(ours, theirs) < 1e-10


def test_any_width_of_an_mlp_has_its_ratio():
    for hidden in range(100, 140):
        for dim in (12, 49, 312):
            assert int(dim * ratio(hidden, dim)) == hidden


def test_fewer_positions_are_the_first(tmp_path):
    theirs = gpt()
    ours = loaded(converted(tmp_path, theirs, "data.length=14"))
    assert ours.longest == 13 and apart(ours, theirs) < 1e-10


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Convert a BERT to a run, after which its folder is gone."""
    folder = tmp_path_factory.mktemp("converted")
    their = saved(folder / "their", bert())
    run = convert(their, folder / "run", "data.document=line")
    shutil.rmtree(their)
    return run


def test_others_start_from_it(run):
    source = open_run(run)
    other = source.task.build_model(source.recipe.model.with_mixer("lion_s"))
    init_from(other, run, source.task.info)
    kept, mine = source.model.state_dict(), other.state_dict()
    fresh = {name for name in mine if ".decays." in name}
    assert fresh and mine.keys() - kept.keys() == fresh and kept.keys() - mine.keys() == {"positions.weight"}
    assert all(torch.equal(mine[name], kept[name]) for name in mine.keys() - fresh)


def test_other_numbers_of_positions_start_with_the_same(run, caplog):
    source = open_run(run)
    kept = source.model.positions.weight
    for count in (20, 48):
        config = replace(source.recipe.model, max_positions=count)
        other = source.task.build_model(config)
        new = other.positions.weight.detach().clone()
        with caplog.at_level(logging.INFO, "lion"):
            init_from(other, run, source.task.info)
        both = min(count, len(kept))
        assert torch.equal(other.positions.weight[:both], kept[:both])
        assert torch.equal(other.positions.weight[both:], new[both:])
        assert f"adapted: positions.weight ({len(kept)}, 12) -> ({count}, 12)" in caplog.text


def test_the_run_keeps_its_tokenizer_and_gives_it_back(run, tmp_path, capsys):
    tokenizer = TOKENIZERS["bert"]
    assert open_run(run).task.info.fingerprint == tokenizer.fingerprint
    (tmp_path / "text.txt").write_text("\n".join(TEXT * 20))
    where = [f"data.path={tmp_path}/text.txt", f"data.root={tmp_path}/data"]
    assert "MLM accuracy" in printed(capsys, "eval", run, *where, "--eager")
    run = shutil.copytree(run, tmp_path / "moved")
    assert here("predict", run, "the capital of [MASK] is paris.") == 0
    assert here("export", run, tmp_path / "named", f"data.tokenizer={run / 'their.json'}") == 0
    assert here("export", run, tmp_path / "back") == 0
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    cls, sep, mask = (tokenizer.special[name] for name in ("cls", "sep", "mask"))
    before = tokenizer.encode("the capital of")
    after = tokenizer.encode("is paris.")
    assert auto("the capital of [MASK] is paris.").input_ids == [cls, *before, mask, *after, sep]
    pair = auto("the capital of", "is paris.")
    assert pair.input_ids == [cls, *before, sep, *after, sep]
    assert pair.token_type_ids == [0] * (2 + len(before)) + [1] * (1 + len(after))
    assert (auto.mask_token_id, auto.pad_token_id, auto.model_max_length) == (mask, tokenizer.special["pad"], 32)


def test_gpts_generate_and_are_given_back_with_their_tokenizer(tmp_path, capsys):
    run = converted(tmp_path, gpt())
    text = printed(capsys, "generate", run, "--prompt", "To be", "--tokens", 3, "--temperature", 0).splitlines()[-1]
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


# settings of a run whose model transformers' own BERT cannot be
OTHER = """
model.mixer=lion_s model.norm=rmsnorm model.block=pre_norm model.mlp=glu model.position_embedding=false
model.attention.out_norm=layernorm model.attention.feature_map=elu1 model.attention.block=published
""".split()


@pytest.mark.parametrize("change", OTHER)
def test_runs_of_other_models_become_classes_of_ours(change, run, tmp_path):
    recipe = resolve(run / "recipe.yaml", [change, f"run.root={tmp_path}", "run.name=other"])
    untrained(recipe, open_run(run).task.info)
    assert here("export", tmp_path / "other", tmp_path / "back") == 0
    config = read_json(tmp_path / "back/config.json")
    assert config["architectures"] == ["LionForMaskedLM"]
    assert sorted(os.listdir(tmp_path)) == ["back", "other"]


CONFIGS = [  # model, change of config.json or setting of the recipe, expected message
    ("bert", {"model_type": "roberta"}, "model_type 'roberta', but the model of the recipe is a bert"),
    ("bert", {"is_decoder": True}, "its config.json has is_decoder True, our model supports only False"),
    ("bert", {"add_cross_attention": True}, "add_cross_attention True"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
    ("bert", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    ("bert", {"hidden_act": "relu"}, "its activation is 'relu', our model supports gelu"),
    ("bert", {"hidden_size": 24}, "hidden_size is 24 in its config, 12 by its weights"),
    ("bert", {"num_hidden_layers": 3}, "num_hidden_layers is 3 in its config, 2 by its weights"),
    ("bert", {"vocab_size": 99}, "vocab_size is 99 in its config"),
    ("bert", {"num_attention_heads": 5}, "num_heads 5 does not divide dim 12"),
    ("bert", "model.num_heads=6", "its config: model.num_heads is 3, not 6; try model.num_heads=3"),
    ("bert", "model.depth=3", "its weights: model.depth is 2, not 3; try model.depth=2"),
    ("bert", "model.mixer=lion_s", "the recipe has mixer 'lion_s': convert it with the softmax recipe"),
    ("bert", "data.tokenizer=bytes", "tokenizer 'bytes' has 261 ids: another vocabulary"),
    ("bert", "data.length=40", "data.length: 40 tokens, but model.max_positions allows only 32"),
    ("bert", "--ema", "--ema: a checkpoint of transformers holds no averaged weights"),
    ("gpt", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ("gpt", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True"),
    ("gpt", {"scale_attn_weights": False}, "scale_attn_weights False"),
    ("gpt", {"activation_function": "relu"}, "its activation is 'relu', our model supports gelu_new"),
    ("gpt", "data.length=40", "16 positions: at most 17"),
]


def refused(capsys, folder, kind, *settings):
    """Return the line of a conversion that must fail, and that must not write anything beside the checkpoint."""
    run = folder.parent / "run"
    line = refuse(capsys, "convert", folder, SIZES[kind], run, "data.name=text", "data.length=17", *settings)
    assert os.listdir(folder.parent) == [folder.name]
    return line


@pytest.mark.parametrize("kind, change, message", CONFIGS)
def test_other_models_are_refused(kind, change, message, tmp_path, capsys):
    folder = saved(tmp_path / "their", MODELS[kind]())
    settings = [change]
    if isinstance(change, dict):
        settings = []
        config = read_json(folder / "config.json")
        (folder / "config.json").write_text(json.dumps(config | change))
    assert message in refused(capsys, folder, kind, *settings)


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
def test_other_weights_are_refused(name, tmp_path, capsys):
    value, message = DAMAGE[name]
    theirs = bert()
    folder = saved(tmp_path / "their", theirs)
    held = {**theirs.state_dict(), name: value}
    if name == WORDS:
        held.pop("cls.predictions.decoder.weight")
    (folder / "model.safetensors").unlink()
    torch.save({k: v for k, v in held.items() if v is not None}, folder / "pytorch_model.bin")
    assert message in refused(capsys, folder, "bert")


def test_folders_that_hold_no_checkpoint_are_refused(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "their"
    folder.mkdir()
    weights, config, index = (
        folder / name for name in ("model.safetensors", "config.json", "model.safetensors.index.json")
    )

    def check(message):
        assert message in refused(capsys, folder, "bert")

    check("their: no checkpoint in this folder, expected model.safetensors or pytorch_model.bin")
    weights.write_bytes(b"no weights at all")
    check("model.safetensors: not a readable safetensors file")
    saved(folder, bert())
    whole, text = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:-40])
    check("model.safetensors: not a readable safetensors file")
    weights.write_bytes(whole)
    config.write_text(text[:-9])
    check("config.json: cannot be read")
    config.unlink()
    check("config.json: no such file")
    config.write_text(text)
    weights.unlink()
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    check("model-1.safetensors: no such checkpoint")
    for held in ({}, *({"weight_map": {"a": name}} for name in ("", "/", "a\0b", "\ud800", 3))):
        index.write_text(json.dumps(held))
        check("index.json: not an index of weights")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    index.rename(weights)
    check("model.safetensors: needs safetensors: pip install safetensors")


def test_giving_back_writes_all_or_nothing(run, tmp_path, capsys, monkeypatch):
    assert "run: exists already" in refuse(capsys, "export", run, run)
    (tmp_path / "file").write_text("")
    assert "cannot be written (" in refuse(capsys, "export", run, tmp_path / "file/back")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(classes, "save_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        here("export", run, tmp_path / "back")
    assert os.listdir(tmp_path) == ["file"]
