"""Tests of the evaluation of runs: all forms in one process, of one checkpoint."""

import shutil
import weakref

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import lion
from lion.config import ConfigError
from lion.evaluation import forms as forms_module
from lion.evaluation.forms import measure
from lion.models.vit import ViT
from lion.ops import Part
from lion.runs import open_run
from lion.tasks.base import Outcome
from lion.tasks.metrics import MetricOfPass
from lion.trainer.checkpoint_files import STATE, load_state, newest, prune, scratch_folder, seal
from lion.trainer.compilation import compile_blocks, missing_compiler
from lion.trainer.evaluate import evaluate as evaluate_model
from lion.trainer.loader import eval_batches
from lion.trainer.runtime import Runtime
from tests.helpers import here, refuse, tiny_recipe
from tests.processes import in_processes
from tools import evaluate
from tools.compose import build_data, resolve_run

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    assert here("train", tiny_recipe(folder), "--no-eval") == 0
    return folder / "runs" / "tiny"


def test_all_forms_are_of_one_checkpoint(run, monkeypatch):
    """Save a better checkpoint between two forms, and delete the one that is measured."""
    first, choose = newest(run, "best").step, evaluate.choose_form

    def replace_and_choose(*args):
        found = newest(run, "best")
        state = load_state(found.state)
        scratch = scratch_folder(run, "best", found.step + 1)
        state["model"] = {name: torch.randn_like(value) for name, value in state["model"].items()}
        torch.save({**state, "step": found.step + 1}, scratch / STATE)
        prune(seal(scratch), 1)
        return choose(*args)

    monkeypatch.setattr(forms_module, "set_form", replace_and_choose)
    (chunk,) = evaluate.measure_forms(run, "chunk", 3)
    assert newest(run, "best").step >= first + 2  # one checkpoint for each form, full and chunk
    assert chunk["best_step"] == first and chunk["deviation"] < 1e-4


def evaluated(group, run, sequence) -> list[dict]:
    mesh = init_device_mesh("cpu", (group.size() // sequence, sequence), mesh_dim_names=("data", "sequence"))
    runtime = Runtime(torch.device("cpu"), group.rank(), group.size(), Part.of(mesh.get_group("sequence")))
    return evaluate.measure_forms(run, "chunk", 2, eager=True, runtime=runtime)


@pytest.mark.process
def test_processes_share_rows(run, capsys):
    alone, measured = (
        evaluate.measure_forms(run, "chunk", 2, eager=True),
        ("samples_per_second", "peak_bytes", "deviation"),
    )
    for rows in [*in_processes(2, evaluated, run, 2), *in_processes(4, evaluated, run, 2)]:
        for row, whole in zip(rows, alone, strict=True):
            assert row["values"] == pytest.approx(whole["values"], rel=1e-5) and row["deviation"] < 1e-4
            assert {k: row[k] for k in row if k not in (*measured, "value", "values")}.items() <= whole.items()
    assert "rows of 5 tokens are too short for 20" in refuse(capsys, "eval", run, "--processes", 20)
    assert "--processes: --lengths runs in one" in refuse(capsys, "eval", run, "--processes", 2, "--lengths", 8)


def test_a_program_evaluates_a_run_on_data_of_its_own(run):
    """Check that the library gives the rows of the command, on data that are passed."""
    splits = build_data(resolve_run(run))
    (row,) = lion.evaluate_run(lion.open_run(run), splits, "rnn", 3, split="val")
    (same,) = evaluate.measure_forms(run, "rnn", 3, split="val")
    measured = {"samples_per_second", "peak_bytes"}
    assert {k: v for k, v in row.items() if k not in measured} == {k: v for k, v in same.items() if k not in measured}
    assert (row["form"], row["chunk_size"], row["split"]) == ("rnn", 3, "val") and row["deviation"] < 1e-4


def test_a_split_that_the_data_do_not_have_is_refused(run):
    splits = build_data(resolve_run(run))._replace(test=None)
    with pytest.raises(ConfigError, match="--split test: data set 'digits' has no such split, use val"):
        lion.evaluate_run(lion.open_run(run), splits, "rnn", 3, split="test")


@pytest.mark.slow
def test_each_batch_is_run_in_every_form_and_forgotten(run, monkeypatch):
    """Compare with each form alone over the whole split; outputs of at most one batch exist at any time."""
    loaded = open_run(run)
    test = build_data(resolve_run(loaded.folder)).test
    batches = [*eval_batches(test, seed=0, split="test", batch=64, rank=0, world=1, workers=0, pin=False)]
    assert len(batches) > 3 and not batches[-1]["mask"].all()
    forms, cpu = [("full", None), ("chunk", 3), ("rnn", 1)], Runtime(torch.device("cpu"))
    expected, outputs = {}, {}
    for form in forms:
        lion.set_form(loaded.model, *form)
        expected[form] = evaluate_model(loaded.model, batches, loaded.task, cpu)["top1"]
        with torch.inference_mode():
            outputs[form] = torch.cat([loaded.model(b["image"])[b["mask"]] for b in batches])
    counter, held, alive, once = CompileCounter(), [], [], loaded.task.evaluate
    compile_blocks(loaded.model, backend=counter)

    def watched(model, batch):
        outcome = once(model, batch)
        held.append(weakref.ref(outcome))
        alive.append(sum(ref() is not None for ref in held))
        return outcome

    monkeypatch.setattr(loaded.task, "evaluate", watched)
    monkeypatch.setattr(forms_module, "seconds", lambda run, device: (run(), 0.5)[1])
    found = measure(loaded.model, loaded.task, batches, len(batches), forms, cpu, "fp32")
    assert list(found) == forms and max(alive) <= 3
    assert counter.frame_count == len(forms)  # one graph per form, however often the forms alternate
    own = MetricOfPass("pass", measure=lambda task, model, batches, _: float(model(next(iter(batches))["image"])[0, 0]))
    monkeypatch.setattr(loaded.task, "metrics", (*loaded.task.metrics, own))
    both = measure(loaded.model, loaded.task, batches[:1], 1, forms[:1], cpu, "fp32")
    assert both[forms[0]]["values"]["pass"] == pytest.approx(outputs[forms[0]][0, 0].item(), abs=2e-6)
    monkeypatch.setattr(loaded.task, "metrics", (own,))
    passes = measure(loaded.model, loaded.task, batches[:1], 1, forms, cpu, "fp32")
    assert all(passes[form]["value"] == pytest.approx(outputs[form][0, 0].item(), abs=2e-6) for form in forms)
    for form in forms:
        assert found[form]["value"] == expected[form] and found[form]["samples_per_second"] == 64 / 0.5
        gap = (outputs[form] - outputs["full", None]).abs().max().item()
        assert found[form]["deviation"] == pytest.approx(gap, abs=2e-6) and (gap > 0) == (form[0] != "full")
        assert found[form]["peak_bytes"] > 0


def test_outputs_are_compared_sample_by_sample(run):
    """Check that no further tensor of the size of a batch is made: outputs of text are vocabulary x length."""
    task, largest = open_run(run).task, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **kwargs or {})
            held = {x.untyped_storage().data_ptr() for x in args if torch.is_tensor(x)}
            if torch.is_tensor(out) and out.untyped_storage().data_ptr() not in held:
                largest = max(largest, out.numel())
            return out

    reference, mask = torch.randn(6, 50, 40), torch.tensor([True] * 5 + [False])
    outputs = reference + 0.25 * torch.rand(6, 50, 40)
    outputs[3, 7, 11], outputs[5] = reference[3, 7, 11] - 0.5, 9
    measured = forms_module.Measured(task, torch.device("cpu"))
    with Watch():
        measured.add(Outcome({}, outputs), reference, mask)
    assert 1 < largest <= reference[0].numel()
    assert measured.deviation.item() == pytest.approx(0.5)
    outputs[1, 2, 3] = torch.nan
    measured.add(Outcome({}, outputs), reference, mask)
    assert measured.deviation.isnan()


@pytest.mark.slow
@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
def test_compiled_where_the_recipe_says_so(run, tmp_path, capsys):
    """Check that the note under the table reports compilation, and that results are equal; the tiny recipe is eager."""
    folder, tables = shutil.copytree(run, tmp_path / "compiled"), {}
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("compile: false", "compile: true"))
    for flags in ([], ["--eager"]):
        assert here("eval", folder, "--form", "rnn", "--chunk-size", "4", *flags) == 0
        tables[bool(flags)] = capsys.readouterr().out
    assert ", compiled;" in tables[False] and ", eager;" in tables[True]
    values = [text.splitlines()[2].split()[2] for text in tables.values()]
    assert values[0] == values[1]


def test_a_run_is_measured_in_its_precision(tmp_path, monkeypatch):
    assert here("train", tiny_recipe(tmp_path, trainer={"precision": "bf16"}), "--no-eval") == 0
    seen, forward = set(), ViT.forward
    monkeypatch.setattr(ViT, "forward", lambda self, x: (out := forward(self, x), seen.add(out.dtype))[0])
    evaluate.measure_forms(tmp_path / "runs" / "tiny", "full")
    assert seen == {torch.bfloat16}


def test_the_weights_are_those_asked_for(tmp_path, monkeypatch):
    assert here("train", tiny_recipe(tmp_path, trainer={"ema": 0.999}), "--no-eval") == 0
    run, asked = tmp_path / "runs" / "tiny", []
    raw, ema = (evaluate.measure_forms(run, "full", split="val", ema=e)[0]["values"]["loss"] for e in (False, True))
    assert raw != pytest.approx(ema, rel=1e-3)
    monkeypatch.setattr(evaluate, "open_run", lambda run, **how: asked.append(how) or open_run(run))
    assert here("eval", run, "--form", "full", "--ema", "--checkpoint", "last") == 0
    assert {"checkpoint": "last", "ema": True} in asked
