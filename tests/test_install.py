"""Installation with `pip install .`: the library and its command, working outside the clone."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

import lion
from lion.distribution import NAME, VERSION
from tests.helpers import ROOT, ended, here, tiny_recipe

FOLDERS = ("lion", "data", "tools", "recipes")
OFFLINE = ("--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check")
GPT = """
task: {name: causal_lm}
data: {name: text, path: text.txt, tokenizer: bytes, pack: windows, length: 17, split: tail, val_split: 0.1}
model: {mixer: lion_s, dim: 16, depth: 1, num_heads: 2}
trainer: {batch_size: 4, steps: 2, eval_every: 2, save_every: 2, compile: false, device: cpu}
optim: {lr: 1e-3}
"""
PROGRAM = """
import json, sys
site, run = sys.argv[1:]
others = ("torchvision", "datasets", "tokenizers", "yaml", "tensorboard", "tqdm", "PIL")
sys.modules.update(dict.fromkeys(others))  # the operator and the layers do without
import torch, lion
assert lion.__file__.startswith(site), lion.__file__
q = torch.randn(2, 3, 5, 8)
assert lion.linear_attention(q, q, q, feature_map="elu1", form="chunk").shape == q.shape
assert lion.LionAttention(dim=16, num_heads=2)(torch.randn(2, 5, 16)).shape == (2, 5, 16)
for name in others:
    del sys.modules[name]
model, recipe = lion.load(run, compile=False), lion.load_recipe(f"{run}/recipe.yaml")
lion.set_form(model, "rnn")
assert not {"data", "tools", "tests"} & sys.modules.keys()
try:
    lion.evaluate(run)  # finds `tools` and `data` in the wheel, which here lacks the package of the digits
except lion.config.ConfigError as error:
    assert str(error).endswith("pip install scikit-learn"), error
assert sys.modules["tools"].__file__.startswith(site)
print(json.dumps([recipe.model.mixer, model(torch.ones(1, 1, 8, 8)).tolist()]))
"""


def run(*command, cwd, env=None):
    words = [str(word) for word in command]
    return ended(subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)).stdout


def needed(*names):
    """Return the installed distributions that packages need, themselves included."""
    requirements = pytest.importorskip("packaging.requirements")
    found, waiting = {}, [requirements.Requirement(name) for name in names]
    for need in waiting:
        key = (need.name.lower(), *sorted(need.extras))
        if key not in found:
            found[key] = metadata.distribution(need.name)
            for line in found[key].requires or ():
                more = requirements.Requirement(line)
                if more.marker is None or any(more.marker.evaluate({"extra": x}) for x in need.extras or {""}):
                    waiting.append(more)
    return found.values()


def link(distributions, site):
    """Link the files of installed distributions into another folder of packages."""
    for distribution in distributions:
        tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
        for place in (Path(distribution.locate_file(top)) for top in tops):
            if not (site / place.name).exists():
                (site / place.name).symlink_to(place)


def in_a_wheel(path):
    """Return the place of a file of the repository in a wheel."""
    place = path.relative_to(ROOT).as_posix()
    return place if place.startswith("lion/") else f"lion/clone/{place}"


def build_wheel(folder):
    """Build the wheel of a copy of the clone, which has tests, too."""
    clone = folder / "clone"
    for name in (*FOLDERS, "tests"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    options = ("--no-build-isolation", "--wheel-dir", folder)
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, *options, clone, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def without_clone():
    """Return the environment of a process that does not find the clone; `run.sh` puts it on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"OMP_NUM_THREADS": "1"}


def install_wheel(wheel, folder):
    """Install the wheel in an environment with what it requires; return the folder of its packages."""
    environment = folder / "env"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *OFFLINE, wheel, cwd=folder, env=without_clone())
    (site,) = environment.glob("lib/*/site-packages")
    (ours,) = metadata.distributions(name=NAME, path=[str(site)])
    assert ours.metadata["Description-Content-Type"] == "text/markdown"
    assert ours.read_text("METADATA").endswith((ROOT / "README.md").read_text())
    link(needed(*(line for line in ours.requires if "extra" not in line)), site)
    return site


@pytest.mark.slow
def test_an_installed_wheel_works_away_from_the_clone(tmp_path):
    for name in ("setuptools", "pip", "sklearn"):
        pytest.importorskip(name)
    wheel = build_wheel(tmp_path)
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".yaml", ".typed")]
    assert held == {in_a_wheel(path) for path in kept}
    assert "lion/py.typed" in held
    assert wheel.name.startswith(f"{NAME.replace('-', '_')}-{VERSION}-")
    site = install_wheel(wheel, tmp_path)
    python = tmp_path / "env/bin/python"
    command = tmp_path / "env/bin/lion"
    empty = tmp_path / "empty"
    empty.mkdir()

    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    folder = tmp_path / "runs" / "tiny"
    mixer, logits = json.loads(run(python, "-I", "-c", PROGRAM, site, folder, cwd=empty))
    model = lion.load(folder, compile=False)
    lion.set_form(model, "rnn")
    assert mixer == "lion_s"
    torch.testing.assert_close(torch.tensor(logits), model(torch.ones(1, 1, 8, 8)), rtol=0, atol=1e-5)
    assert not list(empty.iterdir())

    (empty / "tools.py").write_text("raise ImportError('not these tools')\n")
    env = without_clone()

    def lion_command(*words):
        return run(command, *words, cwd=empty, env=env)

    def refusal(*words):
        done = subprocess.run([command, *words], cwd=empty, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 2
        return done.stderr

    assert "98 top-1" in lion_command("list", "quickstart")
    for words, own in ((["--help"], "  lion bench ops "), (["bench", "ops", "--help"], "usage: lion bench ops ")):
        text = lion_command(*words)
        assert own in text
        assert "./run.sh" not in text
    assert "run.sh" not in refusal("quickstrat")
    assert refusal("quickstart", "trainer.steps=2", "--no-eval").endswith("pip install scikit-learn\n")
    (empty / "text.txt").write_text("the cat sat on the mat. " * 100)
    (empty / "gpt.yaml").write_text(GPT)
    run(python, "-m", "lion", "./gpt.yaml", f"data.root={empty / 'data'}", "--no-eval", cwd=empty, env=env)
    written = json.loads((empty / "runs/gpt/environment.json").read_text())
    assert written["commit"] is None
    text = lion_command("generate", "gpt", "--prompt", "the ", "--tokens", 3, "--eager")
    assert text.startswith("the ")
    assert len(text) == len("the ") + 3 + 1

    (site / "lion" / "__init__.py").write_text("Mapper = None\n")  # the other project `lion`, installed later
    replaced = refusal("list")
    assert replaced.startswith("error: another project named 'lion' has replaced")
    assert replaced.count("\n") == 1
    assert NAME in replaced
