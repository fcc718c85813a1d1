"""Tests of the table of tasks."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

LIGHT = """
import sys
import lion.evaluation.run, lion.recipe, lion.runs
assert "torch.distributed.checkpoint" not in sys.modules  # takes half a second
import lion.trainer.loop
import torch
from lion.tasks import TASKS
from lion.trainer.runtime import environment
assert TASKS["image_classification"].unit == "images"
found = environment(torch.device("cpu"))
print(found["torchvision"], "torchvision" in sys.modules)
"""


@pytest.mark.slow
def test_what_is_not_needed_is_not_imported():
    import torchvision

    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    version, loaded = done.stdout.split()
    assert torchvision.__version__.startswith(version) and loaded == "False"
