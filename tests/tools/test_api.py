"""The public interface: its page, its annotations, and its version."""

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest
import torch

import lion
from lion.distribution import VERSION
from tests.helpers import ROOT
from tools.api import EXTRAS, MODULES, page, parsed


def test_the_page_describes_every_public_name():
    for module in EXTRAS:
        pytest.importorskip(module.removeprefix("lion."))
    text = page()
    for module in MODULES:
        section = text.partition(f"\n## {module}\n")[2].partition("\n## ")[0]
        described = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert described == sorted(importlib.import_module(module).__all__, key=str.lower)
    assert "### linear_attention\n\n```python\nlinear_attention(\n    q: Tensor,\n" in text


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_and_methods_are_annotated(module):
    if module in EXTRAS:
        pytest.importorskip(module.removeprefix("lion."))
    exported = importlib.import_module(module)
    for name in exported.__all__:
        value = getattr(exported, name)
        if not (inspect.isfunction(value) or inspect.isclass(value)):
            continue
        top = parsed(value)
        for method in top.body if isinstance(top, ast.ClassDef) else [top]:
            if not isinstance(method, ast.FunctionDef) or private(method.name):
                continue
            args = method.args
            plain = args.posonlyargs + args.args + args.kwonlyargs
            bare = [a.arg for a in plain if a.annotation is None and a.arg not in ("self", "cls")]
            assert not bare and method.returns is not None, f"{module}.{name}.{method.name}: {bare}"


def private(name):
    return name.startswith("_") and name != "__init__"


MYPY = """
[mypy]
strict = true
follow_imports = silent
ignore_missing_imports = true

# of torch, only the types that the interface names
[mypy-torch.*,torchvision.*,numpy.*,transformers.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch._tensor,torch.nn,torch.nn.modules.*,torch.nn.parameter]
follow_imports = silent
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_public_interface(tmp_path):
    """Check a program with mypy, in which mistakes are marked: a mark without a mistake is an error, too."""
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(MYPY)
    options = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", "/dev/null", "--no-error-summary"]
    line = [sys.executable, "-m", "mypy", *options, "tests/typed_use.py"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert not done.stdout and not done.stderr


WHOLE = """
[mypy]
python_version = 3.11

# their types are skipped, which takes a third of the time; `mypy lion` reads those of numpy and transformers
[mypy-numpy.*,scipy.*,sklearn.*,timm.*,torchvision.*,tqdm.*,transformers.*,triton.*,yaml.*]
follow_imports = skip
ignore_missing_imports = true
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.14."), reason="checked with the types of torch 2.14")
def test_types_hold(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(WHOLE)
    line = [sys.executable, "-m", "mypy", "lion", "--config-file", tmp_path / "mypy.ini", "--cache-dir", "/dev/null"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("Success"), done.stdout


def test_one_version_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert lion.__version__ == VERSION
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
