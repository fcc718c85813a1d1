"""Evaluating runs: all forms in one process, of one checkpoint."""

import shutil

import pytest
import torch

from lion.trainer.checkpoint import STATE, load_state, newest, prune, scratch_folder, seal
from lion.trainer.runtime import missing_compiler
from tests.helpers import here, tiny_recipe
from tools import evaluate

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    assert here("train", tiny_recipe(folder), "--no-eval") == 0
    return folder / "runs" / "tiny"


def test_all_forms_are_of_one_checkpoint(run, monkeypatch):
    """Between two forms the run saves a better one and deletes the one that is measured."""
    first, choose = newest(run, "best").step, evaluate.choose_form

    def replace_and_choose(*args):
        found = newest(run, "best")
        state = load_state(found.state)
        scratch = scratch_folder(run, "best", found.step + 1)
        state["model"] = {name: torch.randn_like(value) for name, value in state["model"].items()}
        torch.save({**state, "step": found.step + 1}, scratch / STATE)
        prune(seal(scratch), 1)
        return choose(*args)

    monkeypatch.setattr(evaluate, "choose_form", replace_and_choose)
    (chunk,) = evaluate.measure_forms(run, "chunk", 3)
    assert newest(run, "best").step >= first + 2  # one for each form, full and chunk
    assert chunk["best_step"] == first and chunk["deviation"] < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
def test_compiled_where_the_recipe_says_so(run, tmp_path, capsys):
    """The tiny recipe says no; what is compiled is named under the table, and computes the same."""
    folder, tables = shutil.copytree(run, tmp_path / "compiled"), {}
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("compile: false", "compile: true"))
    for flags in ([], ["--eager"]):
        assert here("eval", folder, "--form", "rnn", "--chunk-size", "4", *flags) == 0
        tables[bool(flags)] = capsys.readouterr().out
    assert ", compiled;" in tables[False] and ", eager;" in tables[True]
    values = [text.splitlines()[2].split()[2] for text in tables.values()]
    assert values[0] == values[1]
