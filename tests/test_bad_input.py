"""Invalid user input: one clear line, exit code 2, and no partial output."""

import shutil

import pytest
from PIL import Image

from data.folders import DOWNLOADED
from lion.config import merge
from tests.helpers import here, refuse, refused, tiny_recipe
from tools import __main__ as commands
from tools.cli import run_command
from tools.keys import check_files, layers_of

pytest.importorskip("sklearn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainr": {}}, "tiny.yaml: unknown key 'trainr': did you mean 'trainer'?"),
        ({"model": {"mixer": "lion_x"}}, "tiny.yaml: model.mixer: 'lion_x' is not a choice, did you mean"),
        ({"optim": {"lr": 0}}, "optim.lr: expected more than 0, got 0.0"),
        ({"optim": {"betas": [0.9, 1.5]}}, "optim.betas must be"),
        ({"schedule": {"warmup": "long"}}, "schedule.warmup: expected steps (2000)"),
        (
            {"model": {"mixer": "softmax", "attention": {"form": "rnn"}}},
            "model.attention.form 'rnn' is not available with",
        ),
        (
            {"model": {"mixer": "softmax", "attention": {"decay_convention": "source"}}},
            "model.attention.decay_convention belongs to linear mixers",
        ),
        (
            {"model": {"attention": {"form": "chunk", "score_dropout": 0.1}}},
            "model.attention.score_dropout exists in the full",
        ),
        ({"trainer": {"epochs": 3}}, "give exactly one of trainer.epochs and trainer.steps"),
        (
            {"trainer": {"steps": None}},
            "trainer.epochs: give exactly one of trainer.epochs, trainer.steps and trainer.time, got none",
        ),
        ({"trainer": {"eval_every": "often"}}, "trainer.eval_every: expected steps (2000), epochs ('5ep')"),
        ({"trainer": {"batch_size": 4096}}, "trainer.batch_size: 4096 is more than the 1078 training samples"),
        (
            {"trainer": {"micro_batch": 20}},
            "trainer.micro_batch: 20 does not divide the 64 samples of a process, nearest: 16, 32",
        ),
        ({"trainer": {"device": "cuda:77"}}, "trainer.device: 'cuda:77' is not available here, use one of"),
        ({"data": {"name": "digitz"}}, "tiny.yaml: data.name: unknown data set 'digitz', did you mean 'digits'?"),
        ({"data": {"name": "common"}}, "data.name: unknown data set 'common'"),
        ({"data": {"name": "os"}}, "data.name: unknown data set 'os'"),
        ({"task": {"name": "mlm"}}, "task.name: unknown task 'mlm'"),
        ({"model": {"attention": {"feature_map": "identity"}}}, "model.attention.normalize 'sum' divides by a row sum"),
        ({"run": {"name": "../elsewhere"}}, "run.name: expected letters"),
        ({"extends": "nothing.yaml"}, "tiny.yaml: extends: relative paths start at its folder; "),
        ({"extends": "tiny.yaml"}, "extends itself"),
        ({"init_from": "no-such-run"}, "run 'no-such-run': no recipe.yaml"),
    ],
    ids=lambda x: str(x)[:40] if isinstance(x, dict) else "",
)
def test_malformed_recipes(change, message, tmp_path, capsys):
    path = tiny_recipe(tmp_path, **change)
    assert message in refuse(capsys, "train", path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected sections of keys"),
        ("- a\n- b", "expected sections of keys"),
        ("{task: {}, model: {}}", "missing section 'data'"),
        ("\x00", "not YAML"),
    ],
)
def test_files_that_are_not_recipes(text, message, tmp_path, capsys):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert message in refuse(capsys, "train", path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "override: unknown key 'lr': did you mean 'optim.lr'?"),
        ("direction=3", "override: unknown key 'direction': did you mean 'model.attention.direction'?"),
        ("model.chunk_size=3", "unknown key 'model.chunk_size': did you mean 'model.attention.chunk_size'?"),
        ("name=x", "override: unknown key 'name': did you mean 'task.name' or 'model.name' or 'data.name'?"),
        ("trainer.steps", "expected section.key=value"),
        ("model.dim=15", "override: model.num_heads 2 does not divide dim 15, nearest: 1"),
        ("optim.betas=[a, 0.9]", "override: optim.betas[0]: expected a number, got 'a'"),
        ("trainer.save_every=1:30", "override: trainer.save_every: expected steps (2000), epochs ('5ep')"),
        ("task.temperature=2", "task.temperature: has no effect without a teacher, which task.teacher names"),
        ("task={teacher: a, temperature: 2}", "task.temperature: has no effect with distillation 'hard', only with"),
        ("trainer.ema=1", "trainer.ema: expected less than 1"),
        ("model=3", "override: model: expected a section with settings, got '3'"),
        ("a" + ".a" * 5000 + "=1", "a.a...': expected section.key=value, at most 20 names deep"),
    ],
)
def test_malformed_overrides(override, message, tmp_path, capsys):
    assert message in refuse(capsys, "train", tiny_recipe(tmp_path), override)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_an_environment_without_a_launcher(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(name, "abc")
    line = refuse(capsys, "train", tiny_recipe(tmp_path))
    assert line == f"error: environment variable {name}: expected a whole number, got 'abc'\n"
    assert not (tmp_path / "runs").exists()


def test_a_form_that_the_mixer_lacks_is_refused_before_training(tmp_path, capsys):
    vim = {"mixer": "vim", "mlp": "none", "norm": "rmsnorm"}
    path = tiny_recipe(tmp_path, model=vim)
    assert "--form: VimMixer has only chunk, rnn, got 'full'" in refuse(capsys, "train", path, "--form", "full")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", ["", "few words"])
def test_a_text_without_a_sample(text, tmp_path, capsys):
    (tmp_path / "few.txt").write_text(text)
    settings = [f"data.path={tmp_path / 'few.txt'}", f"data.root={tmp_path}", f"run.root={tmp_path / 'runs'}"]
    line = refuse(capsys, "train", "mlm_tiny_lion_s", "data.name=text", *settings)
    assert "data.path: every document of val is one token" in line or "data.path: no tokens" in line


def test_a_text_that_fills_a_batch_is_not_refused_by_an_estimate(tmp_path, capsys):
    """Check short words: 32 samples of 32 tokens, but 9 by 3.5 bytes a token."""
    (tmp_path / "few.txt").write_text("a b c d e f g h \n\n" * 64)
    settings = [f"data.path={tmp_path / 'few.txt'}", f"data.root={tmp_path}", f"run.root={tmp_path / 'runs'}"]
    settings += ["data.length=32", "data.tokenizer=wordpiece", "data.vocabulary=300", "trainer.batch_size=12"]
    small = ["model.dim=16", "model.depth=1", "model.num_heads=2", "trainer.compile=false", "trainer.steps=1"]
    more = ["trainer.micro_batch=null", "schedule.warmup=0", "trainer.epochs=null"]
    assert here("train", "mlm_tiny_lion_s", "data.name=text", *settings, *small, *more, "--no-eval") == 0
    assert "12 is more than" not in capsys.readouterr().err


def test_debug_shows_the_traceback_before_the_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        run_command(commands.main, ["train", str(tmp_path / "none.yaml"), "--debug"])
    lines = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and lines[0].startswith("Traceback") and lines[-1].startswith("error: ")


def test_both_lengths_at_once(tmp_path, capsys):
    line = refuse(capsys, "train", tiny_recipe(tmp_path), "trainer.steps=3", "trainer.epochs=1")
    assert "override: give exactly one of trainer.epochs and trainer.steps" in line


def test_a_base_is_not_a_recipe(capsys):
    assert "a base of several recipes, not a recipe" in refuse(capsys, "train", "recipes/base/deit.yaml")


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/own").mkdir(parents=True)
    (tmp_path / "runs/own/recipe.yaml").write_text("")
    assert "'own' is a run: ./run.sh runs/own/recipe.yaml trains it to its end" in refuse(capsys, "own")
    assert "runs/own: a run, whose recipe is runs/own/recipe.yaml" in refuse(capsys, "runs/own")
    shutil.rmtree(tmp_path / "runs")
    assert "unknown command 'evaluate', did you mean" in refuse(capsys, "evaluate")
    assert "no such file, did you mean" in refuse(capsys, "train", tiny_recipe(tmp_path).with_name("tinny.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"\xe9")
    (tmp_path / "folder.yaml").mkdir()
    for name, reason in (("latin", "'utf-8' codec can't decode"), ("folder", "Is a directory)")):
        line = refuse(capsys, "show", f"{name}.yaml")
        assert f"{name}.yaml: cannot be read ({reason}" in line and "did you mean" not in line
    assert "tinny.yaml: no such recipe, did you mean 'tiny.yaml'?" in refuse(capsys, "show", "tinny.yaml")
    assert "there are none under runs/ yet" in refuse(capsys, "eval", "nothing")
    assert "--chunk-size: expected at least 1" in refuse(capsys, "eval", "nothing", "--chunk-size", "0")
    assert "no recipe.yaml" in refuse(capsys, "predict", "nothing", "x.png")


def test_a_missing_data_set_says_what_where_and_how(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LION_DATA", str(tmp_path / "root"))
    line = refuse(capsys, "train", "recipes/deit_tiny_lion_s.yaml", f"run.root={tmp_path}/runs")
    assert "data set 'imagenet'" in line and str(tmp_path / "root" / "imagenet") in line and "ILSVRC2012" in line
    line = refuse(capsys, "train", "recipes/deit_tiny_lion_s.yaml", f"data.root={tmp_path}/gone")
    assert f"no folder {tmp_path}/gone" in line
    assert not (tmp_path / "runs").exists()
    recipe = tiny_recipe(tmp_path, **FOLDERS)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "summary.json").touch()
    check_files(recipe, layers_of(recipe, [f"run.root={tmp_path}/runs"]))  # complete
    refused("no folder", check_files, recipe, layers_of(recipe, [f"run.root={tmp_path}/runs", "run.name=other"]))


@pytest.mark.parametrize("name", DOWNLOADED)
def test_a_set_of_torchvision_is_missed_before_pytorch_is_loaded(tmp_path, name):
    recipe = tiny_recipe(tmp_path)
    own = [f"run.root={tmp_path}/runs", f"data.name={name}", f"data.root={tmp_path}"]
    for more in ([], ["data.download=false"]):
        refused(f"no folder {tmp_path}/.+data.download=true", check_files, recipe, layers_of(recipe, [*own, *more]))
    check_files(recipe, layers_of(recipe, [*own, "data.download=true"]))
    (tmp_path / DOWNLOADED[name]).mkdir(parents=True)
    check_files(recipe, layers_of(recipe, own))


def pictures(root, layout):
    """Write the files of `layout`: images for `.png`, text otherwise, folders for names that end with a slash."""
    for name in layout:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if name.endswith(".png"):
            Image.new("RGB", (8, 8)).save(path)
        elif not name.endswith("/"):
            path.write_text("text")


FOLDERS = {"data": {"name": "imagefolder", "image_size": [8, 8]}, "trainer": {"batch_size": 4}}
WHOLE = ("train/a/1.png", "train/a/2.png", "train/b/1.png", "train/b/2.png", "val/a/1.png", "val/b/1.png")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ([], "no folder"),
        (WHOLE[:4], "/val; expected ROOT/train/CLASS"),
        (WHOLE[4:], "/train; expected ROOT/train/CLASS"),
        (["train", *WHOLE[4:]], "/train; expected ROOT/train/CLASS"),
        ([*WHOLE, "train/c/"], "/train: no images of class c; expected ROOT"),
        ([*WHOLE, "train/c/text", "val/c/1.png"], "/train: no images of class c; expected ROOT"),
        ([*WHOLE, "train/c", "val/c/1.png"], "train and val have different classes: only val has class 'c'"),
        ([*WHOLE, "train/c/1.png"], "train and val have different classes: only train has class 'c'"),
        ([*WHOLE, "test/a/1.png"], "train and test have different classes: only train has class 'b'"),
        ([*WHOLE, "test/"], "no class folders; expected ROOT"),
        (["train/1.png", "val/1.png"], "no class folders; expected ROOT"),
        (["train/", "val/"], "no class folders; expected ROOT"),
        (["train/a/1.png", "val/a/1.png"], "only one class (a), expected at least two"),
        ([*WHOLE, "val/b/broken.jpg"], "not an image: "),
        (WHOLE[1:], "trainer.batch_size: 4 is more than the 3 training samples"),
    ],
)
def test_folders_of_images(layout, message, tmp_path, capsys):
    root = tmp_path / "root"
    pictures(root, layout)
    recipe = tiny_recipe(tmp_path, **merge(FOLDERS, {"data": {"root": str(root)}}))
    assert message in refuse(capsys, "train", recipe)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.image_size=[0,8]", "data.image_size: expected sides of 1"),
        ("data.image_size=[8,-8]", "data.image_size: expected sides of 1"),
        ("data.random_scale=[0.5,0.1]", "data.random_scale: expected two shares"),
        ("data.random_scale=[-1,1]", "data.random_scale: expected two shares"),
        ("data.root=/dev/null", "no folder /dev/null"),
        ("data.root=~nobody-here", "no folder ~nobody-here"),
        ("data.root=" + "x" * 5000, "xxx"),
        ("data.crop=1e-6", "data.crop: "),
        ("data.image_size=[60000,60000]", "data.image_size: expected sides of 1 to 16384 pixels"),
        ("data.repeats=100", "data.repeats: 100 views of an image, more than a batch of"),
        ("task.mixup=1e-9", "task.mixup: expected 0 (off) or at least 1e-06"),
        ("trainer.device=meta", "trainer.device: 'meta' is not available"),
        ("trainer.device=hpu", "trainer.device: 'hpu' is not available"),
        ("schedule.warmup=1e999ep", "schedule.warmup: expected steps"),
        ("trainer.eval_every=1e999", "trainer.eval_every: expected steps"),
        ("init_from=" + "x" * 5000, "xxx"),
        (
            "task.mixup=0.8 trainer.micro_batch=1",
            "trainer.micro_batch: 1 sample in each process, but task.mixup and task.cutmix mix",
        ),
    ],
    ids=lambda x: x[:30],
)
def test_values_that_only_look_right(change, message, tmp_path, capsys):
    pictures(tmp_path / "root", WHOLE)
    recipe = tiny_recipe(tmp_path, **merge(FOLDERS, {"data": {"root": str(tmp_path / "root")}}))
    assert message in refuse(capsys, "train", recipe, *change.split())
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--from full", "unknown option --from full: did you mean '--form'?"),
        ("trian x.yaml", "unknown command 'trian', did you mean 'train'?"),
        ("quickstrt", "unknown command 'quickstrt', did you mean 'quickstart'?"),
        ("zz", "valid: train, prepare, eval, list, show, predict, generate, sample, distance, glue, bench ops, "),
        ("train", "required: recipe\n"),
        ("train x.yaml --epochs 3", "unknown option --epochs 3: write trainer.epochs=VALUE"),
        ("train x.yaml --frsh", "unknown option --frsh: did you mean '--fresh'?"),
        ("train quickstart --processes", "--processes: expected one argument"),
        ("train quickstart --processes two", "--processes: expected a whole number, got 'two'"),
        ("train quickstart --processes -1", "--processes: expected at least 1, got -1"),
        ("train quickstart --fresh=yes", "--fresh: ignored explicit argument 'yes'"),
        ("train x.yaml more", "x.yaml: no such recipe"),
        ("show x.yaml", "x.yaml: no such recipe"),
        ("show zz", "zz: no such recipe, ./run.sh list prints the recipes"),
        ("show deit_tiny_lions", "deit_tiny_lions: no such recipe, did you mean 'deit_tiny_lion_s'?"),
        ("train cifar10_mni.yaml", "cifar10_mni.yaml: no such recipe, did you mean 'cifar10_mini'?"),
        ("show quickstart --processes 0", "--processes: expected at least 1, got 0"),
        ("show --from 3", "unknown option --from"),
        ("list --all", "unknown option --all: "),
        ("eval", "required: run\n"),
        ("eval x --form chunks", "--form: invalid choice: 'chunks', did you mean 'chunk'?"),
        ("eval x --from full", "unknown option --from full: did you mean '--form'?"),
        ("eval x --chunk-size 1.5", "--chunk-size: expected a whole number, got '1.5'"),
        ("eval x --chunk-size 8 --form full", "--chunk-size: the full form has no chunks"),
        ("eval x --out here", "--out: only for --lengths"),
        ("eval x --tokens 9", "--tokens: only for --lengths"),
        ("eval x --c 3", "ambiguous option: --c could match --chunk-size, --checkpoint"),
        ("eval x --split train", "--split: invalid choice: 'train'"),
        ("eval x y", "run 'x': no recipe.yaml"),
        ("eval " + "x" * 5000, "xxx"),
        ("predict", "required: run, FILE|FOLDER|SENTENCE"),
        ("predict x", "required: FILE|FOLDER|SENTENCE"),
        ("predict x y.png --top 0", "--top: expected at least 1, got 0"),
        ("predict x y.png --topp=2", "unknown option --topp=2: did you mean '--top'?"),
        ("predict x y.png --form auto", "--form: invalid choice: 'auto'"),
        ("consolidate", "required: run"),
        ("consolidate x", "run 'x': no recipe.yaml"),
        ("consolidate x --now", "unknown option --now: "),
        ("bench", "unknown command 'bench', did you mean 'bench ops'?"),
        ("bench op", "unknown command 'bench op', did you mean 'bench ops'?"),
        ("bench train", "required: recipes"),
        ("bench train x.yaml --eager", "x.yaml: no such recipe"),
        ("bench inference x", "run 'x': no recipe.yaml"),
        ("bench inference x --sizes 8,", "--sizes: expected a whole number, got ''"),
        ("convert x.pth y.yaml", "required: out\n"),
        ("convert x.pth y.yaml z", "y.yaml: no such recipe"),
        ("report", "expected runs, --section TITLE RUN"),
        ("test --quik", "run.sh test: unknown option --quik, did you mean '--quick'?"),
        ("paper --table nosuch", "--table: unknown table 'nosuch', valid: block-cifar10, "),
        ("report x", "run 'x': no recipe.yaml"),
        ("report x --name ../x", "--name: expected a name without folders, got '../x'"),
        ("report x --name ..", "--name: expected a name without folders"),
        ("bench ops --length 0", "--length: expected at least 1, got 0"),
        ("bench ops --rounds x", "--rounds: expected a whole number, got 'x'"),
        ("bench ops --mixer softmax", "unknown mixer 'softmax', did you mean"),
    ],
    ids=lambda x: x[:30],
)
def test_command_lines(line, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refuse(capsys, *line.split())
    assert not list(tmp_path.iterdir())
