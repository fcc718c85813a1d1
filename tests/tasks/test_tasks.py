"""Tests of the table of tasks, and of what its modules and those of the data import."""

import subprocess
import sys

import pytest
import torchvision

from tests.helpers import ROOT

LIGHT = """
import sys
sys.modules["datasets"] = sys.modules["sklearn"] = None  # extras that are not installed
import lion.evaluation.run, lion.recipe, lion.runs
assert "torch.distributed.checkpoint" not in sys.modules  # takes half a second
import lion.trainer.loop
import torch
from lion.tasks import TASKS
from lion.trainer.runtime import environment
assert TASKS["image_classification"].unit == "images"
found = environment(torch.device("cpu"))
print(found["torchvision"], "torchvision" in sys.modules)
import data
assert not [name for name in sys.modules if name.startswith("data.vision")]
for name in ("cifar10", "imagefolder", "digits"):
    data.dataset(name)
try:
    data.dataset("hf")
except ImportError:
    sys.exit(7)
"""


@pytest.mark.slow
def test_what_is_not_needed_is_not_imported_and_a_missing_extra_only_hurts_its_own_set():
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    version, loaded = done.stdout.split()
    assert torchvision.__version__.startswith(version)
    assert loaded == "False"
