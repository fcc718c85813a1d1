"""Installation with `pip install .`: the complete library alone, working outside the clone."""

import json
import shutil
import subprocess
import sys
import zipfile

import pytest
import torch

import lion
from tests.helpers import ROOT, here, tiny_recipe

PROGRAM = """
import json, sys
site, run = sys.argv[1:]
sys.path.insert(0, site)
sys.modules["torchvision"] = None  # the operator and the layers do without
import torch, lion
assert lion.__file__.startswith(site), lion.__file__
q = torch.randn(2, 3, 5, 8)
assert lion.linear_attention(q, q, q, feature_map="elu1", form="chunk").shape == q.shape
assert lion.LionAttention(dim=16, num_heads=2)(torch.randn(2, 5, 16)).shape == (2, 5, 16)
del sys.modules["torchvision"]
model, recipe = lion.load(run, compile=False), lion.load_recipe(f"{run}/recipe.yaml")
lion.set_form(model, "rnn")
assert not {"data", "tools", "tests"} & sys.modules.keys()
print(json.dumps([recipe.model.mixer, model(torch.ones(1, 1, 8, 8)).tolist()]))
"""


def run(*command, cwd):
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_library_works_away_from_the_clone(tmp_path):
    pytest.importorskip("setuptools")
    pytest.importorskip("pip")
    pytest.importorskip("sklearn")
    clone, site, empty = (tmp_path / name for name in ("clone", "site", "empty"))
    for folder in ("lion", "data", "tools", "tests", "recipes"):
        shutil.copytree(ROOT / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone)
    offline = ("--no-deps", "--no-index", "--no-cache-dir", "--disable-pip-version-check")
    run("-m", "pip", "wheel", *offline, "--no-build-isolation", "--wheel-dir", tmp_path, clone, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    held = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert held == {str(path.relative_to(ROOT)) for path in (ROOT / "lion").rglob("*.py")}
    run("-m", "pip", "install", *offline, "--target", site, wheel, cwd=tmp_path)
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    folder = tmp_path / "runs" / "tiny"
    empty.mkdir()
    mixer, logits = json.loads(run("-I", "-c", PROGRAM, site, folder, cwd=empty))
    model = lion.load(folder, compile=False)
    lion.set_form(model, "rnn")
    assert mixer == "lion_s"
    torch.testing.assert_close(torch.tensor(logits), model(torch.ones(1, 1, 8, 8)), rtol=0, atol=1e-5)
    assert not list(empty.iterdir())
