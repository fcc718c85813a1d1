"""timm's own tests of models, run on ours.

`LION_TIMM_SUITE=FOLDER` names the unpacked source of the installed timm. Version 1.0.31:
`pip download --no-binary :all: --no-deps timm==1.0.31 && tar xf timm-1.0.31.tar.gz` makes the folder `timm-1.0.31`.

`LION_TIMM_MODELS` selects models, by default "vit_lion_*tiny*"; "vit_lion_*" are all.
"""

import os
import re
import subprocess
import sys
from fnmatch import filter as matching
from pathlib import Path

import pytest

from tests.helpers import ROOT

timm = pytest.importorskip("timm")
configs = pytest.importorskip("lion.timm.vision_transformer")

FOLDER = os.environ.get("LION_TIMM_SUITE")
CASES = (  # of each model; `lion/timm/README.md` lists the tests that do not apply
    "test_model_forward[1-{}]",
    "test_model_backward[2-{}]",
    "test_model_default_cfgs_non_std[1-{}]",
    "test_model_forward_intermediates_features[1-{}]",
    "test_model_forward_intermediates[1-{}]",
    "test_prune_intermediate_layers_contract[{}]",
    "test_model_forward_fx[1-{}]",
    "test_model_backward_fx[2-{}]",
)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not FOLDER, reason="LION_TIMM_SUITE names no folder with timm's source")
def test_timms_own_suite():
    """Check that every test ran on every model: timm skips models by the names of models and of their modules."""
    assert f"__version__ = '{timm.__version__}'" in (Path(FOLDER) / "timm/version.py").read_text()
    names = matching(configs.CONFIGS, os.environ.get("LION_TIMM_MODELS", "vit_lion_*tiny*"))
    cases = [f"tests/test_models.py::{case.format(name)}" for case in CASES for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "lion.timm", "-p", "no:cacheprovider", "-W", "ignore"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *cases], cwd=FOLDER, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert re.match(rf"{len(cases)} passed in ", done.stdout.splitlines()[-1]) and cases
