"""Export of runs to folders of `lion.transformers`, and back: weights, tokenizers, image processors, model cards."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

pytest.importorskip("transformers")

import transformers

import lion
from data.text.tokenizers import make_tokenizer
from data.vision.digits import INFO, Digits
from lion.files import read_json
from lion.runs import open_run
from lion.samples.images import ImageInfo
from lion.samples.labels import TokenLabelsInfo
from lion.samples.sequences import SequenceInfo
from lion.samples.text import LabelledTextInfo
from lion.transformers import LionForCausalLM
from tests.helpers import assert_equal, assert_in, here, printed, refuse, refused, state_of, tiny_recipe
from tests.tools.untrained import text_info, untrained
from tools.compose import describe_data, make_task, resolve
from tools.export.hub import image_processor

TEXT = ["The capital of France is Paris.", "Ask not what your country can do for you.", "To be, or not to be: that is."]
SMALL = "model.dim=12 model.depth=2 model.num_heads=3 trainer.precision=fp32 trainer.micro_batch=4".split()
RECIPES = {"bert": ("mlm_tiny_lion_s", "wordpiece", 200), "gpt": ("gpt2_tiny_lion_s", "bpe", 280)}


def text_run(folder, kind):
    """Write an untrained run of a language model, with its tokenizer."""
    recipe, name, size = RECIPES[kind]
    tokenizer = make_tokenizer(name, TEXT, size)
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    places = [f"run.root={folder}", f"run.name={kind}", f"data.tokenizer={folder / 'tokenizer.json'}"]
    recipe = resolve(recipe, [*SMALL, "data.name=text", "data.length=17", *places])
    return untrained(recipe, text_info(tokenizer, 17, "tokenizer")), tokenizer


def export(run, out):
    assert here("export", run, out) == 0
    return out


def reloaded(kind, folder):
    """Load an exported model with an Auto class of transformers, without missing and additional weights."""
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return model


def head_of(card):
    """Return the metadata at the beginning of a model card."""
    return yaml.safe_load(card.split("---")[1])


def back(folder, out):
    """Convert an exported folder to a run, with the recipe that it holds."""
    assert here("convert", folder, folder / "recipe.yaml", out) == 0
    return out


def run_card(folder):
    """Run the lines of Python of a model card, and return their variables."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    for name in ("FOLDER", "image.png"):
        code = code.replace(name, str(folder / name).removesuffix("/FOLDER"))
    found = {}
    exec(code.replace(", trust_remote_code=True", ""), found)
    return found


def same_run(run, other):
    a = state_of(run, "best")
    b = state_of(other, "best")
    assert a["info"] == b["info"]
    assert_equal(a["model"], b["model"])
    assert open_run(run).recipe.model == open_run(other).recipe.model


@pytest.mark.parametrize("kind", RECIPES)
@torch.no_grad()
def test_language_models_return_bit_for_bit(kind, tmp_path, capsys):
    run, tokenizer = text_run(tmp_path, kind)
    assert "lion_s" in printed(capsys, "export", run, tmp_path / "out")
    model = reloaded({"bert": "MaskedLM", "gpt": "CausalLM"}[kind], tmp_path / "out")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.padding_side == {"bert": "right", "gpt": "left"}[kind]
    assert words.pad_token == (words.eos_token if kind == "gpt" else "[PAD]")
    inputs = words([TEXT[0], TEXT[0][:20]], padding=True, return_tensors="pt")
    ours = lion.load(run, compile=False)
    ids, mask = inputs.input_ids, inputs.attention_mask
    assert ids[0].tolist()[kind == "bert" :][:3] == tokenizer.encode(TEXT[0])[:3] and not mask.all()
    wanted = ours(ids, mask - 1)
    torch.testing.assert_close(model(**inputs).logits[mask.bool()], wanted[mask.bool()])
    same_run(run, back(tmp_path / "out", tmp_path / "again"))
    model.save_pretrained(tmp_path / "tuned")  # as after fine-tuning
    (tmp_path / "out/recipe.yaml").rename(tmp_path / "tuned/recipe.yaml")
    same_run(run, back(tmp_path / "tuned", tmp_path / "tuned_again"))


@pytest.mark.slow
@pytest.mark.parametrize("classes", [("no", "yes", "maybe"), ()])
@torch.no_grad()
def test_classifiers_keep_their_classes(classes, tmp_path):
    run, _ = text_run(tmp_path, "bert")
    where = [f"init_from={run}", f"run.root={tmp_path}", "run.name=glue", f"data.tokenizer={tmp_path}/tokenizer.json"]
    recipe = resolve("glue_rte" if classes else "glue_stsb", [*SMALL, *where, "model.mixer=lion_s"])
    untrained(recipe, LabelledTextInfo(**{**vars(open_run(run).task.info), "classes": classes}))
    out = export(recipe.folder, tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(out)
    config = model.config
    if classes:
        assert config.id2label == dict(enumerate(classes)) and config.problem_type is None
    else:
        assert config.num_labels == 1 and config.problem_type == "regression"
    ids = torch.arange(8).view(2, 4)
    torch.testing.assert_close(model(ids).logits, lion.load(recipe.folder, compile=False)(ids))
    same_run(recipe.folder, back(out, tmp_path / "again"))
    if classes:  # as after fine-tuning on two other classes
        names = {"id2label": {0: "new", 1: "old"}, "label2id": {"new": 0, "old": 1}, "num_labels": 2}
        tuned = type(model).from_pretrained(out, ignore_mismatched_sizes=True, **names)
        tuned.save_pretrained(tmp_path / "tuned")
        shutil.copy(out / "recipe.yaml", tmp_path / "tuned")
        assert open_run(back(tmp_path / "tuned", tmp_path / "other")).task.info.classes == ("new", "old")
    for name in ("recipe.yaml", "README.md", "config.json"):
        assert str(tmp_path) not in (out / name).read_text()
    card = (out / "README.md").read_text()
    assert "Not evaluated." in card and '("A sentence."' in card
    (recipe.folder / "columns.json").write_text('["premise", "hypothesis"]')  # as a run on pairs keeps them
    card = (export(recipe.folder, tmp_path / "pairs") / "README.md").read_text()
    assert '("A first sentence.", "A second one."' in card


SEQUENCES = {  # Auto class, recipe, metadata of the data, and changes of the recipe
    "pixels": ("SequenceClassification", "lra_image_lion_s", SequenceInfo(10, 64, mean=0.4, std=0.3), []),
    "pairs": ("SequenceClassification", "lra_listops_lion_s", SequenceInfo(2, 32, 50, parts=2), ["data.name=aan"]),
    "masked": ("MaskedLM", "lra_listops_lion_s_masked", SequenceInfo(10, 32, 18), []),
    "masked_pixels": ("MaskedLM", "lra_image_lion_s_masked", SequenceInfo(10, 64, mean=0.4, std=0.3), []),
    "tokens": ("TokenClassification", "recall_lion_s", TokenLabelsInfo(7, 16, 24, 30, 3), []),
}


@pytest.mark.parametrize("name", SEQUENCES)
@torch.no_grad()
def test_models_of_long_sequences_and_of_labelled_tokens(name, tmp_path):
    kind, recipe, info, changes = SEQUENCES[name]
    recipe = resolve(recipe, [*SMALL, *changes, f"run.root={tmp_path}", "run.name=run"])
    task = make_task(recipe, info)
    untrained(recipe, info)
    out = export(recipe.folder, tmp_path / "out")
    model = reloaded(kind, out)
    ours = lion.load(recipe.folder, compile=False)
    batch = task.example(3, "cpu")
    inputs = batch["tokens"] if "tokens" in batch else batch["pixels"]
    mask = torch.ones(inputs.shape[: 2 + (name == "pairs")], dtype=torch.int64)
    mask[1, ..., -5:] = 0
    wanted = ours(inputs, mask.bool())
    kept = mask.bool() if wanted.dim() == 3 else slice(None)
    assert wanted.std() > 0
    torch.testing.assert_close(model(inputs, mask).logits[kept], wanted[kept], rtol=0, atol=1e-5)
    if kind == "MaskedLM":
        hidden = torch.rand(mask.shape) < 0.5
        wanted = ours(inputs, None, hidden)
        torch.testing.assert_close(model(inputs, bool_masked_pos=hidden).logits, wanted, rtol=0, atol=1e-5)
    same_run(recipe.folder, back(out, tmp_path / "again"))
    found = run_card(out)
    assert found["inputs"].shape[1:] == inputs.shape[1:] and int(found["inputs"].max()) < (info.vocabulary or 256)


@pytest.mark.slow
def test_an_image_run_is_exported_with_its_card_and_processor(tmp_path):
    pytest.importorskip("sklearn")
    assert here("train", tiny_recipe(tmp_path, "tiny")) == 0
    run = tmp_path / "runs/tiny"
    out = export(run, tmp_path / "out")
    files = {"README.md", "config.json", "model.safetensors", "modeling_lion.py", "preprocessor_config.json"}
    assert {path.name for path in out.iterdir()} == {*files, "recipe.yaml"}
    model = transformers.AutoModelForImageClassification.from_pretrained(out)
    assert model.config.id2label[3] == "3"
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    wanted = lion.load(run, compile=False)(torch.from_numpy(pixels)[None, None])
    inputs = processor(Image.fromarray(pixels), return_tensors="pt")
    torch.testing.assert_close(model(**inputs).logits, wanted)
    same_run(run, back(out, tmp_path / "again"))

    card = (out / "README.md").read_text()
    head = head_of(card)
    summary = read_json(run / "summary.json")
    (result,) = head["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == pytest.approx(summary["value"], abs=1e-6)
    assert result["dataset"]["split"] == "test" and "pipeline_tag" not in head
    assert head["license"] == "mit" and "\npip install '.[transformers]'  # in a clone of the package\n" in card
    assert_in(card, "\nfull ", "\nchunk (64) ", "\nrnn (1) ", "digits", "## Licence", "(recipe.yaml)")
    Image.fromarray(pixels).convert("RGB").save(out / "image.png")
    torch.testing.assert_close(run_card(out)["logits"], wanted)
    large = Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 50).convert("L")
    large.save(out / "image.png")
    read = Digits.load(None, str(out / "image.png"), INFO)["image"]
    resized = processor(large, return_tensors="pt").pixel_values[0]
    torch.testing.assert_close(resized, (read / 255 - INFO.mean[0]) / INFO.std[0], atol=0.02, rtol=0)

    (run / "summary.json").write_text(json.dumps({**summary, "best_step": 1}))  # of the weights of another step
    assert here("export", run, tmp_path / "last", "--checkpoint", "last") == 0
    card = (tmp_path / "last/README.md").read_text()
    assert "Not evaluated." in card and "model-index" not in card


@pytest.mark.slow
def test_prompts_are_tokenised_as_by_generate(tmp_path, monkeypatch):
    """Check that no [SEP], at which a text ends, stands between a prompt and its continuation."""
    monkeypatch.setitem(RECIPES, "gpt", ("gpt2_tiny_lion_s", "wordpiece", 200))
    run, tokenizer = text_run(tmp_path, "gpt")
    words = transformers.AutoTokenizer.from_pretrained(export(run, tmp_path / "out"))
    assert tokenizer.frame[1] and words(TEXT[0]).input_ids == tokenizer.encode(TEXT[0])


def test_a_crop_that_no_image_processor_has_is_refused():
    info = ImageInfo((8, 12), 1, ("a", "b"), (0.5,), (0.5,))
    assert image_processor(info, {"pad": 2})["size"] == {"height": 8, "width": 12}
    refused("transformers has no image processor that crops to 8 x 12 px", image_processor, info, {"crop": 0.875})


@torch.no_grad()
def test_a_pipeline_classifies_images_in_colour(tmp_path):
    recipe = resolve("cifar10_mini", [*SMALL, f"run.root={tmp_path}", "run.name=run"])
    info = describe_data(recipe, look=False)[0]
    untrained(recipe, info)
    out = export(recipe.folder, tmp_path / "out")
    assert head_of((out / "README.md").read_text())["pipeline_tag"] == "image-classification"
    Image.effect_mandelbrot((40, 32), (-2, -1, 1, 1), 50).save(out / "image.png")
    classify = transformers.pipeline("image-classification", str(out))
    wanted = run_card(out)["logits"].softmax(-1)[0]
    found = {row["label"]: row["score"] for row in classify(str(out / "image.png"), top_k=10)}
    assert found == pytest.approx({info.classes[i]: float(p) for i, p in enumerate(wanted)}, abs=1e-6)


def test_bad_input_is_one_line(tmp_path, capsys, monkeypatch):
    recipe = resolve("dit_tiny_lightnet", ["model.depth=1", f"run.root={tmp_path}", "run.name=dit"])
    info = describe_data(recipe, look=False)[0]
    untrained(recipe, info)
    line = refuse(capsys, "export", recipe.folder, tmp_path / "out")
    assert "model.name: lion.transformers has no class for 'dit', because transformers has none for diffusion" in line
    run, _ = text_run(tmp_path, "gpt")
    out = export(run, tmp_path / "gpt_out")
    line = refuse(capsys, "convert", out, "mlm_tiny_lion_s", tmp_path / "again")
    assert "gpt_out: exported from a run of task 'causal_lm', the recipe has 'masked_lm'" in line
    model = LionForCausalLM.from_pretrained(out)
    known = model.config.vocab_size
    model.resize_token_embeddings(known + 3)
    model.save_pretrained(tmp_path / "resized")
    line = refuse(capsys, "convert", tmp_path / "resized", out / "recipe.yaml", tmp_path / "again")
    assert f"its embeddings were resized to {known + 3} ids, its tokenizer has {known}" in line
    for name in [name for name in sys.modules if name.split(".")[:2] == ["lion", "transformers"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refuse(capsys, "export", run, tmp_path / "out")
    assert "needs transformers 5.23 or newer: pip install -U 'transformers>=5.23'" in line
    assert not (tmp_path / "out").exists()
