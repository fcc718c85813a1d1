"""Tests of `./run.sh eval RUN --choices FILE`: scores against a plain loop, accuracies by hand, and errors."""

import json

import pytest
import torch

import lion
from data.text.tokenizers import open_tokenizer
from lion.evaluation.choices import accuracy_of_choices, interval, log_likelihoods
from lion.evaluation.questions import Choices, encode, joined, read_questions
from lion.runs import open_run
from lion.samples.text import TextInfo
from tests.helpers import here, refuse
from tools.compose import make_task, resolve
from tools.convert import write_run

LENGTH = 24
QUESTIONS = [
    {"context": "the cat sat", "choices": ["on the mat", "of a", "under it"], "answer": 0},
    {"query": "a dog ", "choices": ["and more", "x"], "gold": 1},
    {"ctx": "", "endings": ["once", "twice", "never again"], "label": "2"},
    {"question_stem": "so", "choices": {"text": ["it", "was"], "label": ["A", "B"]}, "answerKey": "B", "id": 7},
    {"context": "", "question": "what is far too long for so few positions", "choices": ["yes", "nobody"], "answer": 0},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Make untrained runs on bytes; the softmax model has 24 positions."""
    folder, tokenizer, found = tmp_path_factory.mktemp("choices"), open_tokenizer("bytes"), {}
    for mixer in ("softmax", "lion_s"):
        small = ["model.dim=12", "model.depth=2", "model.num_heads=2", f"data.length={LENGTH + 1}"]
        small += ["data.name=text", "data.tokenizer=bytes", "trainer.compile=false", "trainer.batch_size=3"]
        recipe = resolve(
            f"gpt2_tiny_{mixer}", [*small, f"run.root={folder}", f"run.name={mixer}", "model.init_std=0.5"]
        )
        info = TextInfo(tokenizer.vocabulary, LENGTH + 1, "bytes", tokenizer.fingerprint, tokenizer.special)
        torch.manual_seed(0)
        model = make_task(recipe, info).build_model(recipe.model)
        write_run(recipe.folder, recipe, {"info": info.to_dict(), "model": model.state_dict(), "ema": None}, {}, {})
        found[mixer] = recipe.folder
    return found


def written(path, questions):
    path.write_text("\n".join(json.dumps(q) for q in questions) + "\n\n")
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("questions") / "some.jsonl", QUESTIONS)


@torch.no_grad()
def by_hand(model, questions):
    """Compute scores [question][choice], one row at a time, without padding."""
    tokenizer, found = open_tokenizer("bytes"), []
    for q in questions:
        found.append([])
        for choice in q.choices:
            text = q.text and q.text + (" " if not q.text.endswith(" ") else "")
            head = tokenizer.encode(text) or [tokenizer.special["end"]]
            ids = [*head, *tokenizer.encode(choice)]
            size = len(tokenizer.encode(choice)) + len(text) - len(text.rstrip())  # the blank is predicted, too
            ids = ids if model.longest is None else ids[-model.longest - 1 :]
            shares = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            found[-1].append(sum(shares[i - 1, ids[i]].item() for i in range(len(ids) - size, len(ids))))
    return found


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
@torch.no_grad()
def test_log_likelihoods_are_those_of_one_choice_at_a_time(runs, file, mixer):
    model, questions = lion.load(runs[mixer], compile=False), read_questions(file)
    rows, cut = encode(questions, open_tokenizer("bytes"), model.longest)
    assert cut == (mixer == "softmax") and (model.longest == LENGTH or mixer != "softmax")
    expected = by_hand(model, questions)
    for form in ("auto", "full") if mixer == "softmax" else ("full", "chunk", "rnn"):
        lion.set_form(model, form, 4 if form in ("chunk", "rnn") else None)
        seen = set()
        for batch in Choices(rows, 5):
            assert batch["tokens"].shape[0] == 5 and batch["tokens"].shape[1] <= max(len(row.ids) for row in rows)
            scores = log_likelihoods(model, batch)
            for question, choice, score, real in zip(batch["question"], batch["choice"], scores, batch["mask"]):
                assert score.item() == pytest.approx(expected[question][choice], abs=1e-4)
                if real:
                    assert (int(question), int(choice)) not in seen
                    seen.add((int(question), int(choice)))
        assert len(seen) == len(rows) == 12


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
def test_accuracies_by_hand(runs, file, mixer, capsys):
    assert here("eval", runs[mixer], "--choices", file) == 0
    out = capsys.readouterr().out.splitlines()
    questions, model = read_questions(file), lion.load(runs[mixer], compile=False)
    scores, wanted = by_hand(model, questions), []
    blank = [bool(q.text) and not q.text.endswith(" ") for q in questions]
    spaces = [len(q.text) - len(q.text.rstrip()) for q in questions]
    sizes = [lambda q, c: 1, lambda q, c: len(c.encode()), lambda q, c: len(c) + q]  # each token is one byte
    for size in sizes:
        right = 0
        for q, own, more in zip(questions, scores, [a + b for a, b in zip(blank, spaces)]):
            ranked = [score / size(more, choice) for score, choice in zip(own, q.choices)]
            right += ranked.index(max(ranked)) == q.answer
        low, high = interval(right / 5, 5)
        wanted.append(f"{20 * right:.2f} ({100 * low:.1f} to {100 * high:.1f})")
    forms = out[2:-1] if mixer == "lion_s" else out[2:-2]
    assert len(forms) == (4 if mixer == "lion_s" else 1)
    for line in forms:
        assert all(part in line for part in wanted), (line, wanted)
    about = [line for line in out if line.startswith("5 questions of 2 to 3 choices, chance 43.33 %")]
    assert len(about) == 1
    cut = "1 of 5 texts lost their beginning, because the model has 24 positions"
    assert (cut in out) == (mixer == "softmax")


def test_the_best_of_each_question_wherever_its_rows_stand():
    score = torch.tensor([-4.0, -3.0, -9.0, -1.0, -8.0])
    size = torch.tensor([4, 1, 3, 1, 2])
    question, choice = torch.tensor([7, 3, 7, 3, 7]), torch.tensor([0, 0, 1, 1, 2])
    right = torch.tensor([True, False, False, True, False])
    one = torch.ones(5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(0))
    for index in (torch.arange(5), order):
        columns = (question[index], choice[index], right[index])
        assert accuracy_of_choices(score[index], one, *columns) == 1  # -4 of question 7 and -1 of question 3
        assert accuracy_of_choices(score[index], size[index], *columns) == 1  # -1, -3, -4, and -3, -1
    assert accuracy_of_choices(-score, one, question, choice, right) == 0
    tie = accuracy_of_choices(torch.zeros(5), one, question[order], choice[order], right[order])
    assert tie == 0.5  # a tie selects the first choice, which is right in question 7 alone


def test_a_share_has_its_interval():
    """Compare the intervals with those of scipy."""
    stats = pytest.importorskip("scipy.stats")
    for right, count in ((0, 5), (3, 8), (77, 100), (100, 100)):
        known = stats.binomtest(right, count).proportion_ci(method="wilson")
        assert interval(right / count, count) == pytest.approx((known.low, known.high), abs=1e-6)


def test_one_blank_stands_between():
    assert [joined("a", "b"), joined("a ", "b"), joined("a", "\nb"), joined("", "b")] == ["a b", "a b", "a\nb", "b"]


GOOD = {"context": "a", "choices": ["b", "c"], "answer": 0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({**GOOD, "answer": 2}, "line 2: expected an answer of 0 to 1, got 2"),
        ({**GOOD, "answer": -1}, "line 2: expected an answer of 0 to 1, got -1"),
        ({**GOOD, "answer": True}, "line 2: expected an answer of 0 to 1, got True"),
        ({**GOOD, "answer": "1" * 5000}, "line 2: expected an answer of 0 to 1, got '11"),
        ({**GOOD, "answer": ""}, "line 2: expected an answer of 0 to 1, got ''"),
        (
            {"context": "a", "choices": ["b", "c"]},
            "line 2: no answer (answer or gold or label or answerKey), it has con",
        ),
        ({"choices": ["b", "c"], "answer": 0}, "line 2: no text (context or question or"),
        ({**GOOD, "query": "b"}, "line 2: both 'context' and 'query'"),
        ({**GOOD, "choices": ["b"]}, "line 2: expected at least two choices, got 1"),
        ({**GOOD, "choices": ["b", " "]}, "line 2: choice 1 is empty"),
        ({**GOOD, "choices": "b, c"}, "line 2: expected a list of texts as its choices, got 'b, c'"),
        (
            {**GOOD, "choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answer": "C"},
            "line 2: answer 'C' is none of",
        ),
        ({**GOOD, "choices": ["b", "c" * 24]}, "line 2: choice 1 has 25 tokens, the model 24 positions"),
        ([1, 2], "line 2: expected a text, choices and an answer, got '[1, 2]'"),
    ],
)
def test_a_bad_line_is_named(runs, tmp_path, capsys, line, message):
    path = written(tmp_path / "bad.jsonl", [GOOD, line])
    assert message in refuse(capsys, "eval", runs["softmax"], "--choices", path)


def test_bad_files_and_runs(runs, tmp_path, capsys, file):
    run, path = runs["softmax"], tmp_path / "bad.jsonl"
    for text, message in ((b"\n", "holds no questions"), (b"\xff", "not UTF-8"), (b"{", "line 1: not JSON")):
        path.write_bytes(text)
        assert message in refuse(capsys, "eval", run, "--choices", path)
    assert "No such file" in refuse(capsys, "eval", run, "--choices", tmp_path / "none.jsonl")
    assert "leave --lengths out" in refuse(capsys, "eval", run, "--choices", file, "--lengths", 8)
    assert "has only full, got 'rnn'" in refuse(capsys, "eval", run, "--choices", file, "--form", "rnn")


def test_the_weights_are_those_asked_for(runs, file, monkeypatch):
    asked = []
    monkeypatch.setattr("tools.choices.open_run", lambda run, **how: asked.append(how) or open_run(run))
    assert here("eval", runs["lion_s"], "--choices", file, "--form", "full", "--ema", "--checkpoint", "last") == 0
    assert asked == [{"checkpoint": "last", "ema": True}]
