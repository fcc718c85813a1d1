"""lm-evaluation-harness on an exported causal model: the results of `eval --choices`. Skipped without lm_eval."""

import json
import re
from pathlib import Path

import pytest
import torch

import lion
from lion.evaluation.choices import log_likelihoods
from lion.evaluation.questions import Choices, encode, read_questions
from tests.helpers import ROOT, here, printed
from tests.test_docs import blocks
from tests.tools.test_export import BYTES, make

QUESTIONS = [
    {"context": f"{subject} {verb}".strip(), "choices": ["on the mat", "of a cat", "under it all"], "answer": i % 3}
    for i, (subject, verb) in enumerate((s, v) for s in ("the cat", "a dog", "my hat", "it") for v in ("sat", "is", ""))
]


@pytest.mark.parametrize("name", ["softmax", "text"])  # a class of transformers, and one of lion.transformers
def test_the_harness_finds_the_same_accuracies(name, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", f"{tmp_path}/cache")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(tmp_path)
    run = make(tmp_path / "runs", name)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)) + "\n")
    (tmp_path / "tasks").mkdir()
    (task,) = blocks(ROOT / "tools/export/README.md", "yaml")
    (tmp_path / "tasks/mine.yaml").write_text(task)
    assert here("export", run, tmp_path / "gpt") == 0
    ours = [
        float(found)
        for found in re.findall(
            r"(\d+\.\d\d) \(", printed(capsys, "eval", run, "--choices", "questions.jsonl", "--form", "full", "--eager")
        )
    ]
    found = simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(tmp_path / "gpt"),
            "device": "cpu",
            "dtype": "float32",
            "trust_remote_code": True,
        },
        tasks=["mine"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        batch_size=4,
        bootstrap_iters=0,
    )
    theirs = [100 * found["results"]["mine"][f"{name},none"] for name in ("acc", "acc_norm")]
    assert [round(x, 2) for x in theirs] == ours[:2]
    model, questions = lion.load(run, compile=False), read_questions(Path("questions.jsonl"))
    (batch,) = Choices(rows := encode(questions, BYTES, model.longest)[0], len(rows))
    with torch.no_grad():
        scores = log_likelihoods(model, batch)
    expected = {(q, c): s for q, c, s in zip(*(batch[n].tolist() for n in ("question", "choice")), scores.tolist())}
    for sample in found["samples"]["mine"]:
        for choice, ((score, _),) in enumerate(sample["resps"]):
            assert score == pytest.approx(expected[sample["doc_id"], choice], abs=1e-4)
    assert len(found["samples"]["mine"]) == len(QUESTIONS)
