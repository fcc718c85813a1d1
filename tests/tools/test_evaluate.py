"""Tests of the evaluation of runs: all forms in one process, of one checkpoint."""

import shutil
import weakref

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import lion
from lion.evaluation import forms as forms_module
from lion.evaluation.forms import measure
from lion.models.vit import ViT
from lion.ops import Part
from lion.recipe import load_recipe
from lion.runs import open_run
from lion.tasks.base import Outcome
from lion.tasks.metrics import MetricOfPass
from lion.trainer.checkpoint_files import STATE, load_state, newest, prune, scratch_folder, seal
from lion.trainer.compilation import compile_blocks
from lion.trainer.evaluate import evaluate as evaluate_model
from lion.trainer.loader import Loading, eval_batches
from lion.trainer.runtime import Runtime
from tests.helpers import here, printed, refuse, refused, tiny_recipe, trained
from tests.processes import in_processes
from tools import compose, evaluate
from tools.compose import build_data, resolve_run

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tiny_recipe(tmp_path_factory.mktemp("evaluate")))


@pytest.mark.slow
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


MEASURED = {"samples_per_second", "peak_bytes"}


def without(row, names):
    return {name: value for name, value in row.items() if name not in names}


def evaluated(group, run) -> list[dict]:
    """Evaluate in two groups of two processes that share rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    runtime = Runtime(torch.device("cpu"), group.rank(), group.size(), Part.of(mesh.get_group("sequence")))
    return evaluate.measure_forms(run, "chunk", 2, eager=True, runtime=runtime)


@pytest.mark.process
def test_processes_share_rows(run, capsys):
    alone = evaluate.measure_forms(run, "chunk", 2, eager=True)
    for rows in in_processes(4, evaluated, run):
        for row, whole in zip(rows, alone, strict=True):
            assert row["values"] == pytest.approx(whole["values"], rel=1e-5) and row["deviation"] < 1e-4
            assert without(row, MEASURED | {"deviation", "value", "values"}).items() <= whole.items()
    assert "rows of 5 tokens are too short for 20" in refuse(capsys, "eval", run, "--processes", 20)
    assert "--processes: --lengths runs in one" in refuse(capsys, "eval", run, "--processes", 2, "--lengths", 8)


def test_lengths_are_of_text(run, capsys):
    assert "expected a run on text" in refuse(capsys, "eval", run, "--lengths", 16)


def test_a_program_evaluates_a_run_on_data_of_its_own(run):
    """Check that the library gives the rows of the command, on data that are passed."""
    splits = build_data(resolve_run(run))
    (row,) = lion.evaluate(lion.open_run(run), splits, "rnn", 3, split="val")
    (same,) = evaluate.measure_forms(run, "rnn", 3, split="val")
    assert without(row, MEASURED) == without(same, MEASURED)
    assert (row["form"], row["chunk_size"], row["split"]) == ("rnn", 3, "val") and row["deviation"] < 1e-4
    splits = splits._replace(test=None)
    said = r"--split test: the data of .* have no such split, use val"
    refused(said, lion.evaluate, lion.open_run(run), splits, "rnn", 3, split="test")


@pytest.mark.slow
def test_each_batch_is_run_in_every_form_and_forgotten(run, monkeypatch):
    """Compare with each form alone over the whole split; outputs of at most one batch exist at any time."""
    from torch._dynamo.testing import CompileCounter  # takes seconds to import, also in processes

    loaded = open_run(run)
    test = build_data(resolve_run(loaded.folder)).test
    batches = [*eval_batches(test, Loading(), seed=0, split="test", batch=64)]
    assert len(batches) > 3 and not batches[-1]["mask"].all()
    forms, cpu = [("full", None), ("chunk", 3), ("rnn", 1)], Runtime(torch.device("cpu"))
    expected, outputs = {}, {}
    for form in forms:
        lion.set_form(loaded.model, *form)
        expected[form] = evaluate_model(loaded.model, batches, loaded.task, cpu)["top1"]
        with torch.inference_mode():
            outputs[form] = torch.cat([loaded.model(b["image"])[b["mask"]] for b in batches])
    counter = CompileCounter()
    held, alive, once = [], [], loaded.task.evaluate
    compile_blocks(loaded.model, backend=counter)

    def watched(model, batch):
        outcome = once(model, batch)
        held.append(weakref.ref(outcome))
        alive.append(sum(ref() is not None for ref in held))
        return outcome

    def half(run, device):
        run()
        return 0.5

    def first_logit(task, model, batches, _):
        return float(model(next(iter(batches))["image"])[0, 0])

    monkeypatch.setattr(loaded.task, "evaluate", watched)
    monkeypatch.setattr(forms_module, "seconds", half)
    found = measure(loaded.model, loaded.task, batches, len(batches), forms, cpu, "fp32")
    assert list(found) == forms and max(alive) <= 3
    assert counter.frame_count == len(forms)  # one graph per form, however often the forms alternate
    own = MetricOfPass("pass", measure=first_logit)
    for metrics in ((*loaded.task.metrics, own), (own,)):
        monkeypatch.setattr(loaded.task, "metrics", metrics)
        passes = measure(loaded.model, loaded.task, batches[:1], 1, forms, cpu, "fp32")
        for form in forms:
            assert passes[form]["values"]["pass"] == pytest.approx(outputs[form][0, 0].item(), abs=2e-6)
    for form in forms:
        assert found[form]["value"] == expected[form] and found[form]["samples_per_second"] == 64 / 0.5
        gap = (outputs[form] - outputs["full", None]).abs().max().item()
        assert found[form]["deviation"] == pytest.approx(gap, abs=2e-6) and (gap > 0) == (form[0] != "full")
        assert found[form]["peak_bytes"] > 0
        assert passes[form]["value"] == passes[form]["values"]["pass"]


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
    rows = {"prediction": torch.zeros(6), "label": torch.zeros(6)}
    with Watch():
        measured.add(Outcome({}, outputs, rows), reference, mask)
    assert 1 < largest <= reference[0].numel()
    assert measured.deviation.item() == pytest.approx(0.5)
    outputs[1, 2, 3] = torch.nan
    measured.add(Outcome({}, outputs, rows), reference, mask)
    assert measured.deviation.isnan()


def test_compiled_where_the_recipe_says_so(run, tmp_path, capsys, monkeypatch):
    """Check the note under the table; the tiny recipe is eager."""
    folder = shutil.copytree(run, tmp_path / "compiled")
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("compile: false", "compile: true"))
    asked = []

    def compiled(model):
        asked.append(model)
        return True

    monkeypatch.setattr("lion.evaluation.run.compile_blocks", compiled)
    for note, flags in ((", compiled;", []), (", eager;", ["--eager"])):
        assert note in printed(capsys, "eval", folder, "--form", "rnn", "--chunk-size", "4", *flags)
        assert len(asked) == 1


@pytest.mark.slow
def test_a_run_is_measured_in_its_precision_with_its_average(tmp_path, monkeypatch):
    run = trained(tiny_recipe(tmp_path, trainer={"precision": "bf16", "ema": 0.999}))
    seen, forward = set(), ViT.forward

    def watched(self, x):
        out = forward(self, x)
        seen.add(out.dtype)
        return out

    monkeypatch.setattr(ViT, "forward", watched)
    losses = []
    for ema in (False, True):
        (row,) = evaluate.measure_forms(run, "full", split="val", ema=ema)
        losses.append(row["values"]["loss"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert seen == {torch.bfloat16}


def test_the_recipe_is_read_once_and_the_weights_are_those_asked_for(run, weights_asked, monkeypatch):
    reads = []

    def loaded(*args, **how):
        reads.append(args)
        return load_recipe(*args, **how)

    for module in (compose, lion.runs):
        monkeypatch.setattr(module, "load_recipe", loaded)
    assert here("eval", run, "--form", "full", "--ema", "--checkpoint", "last") == 0
    assert weights_asked == [{"checkpoint": "last", "ema": True}]
    assert len(reads) == 1
