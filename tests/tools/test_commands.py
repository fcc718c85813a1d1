"""Tests of the commands, run as a user runs them."""

import ctypes
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from torchvision.transforms.v2.functional import pil_to_tensor

import lion
from data.vision.digits import INFO, Digits
from lion.config import ConfigError
from lion.evaluation.forms import forms_to_measure
from lion.trainer.checkpoint_files import load_state
from tests.helpers import ROOT, here, pictures, refuse, state_of, tiny_recipe
from tools import checks, external, predict, train
from tools.cli import one_line, run_command
from tools.commands import COMMANDS, parse_command
from tools.compose import build_data, loader_workers, resolve
from tools.listing import RECIPES, listing, recipe_names, recipe_path
from tools.mixers import mixer_rows, mixer_table
from tools.show import activation_bytes, parts, show

pytest.importorskip("sklearn")


def run_sh(*args, timeout=400, script=ROOT / "run.sh"):
    """Run run.sh with this interpreter, without installing anything."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "LION_NO_INSTALL": "1", "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(script), *map(str, args)], env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Train a short quickstart through run.sh, compiled if there is a compiler."""
    root = tmp_path_factory.mktemp("runs")
    done = run_sh(f"run.root={root}", "trainer.epochs=12", "trainer.eval_every=4ep")
    assert done.returncode == 0, done.stderr
    return root, done


@pytest.mark.slow
def test_quickstart_learns_and_leaves_a_complete_run(quickstart):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root, done = quickstart
    folder = root / "quickstart"
    names = {
        p.name.partition(".tfevents")[0] for p in folder.iterdir()
    }  # names of TensorBoard files contain time and host
    assert names == {
        "recipe.yaml", "environment.json", "metrics.jsonl", "events.out", "checkpoints", "summary.json", ".lock",
    }  # fmt: skip
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["metric"] == "top1" and summary["split"] == "test" and summary["value"] > 0.9
    assert summary["forms"].keys() == {"full", "chunk", "rnn", "rnn_64"}
    for result in summary["forms"].values():
        assert result["value"] == summary["value"] and result["deviation"] < 1e-4 and result["peak_bytes"] > 0
    assert str(folder) in done.stdout and "tensorboard --logdir" in done.stdout
    assert "loss=" in done.stderr and "images/s=" in done.stderr and "lr=" in done.stderr
    assert done.stderr.count("step/s") < 20  # of 192 steps: without a terminal, the progress bar is drawn rarely
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    events = EventAccumulator(str(folder)).Reload()
    (point,) = events.Scalars("test/top1")
    assert (point.step, point.value) == (summary["best_step"], pytest.approx(summary["value"]))
    row = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    assert b"model.mixer" in row and b"data.name" in row and b"about." not in row
    graphs = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines() if '"train"' in x]
    if shutil.which("g++"):
        assert graphs[0]["compiled_graphs"] == 1 and graphs[-1]["compiled_graphs"] == 2  # one more graph for evaluation
    for kind in ("last", "best"):
        assert not any("_orig_mod" in k for k in state_of(folder, kind)["model"])


@pytest.mark.slow
def test_a_finished_run_prints_its_summary_and_a_changed_one_is_refused(quickstart, capsys, monkeypatch):
    root, done = quickstart
    recipe = [ROOT / "recipes/quickstart.yaml", f"run.root={root}", "trainer.eval_every=4ep"]
    assert here("train", *recipe, "trainer.epochs=12") == 0
    first, _, summary = capsys.readouterr().out.partition("\n")
    assert first == f"{root / 'quickstart'} is complete, nothing to train; --fresh starts anew"
    assert summary.strip() == done.stdout[done.stdout.index("form ") :].strip()
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):  # torchrun --nproc-per-node=1
        monkeypatch.setenv(name, value)
    assert here("train", *recipe, "trainer.epochs=12") == 0 and "is complete" in capsys.readouterr().out
    monkeypatch.delenv("RANK")
    changed = refuse(capsys, "train", *recipe, "trainer.epochs=13", "optim.lr=1e-3", "trainer.log_every=3")
    for part in ("optim.lr: 0.002 -> 0.001", "trainer.epochs: 12.0 -> 13.0", "run.name=", "--fresh"):
        assert part in changed
    assert "log_every" not in changed


@pytest.mark.slow
def test_eval_predict_and_load(quickstart, tmp_path, capsys):
    """Check on batches of 64, whose graphs Inductor has in its cache from the evaluation after the training."""
    folder = quickstart[0] / "quickstart"
    assert here("eval", folder, "--form", "rnn", "--chunk-size", "64") == 0
    header, _, row, note = capsys.readouterr().out.strip().splitlines()
    assert header.split() == ["form", "top-1", "%", "samples/s", "peak", "memory", "deviation"]
    assert row.startswith("rnn (64)") and "weights" in note

    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    files = []
    for i in range(64):
        files.append(tmp_path / f"{i}.png")
        Image.fromarray((pictures[i].reshape(8, 8) * 15.9).astype("uint8")).save(files[-1])
    done = run_sh("predict", folder, *files, "--form", "rnn")
    assert done.returncode == 0, done.stderr
    guesses = [int(line.split()[1]) for line in done.stdout.strip().splitlines()[2:]]
    assert sum(g == y for g, y in zip(guesses, labels)) >= 56
    (tmp_path / "no.png").write_text("text")
    assert "not a readable image" in refuse(capsys, "predict", folder, tmp_path / "no.png")
    table = done.stdout.splitlines()
    some = (files[0], tmp_path / "no.png", files[1], tmp_path / "gone.png")
    assert here("predict", folder, *some, "--form", "rnn", "--eager") == 2
    some = capsys.readouterr()  # unreadable files do not stop the others from being classified
    assert [line.split()[:2] for line in some.out.splitlines()[2:]] == [line.split()[:2] for line in table[2:4]]
    assert [line.split(": ", 2)[1] for line in some.err.splitlines()] == [f"{tmp_path}/no.png", f"{tmp_path}/gone.png"]

    model = lion.load(folder)
    lion.set_form(model, "rnn")
    pixels = torch.stack([pil_to_tensor(Image.open(file)) for file in files])  # the same files as for `predict`
    with torch.inference_mode():
        assert [int(model.classes[i]) for i in model(pixels).argmax(1)] == guesses


class Letters:
    """A data set of text files: a sample holds the letters of a file, and a batch is padded with zeros."""

    asks = ("file",)

    def load(self, path, info):
        if not Path(path).exists():
            raise ConfigError(f"{path}: no such file")
        return {"tokens": torch.tensor([ord(c) for c in Path(path).read_text()])}

    def collate(self, samples):
        return {"tokens": torch.nn.utils.rnn.pad_sequence([s["tokens"] for s in samples], batch_first=True)}


class Spelling:
    """A task whose outputs (B, L, 128) are the letters themselves."""

    info, fills_masks = None, False

    def check_prediction(self):
        pass

    def outputs(self, model, batch):
        return torch.nn.functional.one_hot(batch["tokens"], 128)

    def describe(self, outputs, count):
        assert outputs.is_floating_point() and outputs.shape[2] == 128
        return [["".join(chr(c) for c in row if c)] for row in outputs.argmax(-1).tolist()]


def test_predict_takes_texts_of_other_lengths(tmp_path, monkeypatch, capsys):
    model, recipe = torch.nn.Linear(1, 1), resolve("quickstart", ["trainer.device=cpu"])
    loaded = SimpleNamespace(model=model, task=Spelling(), folder=tmp_path, recipe=recipe)
    for name, value in (("open_run", loaded), ("choose_form", None), ("resolve_run", None), ("open_data", Letters())):
        monkeypatch.setattr(predict, name, lambda *args, value=value: value)
    words = [
        chr(ord("a") + i % 26) * (1 + i % 7 + i // 64) for i in range(70)
    ]  # two batches; the longest word is in the second one
    files = [tmp_path / f"{i}.txt" for i in range(70)]
    for file, word in zip(files, words):
        file.write_text(word)
    assert here("predict", "x", *files, "--eager") == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:]] == [
        [str(file), word] for file, word in zip(files, words)
    ]
    assert here("predict", "x", files[3], tmp_path / "gone.txt", "--eager") == 2
    assert capsys.readouterr().out.splitlines()[2:] == [f"{files[3]}   dddd"]


def test_predict_takes_the_form_and_the_compilation_of_the_run(tmp_path, monkeypatch, capsys):
    """Check a mixer without the full form, in a run without compilation."""
    model = {"mixer": "vim", "mlp": "none", "position_embedding": None}
    assert here("train", tiny_recipe(tmp_path, model=model), "--no-eval") == 0
    Image.new("L", (8, 8), 99).save(tmp_path / "grey.png")
    monkeypatch.setattr(predict, "compile_blocks", lambda *_, **__: pytest.fail("compiled"))
    capsys.readouterr()
    assert here("predict", tmp_path / "runs" / "tiny", tmp_path / "grey.png") == 0
    assert "grey.png" in capsys.readouterr().out


@pytest.mark.slow
def test_fresh_keeps_the_earlier_run_and_softmax_has_one_form(tmp_path, capsys):
    path = tiny_recipe(tmp_path, model={"mixer": "softmax"})
    assert here("train", path) == 0
    capsys.readouterr()
    refuse(capsys, "train", path, "--fresh", "trainer.device=cuda:77")
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["tiny"]  # refused before anything was moved
    assert here("train", path, "--fresh", "trainer.steps=4") == 0
    capsys.readouterr()
    assert (tmp_path / "runs" / "tiny.old1" / "summary.json").exists()
    summary = json.loads((tmp_path / "runs" / "tiny" / "summary.json").read_text())
    assert summary["forms"].keys() == {"full"}
    refused = refuse(capsys, "eval", tmp_path / "runs" / "tiny", "--form", "rnn")
    assert "SoftmaxAttention has only full, got 'rnn'" in refused


def test_init_from_brings_another_head(tmp_path):
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    old = state_of(tmp_path / "runs" / "tiny", "best")["model"]
    changes = {"init_from": str(tmp_path / "runs" / "tiny"), "optim": {"lr": 1e-12}}
    assert here("train", tiny_recipe(tmp_path, "tuned", **changes), "--no-eval") == 0
    new = lion.load(tmp_path / "runs" / "tuned").state_dict()
    assert all(torch.allclose(new[k], old[k], atol=1e-6) for k in old)
    shutil.rmtree(tmp_path / "runs" / "tiny")
    assert here("train", tiny_recipe(tmp_path, "tuned", **changes), "--no-eval") == 0, "it has weights of its own"


def test_init_from_another_grid_interpolates_positions(tmp_path, caplog, capsys):
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    first = lion.load(tmp_path / "runs" / "tiny")
    changes = {"init_from": str(tmp_path / "runs" / "tiny"), "optim": {"lr": 1e-12}, "model": {"patch_size": 2}}
    with caplog.at_level("INFO", "lion"):
        assert here("train", tiny_recipe(tmp_path, "finer", **changes), "--no-eval") == 0
    finer = lion.load(tmp_path / "runs" / "finer")
    assert finer.position.shape == (1, 17, 16)
    want = finer.adapt(first.state_dict(), first)["position"]
    torch.testing.assert_close(finer.position.data, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(finer.head.weight, first.head.weight, rtol=0, atol=1e-6)
    assert "new: patch.weight; not used: patch.weight" in caplog.text
    other = tiny_recipe(tmp_path, "other", init_from=changes["init_from"], model={"dim": 8, "depth": 1})
    capsys.readouterr()
    line = refuse(capsys, "train", other)
    assert "do not fit, e.g. cls is (1, 1, 8) here and (1, 1, 16) there; the run has model.dim=16 model.depth=" in line
    assert not (tmp_path / "runs" / "other").exists()


@pytest.mark.slow
def test_show_and_list():
    text = show("deit_small_lion_s", [], processes=4)
    for part in (
        "mixer: lion_s",
        "22,002,736",
        "375,300",
        "1024 = 4 processes x 1 accumulated x 256",
        "GB of state",
        "MFLOP",
    ):
        assert part in text
    assert all(row[0] in mixer_table() for row in mixer_rows())


@pytest.mark.slow
def test_show_ends_with_what_a_recipe_costs_here(tmp_path, monkeypatch):
    """Check that time, memory and disk come after all keys, and that nothing is downloaded or tokenized."""
    monkeypatch.setenv("LION_DATA", str(tmp_path / "data"))
    book = tmp_path / "book.txt"
    book.write_text("one long document\n" * 50_000)
    text = show("mlm_tiny_lion_s", ["data.name=text", f"data.path={book}", "run.name=books"])
    settings, summary = text.rsplit("\n\n", 1)
    assert "mixer: lion_s" in settings and "#   model.attention.feature_map: " in settings
    for line in (
        r"recipe +books: book.txt, no number yet",
        r"data +text, .*; about \d.* MB to write, .* GB free under",
        r"steps +2,000 = [\d,.]+ epochs of \d+",
        r"time +about [\d.]+ (s|min|h) here \(\d+ CPU threads?, float32, eager: ",
        r"run folder +runs/books, [\d.]+ MB of checkpoints",
    ):
        assert re.search(line, summary), (line, summary)
    assert not (tmp_path / "data").exists()
    large = show("mlm_base_softmax", ["model.depth=1", "model.dim=48"])
    assert "327 GB to download and about 312 GB to write" in large


def test_show_prints_what_it_knows_before_it_measures():
    settings, known, *measured = parts("vim_tiny", ["data.image_size=[32,32]"], 1, None)
    assert "mixer: vim" in settings and re.search(r"^model +vim, [\d,]+ parameters$", known, re.M)
    assert [text.split()[0] for text in measured[:2]] == ["memory", "time"]


def test_recipes_by_family():
    listed = listing()
    cpu, deit = listed.index("quickstart "), listed.index("deit_small_lion_s ")
    assert cpu < listed.index("ImageNet-1k, DeiT's training") < deit and "Table 2, Lion-S, small" in listed
    assert {line.split()[0] for line in listed.splitlines() if line.startswith("  ")} == set(recipe_names())
    assert "Your own" not in listed, "every recipe here has a family"
    assert "cifar100_softmax " not in listing("lion_s") and "cifar100_lion_s " in listing("LION_S")
    assert "cifar100_lion_s " in listing("table 14") and "cifar100_lion_s_vector" not in listing("Table 14")
    assert "gpt2_small_softmax" in listing("*small*softmax") and "mlm" not in listing("*small*softmax")
    with pytest.raises(ConfigError, match=r"'quickstrat': no recipe's name or row matches, did you mean 'quickstart'"):
        listing("quickstrat")


def test_show_names_what_was_left_open_alone(tmp_path):
    """Check that a patch size given as one number is not listed as open, although the model is built with two."""
    recipe = tiny_recipe(tmp_path, model={"patch_size": 2, "position_embedding": None, "readout": "mean"})
    lines = [line for line in show(str(recipe), []).splitlines() if line.startswith("#   ")]
    assert "#   model.position_embedding: false" in lines and "#   model.attention.feature_map: " in "\n".join(lines)
    assert not any(name in line for line in lines for name in ("patch_size", "readout", "null"))


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
    for name in ("quickstart", "pictures"):
        (tmp_path / name).mkdir()
    assert recipe_path("quickstart") == RECIPES / "quickstart.yaml"
    with pytest.raises(ConfigError, match=r"pictures: no such recipe, \./run\.sh list prints"):
        recipe_path("pictures")
    (tmp_path / "runs" / "pictures").mkdir(parents=True)
    (tmp_path / "runs" / "pictures" / "recipe.yaml").touch()
    with pytest.raises(ConfigError, match=r"pictures: .* but a run; its recipe is runs/pictures/recipe.yaml"):
        recipe_path("pictures")


@pytest.mark.process
def test_options_are_checked_before_anything_is_loaded(capsys):
    """Check that the table lists the options of the parsers, and that a wrong line does not import PyTorch."""
    for name, entry in COMMANDS.items():
        if entry.options is None:
            continue
        with pytest.raises(SystemExit):
            here(*name.split(), "--help")
        taken = set(re.findall(r"^  (?:-h, )?(--[a-z][a-z-]*)", capsys.readouterr().out, re.M)) - {"--help"}
        assert taken == set(entry.options.split()), name
    for words, message in (
        (["eval", "run", "--fromat"], "run.sh eval: unknown option --fromat: did you mean '--form'?"),
        (["lst"], "unknown command 'lst', did you mean 'list'?"),
        (["show", "quickstrat"], "quickstrat: no such recipe, did you mean 'quickstart'?"),
        (["show", "quickstart", "--process=3", "--x"], "run.sh show: unknown option --x"),
    ):
        code = f"import sys; from tools.__main__ import main\ntry: main({words!r})\n"
        code += "except Exception as e: print(e, 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout.startswith(message) and done.stdout.endswith("False\n"), done


@pytest.mark.process
def test_help_to_a_reader_that_has_seen_enough():
    done = subprocess.run("./run.sh --help | head -1", cwd=ROOT, shell=True, capture_output=True, text=True)
    assert done.stdout == "usage:\n" and done.stderr == ""


def test_activation_estimate_follows_the_batch(tmp_path):
    from tools.compose import describe_data, make_task, resolve

    recipe = resolve(tiny_recipe(tmp_path))
    task = make_task(recipe, describe_data(recipe)[0])
    one, four = (activation_bytes(task, recipe, micro) for micro in (1, 4))
    assert 3 < four / one < 5


def test_softmax_keeps_no_scores():
    """Check that twice the tokens need twice the memory, as in fused kernels; plain `meta` tensors would save L x L
    scores.
    """
    from tools.compose import describe_data, make_task, resolve

    def kept(side):
        recipe = resolve("lra_image_softmax", [f"data.side={side}", "model.depth=1", "model.dropout=0"])
        return activation_bytes(make_task(recipe, describe_data(recipe)[0]), recipe, 1)

    assert 3.9 < kept(128) / kept(64) < 4.1


def test_forms_to_measure():
    forms = ("full", "chunk", "rnn")
    assert forms_to_measure("all", None, forms) == [("full", None), ("chunk", 64), ("rnn", 1), ("rnn", 64)]
    assert forms_to_measure("all", 1, forms) == [("full", None), ("chunk", 1), ("rnn", 1)]
    assert forms_to_measure("all", 8, ("full",)) == [("full", None)]
    assert forms_to_measure("rnn", None, forms) == [("rnn", 1)]
    assert forms_to_measure("all", None, forms, length=1024)[0] == ("full", None)
    assert forms_to_measure("all", None, forms, length=1025) == [
        ("chunk", 64),
        ("rnn", 64),
    ]  # no form with an L x L matrix
    assert forms_to_measure("full", None, forms, length=10_000) == [("full", None)]
    assert forms_to_measure("all", None, ("full",), length=10_000) == [("full", None)]


@pytest.mark.slow
def test_help_names_every_command_before_anything_is_installed(tmp_path):
    """Run with `-S`, so that the interpreter finds no installed package."""
    for argv in (["--help"], ["help"], ["bench", "-h"]):
        done = subprocess.run([sys.executable, "-S", "-m", "tools", *argv], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for name, entry in COMMANDS.items():
            if argv[0] != "bench" or name.startswith("bench "):
                assert f"./run.sh {name} {entry.synopsis}".rstrip() in done.stdout and entry.help in done.stdout
    done = subprocess.run([sys.executable, "-S", "-m", "tools", "list"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "error: this Python has no torch and no yaml: pip install -e .," in done.stderr
    done = run_sh("--help")
    assert done.returncode == 0 and "--fresh" in done.stdout and "./run.sh test [--quick]" in done.stdout
    (tmp_path / "lion").symlink_to(ROOT / "run.sh")
    done = run_sh("quickstrt", script=tmp_path / "lion")
    assert done.returncode == 2 and "unknown command 'quickstrt', did you mean 'quickstart'" in done.stderr


def test_every_command_of_the_table_is_there():
    for entry in COMMANDS.values():
        module, _, function = entry.where.partition(":")
        assert callable(getattr(importlib.import_module(module), function or "main"))


@pytest.mark.parametrize(
    ("line", "name", "rest"),
    [
        ("", "train", ["quickstart"]),
        ("seed=1 --no-eval", "train", ["quickstart", "seed=1", "--no-eval"]),
        ("--fresh", "train", ["quickstart", "--fresh"]),
        ("my.yaml seed=1", "train", ["my.yaml", "seed=1"]),
        ("recipes/my", "train", ["recipes/my"]),
        ("eval runs/x", "eval", ["runs/x"]),
        ("bench ops --eager", "bench ops", ["--eager"]),
        ("bench", "bench", []),
    ],
)
def test_what_a_line_calls(line, name, rest):
    assert parse_command(line.split()) == (name, rest)


def test_quick_runs_in_two_processes(monkeypatch):
    called = []
    monkeypatch.setattr(os, "execv", lambda path, argv: called.append(argv[1:]))
    external.test(["--quick", "tests/ops", "-x"])
    external.test(["-k", "quick"])
    assert called == [
        ["-m", "pytest", "-n", "2", "--dist", "worksteal", "--quick", "tests/ops", "-x"],
        ["-m", "pytest", "-k", "quick"],
    ]


def test_a_run_in_eager_mode_and_why_another_length_is_another_run(tmp_path, capsys):
    path = tiny_recipe(tmp_path, trainer={"compile": True, "steps": 2})
    assert here("train", path, "--eager", "--no-eval") == 0
    assert resolve(tmp_path / "runs" / "tiny" / "recipe.yaml").trainer.compile is False
    capsys.readouterr()
    line = refuse(capsys, "train", path, "--eager", "trainer.steps=1")
    assert (
        "trainer.steps: 2 -> 1 (the learning rate of every step depends on the length, so the steps taken so far"
        in line
    )


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

    def wrong(argv):
        raise ConfigError("wrong")

    with monkeypatch.context() as patched, open("/dev/full", "w") as full:
        patched.setattr(sys, "stdout", full)
        assert outcome(lambda argv: print("some") or 0) == 1
        assert capsys.readouterr().err == "error: No space left on device\n"
    with monkeypatch.context() as patched, open("/dev/full", "w", buffering=1) as full:
        patched.setattr(sys, "stderr", full)
        assert outcome(wrong) == 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_bare_name_is_that_of_a_shipped_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert resolve("deit_tiny_lion_s") == resolve("deit_tiny_lion_s.yaml") == resolve("deit_tiny_lion_s")
    assert here("quickstart", f"run.root={tmp_path}", "trainer.steps=1", "trainer.compile=false", "--no-eval") == 0
    capsys.readouterr()
    assert "unknown command 'quickstrat'" in refuse(capsys, "quickstrat")


def test_a_warm_up_beyond_the_end_is_said(tmp_path):
    text = show(str(tiny_recipe(tmp_path, schedule={"warmup": 7})), [])
    assert "7 steps of warm-up, but the run ends earlier: the peak is not reached" in text


def test_no_more_loader_workers_than_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    path = ROOT / "recipes/deit_tiny_lion_s.yaml"
    assert loader_workers(resolve(path)) == 3 and loader_workers(resolve(path, ["data.workers=2"])) == 2
    assert loader_workers(resolve(path, ["data.workers=null"])) == 3
    assert loader_workers(resolve("quickstart")) == 0


def test_data_are_prepared_once_wherever_they_are_built(tmp_path, monkeypatch):
    """Check that the launcher prepares nothing, and that each process prepares once."""
    calls = []
    monkeypatch.setenv("LION_DATA", str(tmp_path / "root"))
    monkeypatch.setattr(Digits, "prepare", lambda self: calls.append("prepare"))
    monkeypatch.setattr(Digits, "build", lambda self, build=Digits.build: calls.append("build") or build(self))
    monkeypatch.setattr(train, "launch", lambda machines, argv: calls.append(f"launch {machines.processes}") or 0)
    path, run = tiny_recipe(tmp_path), tmp_path / "runs" / "tiny"
    assert here("train", path, "--no-eval", "--processes", "2") == 0 and calls == ["launch 2"]
    for environment in ({"RANK": "0", "WORLD_SIZE": "1"}, {}):
        with monkeypatch.context() as launched:
            for name, value in environment.items():
                launched.setenv(name, value)
            calls.clear()
            assert here("train", path, f"run.name=tiny{len(environment)}", "trainer.steps=1", "--no-eval") == 0
            assert calls == ["prepare", "build"]
    for line in (["eval", run.with_name("tiny0"), "--form", "full"], ["show", path]):
        calls.clear()
        assert here(*line) == 0 and calls == ["prepare", "build"]


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


@pytest.mark.slow
def test_others_wait_for_who_prepares(tmp_path):
    """Check that two processes prepare the same data once, and open them only when they are complete."""
    code = """
import sys, time
from pathlib import Path
from data.vision.digits import INFO, Digits
from tools.compose import build_data, resolve
made = Path(sys.argv[1])
def prepare(self):
    if not made.exists():
        with made.open("a") as file:
            for word in ("begun", "done"):
                file.write(word + "\\n"); file.flush(); time.sleep(0.7)
Digits.prepare = prepare
build_data(resolve(sys.argv[2]))
print(made.read_text().split())
"""
    call = [sys.executable, "-c", code, str(tmp_path / "made"), str(tiny_recipe(tmp_path))]
    env = {**os.environ, "LION_DATA": str(tmp_path / "root"), "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen(call, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["['begun', 'done']\n"] * 2


def test_bad_settings_are_refused_before_data_are_prepared(tmp_path, monkeypatch, capsys):
    def prepare(self):
        raise AssertionError

    monkeypatch.setattr(Digits, "prepare", prepare)
    monkeypatch.setattr(Digits, "published", lambda self: (INFO, 1000))
    path = tiny_recipe(tmp_path)
    for override, words in (
        ("trainer.micro_batch=7", "trainer.micro_batch: 7 does not divide"),
        ("model.patch_size=3", "model.patch_size: 3 does not divide"),
        ("trainer.device=cuda:77", "trainer.device: 'cuda:77' is not available"),
    ):
        assert words in refuse(capsys, "train", path, override)
    monkeypatch.setattr(checks, "checkpoint_bytes", lambda *args: (2**60, 2**60))
    assert "run.root: checkpoints in" in refuse(capsys, "train", path)


def test_only_training_pays_for_a_cache(tmp_path):
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / label / "1.png")
    data = {"name": "imagefolder", "root": str(tmp_path), "cache": "memory"}
    recipe = resolve(tiny_recipe(tmp_path, data=data))
    assert type(build_data(recipe, cached=True).train.source).__name__ == "Decoded"
    assert type(build_data(recipe).train.source).__name__ == "ClassFolders"
    assert recipe.data.cache == "memory"


def photo_recipe(folder, **changes):
    pictures(folder, {split: {"cat": 6, "dog": 6} for split in ("train", "val")})
    data = {"name": "imagefolder", "root": str(folder), "image_size": [8, 8], "workers": 0, **changes}
    return tiny_recipe(folder, data=data, trainer={"batch_size": 6, "steps": 3, "eval_every": 3, "save_every": 1})


def test_repeated_augmentation_reaches_the_trainer(tmp_path):
    assert here("train", photo_recipe(tmp_path, repeats=3), "--no-eval") == 0
    upcoming = load_state(tmp_path / "runs" / "tiny" / "checkpoints" / "last-2" / "state.pt")["next"]["samples"]
    assert len(upcoming) >= 3 and upcoming[:3] == upcoming[:1] * 3


@pytest.mark.slow
def test_data_of_other_classes_is_refused(tmp_path, capsys, caplog):
    """Check that renamed class folders are refused, because they would silently change the labels of a run."""
    recipe, run = photo_recipe(tmp_path), tmp_path / "runs" / "tiny"
    assert here("train", recipe, "--no-eval") == 0
    for split in ("train", "val"):
        (tmp_path / split / "dog").rename(tmp_path / split / "bird")
    wrong = "checkpoint was trained on other data: class 0 was 'cat', and is 'bird' now"
    capsys.readouterr()
    assert wrong in refuse(capsys, "bench", "inference", run, "--sizes", "8", "--evaluate", "3")
    assert wrong in refuse(capsys, "eval", run)
    shutil.rmtree(run / "checkpoints" / "last-3")
    assert wrong in refuse(capsys, "train", recipe)
    (tmp_path / "moved").mkdir()
    for split in ("train", "val"):
        shutil.copytree(tmp_path / split / "bird", tmp_path / "moved" / split / "dog")
        shutil.copytree(tmp_path / split / "cat", tmp_path / "moved" / split / "cat")
    assert here("eval", run, f"data.root={tmp_path / 'moved'}", "--form", "full") == 0
    assert "'seed=1': the recipe of a run is fixed, only data.root, data.workers may" in refuse(
        capsys, "eval", run, "seed=1"
    )
    with caplog.at_level("INFO", "lion"):
        assert here("train", recipe, f"data.root={tmp_path / 'moved'}", "--no-eval") == 0  # only the place has changed
    assert "resuming at step 2 of 3" in caplog.text
    capsys.readouterr()
    for inside in ("recipe.yaml", "checkpoints/last"):
        assert f"not a run's folder, did you mean '{run}'?" in refuse(capsys, "eval", run / inside)
    for split in ("train", "val"):
        pictures(tmp_path / "moved", {split: {"eel": 2}})
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
    assert own.splitlines()[0] == "Your own" and [line.split() for line in own.splitlines()[1:]] == [
        ["broken"], ["mymix"], ["pictures"],
    ]  # fmt: skip
    assert "Lion-S, small" in "".join(rest) and "98 top-1" in "".join(rest)
    assert resolve(tmp_path / "mymix.yaml").about.expected == "no number yet"
    assert resolve(tmp_path / "quickstart.yaml", ["optim.lr=1e-3"]).about.expected == "98 top-1"
    assert resolve(tmp_path / "quickstart.yaml", ["data.name=mnist"]).about.expected == "no number yet"


def test_a_command_is_kept_without_the_folders_of_a_machine():
    recipe = resolve("mlm_tiny_lion_s", ["data.name=text"])
    overrides = ["data.name=text", "data.path=/home/me/book.txt", "run.name=books", "optim.lr=1e-3"]
    line = train.command_of("mlm_tiny_lion_s", overrides, recipe, None)
    assert line == "./run.sh mlm_tiny_lion_s data.name=text data.path=book.txt run.name=books optim.lr=1e-3"
