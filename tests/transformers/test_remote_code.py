"""Folders that the Auto classes load in a process that knows nothing of this package."""

import importlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers.dynamic_module_utils import check_imports

from lion.transformers import LionForCausalLM, LionForTokenClassification
from lion.transformers.remote import CODE, FILE
from tests.helpers import ended
from tests.layers.helpers import close
from tests.transformers.tiny import ids, made

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
folder = sys.argv[1]
for blocked in ("lion", "lion.transformers"):  # not installed, and another project of that name
    sys.modules[blocked] = None
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except ImportError as error:
        print(error)
    del sys.modules[blocked]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
torch.save(model(torch.load(f"{folder}/ids.pt")).logits.detach(), f"{folder}/logits.pt")
model.save_pretrained(f"{folder}/again")
model = AutoModelForTokenClassification.from_pretrained(f"{folder}/tokens", trust_remote_code=True).eval()
torch.save(model(torch.load(f"{folder}/ids.pt")).logits.detach(), f"{folder}/tokens.pt")
"""


@pytest.mark.process
def test_a_process_loads_it_by_its_remote_code(tmp_path):
    model = made(LionForCausalLM, "gpt").float()
    model.save_pretrained(tmp_path)
    tokens = made(LionForTokenClassification, "token_classifier", num_labels=3).float()
    tokens.save_pretrained(tmp_path / "tokens")
    assert check_imports(tmp_path / FILE) == []  # else transformers asks to install the other project
    torch.save(ids(1, 6), tmp_path / "ids.pt")
    places = {"HF_HOME": str(tmp_path / "cache"), "HF_MODULES_CACHE": str(tmp_path / "modules")}
    code = [sys.executable, "-c", LOAD, str(tmp_path)]
    found = ended(subprocess.run(code, capture_output=True, text=True, env={**os.environ, **places}))
    line = "this model needs the package lion, in a clone of it: pip install '.[transformers]'"
    assert found.stdout.splitlines() == [line, line]
    close(torch.load(tmp_path / "logits.pt"), model(ids(1, 6)).logits.detach())
    close(torch.load(tmp_path / "tokens.pt"), tokens(ids(1, 6)).logits.detach())
    again = {path.name for path in (tmp_path / "again").iterdir()}
    assert again == {"config.json", "generation_config.json", "model.safetensors", FILE}
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / FILE).read_bytes()


def test_an_old_transformers_is_one_line_here_and_in_the_remote_code(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.1"))
    line = r"needs transformers 5.23 or newer: pip install -U 'transformers>=5.23'$"
    for load in (lambda: importlib.import_module("lion.transformers"), lambda: exec(CODE, {})):
        monkeypatch.delitem(sys.modules, "lion.transformers", raising=False)
        with pytest.raises(ImportError, match=line):
            load()
