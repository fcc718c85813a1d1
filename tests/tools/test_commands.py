"""Tests of the commands, run as a user runs them."""

import csv
import ctypes
import importlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

import lion
from data.vision.digits import INFO, Digits
from data.vision.imagefolder import ImageFolder
from lion.config import ConfigError
from lion.evaluation.forms import forms_to_measure
from lion.files import read_json
from lion.inference.text import MODES
from lion.ops import FORMS
from lion.trainer.checkpoint_files import load_state
from lion.trainer.optim import OptimConfig
from lion.trainer.plan import TrainerConfig, make_plan
from lion.trainer.runtime import MATMUL
from tests.helpers import (
    ROOT,
    assert_equal,
    assert_in,
    column,
    here,
    pictures,
    printed,
    read_lines,
    refuse,
    refused,
    state_of,
    tiny_recipe,
    trained,
)
from tests.processes import CONTEXT
from tools import checks, external, options, predict, train
from tools.cli import one_line, run_command
from tools.commands import COMMANDS, parse_command
from tools.compose import build_data, describe_data, doubts, loader_workers, make_task, resolve
from tools.cost import describe_busy
from tools.export import FORMATS
from tools.glue import TASKS
from tools.gpu.targets import TARGETS
from tools.keys import SOURCES, check_keys, layers_of, names_in
from tools.listing import RECIPES, listing, recipe_files, recipe_path
from tools.mixers import mixer_rows, mixer_table
from tools.show import activation_bytes, parts

pytest.importorskip("sklearn")


def run_sh(*args, timeout=400, script=ROOT / "run.sh", cwd=ROOT):
    """Run run.sh with this interpreter, without installing anything."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "LION_NO_INSTALL": "1", "PATH": path, "OMP_NUM_THREADS": "1"}
    call = [str(script), *map(str, args)]
    return subprocess.run(call, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def python(*args):
    return subprocess.run([sys.executable, *args], cwd=ROOT, capture_output=True, text=True)


def first_parts(count, recipe, *overrides, processes=None):
    """Return the first pieces of what `show` prints; the fourth one, the time, is measured."""
    return list(itertools.islice(parts(str(recipe), [*overrides], processes, None), count))


QUICK = ["model.patch_size=4", "model.depth=2", "trainer.eval_every=4ep"]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Train a short quickstart of few tokens through run.sh, compiled if there is a compiler."""
    root = tmp_path_factory.mktemp("runs")
    done = run_sh(f"run.root={root}", *QUICK, "trainer.epochs=8", "--form", "full")
    assert done.returncode == 0, done.stderr
    return root, done


def check_forms(summary, forms):
    assert summary["forms"].keys() == forms
    for result in summary["forms"].values():
        assert result["value"] == summary["value"] and result["deviation"] < 1e-4 and result["peak_bytes"] > 0


@pytest.mark.slow
def test_quickstart_learns_and_leaves_a_complete_run(quickstart):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root, done = quickstart
    folder = root / "quickstart"
    names = {path.name.partition(".tfevents")[0] for path in folder.iterdir()}  # without time and host
    files = ["recipe.yaml", "environment.json", "metrics.jsonl", "summary.json", ".lock"]
    assert names == {*files, "events.out", "checkpoints"}
    summary = read_json(folder / "summary.json")
    assert summary["metric"] == "top1" and summary["split"] == "test" and summary["value"] > 0.9
    check_forms(summary, {"full"})
    assert str(folder) in done.stdout and "tensorboard --logdir" in done.stdout
    assert_in(done.stderr, "loss=", "images/s=", "lr=")
    assert done.stderr.count("step/s") < 20  # of 128 steps: without a terminal, the progress bar is drawn rarely
    environment = read_json(folder / "environment.json")
    assert environment["torch"] == torch.__version__
    events = EventAccumulator(str(folder)).Reload()
    (point,) = events.Scalars("best/test_top1")
    assert (point.step, point.value) == (summary["best_step"], pytest.approx(summary["value"]))
    table = events.PluginTagToContent("hparams")
    row = table["_hparams_/session_start_info"]
    assert b"model.attention.conv_width" in row and b"data.name" in row and b"about." not in row
    assert "_hparams_/experiment" not in table, "TensorBoard finds the columns that differ between runs by itself"
    graphs = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "train"]
    if shutil.which("g++"):
        assert graphs[0]["compiled_graphs"] == 1 and graphs[-1]["compiled_graphs"] == 2  # one more graph for evaluation
    for kind in ("last", "best"):
        assert not any("_orig_mod" in key for key in state_of(folder, kind)["model"])


@pytest.mark.slow
def test_a_finished_run_prints_its_summary_and_a_changed_one_is_refused(quickstart, capsys, monkeypatch):
    root, done = quickstart
    recipe = [ROOT / "recipes/quickstart.yaml", f"run.root={root}", *QUICK]
    first, _, summary = printed(capsys, "train", *recipe, "trainer.epochs=8").partition("\n")
    assert first == f"{root / 'quickstart'} is complete, nothing to train; --fresh starts anew"
    assert summary.strip() == done.stdout[done.stdout.index("form ") :].strip()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):  # torchrun --nproc-per-node=1
        monkeypatch.setenv(name, value)
    assert here("train", *recipe, "trainer.epochs=8") == 0 and "is complete" in capsys.readouterr().out
    monkeypatch.delenv("RANK")
    changed = refuse(capsys, "train", *recipe, "trainer.epochs=9", "optim.lr=1e-3", "trainer.log_every=3")
    assert_in(changed, "optim.lr: 0.002 -> 0.001", "trainer.epochs: 8.0 -> 9.0", "run.name=", "--fresh")
    assert "log_every" not in changed


@pytest.mark.slow
def test_eval_predict_and_load(quickstart, tmp_path, capsys):
    folder = quickstart[0] / "quickstart"
    header, _, row, note = (
        printed(capsys, "eval", folder, "--form", "rnn", "--chunk-size", "64", "--eager").strip().splitlines()
    )
    assert header.split() == ["form", "top-1", "%", "samples/s", "peak", "memory", "deviation"]
    assert row.startswith("rnn (64)") and "weights" in note

    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    files = [tmp_path / f"{i}.png" for i in range(64)]
    for file, values in zip(files, pixels):
        Image.fromarray((values.reshape(8, 8) * 15.9).astype("uint8")).save(file)
    table = [
        line.split()[:2]
        for line in printed(capsys, "predict", folder, *files, "--form", "rnn", "--eager").splitlines()[2:]
    ]
    guesses = [int(guess) for _, guess in table]
    assert sum(guess == label for guess, label in zip(guesses, labels)) >= 56
    photos = tmp_path / "photos"
    (photos / "more").mkdir(parents=True)
    shutil.copy(files[0], photos)
    shutil.copy(files[1], photos / "more")
    (photos / "notes.txt").write_text("notes")
    out = tmp_path / "found.csv"
    assert here("predict", folder, photos, f"{tmp_path}/[2-3].png", "--form", "rnn", "--out", out) == 0
    said = capsys.readouterr()
    assert "4 predictions written" in said.out and "1 files are not pictures" in said.err
    with open(out) as file:
        rows = list(csv.DictReader(file))
    assert column(rows, "file") == [
        *map(str, (photos / "0.png", photos / "more/1.png", tmp_path / "2.png", tmp_path / "3.png"))
    ]
    assert [row["top 1"] for row in rows] == [str(guess) for guess in guesses[:4]]
    assert 10 <= float(rows[0]["top 1 percent"]) <= 100
    assert here("predict", folder, files[2], "--out", tmp_path / "found.json") == 0
    (record,) = read_json(tmp_path / "found.json")
    assert record["top 1"] == rows[2]["top 1"]
    (tmp_path / "none").mkdir()
    for words, message in {
        f"{tmp_path}/none": "is a folder without pictures",
        f"{tmp_path}/*.jpg": "no file matches",
        f"{files[0]} --out found.txt": "--out: expected a name that ends in .csv or .json",
    }.items():
        assert message in refuse(capsys, "predict", folder, *words.split())
    text = tmp_path / "no.png"
    text.write_text("text")
    assert "not a readable image" in refuse(capsys, "predict", folder, text)
    assert here("predict", folder, files[0], text, files[1], tmp_path / "gone.png", "--form", "rnn", "--eager") == 2
    some = capsys.readouterr()  # unreadable files do not stop the others from being classified
    assert [line.split()[:2] for line in some.out.splitlines()[2:]] == table[:2]
    assert [line.split(": ", 2)[1] for line in some.err.splitlines()] == [str(text), f"{tmp_path}/gone.png"]

    model = lion.load(folder, compile=False)
    lion.set_form(model, "rnn")
    pixels = torch.stack([pil_to_tensor(Image.open(file)) for file in files])  # the same files as for `predict`
    with torch.inference_mode():
        assert [int(model.classes[i]) for i in model(pixels).argmax(1)] == guesses


@pytest.mark.slow
def test_a_small_run_has_the_weights_without_the_optimizer(quickstart, tmp_path, capsys):
    folder, small = quickstart[0] / "quickstart", tmp_path / "small"
    said = printed(capsys, "export", folder, small, "--format", "run")
    assert re.search(r"parameters, without the state of the optimizer; [\d.]+ MB\n$", said)

    def size(path):
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())

    assert 2 * size(small) < size(folder)
    assert_equal(lion.load(small).state_dict(), lion.load(folder).state_dict())
    assert "optimizer" not in state_of(small, "best")
    assert here("eval", small, "--form", "full", "--eager") == 0
    summary = read_json(small / "summary.json")
    assert f"{100 * summary['value']:.2f}" in capsys.readouterr().out


class Spelling:
    """Text files as data, whose letters are padded with zeros, and a task whose outputs (B, L, 128) are the letters."""

    asks = ("file",)
    info = None
    fills_masks = False

    def load(self, path, info):
        if not Path(path).exists():
            raise ConfigError(f"{path}: no such file")
        return torch.tensor([ord(letter) for letter in Path(path).read_text()])

    def collate(self, samples):
        return {"tokens": torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)}

    def check_prediction(self):
        pass

    def outputs(self, model, batch):
        return torch.nn.functional.one_hot(batch["tokens"], 128)

    def describe(self, outputs, count):
        assert outputs.is_floating_point() and outputs.shape[2] == 128
        return [["".join(chr(letter) for letter in row if letter)] for row in outputs.argmax(-1).tolist()]


def test_predict_takes_texts_of_other_lengths(tmp_path, monkeypatch, capsys):
    recipe = resolve("quickstart", ["trainer.device=cpu"])
    loaded = SimpleNamespace(model=torch.nn.Linear(1, 1), task=Spelling(), folder=tmp_path, recipe=recipe)
    for name, value in {"open_with_data": loaded, "choose_form": None, "open_data": Spelling()}.items():
        monkeypatch.setattr(predict, name, lambda *args, value=value: value)
    (tmp_path / "recipe.yaml").touch()
    rows = []
    for i in range(70):  # two batches; the longest word is in the second one
        file = tmp_path / f"{i}.txt"
        file.write_text(chr(ord("a") + i % 26) * (1 + i % 7 + i // 64))
        rows.append([str(file), file.read_text()])
    assert [
        line.split()
        for line in printed(capsys, "predict", tmp_path, *[file for file, _ in rows], "--eager").splitlines()[2:]
    ] == rows
    assert here("predict", tmp_path, rows[3][0], tmp_path / "gone.txt", "--eager") == 2
    assert capsys.readouterr().out.splitlines()[2:] == [f"{rows[3][0]}   dddd"]


@pytest.mark.slow
def test_predict_takes_the_form_and_the_compilation_of_the_run(tmp_path, monkeypatch, capsys):
    """Check a mixer without the full form, in a run without compilation."""
    run = trained(tiny_recipe(tmp_path, model={"mixer": "vim", "mlp": "none", "position_embedding": None}))
    Image.new("L", (8, 8), 99).save(tmp_path / "grey.png")
    monkeypatch.setattr(predict, "compile_blocks", lambda *_, **__: pytest.fail("compiled"))
    assert "grey.png" in printed(capsys, "predict", run, tmp_path / "grey.png")


@pytest.mark.slow
def test_fresh_keeps_the_earlier_run_and_softmax_has_one_form(tmp_path, capsys):
    path, run = tiny_recipe(tmp_path), tmp_path / "runs/tiny"
    assert here("train", path) == 0
    check_forms(read_json(run / "summary.json"), {"full", "chunk", "rnn", "rnn_64"})
    refuse(capsys, "train", path, "--fresh", "trainer.device=cuda:77")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["tiny"]  # refused before anything was moved
    assert here("train", path, "--fresh", "trainer.steps=4", "model.mixer=softmax") == 0
    assert (tmp_path / "runs/tiny.old1/summary.json").exists()
    check_forms(read_json(run / "summary.json"), {"full"})
    assert "SoftmaxAttention has only full, got 'rnn'" in refuse(capsys, "eval", run, "--form", "rnn")


@pytest.mark.slow
def test_init_from_keeps_what_fits_and_interpolates_positions(tmp_path, caplog, capsys):
    source = trained(tiny_recipe(tmp_path))
    first = lion.load(source)
    tuned = {"init_from": str(source), "optim": {"lr": 1e-12}}
    same = tiny_recipe(tmp_path, "same", **tuned)
    new = lion.load(trained(same))
    torch.testing.assert_close(new.state_dict(), first.state_dict(), rtol=0, atol=1e-6)
    with caplog.at_level("INFO", "lion"):
        finer = lion.load(trained(tiny_recipe(tmp_path, "finer", **tuned, model={"patch_size": 2})))
    assert "new: patch.weight; not used: patch.weight" in caplog.text
    assert finer.position.shape == (1, 17, 16)
    want = finer.adapt(first.state_dict(), first)["position"]
    torch.testing.assert_close(finer.position.data, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(finer.head.weight, first.head.weight, rtol=0, atol=1e-6)
    line = refuse(capsys, "train", tiny_recipe(tmp_path, "other", **tuned, model={"dim": 8, "depth": 1}))
    assert "do not fit, e.g. cls is (1, 1, 8) here and (1, 1, 16) there; the run has model.dim=16 model.depth=" in line
    assert not (tmp_path / "runs/other").exists()
    shutil.rmtree(source)
    trained(same)  # it has weights of its own


@pytest.mark.slow
def test_show_and_list():
    text = "\n".join(first_parts(3, "deit_small_lion_s", processes=4))
    assert_in(
        text,
        "mixer: lion_s",
        "22,002,736",
        "375,300",
        "1024 = 4 processes x 1 accumulated x 256",
        "GB of state",
        "MFLOP",
    )
    table = mixer_table()
    assert all(row[0] in table for row in mixer_rows())


@pytest.mark.slow
def test_show_ends_with_what_a_recipe_costs_here(tmp_path, monkeypatch):
    """Check that time, memory and disk come after all keys, and that nothing is downloaded or tokenized."""
    monkeypatch.setenv("LION_DATA", f"{tmp_path}/data")
    book = tmp_path / "book.txt"
    book.write_text("one long document\n" * 50_000)
    pieces = first_parts(9, "mlm_tiny_lion_s", "data.name=text", f"data.path={book}", "run.name=books")
    settings, known, memory, measured, *_ = pieces
    assert "mixer: lion_s" in settings and "#   model.attention.feature_map: " in settings
    for line in (
        r"^recipe +books: book.txt, no number yet",
        r"^model +lion_s, [\d,]+ parameters$",
        r"^data +text, .*; about \d.* MB to write, .* GB free under",
        r"^steps +2,000 = [\d,.]+ epochs of \d+",
        r"^run folder +runs/books, [\d.]+ MB of checkpoints",
    ):
        assert re.search(line, known, re.M), (line, known)
    assert memory.startswith("memory ")
    assert re.match(r"time +about [\d.]+ (s|min|h) here \(\d+ CPU threads?, float32, eager: ", measured)
    assert not (tmp_path / "data").exists()
    _, large = first_parts(2, "mlm_base_softmax", "model.depth=1", "model.dim=48")
    assert "327 GB to download and about 312 GB to write" in large


def test_recipes_by_family():
    listed = listing()
    cpu, deit = listed.index("quickstart "), listed.index("deit_small_lion_s ")
    assert cpu < listed.index("ImageNet-1k, DeiT's training") < deit and "Table 2, Lion-S, small" in listed
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == set(recipe_files())
    assert "Your own" not in listed, "every recipe here has a family"
    assert "cifar100_softmax " not in listing("lion_s") and "cifar100_lion_s " in listing("LION_S")
    assert "cifar100_lion_s " in listing("table 14") and "cifar100_lion_s_vector" not in listing("Table 14")
    assert "gpt2_small_softmax" in listing("*small*softmax") and "mlm" not in listing("*small*softmax")
    refused(r"'quickstrat': no recipe's name or row matches, did you mean 'quickstart'", listing, "quickstrat")
    assert listing("small", "lion_s", "table 2") == listing("Table 2", "lion_s", "small") != listing("small", "lion_s")


def test_show_names_what_was_left_open_alone(tmp_path):
    """Check that a patch size given as one number is not listed as open, although the model is built with two."""
    recipe = tiny_recipe(tmp_path, model={"patch_size": 2, "position_embedding": None, "readout": "mean"})
    (settings,) = first_parts(1, recipe)
    left = [line for line in settings.splitlines() if line.startswith("#   ")]
    assert "#   model.position_embedding: false" in left and "#   model.attention.feature_map: " in settings
    for name in ("patch_size", "readout", "null"):
        assert not any(name in line for line in left)


def test_list_is_a_command_of_its_own(capsys):
    for name, words in (("list", "run.sh list [-h]"), ("show", "run.sh show [-h]")):
        with pytest.raises(SystemExit):
            here(name, "--help")
        assert words in capsys.readouterr().out
    assert here("list", "quickstart") == 0 and "98 top-1" in capsys.readouterr().out
    assert here("list", "--mixers") == 0 and "lion_s_vector" in capsys.readouterr().out
    assert "--mixers: lists all mixers, leave 'gla' out" in refuse(capsys, "list", "gla", "--mixers")
    assert "required: recipe" in refuse(capsys, "show")
    assert "row matches, ./run.sh list prints all recipes\n" in refuse(capsys, "list", "0" * 30)


def test_a_folder_does_not_hide_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "photos"):
        (tmp_path / name).mkdir()
    assert recipe_path("quickstart") == RECIPES / "quickstart.yaml"
    refused(r"photos: no such recipe, \./run\.sh list prints", recipe_path, "photos")
    (tmp_path / "runs/photos").mkdir(parents=True)
    (tmp_path / "runs/photos/recipe.yaml").touch()
    refused(r"photos: .* but a run; its recipe is runs/photos/recipe.yaml", recipe_path, "photos")


@pytest.mark.process
def test_options_have_the_names_of_the_tables():
    """Check the names that the options repeat, because the tables import PyTorch."""
    ours = (options.FORMS, options.MODES, options.FORMATS, options.GLUE_TASKS, options.MATMUL, options.GPUS)
    for names, theirs in zip(ours, (FORMS, MODES, FORMATS, TASKS, MATMUL, TARGETS), strict=True):
        assert list(names) == list(theirs)


def test_options_are_checked_before_anything_is_loaded():
    cases = {
        "eval run --fromat": "run.sh eval: unknown option --fromat: did you mean '--form'?",
        "lst": "unknown command 'lst', did you mean 'list'?",
        "eval nosuch": "run 'nosuch': no recipe.yaml in nosuch or runs/nosuch, ",
        "export nosuch out": "run 'nosuch': no recipe.yaml in nosuch or runs/nosuch, ",
        "texts data.path=nosuch/": "data.path: no file or folder ",
        "gpt2_tiny_lion_s data.name=text data.path=nosuch.txt": "data.path: no file or folder ",
        "show quickstrat": "quickstrat: no such recipe, did you mean 'quickstart'?",
        "show quickstart --process=3 --x": "run.sh show: unknown option --x",
        "bench ops --length 0": "run.sh bench ops: --length: expected at least 1, got 0",
        "quickstart optim.lrr=1": "override: unknown key 'optim.lrr': did you mean 'lr'?",
        "quickstart lr=1": "override: unknown key 'lr': did you mean 'optim.lr'?",
        "show quickstart tainer.epochs=1": "override: unknown key 'tainer': did you mean 'trainer.epochs'?",
        "quickstart model.attention.conv_wdth=4": "override: unknown key 'model.attention.conv_wdth': did you",
    }
    code = f"import sys\nfrom tools.__main__ import main\nfor words in {list(cases)!r}:\n"
    code += " try: main(words.split())\n"
    code += " except Exception as e: print(str(e).partition('\\n')[0], 'torch' in sys.modules)"
    done = python("-c", code)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done
    for line, message in zip(lines, cases.values()):
        assert line.startswith(message) and line.endswith("False"), line
    code = "import sys\nfrom tools.options import OPTIONS, read\nfor name in OPTIONS:\n try: read(name, ['--help'])\n"
    code += " except SystemExit: pass\nprint('torch' in sys.modules)"
    done = python("-c", code)
    assert done.stdout.count("usage: run.sh") == len(options.OPTIONS) and done.stdout.endswith("False\n"), done


@pytest.mark.process
def test_help_to_a_reader_that_has_seen_enough():
    done = subprocess.run("./run.sh --help | head -1", cwd=ROOT, shell=True, capture_output=True, text=True)
    assert done.stdout == "usage:\n" and done.stderr == ""


def test_activation_estimate_follows_the_batch(tmp_path):
    recipe = resolve(tiny_recipe(tmp_path))
    task = make_task(recipe, describe_data(recipe)[0])
    one, four = (activation_bytes(task, recipe, micro) for micro in (1, 4))
    assert 3 < four / one < 5


def test_softmax_keeps_no_scores():
    """Check that twice the tokens need twice the memory, as in fused kernels; plain `meta` tensors would save L x L
    scores.
    """

    def kept(side):
        recipe = resolve("lra_image_softmax", [f"data.side={side}", "model.depth=1", "model.dropout=0"])
        return activation_bytes(make_task(recipe, describe_data(recipe)[0]), recipe, 1)

    assert 3.9 < kept(128) / kept(64) < 4.1


def test_forms_to_measure():
    full, chunk, token, chunks = ("full", None), ("chunk", 64), ("rnn", 1), ("rnn", 64)
    for form, chunk_size, forms, length, expected in (
        ("all", None, FORMS, 0, [full, chunk, token, chunks]),
        ("all", 1, FORMS, 0, [full, ("chunk", 1), token]),
        ("all", 8, ("full",), 0, [full]),
        ("rnn", None, FORMS, 0, [chunks]),
        ("rnn", 1, FORMS, 0, [token]),
        ("rnn", (1, 64), FORMS, 0, [token, chunks]),
        ("all", (1, 64), FORMS, 0, [full, ("chunk", 1), chunk, token, chunks]),
        ("all", None, FORMS, 1024, [full, chunk, token, chunks]),
        ("all", None, FORMS, 1025, [chunk, chunks]),  # no form with an L x L matrix
        ("full", None, FORMS, 10_000, [full]),
        ("all", None, ("full",), 10_000, [full]),
    ):
        assert forms_to_measure(form, chunk_size, forms, length=length) == expected


@pytest.mark.slow
def test_help_names_every_command_before_anything_is_installed(tmp_path):
    """Run with `-S`, so that the interpreter finds no installed package."""
    for argv in (["--help"], ["help"], ["bench", "-h"]):
        done = python("-S", "-m", "tools", *argv)
        assert done.returncode == 0, done.stderr
        for name, entry in COMMANDS.items():
            if argv[0] != "bench" or name.startswith("bench "):
                assert f"./run.sh {name} {entry.synopsis}".rstrip() in done.stdout and entry.help in done.stdout
    done = python("-S", "-m", "tools", "list")
    assert done.returncode == 2 and "error: this Python has no torch and no yaml: pip install -e .," in done.stderr
    done = run_sh("--help")
    assert done.returncode == 0 and "--fresh" in done.stdout and "./run.sh test [--quick|--every]" in done.stdout
    (tmp_path / "lion").symlink_to(ROOT / "run.sh")
    done = run_sh("quickstrt", script=tmp_path / "lion")
    assert done.returncode == 2 and "unknown command 'quickstrt', did you mean 'quickstart'" in done.stderr
    for name in ("tools", "random", "numpy", "datasets"):  # hide no module of the clone, of Python or of a library
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the current folder')")
    (tmp_path / "mine.py").write_text("print('my module')")
    (tmp_path / "own.yaml").write_text("seed: 1\nimports: [mine]")
    done = run_sh("show", "own.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "own.yaml: missing section 'task'" in done.stderr
    assert "my module" in done.stdout


def test_every_command_of_the_table_is_there():
    for entry in COMMANDS.values():
        module, _, function = entry.where.partition(":")
        assert callable(getattr(importlib.import_module(module), function or "main"))


def test_what_a_line_calls():
    for line, name, rest in (
        ("", "train", "quickstart"),
        ("seed=1 --no-eval", "train", "quickstart seed=1 --no-eval"),
        ("--fresh", "train", "quickstart --fresh"),
        ("my.yaml seed=1", "train", "my.yaml seed=1"),
        ("recipes/my", "train", "recipes/my"),
        ("eval runs/x", "eval", "runs/x"),
        ("bench ops --eager", "bench ops", "--eager"),
        ("bench", "bench", ""),
    ):
        assert parse_command(line.split()) == (name, rest.split()), line


def test_the_suite_runs_in_as_many_processes_as_cores_and_memory_allow(tmp_path, monkeypatch):
    called = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "execv", lambda path, argv: called.append(argv[3:]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    monkeypatch.setattr(external, "NEEDED", 1000)
    limited = tmp_path / "memory.max"
    monkeypatch.setattr(external, "LIMIT", limited)
    for limit, count in {"3999": "3", "500": "1", "9000": "4", "max": "4"}.items():
        limited.write_text(f"{limit}\n")
        external.test(["--quick", "tests/ops", "-x"])
        assert called.pop() == ["-n", count, "--dist", "worksteal", "--quick", "tests/ops", "-x"]
    for words in (["-n2", "tests/ops"], ["--numprocesses", "1"], ["tests/a.py::test_b"], ["-k", "quick", "--pdb"]):
        external.test(words)
        assert called.pop() == words
    refused("unknown option --quik, did you mean '--quick'", external.test, ["--quik"])


@pytest.mark.slow
def test_a_run_in_eager_mode_and_why_another_length_is_another_run(tmp_path, capsys):
    settings = {"compile": True, "steps": 2}
    run = trained(tiny_recipe(tmp_path, trainer=settings), "--eager")
    assert resolve(run / "recipe.yaml").trainer.compile is False
    line = refuse(capsys, "train", tiny_recipe(tmp_path, trainer=settings), "--eager", "trainer.steps=1")
    assert "trainer.steps: 2 -> 1 (the learning rate of every step depends on the length, so the steps taken" in line


@pytest.mark.slow
def test_a_closed_stderr_and_ascii_do_not_stop_a_run(tmp_path):
    call = [sys.executable, "-m", "tools", "train", tiny_recipe(tmp_path), "--no-eval", "run.name=\u00e9"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *call], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("?: lion_s, "), done.stdout
    assert state_of(tmp_path / "runs" / "\u00e9")["step"] == 6


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_a_standard_stream_is_a_line_or_nothing(monkeypatch, capsys):
    def outcome(main):
        with pytest.raises(SystemExit) as ended:
            run_command(main, [])
        return ended.value.code

    def prints(argv):
        print("some")
        return 0

    def wrong(argv):
        raise ConfigError("wrong")

    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr(sys, "stdout", full)
        assert outcome(prints) == 1
        assert capsys.readouterr().err == "error: No space left on device\n"
    with monkeypatch.context() as patched, open("/dev/full", "w", buffering=1) as full:
        patched.setattr(sys, "stderr", full)
        assert outcome(wrong) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.slow
def test_a_bare_name_is_that_of_a_shipped_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert resolve("deit_tiny_lion_s") == resolve("deit_tiny_lion_s.yaml")
    assert here("quickstart", f"run.root={tmp_path}", "trainer.steps=1", "trainer.compile=false", "--no-eval") == 0
    assert "unknown command 'quickstrat'" in refuse(capsys, "quickstrat")


def test_a_warm_up_beyond_the_end_is_said(tmp_path):
    text = "\n".join(parts(str(tiny_recipe(tmp_path, schedule={"warmup": 7})), [], None, None))
    assert "7 steps of warm-up, but the run ends earlier: the peak is not reached" in text


def test_no_more_loader_workers_than_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    path = ROOT / "recipes/deit_tiny_lion_s.yaml"
    assert loader_workers(resolve(path)) == 3 and loader_workers(resolve(path, ["data.workers=2"])) == 2
    assert loader_workers(resolve(path, ["data.workers=null"])) == 3
    assert loader_workers(resolve("quickstart")) == 0


@pytest.mark.slow
def test_data_are_prepared_once_wherever_they_are_built(tmp_path, monkeypatch):
    """Check that the launcher prepares nothing, and that each process prepares once."""
    calls = []
    build = Digits.build

    def built(self):
        calls.append("build")
        return build(self)

    def launched(machines, argv):
        calls.append(f"launch {machines.processes}")
        return 0

    monkeypatch.setenv("LION_DATA", f"{tmp_path}/root")
    monkeypatch.setattr(Digits, "prepare", lambda self: calls.append("prepare"))
    monkeypatch.setattr(Digits, "build", built)
    monkeypatch.setattr(train, "launch", launched)
    path = tiny_recipe(tmp_path)
    trained(path, "--processes", "2")
    assert calls == ["launch 2"]

    def check_once(*line):
        calls.clear()
        assert here(*line) == 0 and calls == ["prepare", "build"]

    with monkeypatch.context() as patched:
        for variable, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
            patched.setenv(variable, value)
        check_once("train", path, "run.name=group", "trainer.steps=1", "--no-eval")
    check_once("train", path, "run.name=alone", "trainer.steps=1", "--no-eval")
    check_once("eval", tmp_path / "runs/alone", "--form", "full")
    check_once("show", path)


def test_a_compiled_file_that_is_cut_off_is_named(tmp_path):
    """Load files that a killed compilation leaves behind; Inductor wraps the error of the loader."""
    cut = tmp_path / "torchinductor_a user" / "kernel.so"
    cut.parent.mkdir()
    for content in (b"", b"\x7fELF", b"no library" * 99):
        cut.write_bytes(content)
        with pytest.raises(OSError) as raised:
            ctypes.CDLL(cut)
        for error in (raised.value, RuntimeError(f"ImportError: {raised.value}\n\nSet TORCHDYNAMO_VERBOSE=1")):
            assert one_line(error).startswith(f"error: {cut} is truncated by a compilation that was killed: delete")
    for other in (f"{cut}: undefined symbol", "/usr/lib/libc.so: invalid ELF header"):
        assert one_line(RuntimeError(other)) is None


def prepare_slowly(root, recipe, both, results):
    """Open data whose preparation takes a while, in two processes at once."""
    os.environ["LION_DATA"] = str(root)
    made = root / "made"

    def prepare(self):
        if not made.exists():
            for word in ("begun", "done"):
                with made.open("a") as file:
                    file.write(f"{word}\n")
                time.sleep(0.3)

    Digits.prepare = prepare
    both.wait(60)
    build_data(resolve(recipe))
    results.put(made.read_text().split())


@pytest.mark.process
def test_others_wait_for_who_prepares(tmp_path):
    """Check that two processes prepare the same data once, and open them only when they are complete."""
    both, results = CONTEXT.Barrier(2), CONTEXT.Queue()
    for _ in range(2):
        CONTEXT.Process(target=prepare_slowly, args=(tmp_path, tiny_recipe(tmp_path), both, results)).start()
    for _ in range(2):
        assert results.get(timeout=120) == ["begun", "done"]


def test_bad_settings_are_refused_before_data_are_prepared(tmp_path, monkeypatch, capsys):
    def prepare(self):
        raise AssertionError

    monkeypatch.setattr(Digits, "prepare", prepare)
    monkeypatch.setattr(Digits, "published", lambda self: (INFO, 1000))
    path = tiny_recipe(tmp_path)
    for override, words in {
        "trainer.micro_batch=7": "trainer.micro_batch: 7 does not divide",
        "model.patch_size=3": "model.patch_size: 3 does not divide",
        "trainer.device=cuda:77": "trainer.device: 'cuda:77' is not available",
    }.items():
        assert words in refuse(capsys, "train", path, override)
    monkeypatch.setattr(checks, "checkpoint_bytes", lambda *args: (2**60, 2**60))
    assert "run.root: checkpoints in" in refuse(capsys, "train", path)


def photo_recipe(folder, **changes):
    pictures(folder, {split: {"cat": 6, "dog": 6} for split in ("train", "val")})
    data = {"name": "imagefolder", "root": str(folder), "image_size": [8, 8], "workers": 0, **changes}
    return tiny_recipe(folder, data=data, trainer={"batch_size": 6, "steps": 3, "eval_every": 3, "save_every": 1})


def test_only_training_pays_for_a_cache(tmp_path):
    recipe = resolve(photo_recipe(tmp_path, cache="memory"))
    assert type(build_data(recipe, cached=True).train.source).__name__ == "Decoded"
    assert type(build_data(recipe).train.source).__name__ == "ClassFolders"
    assert recipe.data.cache == "memory"


@pytest.mark.slow
def test_repeated_augmentation_reaches_the_trainer(tmp_path):
    run = trained(photo_recipe(tmp_path, repeats=3))
    upcoming = load_state(run / "checkpoints/last-2/state.pt")["next"]["samples"]
    assert len(upcoming) >= 3 and upcoming[:3] == upcoming[:1] * 3


@pytest.mark.slow
def test_data_of_other_classes_is_refused(tmp_path, capsys, caplog):
    """Check that renamed class folders are refused, because they would silently change the labels of a run."""
    recipe, moved = photo_recipe(tmp_path), tmp_path / "moved"
    run = trained(recipe)
    for split in ("train", "val"):
        shutil.copytree(tmp_path / split, moved / split)
        (tmp_path / split / "dog").rename(tmp_path / split / "bird")
    wrong = "checkpoint was trained on other data: class 0 was 'cat', and is 'bird' now"
    assert wrong in refuse(capsys, "bench", "inference", run, "--sizes", "8", "--evaluate", "3")
    assert wrong in refuse(capsys, "eval", run)
    shutil.rmtree(run / "checkpoints/last-3")
    assert wrong in refuse(capsys, "train", recipe)
    assert here("eval", run, f"data.root={moved}", "--form", "full") == 0
    fixed = "'seed=1': the recipe of a run is fixed, only data.root, data.workers may"
    assert fixed in refuse(capsys, "eval", run, "seed=1")
    with caplog.at_level("INFO", "lion"):
        trained(recipe, f"data.root={moved}")  # only the place has changed
    assert "resuming at step 2 of 3" in caplog.text
    for inside in ("recipe.yaml", "checkpoints/last"):
        assert f"not a run's folder, did you mean '{run}'?" in refuse(capsys, "eval", run / inside)
    pictures(moved, {split: {"eel": 2} for split in ("train", "val")})
    assert "was trained on other data: number of classes was 2, and is 3 now" in refuse(capsys, "eval", run)


def test_recipes_of_ones_own_are_listed_and_claim_nothing(tmp_path, monkeypatch):
    """Check that a file that extends a recipe inherits its settings, but not the row of a paper."""
    for name in ("deit_small_lion_s", "quickstart"):
        shutil.copy(ROOT / f"recipes/{name}.yaml", tmp_path)
    (tmp_path / "base").mkdir()
    shutil.copy(ROOT / "recipes/base/deit.yaml", tmp_path / "base")
    (tmp_path / "pictures.yaml").write_text("extends: deit_small_lion_s.yaml\ndata: {name: imagefolder}\n")
    (tmp_path / "mymix.yaml").write_text("extends: quickstart.yaml\nmodel: {mixer: gla}\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    monkeypatch.setattr("tools.listing.RECIPES", tmp_path)
    own, *rest = listing().split("\n\n")
    assert own.split() == ["Your", "own", "broken", "mymix", "pictures"]
    assert "Lion-S, small" in "".join(rest) and "98 top-1" in "".join(rest)
    assert resolve(tmp_path / "mymix.yaml").about.expected == "no number yet"
    assert resolve(tmp_path / "quickstart.yaml", ["optim.lr=1e-3"]).about.expected == "98 top-1"
    assert resolve(tmp_path / "quickstart.yaml", ["data.name=mnist"]).about.expected == "no number yet"


def test_a_command_is_kept_without_the_folders_of_a_machine():
    recipe = resolve("mlm_tiny_lion_s", ["data.name=text"])
    overrides = ["data.name=text", "data.path=/home/me/book.txt", "run.name=books", "optim.lr=1e-3"]
    line = train.command_of("mlm_tiny_lion_s", overrides, recipe, None)
    assert line == "./run.sh mlm_tiny_lion_s data.name=text data.path=book.txt run.name=books optim.lr=1e-3"


def test_no_key_of_our_recipes_is_refused_before_pytorch_is_loaded():
    """Check that every setting of every section is found in the source, by the keys of all shipped recipes."""
    for path in recipe_files().values():
        check_keys(layers_of(path, []))
    for section, settings in {"trainer": TrainerConfig, "optim": OptimConfig, "data": ImageFolder.Config}.items():
        assert {field.name for field in fields(settings)} <= names_in(SOURCES[section])


def test_a_busy_machine_is_named():
    cores = os.cpu_count()
    assert describe_busy(0.1 * cores, 1.05) == ""
    assert f"(load {2.0 * cores:.1f}, {cores} cores)" in describe_busy(2.0 * cores, 1.0)
    assert "two measurements differ by 40%" in describe_busy(0.1 * cores, 1.4)


def test_a_run_that_will_hardly_learn_is_named(tmp_path):
    """Check few updates, a late or low peak and few epochs of mixed pictures; the papers' recipes have none."""
    path = tiny_recipe(tmp_path)

    def said(*settings):
        recipe = resolve(path, ["trainer.steps=600", "task.mixup=0", "task.cutmix=0", *settings])
        return doubts(recipe, make_plan(recipe, samples=1000, world=1))

    assert said() == []
    for settings, message in {
        "trainer.steps=100": "only 100 updates: set more trainer.epochs, or trainer.batch_size below 64",
        "schedule.warmup=300": "the learning rate reaches its peak after 50% of the run: set schedule.warmup=5%",
        "task.mixup=0.2": "40 epochs of mixed pictures are few: set task.mixup=0 task.cutmix=0, as recipe",
        "optim.lr=1e-4 optim.lr_batch=512": "a peak of the learning rate of 1e-05 is too low to start from",
    }.items():
        (line,) = said(*settings.split())
        assert line.startswith(message)
    assert said("init_from=somewhere", "trainer.steps=60", "optim.lr=1e-5") == []
    assert said("task.mixup=0.2", "trainer.steps=800") == []
    for name in ("deit_small_lion_s", "cifar10_mini", "quickstart", "lra_text_lion_s"):
        recipe = resolve(name)
        _, samples, _ = describe_data(recipe, look=False)
        assert doubts(recipe, make_plan(recipe, samples=samples, world=1)) == []
    pieces = first_parts(9, path)
    assert any("warning           only 6 updates" in piece for piece in pieces)


def test_one_command_trains_a_folder_of_pictures(tmp_path, capsys):
    pictures(tmp_path / "photos", {"train": {"cat": 4, "dog": 4}, "val": {"cat": 2, "dog": 2}})
    small = "model.depth=1 model.dim=16 model.num_heads=2 trainer.batch_size=4 trainer.steps=2".split()
    place = [f"data.root={tmp_path / 'photos'}", f"run.root={tmp_path / 'runs'}", "data.workers=0"]
    assert here("pictures", *place, *small, "--eager", "--form", "rnn") == 0
    shown = capsys.readouterr()
    assert "2 classes: cat, dog" in shown.out and "rnn (64)" in shown.out
    assert "warning: only 2 updates" in shown.err
