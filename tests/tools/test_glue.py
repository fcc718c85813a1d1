"""Tests of `./run.sh glue`: Table 8 as recipes, starts of runs, resumed runs, and the table of results."""

import contextlib
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from data.text.glue import TASKS
from lion.config import ConfigError, to_dict
from lion.files import read_json
from lion.recipe_files import RECIPE, SUMMARY
from lion.runs import init_from, lock_run, open_run
from tests.helpers import assert_in, glue_folder, here, printed, read_lines, refuse, trained
from tests.tools.queues import Forked, command_here
from tools import __main__ as commands
from tools import jobs as queue
from tools.cli import run_command
from tools.compose import resolve
from tools.glue.plan import PUBLISHED_SEEDS, SEEDS, TABLE_8, make_jobs, read_pretrained, read_table
from tools.glue.results import best_rate, changes, collect, enters, mean_of_tasks, paper_table, rate_table, read
from tools.processes import kill_tree, start_command

# recipes.md 4.1: learning rate / weight decay / epochs, "a" for AdamW, in this order
ORDER = ("mnli", "qnli", "qqp", "rte", "sst2", "mrpc", "cola", "stsb")
PUBLISHED = {
    "bert24": "5e-5/5e-6/3 1e-5/1e-5/10 3e-5/3e-6/5 1e-5/1e-6/3 3e-5/3e-6/3 8e-5/8e-5/10 5e-5/5e-6/10 3e-5/3e-6/10",
    "m2_base": "5e-5/5e-6/3 5e-5/1e-5/10 3e-5/3e-6/5 1e-5/1e-6/3 3e-5/3e-6/3 8e-5/8e-5/10 8e-5/5e-6/10 8e-5/3e-6/10a",
    "m2_large": "5e-5/5e-6/3 5e-5/1e-6/10 3e-5/3e-6/5 5e-5/1e-6/2a 3e-5/3e-6/3 8e-5/8e-6/10 5e-5/1e-6/10 8e-5/3e-5/8",
    "hydra": "1e-4/5e-6/2 5e-5/1e-6/7 5e-5/3e-6/3 1e-5/1e-6/3a 5e-5/3e-6/2 8e-5/8e-6/10 1e-4/8e-6/10 3e-5/3e-6/8",
    "modified": "1e-5/5e-6/3 1e-5/1e-6/10 1e-5/3e-6/5 1e-5/1e-6/2a 1e-5/3e-6/3 1e-5/8e-6/10 1e-5/1e-6/10 1e-5/3e-5/8",
}
CITED = {  # recipes.md 4.3: values of the cited files
    ("bert24", "qnli"): {"weight_decay": 1e-6},
    ("bert24", "mrpc"): {"weight_decay": 8e-6},
    ("m2_base", "qnli"): {"weight_decay": 1e-6},
    ("m2_base", "cola"): {"optimizer": "adamw"},
    ("m2_base", "stsb"): {"optimizer": "decoupled_adamw"},
    ("m2_large", "stsb"): {"weight_decay": 3e-6},
    ("hydra", "cola"): {"weight_decay": 5e-6},
    ("hydra", "stsb"): {"epochs": 10},
    ("hydra", "rte"): {"optimizer": "decoupled_adamw"},
    ("modified", "stsb"): {"weight_decay": 3e-6},
}
COMMON = {  # recipes.md 4.2: batch, steps between evaluations, metrics, seeds
    "mnli": (48, 2300, "accuracy", 1),
    "qnli": (16, 1000, "accuracy", 1),
    "qqp": (16, 2000, "accuracy f1", 1),
    "rte": (16, 100, "accuracy", 5),
    "sst2": (16, 500, "accuracy", 3),
    "mrpc": (32, 100, "f1 accuracy", 5),
    "cola": (32, 250, "matthews accuracy", 4),
    "stsb": (32, 200, "spearman pearson", 5),
}
QUICK = ("trainer.epochs=2", "trainer.batch_size=8", "trainer.log_every=1", "data.length=32")


def published(name, task):
    """Return learning rate, weight decay and epochs of Table 8, and the name of the optimizer."""
    text = PUBLISHED[name].split()[ORDER.index(task)]
    numbers = [float(number) for number in text.rstrip("a").split("/")]
    return *numbers, "adamw" if text.endswith("a") else "decoupled_adamw"


@pytest.mark.parametrize("name", PUBLISHED)
def test_table_8_is_there_in_full(name):
    assert {path.stem for path in TABLE_8.glob("*.yaml")} == PUBLISHED.keys() | {"cramming", "lightnet"}
    table = read_table(name)
    cited = read_table(name, cited=True).tasks
    assert table.length == (256 if name in ("bert24", "hydra") else 128)
    assert list(table.tasks) == list(ORDER)
    for task, cell in table.tasks.items():
        lr, decay, epochs, optimizer = published(name, task)
        assert (cell.lr, cell.weight_decay, cell.epochs, cell.optimizer) == (lr, decay, epochs, optimizer)
        assert cell.torch_decay(2e-3) == pytest.approx(decay if optimizer == "adamw" else decay / 2e-3)
        of_table = {key: getattr(cell, key) for key in ("lr", "weight_decay", "epochs", "optimizer")}
        of_file = {key: getattr(cited[task], key) for key in of_table}
        changed = CITED.get((name, task), {})
        assert of_file == of_table | changed
        assert changed.items().isdisjoint(of_table.items())


@pytest.mark.parametrize("task", ORDER)
def test_the_tasks_are_trained_as_published(task):
    """Compare the resolved recipe with recipes.md 4.2."""
    recipe = resolve(f"glue_{task}")
    batch, every, metrics, seeds = COMMON[task]
    optim, schedule, trainer = recipe.optim, recipe.schedule, recipe.trainer
    assert (recipe.data.name, recipe.data.task, recipe.data.length) == ("glue", task, 128)
    assert (trainer.batch_size, trainer.eval_every, " ".join(recipe.task.metrics)) == (batch, every, metrics)
    assert (optim.betas, optim.eps, optim.no_decay, trainer.clip_grad) == ((0.9, 0.98), 1e-6, "none", None)
    assert (schedule.kind, schedule.warmup, schedule.min_lr) == ("linear", "6%", 0)
    assert trainer.precision == ("fp32" if task == "stsb" else "bf16")
    assert (recipe.model.attention.score_dropout, recipe.model.classifier_dropout) == (0, 0.1)
    assert PUBLISHED_SEEDS[task] == seeds
    assert SEEDS == (19, 8364, 717, 10536, 90166)
    lr, decay, epochs, _ = published("bert24", task)  # the defaults, except for two decays
    assert (optim.lr, trainer.epochs) == (lr, epochs)
    cited = CITED.get(("bert24", task), {}).get("weight_decay", decay)
    assert optim.weight_decay == pytest.approx(cited / lr)


def masked_lm(folder):
    """Train a run of masked language modelling for about a second."""
    (folder / "text.txt").write_text("\n".join(f"abcdef xyz zyx {i % 7} yz" for i in range(200)))
    path, dropout = folder / "mlm.yaml", "{score_dropout: 0.1}"
    path.write_text(f"""
task: {{name: masked_lm}}
data: {{name: text, path: {folder / "text.txt"}, document: line, tokenizer: wordpiece, vocabulary: 300, length: 32}}
model: {{mixer: lion_s, dim: 16, depth: 1, num_heads: 2, token_types: 2, max_positions: 32, attention: {dropout}}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 8, steps: 2, eval_every: 2, save_every: 2, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    return trained(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make (run of the pre-training, folder of GLUE)."""
    folder = tmp_path_factory.mktemp("glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LION_DATA", f"{folder}/data")
        yield masked_lm(folder), glue_folder(folder / "tasks", TASKS)


def jobs_of(run, tasks, seeds=1, *overrides, recipe="modified", from_mnli=True, name="modified"):
    pretrained, table = read_pretrained(str(run[0])), read_table(recipe)
    table.from_mnli &= from_mnli
    given = [f"data.path={run[1]}", *QUICK, *overrides]
    return make_jobs(pretrained, table, overrides=given, name=name, tasks=tasks, seeds=seeds)


@pytest.mark.slow
def test_a_task_is_a_recipe_of_its_own(run):
    (job,) = jobs_of(run, ["cola"])
    recipe = job.recipe
    assert (recipe.optim.lr, recipe.optim.weight_decay) == (1e-5, pytest.approx(0.1))
    assert (recipe.model.name, recipe.model.mixer, recipe.model.dim) == ("bert_classifier", "lion_s", 16)
    assert resolve(run[0] / "recipe.yaml").model.attention.score_dropout == 0.1
    assert recipe.model.attention.score_dropout == 0
    assert (recipe.trainer.precision, recipe.trainer.compile) == ("fp32", False)
    assert recipe.init_from == str(run[0])
    assert recipe.folder == run[0] / "glue/modified/cola_seed19"
    assert recipe.data.tokenizer == str(run[0] / "glue/tokenizer/wordpiece")


@pytest.mark.parametrize(
    "override, cola, rte",
    [((), 1e-6, 1e-6), (["optim.lr=4e-5"], 1e-6, 1e-6), (["optim.weight_decay=0.3"], 3e-6, 0.3)],
)
def test_another_learning_rate_leaves_the_decay_of_a_step(run, override, cola, rte):
    """Check both decays: Composer defines it at the peak rate, whatever that is; PyTorch multiplies it by the rate."""
    found = {job.task: job.recipe.optim for job in jobs_of(run, ["cola", "rte"], 1, *override, from_mnli=False)}
    assert found["cola"].weight_decay * found["cola"].lr == pytest.approx(cola)
    assert found["rte"].weight_decay == rte


def starts_of(jobs):
    return {job.name: Path(job.recipe.init_from).name for job in jobs}


def test_starts_and_seeds(run):
    starts = starts_of(jobs_of(run, ["stsb", "rte", "mnli", "cola"], 2))
    assert list(starts)[:2] == ["mnli_seed19", "mnli_seed8364"]
    for seed in (19, 8364):
        assert starts[f"rte_seed{seed}"] == starts[f"stsb_seed{seed}"] == f"mnli_seed{seed}"
    assert starts["cola_seed19"] == starts["mnli_seed19"] == "mlm"
    of_mnli, *of_rte = jobs_of(run, ["mnli", "rte"], None)
    assert [of_mnli.seed, *(job.seed for job in of_rte)] == [19, *SEEDS]
    assert set(starts_of(of_rte).values()) == {"mnli_seed19"}  # the only run of mnli
    (alone,) = jobs_of(run, ["rte"], from_mnli=False)
    assert alone.recipe.init_from == str(run[0])
    assert alone.after is None


def test_a_start_from_mnli_needs_its_run_and_names_other_settings(run, caplog):
    with pytest.raises(ConfigError, match=r"rte starts from the run of mnli \(Table 8\), which is missing: add"):
        jobs_of(run, ["rte"])
    (mnli,) = jobs_of(run, ["mnli"])
    trial = replace(mnli.recipe, trainer=replace(mnli.recipe.trainer, epochs=0.01))
    trial.folder.mkdir(parents=True)
    (trial.folder / RECIPE).write_text(yaml.safe_dump(to_dict(trial)))
    (trial.folder / SUMMARY).write_text("{}")
    jobs_of(run, ["rte"])
    shutil.rmtree(trial.folder)
    assert "mnli_seed19, from which tasks start, has other settings: trainer.epochs: 0.01 -> 2.0" in caplog.text


def test_a_dry_run_prints_the_plan_and_its_cost(run, capsys):
    call = ["glue", run[0], "--recipe", "m2_base", f"data.path={run[1]}", "--tasks", "mnli,stsb", "--dry-run", *QUICK]

    def planned(*more):
        text = printed(capsys, *call, *more)
        return text, {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(tuple(TASKS))}

    text, rows = planned()
    assert rows["mnli"][:6] == ["mnli", "mlm", "5e-05", "5e-06", "0.1", "2.0"]
    assert "392,702" in rows["mnli"]
    assert "stsb: values of Table 8; the file that it cites has optimizer decoupled_adamw (--cited)" in text
    assert "runs, 0.0 M tokens" in text
    assert "one after the other" in text
    assert not (run[0] / "glue/m2_base").exists()
    cited, own = planned("--cited")
    assert "(--cited)" not in cited
    assert "stsb: values of Table 8" not in cited
    assert own["stsb"][:4] == rows["stsb"][:4]
    assert own["stsb"][4] != rows["stsb"][4]  # AdamW's weight decay of another optimizer


def test_crammed_berts_fine_tuning(run):
    """Compare the resolved recipes with recipes.md 7.4."""
    first = {}
    for job in jobs_of(run, ORDER, recipe="cramming"):
        r = job.recipe
        assert (job.name, job.after, r.init_from) == (f"{job.task}_seed19", None, str(run[0]))
        assert (r.optim.lr, r.optim.weight_decay, r.optim.betas, r.optim.eps) == (4e-5, 0, (0.9, 0.98), 1e-6)
        assert (r.schedule.kind, r.schedule.warmup, r.trainer.clip_grad) == ("cosine", "10%", None)
        assert (r.model.dropout, r.model.attention.score_dropout, r.model.classifier_dropout) == (0.1, 0.1, 0.1)
        first[job.task] = enters(job.task, r.task.metrics)
    made = read_table("cramming").own("cola")  # the settings that `QUICK` overrides
    assert {"trainer.batch_size=16", "trainer.epochs=5", "data.length=128"} <= set(made)
    assert first == {
        "mnli": ["val accuracy", "val_mismatched accuracy"],
        "qnli": ["val accuracy"],
        "qqp": ["val f1"],
        "rte": ["val accuracy"],
        "sst2": ["val accuracy"],
        "mrpc": ["val f1"],
        "cola": ["val matthews"],
        "stsb": ["val pearson"],
    }
    assert enters("qqp", ("accuracy", "f1")) == ["val accuracy", "val f1"]


def test_every_learning_rate_is_a_run(run):
    jobs = jobs_of(run, ["mnli", "rte"], 2, recipe="lightnet")
    rates = (5e-5, 4e-5, 3e-5, 2e-5)
    expected = [f"{task}_lr{rate}_seed{seed}" for task in ("mnli", "rte") for seed in (19, 8364) for rate in rates]
    assert starts_of(jobs) == dict.fromkeys(expected, "mlm")
    assert [job.name for job in jobs] == expected
    assert tuple(job.recipe.optim.lr for job in jobs[:4]) == rates
    assert read_table("lightnet").tasks == read_table("cramming").tasks
    for job in jobs:
        assert job.recipe.model.attention.score_dropout == 0  # linear attention has no scores
    with pytest.raises(ConfigError, match=r"optim.lr: this recipe has 4 learning rates"):
        jobs_of(run, ["rte"], 1, "optim.lr=1e-5", recipe="lightnet")


@pytest.mark.parametrize(
    "text, said",
    [
        ("rates: [1e-5]", "rates: a recipe with rates has no single run of mnli to start from"),
        ("from_mnli: false\nrates: [1e-5, 1e-5]", "rates: expected different learning rates above 0"),
        ("average: none", "average"),
    ],
)
def test_a_recipe_with_errors_is_refused(text, said, tmp_path):
    (tmp_path / "own.yaml").write_text(f"length: 32\n{text}\n")
    with pytest.raises(ConfigError, match=said):
        read_table(str(tmp_path / "own.yaml"))


def rows_of(scores, **more):
    """Make rows like those of `collect` from {(task, rate): scores by seed}."""
    rows = []
    for (task, lr), found in scores.items():
        for seed, score in enumerate(found):
            metrics = dict.fromkeys(("val accuracy", "val_mismatched accuracy"), score / 100)
            row = {"task": task, "lr": lr, "seed": seed, "score": score, "missing": [], "metrics": metrics}
            rows.append(row | more)
    return rows


def test_the_best_rate_of_each_task_counts():
    scores = {("mnli", 5e-5): [70, 74], ("mnli", 4e-5): [73, 73], ("rte", 5e-5): [60, 50], ("rte", 4e-5): [54, 55]}
    kept = best_rate(rows_of(scores | {("rte", 2e-5): [99]}))  # one seed is still missing
    assert kept == rows_of({key: scores[key] for key in (("mnli", 4e-5), ("rte", 5e-5))})
    assert mean_of_tasks(kept, "numbers") == pytest.approx((2 * 73 + 55) / 3)
    assert mean_of_tasks(kept, "tasks") == pytest.approx((73 + 55) / 2)
    header, body = rate_table(rows_of(scores | {("rte", 3e-5): [1]}), read_table("lightnet"))
    assert header == ["task", "5e-05", "4e-05", "3e-05"]
    assert body == [
        ["mnli", "72.00 ± 2.83", "73.00 ± 0.00", "-"],
        ["rte", "55.00 ± 7.07", "54.50 ± 0.71", "1.00"],
        ["same rate for all", f"{(2 * 72 + 55) / 3:.2f}", f"{(2 * 73 + 54.5) / 3:.2f}", "-"],
    ]


def test_a_folder_may_hold_tasks_that_the_recipe_no_longer_has():
    table = read_table("lightnet")
    del table.tasks["rte"]
    rows = rows_of({("rte", 5e-5): [60, 50]}, settings={})
    assert changes(rows, table) == ["rte: not in this recipe; its runs are from earlier calls."]


@pytest.mark.slow
def test_rates_are_trained_and_the_best_is_reported(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(queue, "start_command", command_here)
    recipe = tmp_path / "rates.yaml"
    text = "{lr: 1e-5, weight_decay: 0, epochs: 1, optimizer: adamw, metrics: [pearson, spearman]}"
    recipe.write_text(f"length: 32\nfrom_mnli: false\nrates: [1e-2, 1e-4]\ntasks: {{stsb: {text}}}\n")
    call = ["glue", run[0], "--recipe", recipe, f"data.path={run[1]}", *QUICK[1:], "--seeds", "1", "--tasks", "stsb"]
    out = printed(capsys, *call)
    assert "0.01, 0.0001" in out
    assert "same rate for all" in out
    folder = run[0] / "glue/rates"
    held = read_json(folder / "results.json")
    first, second = held["rows"]
    assert (first["lr"], first["seed"]) == (1e-2, 19)
    assert (second["lr"], second["seed"]) == (1e-4, 19)
    assert held["average"] == pytest.approx(max(first["score"], second["score"]))
    assert first["score"] == pytest.approx(100 * first["metrics"]["val pearson"])
    written = (folder / "results.md").read_text()
    assert_in(written, "| stsb | Pearson |", "## Learning rates", "|task|0.01|0.0001|", "selected on the same sets")
    assert "19 (done)" in printed(capsys, *call)


def start(*argv, **how):
    """Start a process for cola; the others run in this one."""
    return (start_command if argv[1] == "glue_cola" else command_here)(*argv, **how)


@pytest.fixture(scope="module")
def finished(run):
    """Train mnli with the mismatched genres, then rte; cola fails, since this process holds its lock."""
    folder = run[0] / "glue/modified"
    call = ["glue", run[0], "--recipe", "modified", f"data.path={run[1]}", *QUICK, "--seeds", "1"]
    (folder / "cola_seed19").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        patch.setattr(queue, "start_command", start)
        with lock_run(folder / "cola_seed19"):
            assert here(*call, "--tasks", "rte,cola,mnli") == 2
    return folder, call, said.getvalue()


@pytest.mark.slow
def test_a_failed_task_does_not_stop_the_others(finished):
    folder, _, said = finished
    assert_in(said, "cola_seed19: failed, ", "trains there now", "rte_seed19: finished, ")
    assert "trains there now" in (folder / "logs/cola_seed19.log").read_text()


@pytest.mark.slow
def test_the_table(finished):
    folder, *_ = finished
    mnli, rte = rows = collect(folder)
    assert (mnli["task"], rte["task"]) == ("mnli", "rte")
    both = [mnli["metrics"][f"{split} accuracy"] for split in ("val", "val_mismatched")]
    assert mnli["score"] == pytest.approx(50 * sum(both))
    assert not mnli["missing"]
    held = read_json(folder / "results.json")
    assert held["average"] == pytest.approx((mnli["score"] + rte["score"]) / 2)
    assert held["rows"] == rows
    assert held["average_over"] == "tasks"
    text = (folder / "results.md").read_text()
    assert_in(
        text,
        "| mnli | accuracy + mismatched accuracy |",
        "| average of 2 tasks |",
        "Not run: qnli, qqp, sst2, mrpc, cola, stsb; the average is not the GLUE average.",
        "Trained on a part of the training set: mnli, rte.",
        "mnli: data.length 32 in place of 128, trainer.batch_size 8 in place of 48, trainer.epochs 2.0 in place of 3.",
        "| base | softmax | m2_base | 84.63 | 64.33 | 89.99 | 89.80 | 92.51 | 86.69 | 89.62 | 60.42 | 82.25 |",
    )


@pytest.mark.slow
def test_finished_tasks_are_not_run_again(finished, capsys):
    folder, call, _ = finished
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    assert here(*call, "--tasks", "rte") == 0  # the run of mnli exists, and is not requested
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    assert "19 (done)" in capsys.readouterr().out
    assert [path.name.partition("-")[0] for path in folder.glob("*/checkpoints/*")] == ["best", "best"]
    said = refuse_last(capsys, *call, "--tasks", "rte", "optim.eps=1e-7")
    assert "holds a run with other settings, optim.eps: 1e-06 -> 1e-07: --name NAME keeps these runs apart" in said


def refuse_last(capsys, *argv):
    """Run a command that fails after printing progress, and return its last line."""
    with pytest.raises(SystemExit) as error:
        run_command(commands.main, [str(a) for a in argv])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_pooler_comes_from_mnli_and_the_last_layer_is_new(finished, run):
    (job,) = jobs_of(run, ["rte"])
    loaded = open_run(job.folder)
    start = open_run(job.after.folder).model
    torch.manual_seed(0)
    fresh = loaded.task.build_model(job.recipe.model)
    before = fresh.classifier.weight.clone()
    init_from(fresh, job.after.folder, loaded.task.info)
    assert torch.equal(fresh.pooler.weight, start.pooler.weight)
    assert torch.equal(fresh.encoder.blocks[0].mlp.fc1.weight, start.encoder.blocks[0].mlp.fc1.weight)
    assert torch.equal(fresh.classifier.weight, before)
    assert len(start.classifier.weight) == 3
    init_from(fresh, run[0], loaded.task.info)  # same vocabulary
    assert torch.equal(fresh.tokens.weight, open_run(run[0]).model.tokens.weight)


@pytest.mark.slow
def test_a_fine_tuned_run_is_evaluated_and_predicts(finished, capsys):
    run = finished[0] / "rte_seed19"
    assert "accuracy %" in printed(capsys, "eval", run, "--form", "rnn", "--chunk-size", "8")
    header, _, first, second = printed(capsys, "predict", run, "abc", "xyz", "a", "b", "--eager").splitlines()
    assert header.split()[:2] == ["sentence1", "sentence2"]
    assert first.split()[:2] == ["abc", "xyz"]
    assert "entailment" in second
    said = refuse(capsys, "predict", run, "abc")
    assert "'abc' is incomplete, this run expects sentence1 and sentence2 for each sample" in said


@pytest.mark.slow
def test_the_score_is_that_of_the_last_step(finished, tmp_path):
    copy = shutil.copytree(finished[0] / "rte_seed19", tmp_path / "rte_seed19")
    file = copy / "metrics.jsonl"
    *_, end = (line for line in read_lines(file) if line["kind"] == "val")
    first = json.dumps(end | {"step": 1, "accuracy": 0.75})
    last = json.dumps(end | {"accuracy": 0.5})
    file.write_text(f"{first}\n{last}\n")
    row = read(copy)
    assert (row["score"], row["best"]) == (50, 75)


@pytest.fixture
def started(monkeypatch):
    """Replace the processes of the queue by some that fail at once; return (name of the log, environment) of each."""
    seen = []

    def end_at_once(*argv, out, env):
        seen.append((Path(out.name).stem, env))
        return subprocess.Popen(["false"])

    monkeypatch.setattr(queue, "start_command", end_at_once)
    return seen


def work(jobs, most):
    steps = {job.name: 1 for job in jobs}
    return queue.work(jobs, steps, most, title="glue", result=lambda job: "")


@pytest.mark.parametrize("cores, gpus, tasks, threads", [(8, 0, 6, 2), (8, 0, 2, 4), (1, 0, 2, 1), (8, 1, 2, 8)])
def test_jobs_share_the_cores(run, monkeypatch, started, cores, gpus, tasks, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(queue, "PAUSE", 0.02)
    jobs = jobs_of(run, [task for task in TASKS if task != "mnli"][:tasks], name="shared", from_mnli=False)
    assert work(jobs, queue.at_once()) == 1
    assert [env["OMP_NUM_THREADS"] for _, env in started] == [str(threads)] * tasks


@pytest.mark.parametrize("ends", ["finished", "failed"])
def test_runs_of_another_command_are_waited_for(run, monkeypatch, started, ends):
    theirs, *ours = jobs_of(run, ["qnli", "sst2", "cola"], name=f"twice_{ends}", from_mnli=False)

    def they_end(seconds):
        if len(started) == len(ours) and "waiting for" in said.getvalue() and not log.closed:
            if ends == "finished":
                theirs.folder.mkdir(exist_ok=True)
                (theirs.folder / SUMMARY).write_text("{}")
            log.close()

    monkeypatch.setattr(queue.time, "sleep", they_end)
    log = queue.claim(theirs)
    assert queue.claim(theirs) is None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert work([theirs, *ours], 2) == 1
    expected = [*ours, theirs] if ends == "failed" else ours
    assert [name for name, _ in started] == [job.name for job in expected]
    assert said.getvalue().count(f"waiting for {theirs.name}: another command is training them") == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_stopped_task_resumes(run):
    call = ["glue", run[0], "--recipe", "modified", "--name", "stopped", f"data.path={run[1]}", "--tasks", "qqp"]
    process = Forked(*call, *QUICK, "trainer.epochs=100000")  # starts the process of the job
    folder = run[0] / "glue/stopped/qqp_seed19"
    metrics = folder / "metrics.jsonl"
    end = time.monotonic() + 120
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate()
    finally:
        kill_tree(process)
    assert process.returncode == 130
    assert "stopped: the same command resumes from here" in out
    (last,) = (folder / "checkpoints").glob("last-*")
    assert int(last.name.partition("-")[2]) > 0
    assert not (folder / SUMMARY).exists()


def test_bad_input_is_refused_in_a_line(run, tmp_path, capsys):
    known = f"{run[0]} --recipe modified data.path={run[1]}"
    for argv, words in {
        f"{run[0]} --recipe m2_bas": "unknown GLUE recipe 'm2_bas', did you mean 'm2_base'?",
        f"{known} --tasks cola,wnli": "unknown task 'wnli' of GLUE in this recipe",
        f"{known} --tasks cola,": "expected tasks separated by commas",
        f"{known} --seeds 6": "--seeds: 6, only 5 are published",
        f"{known} data.lenght=3": "unknown key 'data.lenght'",
        f"{known} seed=3": "seed: is set separately for each run; use --seeds, --no-mnli and",
        "nothing --recipe modified": "run 'nothing': no recipe.yaml",
        f"{run[0]}": "required: --recipe",
        f"{known} --tokenizer bytes": "with another vocabulary",
    }.items():
        assert words in refuse(capsys, "glue", *argv.split()), words
    (tmp_path / "cola").mkdir()
    more = f"--tasks cola {' '.join(QUICK[:2])} model.position_embedding=true"
    for argv, words in {
        f"{run[0]} --recipe modified data.path={tmp_path} --tasks cola": "no train.jsonl",
        f"{run[0]} --recipe bert24 data.path={run[1]} {more}": "256 tokens, but model.max_positions allows only 32",
    }.items():
        assert words in refuse_last(capsys, "glue", *argv.split()), words


def test_a_run_of_another_task_is_refused_as_a_start(run, tmp_path, capsys):
    shutil.copytree(run[0] / "checkpoints", tmp_path / "checkpoints")
    recipe = yaml.safe_load((run[0] / "recipe.yaml").read_text())
    recipe["task"] = {"name": "causal_lm"}
    recipe["model"] = {"mixer": "lion_s", "dim": 16, "depth": 1, "num_heads": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    said = refuse(capsys, "glue", tmp_path, "--recipe", "modified")
    assert "task 'causal_lm', GLUE needs a run of masked_lm" in said


def test_the_papers_averages_are_those_of_its_tasks():
    """Check all averages, except two that are printed differently: Table 11, BASE, Hydra and Lion-S."""
    header, rows = paper_table()
    odd = []
    for row in rows:
        numbers = [float(x) for cell in row[3:-1] if cell != "-" for x in cell.split("/")]
        averaged = row[0] != "24 hours" and "BERT-Base" not in row[1]
        if averaged and abs(statistics.mean(numbers) - float(row[-1])) > 0.0101:
            odd.append((row[1], row[-1]))
    assert header[3:-1] == ["mnli", "rte", "qqp", "qnli", "sst2", "stsb", "mrpc", "cola"]
    assert odd == [("Hydra", "84.30"), ("lion_s", "78.40")]
