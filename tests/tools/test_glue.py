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
from pathlib import Path

import pytest
import torch
import yaml

from data.text.glue import TASKS
from lion.config import ConfigError, to_dict
from lion.runs import RECIPE, SUMMARY, init_from, lock_run, open_run
from tests.helpers import glue_folder, here, refuse
from tools import __main__ as commands
from tools import jobs as queue
from tools.cli import run_command
from tools.compose import resolve
from tools.glue.plan import PUBLISHED_SEEDS, SEEDS, TABLE_8, make_jobs, read_pretrained, read_table
from tools.glue.results import best_rate, changes, collect, enters, mean_of_tasks, paper_rows, rate_rows, read
from tools.processes import kill_tree, start_command

QUEUE = {"title": "glue", "result": lambda job: ""}  # arguments of every queue here

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


def test_table_8_is_there_in_full():
    assert {path.stem for path in TABLE_8.glob("*.yaml")} == PUBLISHED.keys() | {"cramming", "lightnet"}
    for name, row in PUBLISHED.items():
        row_of, cells = read_table(name), read_table(name).tasks
        assert row_of.length == (256 if name in ("bert24", "hydra") else 128) and [*cells] == list(ORDER)
        for task, text in zip(ORDER, row.split()):
            lr, decay, epochs = text.rstrip("a").split("/")
            cell, optimizer = cells[task], "adamw" if text.endswith("a") else "decoupled_adamw"
            assert (cell.lr, cell.weight_decay, cell.epochs, cell.optimizer) == (
                float(lr), float(decay), int(epochs), optimizer,
            )  # fmt: skip
            assert cell.torch_decay(2e-3) == pytest.approx(float(decay) / (1 if optimizer == "adamw" else 2e-3))
            other = read_table(name, cited=True).tasks[task]
            changed = {
                k: v
                for k in ("lr", "weight_decay", "epochs", "optimizer")
                if (v := getattr(other, k)) != getattr(cell, k)
            }
            assert changed == CITED.get((name, task), {})


@pytest.mark.parametrize("task", ORDER)
def test_the_tasks_are_trained_as_published(task):
    """Compare the resolved recipe with recipes.md 4.2."""
    recipe, (batch, every, metrics, seeds) = resolve(f"glue_{task}"), COMMON[task]
    optim, schedule, trainer = recipe.optim, recipe.schedule, recipe.trainer
    assert (recipe.data.name, recipe.data.task, recipe.data.length) == ("glue", task, 128)
    assert (trainer.batch_size, trainer.eval_every, " ".join(recipe.task.metrics)) == (batch, every, metrics)
    assert (optim.betas, optim.eps, optim.no_decay, trainer.clip_grad) == ((0.9, 0.98), 1e-6, "none", None)
    assert (schedule.kind, schedule.warmup, schedule.min_lr) == ("linear", "6%", 0)
    assert trainer.precision == ("fp32" if task == "stsb" else "bf16")
    assert (recipe.model.attention.score_dropout, recipe.model.classifier_dropout) == (0, 0.1)
    assert PUBLISHED_SEEDS[task] == seeds and SEEDS == (19, 8364, 717, 10536, 90166)
    lr, decay, epochs = PUBLISHED["bert24"].split()[ORDER.index(task)].split("/")  # the defaults, except for two decays
    assert (optim.lr, trainer.epochs) == (float(lr), float(epochs))
    cited = CITED.get(("bert24", task), {}).get("weight_decay", float(decay))
    assert optim.weight_decay == pytest.approx(cited / float(lr))


def masked_lm(folder, tokenizer="wordpiece", steps=2):
    """Train a run of masked language modelling for about a second."""
    (folder / "text.txt").write_text("\n".join(f"abcdef xyz zyx {i % 7} yz" for i in range(200)))
    path, dropout = folder / "mlm.yaml", "{score_dropout: 0.1}"
    path.write_text(f"""
task: {{name: masked_lm}}
data: {{name: text, path: {folder / "text.txt"}, document: line, tokenizer: {tokenizer}, vocabulary: 300, length: 32}}
model: {{mixer: lion_s, dim: 16, depth: 1, num_heads: 2, token_types: 2, max_positions: 32, attention: {dropout}}}
optim: {{lr: 1e-3}}
trainer: {{batch_size: 8, steps: {steps}, eval_every: {steps}, save_every: {steps}, compile: false, device: cpu}}
run: {{root: {folder / "runs"}}}
""")
    assert here("train", path, "--no-eval") == 0
    return folder / "runs" / "mlm"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make (run of the pre-training, folder of GLUE)."""
    folder = tmp_path_factory.mktemp("glue")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LION_DATA", str(folder / "data"))
        yield masked_lm(folder), glue_folder(folder / "tasks", TASKS)


def jobs_of(run, tasks, seeds=1, *overrides, **how):
    pretrained, table = read_pretrained(str(run[0])), read_table(how.pop("recipe", "modified"))
    table.from_mnli &= how.pop("from_mnli", True)
    how = {"name": "modified", "tasks": tasks, "seeds": seeds, **how}
    return make_jobs(pretrained, table, overrides=[f"data.path={run[1]}", *QUICK, *overrides], **how)


def test_a_task_is_a_recipe_of_its_own(run):
    (job,) = jobs_of(run, ["cola"])
    recipe, before = job.recipe, resolve(run[0] / "recipe.yaml")
    assert (recipe.optim.lr, recipe.optim.weight_decay) == (1e-5, pytest.approx(0.1))
    assert (recipe.model.name, recipe.model.mixer, recipe.model.dim) == ("bert_classifier", "lion_s", 16)
    assert before.model.attention.score_dropout == 0.1 and recipe.model.attention.score_dropout == 0
    assert (recipe.trainer.precision, recipe.trainer.compile) == ("fp32", False)
    assert recipe.init_from == str(run[0]) and recipe.folder == run[0] / "glue" / "modified" / "cola_seed19"
    assert recipe.data.tokenizer == str(run[0] / "glue" / "tokenizer" / "wordpiece")


def test_another_learning_rate_leaves_the_decay_of_a_step(run):
    """Check both decays: Composer defines it at the peak rate, whatever that is; PyTorch multiplies it by the rate."""
    decays = {task: [jobs_of(run, [task], 1, *more, from_mnli=False)[0].recipe.optim for more in
              ((), ["optim.lr=4e-5"], ["optim.weight_decay=0.3"])] for task in ("cola", "rte")}  # fmt: skip
    assert [o.weight_decay * o.lr for o in decays["cola"]] == pytest.approx([1e-6, 1e-6, 3e-6])
    assert [o.weight_decay for o in decays["rte"]] == [1e-6, 1e-6, 0.3]


def test_starts_and_seeds(run, caplog):
    jobs = jobs_of(run, ["stsb", "rte", "mnli", "cola"], 2)
    starts = {job.name: job.recipe.init_from.rpartition("/")[2] for job in jobs}
    assert [*starts][:2] == ["mnli_seed19", "mnli_seed8364"]
    for task in ("rte", "stsb"):
        assert all(starts[f"{task}_seed{seed}"] == f"mnli_seed{seed}" for seed in (19, 8364))
    assert starts["cola_seed19"] == starts["mnli_seed19"] == "mlm"
    published = jobs_of(run, ["mnli", "rte"], None)
    assert [job.seed for job in published] == [19, *SEEDS]
    assert {job.recipe.init_from.rpartition("/")[2] for job in published[1:]} == {"mnli_seed19"}  # the only run of mnli
    alone = jobs_of(run, ["rte"], from_mnli=False)
    assert alone[0].recipe.init_from == str(run[0]) and alone[0].after is None
    with pytest.raises(ConfigError, match=r"rte starts from the run of mnli \(Table 8\), which is missing: add"):
        jobs_of(run, ["rte"])
    trial = jobs_of(run, ["mnli"], 1)[0].recipe
    trial.trainer.epochs = 0.01
    trial.folder.mkdir(parents=True)
    (trial.folder / RECIPE).write_text(yaml.safe_dump(to_dict(trial)))
    (trial.folder / SUMMARY).write_text("{}")
    jobs_of(run, ["rte"], 1)
    shutil.rmtree(trial.folder)
    assert "mnli_seed19, from which tasks start, has other settings: trainer.epochs: 0.01 -> 2.0" in caplog.text


def test_a_dry_run_prints_the_plan_and_its_cost(run, capsys):
    call = ["glue", run[0], "--recipe", "m2_base", f"data.path={run[1]}", "--tasks", "mnli,stsb", "--dry-run", *QUICK]
    assert here(*call) == 0
    text = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith(tuple(TASKS))}
    assert rows["mnli"][:6] == ["mnli", "mlm", "5e-05", "5e-06", "0.1", "2.0"] and "392,702" in rows["mnli"]
    assert "stsb: values of Table 8; the file that it cites has optimizer decoupled_adamw (--cited)" in text
    assert "runs, 0.0 M tokens" in text and "one after the other" in text
    assert not (run[0] / "glue" / "m2_base").exists()
    assert here(*call, "--cited") == 0
    cited = capsys.readouterr().out
    assert "(--cited)" not in cited and "stsb: values of Table 8" not in cited
    (row,) = [line.split() for line in cited.splitlines() if line.startswith("stsb")]
    assert row[:4] == rows["stsb"][:4] and row[4] != rows["stsb"][4]  # AdamW's weight decay of another optimizer


def test_crammed_berts_fine_tuning(run):
    """Compare the resolved recipes with recipes.md 7.4."""
    jobs = {job.task: job for job in jobs_of(run, ORDER, recipe="cramming")}
    for task, job in jobs.items():
        r = job.recipe
        assert (job.name, job.after, r.init_from) == (f"{task}_seed19", None, str(run[0]))
        assert (r.optim.lr, r.optim.weight_decay, r.optim.betas, r.optim.eps) == (4e-5, 0, (0.9, 0.98), 1e-6)
        assert (r.schedule.kind, r.schedule.warmup, r.trainer.clip_grad) == ("cosine", "10%", None)
        assert (r.model.dropout, r.model.attention.score_dropout, r.model.classifier_dropout) == (0.1, 0.1, 0.1)
    made = read_table("cramming").own("cola")  # the settings that `QUICK` overrides
    assert {"trainer.batch_size=16", "trainer.epochs=5", "data.length=128"} <= {*made}
    first = {task: enters(task, job.recipe.task.metrics) for task, job in jobs.items()}
    assert first["mnli"] == ["val accuracy", "val_mismatched accuracy"]
    named = {task: keys[0].partition(" ")[2] for task, keys in first.items() if task != "mnli"}
    others = dict.fromkeys(("qnli", "rte", "sst2"), "accuracy")
    assert named == {"qqp": "f1", "mrpc": "f1", "cola": "matthews", "stsb": "pearson", **others}
    assert len(first["qqp"]) == 1 and enters("qqp", ("accuracy", "f1")) == ["val accuracy", "val f1"]


def test_every_learning_rate_is_a_run(run, tmp_path):
    jobs = jobs_of(run, ["mnli", "rte"], 2, recipe="lightnet")
    names = [f"{task}_lr{rate}_seed{seed}" for task in ("mnli", "rte") for seed in (19, 8364)
             for rate in ("5e-05", "4e-05", "3e-05", "2e-05")]  # fmt: skip
    assert [job.name for job in jobs] == names and all(job.recipe.init_from == str(run[0]) for job in jobs)
    assert [job.recipe.optim.lr for job in jobs[:4]] == [5e-5, 4e-5, 3e-5, 2e-5]
    assert read_table("lightnet").tasks == read_table("cramming").tasks
    assert all(job.recipe.model.attention.score_dropout == 0 for job in jobs)  # linear attention has no scores
    with pytest.raises(ConfigError, match=r"optim.lr: this recipe has 4 learning rates"):
        jobs_of(run, ["rte"], 1, "optim.lr=1e-5", recipe="lightnet")
    for text, said in (
        ("rates: [1e-5]", "rates: a recipe with rates has no single run of mnli to start from"),
        ("from_mnli: false\nrates: [1e-5, 1e-5]", "rates: expected different learning rates above 0"),
        ("average: none", "average"),
    ):
        (tmp_path / "own.yaml").write_text(f"length: 32\n{text}\n")
        with pytest.raises(ConfigError, match=said):
            read_table(str(tmp_path / "own.yaml"))


def rows_of(scores, **more):
    """Make rows like those of `collect` from {(task, rate): scores by seed}."""
    return [
        {"task": task, "lr": lr, "seed": seed, "score": score, "missing": [], **more}
        | {"metrics": {f"{split} accuracy": score / 100 for split in ("val", "val_mismatched")}}
        for (task, lr), found in scores.items()
        for seed, score in enumerate(found)
    ]


def test_the_best_rate_of_each_task_counts():
    table = read_table("lightnet")
    scores = {("mnli", 5e-5): [70, 74], ("mnli", 4e-5): [73, 73], ("rte", 5e-5): [60, 50], ("rte", 4e-5): [54, 55]}
    rows = rows_of(scores)
    kept = best_rate(rows_of({**scores, ("rte", 2e-5): [99]}))  # one seed is still missing
    assert [(row["task"], row["lr"], row["score"]) for row in kept] == [
        ("mnli", 4e-5, 73), ("mnli", 4e-5, 73), ("rte", 5e-5, 60), ("rte", 5e-5, 50),
    ]  # fmt: skip
    assert mean_of_tasks(kept, "numbers") == pytest.approx((2 * 73 + 55) / 3)
    assert mean_of_tasks(kept, "tasks") == pytest.approx((73 + 55) / 2)
    header, body = rate_rows([*rows, *rows_of({("rte", 3e-5): [1]})], table)
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


@pytest.mark.process
@pytest.mark.slow
def test_rates_are_trained_and_the_best_is_reported(run, tmp_path, capsys):
    recipe = tmp_path / "rates.yaml"
    text = "{lr: 1e-5, weight_decay: 0, epochs: 1, optimizer: adamw, metrics: [pearson, spearman]}"
    recipe.write_text(f"length: 32\nfrom_mnli: false\nrates: [1e-2, 1e-4]\ntasks: {{stsb: {text}}}\n")
    call = [run[0], "--recipe", recipe, f"data.path={run[1]}", *QUICK[1:], "--seeds", "1", "--jobs", "2"]
    assert here("glue", *call, "--tasks", "stsb") == 0
    folder, out = run[0] / "glue" / "rates", capsys.readouterr().out
    held = json.loads((folder / "results.json").read_text())
    assert [(row["lr"], row["seed"]) for row in held["rows"]] == [(1e-2, 19), (1e-4, 19)]
    assert held["average"] == pytest.approx(max(row["score"] for row in held["rows"]))
    assert held["rows"][0]["score"] == pytest.approx(100 * held["rows"][0]["metrics"]["val pearson"])
    written = (folder / "results.md").read_text()
    for words in ("| stsb | Pearson |", "## Learning rates", "|task|0.01|0.0001|", "selected on the same sets"):
        assert words in written, words
    assert "0.01, 0.0001" in out and "same rate for all" in out
    assert here("glue", *call, "--tasks", "stsb") == 0 and "19 (done)" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(run):
    """Train mnli with the mismatched genres, then rte, two at a time; cola fails, since this process holds its lock."""
    folder = run[0] / "glue" / "modified"
    call = [run[0], "--recipe", "modified", f"data.path={run[1]}", *QUICK, "--seeds", "1", "--jobs", "2"]
    (folder / "cola_seed19").mkdir(parents=True)
    with lock_run(folder / "cola_seed19"), contextlib.redirect_stderr(io.StringIO()) as said:
        assert here("glue", *call, "--tasks", "rte,cola,mnli") == 2
    return folder, call, said.getvalue()


@pytest.mark.process
@pytest.mark.slow
def test_the_table(trained):
    folder, *_ = trained
    rows = collect(folder)
    assert [row["task"] for row in rows] == ["mnli", "rte"]
    both = [rows[0]["metrics"][f"{split} accuracy"] for split in ("val", "val_mismatched")]
    assert rows[0]["score"] == pytest.approx(50 * sum(both)) and not rows[0]["missing"]
    held = json.loads((folder / "results.json").read_text())
    assert held["average"] == pytest.approx((rows[0]["score"] + rows[1]["score"]) / 2) and held["rows"] == rows
    assert held["average_over"] == "tasks"
    text = (folder / "results.md").read_text()
    for words in (
        "| mnli | accuracy + mismatched accuracy |",
        "| average of 2 tasks |",
        "Not run: qnli, qqp, sst2, mrpc, cola, stsb; the average is not the GLUE average.",
        "Trained on a part of the training set: mnli, rte.",
        "mnli: data.length 32 in place of 128, trainer.batch_size 8 in place of 48, trainer.epochs 2.0 in place of 3.",
        "| base | softmax | m2_base | 84.63 | 64.33 | 89.99 | 89.80 | 92.51 | 86.69 | 89.62 | 60.42 | 82.25 |",
    ):
        assert words in text, words


@pytest.mark.process
@pytest.mark.slow
def test_finished_tasks_are_not_run_again(trained, capsys):
    folder, call, _ = trained
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    assert here("glue", *call, "--tasks", "rte") == 0  # the run of mnli exists, and is not requested
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/metrics.jsonl")}
    assert "19 (done)" in capsys.readouterr().out
    assert [path.name.partition("-")[0] for path in folder.glob("*/checkpoints/*")] == ["best", "best"]
    said = refuse_last(capsys, "glue", *call, "--tasks", "rte", "optim.eps=1e-7")
    assert "holds a run with other settings, optim.eps: 1e-06 -> 1e-07: --name NAME keeps these runs apart" in said


def refuse_last(capsys, *argv):
    """Run a command that fails after printing progress, and return its last line."""
    with pytest.raises(SystemExit) as error:
        run_command(commands.main, [str(a) for a in argv])
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.process
@pytest.mark.slow
def test_the_pooler_comes_from_mnli_and_the_last_layer_is_new(trained, run):
    (job,) = jobs_of(run, ["rte"])
    loaded, start = open_run(job.folder), open_run(job.after.folder)
    torch.manual_seed(0)
    fresh = loaded.task.build_model(job.recipe.model)
    before = fresh.classifier.weight.clone()
    init_from(fresh, job.after.folder, loaded.task.info)
    assert torch.equal(fresh.pooler.weight, start.model.pooler.weight)
    assert torch.equal(fresh.encoder.blocks[0].mlp.fc1.weight, start.model.encoder.blocks[0].mlp.fc1.weight)
    assert torch.equal(fresh.classifier.weight, before) and len(start.model.classifier.weight) == 3
    mlm = open_run(run[0])
    init_from(fresh, run[0], loaded.task.info)  # same vocabulary
    assert torch.equal(fresh.tokens.weight, mlm.model.tokens.weight)


@pytest.mark.process
@pytest.mark.slow
def test_a_fine_tuned_run_is_evaluated_and_predicts(trained, run, capsys):
    folder, *_ = trained
    assert here("eval", folder / "rte_seed19", "--form", "rnn", "--chunk-size", "8") == 0
    assert "accuracy %" in capsys.readouterr().out
    assert here("predict", folder / "rte_seed19", "abc", "xyz", "a", "b", "--eager") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["sentence1", "sentence2"] and lines[2].split()[:2] == ["abc", "xyz"]
    assert len(lines) == 4 and "entailment" in lines[3]
    said = refuse(capsys, "predict", folder / "rte_seed19", "abc")
    assert "'abc' is incomplete, this run expects sentence1 and sentence2 for each sample" in said


@pytest.mark.process
@pytest.mark.slow
def test_a_failed_task_does_not_stop_the_others(trained):
    folder, _, said = trained
    assert "cola_seed19: failed, " in said and "trains there now" in said and "rte_seed19: finished, " in said
    assert "trains there now" in (folder / "logs" / "cola_seed19.log").read_text()


@pytest.mark.parametrize(
    ("cores", "gpus", "tasks", "threads"), [(8, 0, 6, 2), (8, 0, 2, 4), (1, 0, 2, 1), (8, 1, 2, 8)]
)
def test_jobs_share_the_cores(run, monkeypatch, cores, gpus, tasks, threads):
    seen = []

    def end_at_once(*argv, out, env):
        seen.append(env["OMP_NUM_THREADS"])
        return subprocess.Popen(["false"])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(queue, "PAUSE", 0.02)
    monkeypatch.setattr(queue, "start_command", end_at_once)
    jobs = jobs_of(run, [task for task in TASKS if task != "mnli"][:tasks], name="shared", from_mnli=False)
    assert queue.work(jobs, {job.name: 1 for job in jobs}, queue.at_once(), **QUEUE) == 1
    assert seen == [str(threads)] * tasks


@pytest.mark.parametrize("ends", ["finished", "failed"])
def test_runs_of_another_command_are_waited_for(run, monkeypatch, ends):
    seen = []
    jobs = jobs_of(run, ["qnli", "sst2", "cola"], name=f"twice_{ends}", from_mnli=False)
    theirs, *ours = (job.name for job in jobs)

    def end_at_once(*argv, out, env):
        seen.append(Path(out.name).stem)
        return subprocess.Popen(["false"])

    def they_end(seconds):
        if len(seen) == len(ours) and "waiting for" in said.getvalue() and not log.closed:
            if ends == "finished":
                jobs[0].folder.mkdir(exist_ok=True)
                (jobs[0].folder / SUMMARY).write_text("{}")
            log.close()

    monkeypatch.setattr(queue.time, "sleep", they_end)
    monkeypatch.setattr(queue, "start_command", end_at_once)
    log = queue.claim(jobs[0])
    assert queue.claim(jobs[0]) is None
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert queue.work(jobs, {job.name: 1 for job in jobs}, 2, **QUEUE) == 1
    assert seen == ours + [theirs] * (ends == "failed")
    assert said.getvalue().count(f"waiting for {theirs}: another command is training them") == 1


@pytest.mark.process
@pytest.mark.slow
def test_a_stopped_task_resumes(run):
    call = [run[0], "--recipe", "modified", "--name", "stopped", f"data.path={run[1]}", "--tasks", "qqp", *QUICK]
    call = [*map(str, call), "trainer.epochs=100000"]
    process = start_command("glue", *call)
    folder = run[0] / "glue" / "stopped" / "qqp_seed19"
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    finally:
        kill_tree(process)
    assert process.returncode == 130 and "stopped: the same command resumes from here" in out
    (last,) = (folder / "checkpoints").glob("last-*")
    assert int(last.name.partition("-")[2]) > 0 and not (folder / SUMMARY).exists()


def wait_for(what, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_bad_input_is_refused_in_a_line(run, tmp_path, capsys):
    folder, place = run[0], f"data.path={run[1]}"
    for argv, words in (
        ((folder, "--recipe", "m2_bas", place), "unknown GLUE recipe 'm2_bas', did you mean 'm2_base'?"),
        ((folder, "--recipe", "modified", place, "--tasks", "cola,wnli"), "unknown task 'wnli' of GLUE in this recipe"),
        ((folder, "--recipe", "modified", place, "--tasks", "cola,"), "expected tasks separated by commas"),
        ((folder, "--recipe", "modified", place, "--seeds", 6), "--seeds: 6, only 5 are published"),
        ((folder, "--recipe", "modified", place, "data.lenght=3"), "unknown key 'data.lenght'"),
        (
            (folder, "--recipe", "modified", place, "seed=3"),
            "seed: is set separately for each run; use --seeds, --no-mnli and",
        ),
        (("nothing", "--recipe", "modified", place), "run 'nothing': no recipe.yaml"),
        ((folder,), "required: --recipe"),
        ((folder, "--recipe", "modified", place, "--tokenizer", "bytes"), "with another vocabulary"),
    ):
        assert words in refuse(capsys, "glue", *argv), words
    (tmp_path / "cola").mkdir()
    said = refuse_last(capsys, "glue", folder, "--recipe", "modified", f"data.path={tmp_path}", "--tasks", "cola")
    assert "no train.jsonl" in said
    more = [place, "--tasks", "cola", *QUICK[:2], "model.position_embedding=true"]
    said = refuse_last(capsys, "glue", folder, "--recipe", "bert24", *more)
    assert "data.length: 256 tokens, but model.max_positions allows only 32" in said


def test_a_run_of_another_task_is_refused_as_a_start(run, tmp_path, capsys):
    shutil.copytree(run[0] / "checkpoints", tmp_path / "gpt" / "checkpoints")
    recipe = yaml.safe_load((run[0] / "recipe.yaml").read_text())
    recipe["task"], recipe["model"] = {"name": "causal_lm"}, {"mixer": "lion_s", "dim": 16, "depth": 1, "num_heads": 2}
    (tmp_path / "gpt" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    said = refuse(capsys, "glue", tmp_path / "gpt", "--recipe", "modified")
    assert "task 'causal_lm', GLUE needs a run of masked_lm" in said


def test_the_papers_averages_are_those_of_its_tasks():
    """Check all averages, except two that are printed differently: Table 11, BASE, Hydra and Lion-S."""
    header, rows = paper_rows()
    odd = []
    for row in rows:
        numbers = [float(x) for cell in row[3:-1] if cell != "-" for x in cell.split("/")]
        if (
            row[0] != "24 hours"
            and "BERT-Base" not in row[1]
            and abs(statistics.mean(numbers) - float(row[-1])) > 0.0101
        ):
            odd.append((row[1], row[-1]))
    assert header[3:-1] == ["mnli", "rte", "qqp", "qnli", "sst2", "stsb", "mrpc", "cola"]
    assert odd == [("Hydra", "84.30"), ("lion_s", "78.40")]


@pytest.mark.process
@pytest.mark.slow
def test_the_score_is_that_of_the_last_step(trained, tmp_path):
    (done,) = trained[0].glob("rte_seed*")
    copy = shutil.copytree(done, tmp_path / done.name)
    found = [json.loads(text) for text in (done / "metrics.jsonl").read_text().splitlines()]
    end = next(line for line in reversed(found) if line["kind"] == "val")
    val = [{**end, "step": step, "accuracy": value} for step, value in ((1, 0.75), (end["step"], 0.5))]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in val))
    row = read(copy)
    assert (row["score"], row["best"]) == (50, 75)
