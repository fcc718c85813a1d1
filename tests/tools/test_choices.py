"""Tests of `./run.sh eval RUN --choices FILE`: scores against a plain loop, accuracies by hand, and errors."""

import json

import pytest
import torch

import lion
from data.text.tokenizers import open_tokenizer
from lion.evaluation.choices import accuracy_of_choices, interval, log_likelihoods
from lion.evaluation.questions import Choices, encode, joined, read_questions
from tests.helpers import here, printed, refuse
from tests.tools.untrained import text_info, untrained
from tools.compose import resolve

LENGTH = 24
BYTES = open_tokenizer("bytes")
SMALL = f"""
model.dim=12 model.depth=2 model.num_heads=2 model.init_std=0.5 trainer.compile=false trainer.batch_size=3
data.name=text data.tokenizer=bytes data.length={LENGTH + 1}
""".split()
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
    folder, found = tmp_path_factory.mktemp("choices"), {}
    for mixer in ("softmax", "lion_s"):
        recipe = resolve(f"gpt2_tiny_{mixer}", [*SMALL, f"run.root={folder}", f"run.name={mixer}"])
        found[mixer] = untrained(recipe, text_info(BYTES, LENGTH + 1))
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
    found = []
    for question in questions:
        text = question.text
        if text and not text.endswith(" "):
            text += " "
        head = BYTES.encode(text) or [BYTES.special["end"]]
        scores = []
        for choice in question.choices:
            ids = head + BYTES.encode(choice)
            size = len(BYTES.encode(choice)) + len(text) - len(text.rstrip())  # the blank is predicted, too
            if model.longest is not None:
                ids = ids[-model.longest - 1 :]
            shares = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
            scores.append(sum(shares[i - 1, ids[i]].item() for i in range(len(ids) - size, len(ids))))
        found.append(scores)
    return found


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
@torch.no_grad()
def test_log_likelihoods_are_those_of_one_choice_at_a_time(runs, file, mixer):
    model, questions = lion.load(runs[mixer], compile=False), read_questions(file)
    rows, cut = encode(questions, BYTES, model.longest)
    assert cut == (mixer == "softmax") and (model.longest == LENGTH or mixer != "softmax")
    expected = by_hand(model, questions)
    forms = {"softmax": {"auto": None, "full": None}, "lion_s": {"full": None, "chunk": 4, "rnn": 4}}[mixer]
    for form, size in forms.items():
        lion.set_form(model, form, size)
        seen = []
        for batch in Choices(rows, 5):
            assert batch["tokens"].shape[0] == 5 and batch["tokens"].shape[1] <= max(len(row.ids) for row in rows)
            scores = log_likelihoods(model, batch)
            for question, choice, score in zip(batch["question"], batch["choice"], scores):
                assert score.item() == pytest.approx(expected[question][choice], abs=1e-4)
            real = batch["mask"]
            seen += zip(batch["question"][real].tolist(), batch["choice"][real].tolist())
        assert len(seen) == len(set(seen)) == len(rows) == 12


@pytest.mark.parametrize("mixer", ["softmax", "lion_s"])
@pytest.mark.slow
def test_accuracies_by_hand(runs, file, mixer, capsys):
    out = printed(capsys, "eval", runs[mixer], "--choices", file).splitlines()
    questions, model = read_questions(file), lion.load(runs[mixer], compile=False)
    right = [0, 0, 0]  # by the sum of log-likelihoods, by bytes of a choice, by its tokens with the blank
    for question, scores in zip(questions, by_hand(model, questions)):
        lengths = torch.tensor(list(map(len, question.choices)))
        for kind, sizes in enumerate((1, lengths, lengths + bool(question.text))):
            right[kind] += int((torch.tensor(scores) / sizes).argmax()) == question.answer
    wanted = []
    for count in right:
        low, high = interval(count / 5, 5)
        wanted.append(f"{20 * count:.2f} ({100 * low:.1f} to {100 * high:.1f})")
    forms = out[2:-1] if mixer == "lion_s" else out[2:-2]
    assert len(forms) == (4 if mixer == "lion_s" else 1)
    for line in forms:
        assert all(part in line for part in wanted), (line, wanted)
    assert sum(line.startswith("5 questions of 2 to 3 choices, chance 43.33 %") for line in out) == 1
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


BAD = [  # changes of a question, of which None removes a key; expected message
    ({"answer": 2}, "expected an answer of 0 to 1, got 2"),
    ({"answer": -1}, "expected an answer of 0 to 1, got -1"),
    ({"answer": True}, "expected an answer of 0 to 1, got True"),
    ({"answer": "1" * 5000}, "expected an answer of 0 to 1, got '11"),
    ({"answer": ""}, "expected an answer of 0 to 1, got ''"),
    ({"answer": None}, "no answer (answer or gold or label or answerKey), it has con"),
    ({"context": None}, "no text (context or question or"),
    ({"query": "b"}, "both 'context' and 'query'"),
    ({"choices": ["b"]}, "expected at least two choices, got 1"),
    ({"choices": ["b", " "]}, "choice 1 is empty"),
    ({"choices": "b, c"}, "expected a list of texts as its choices, got 'b, c'"),
    ({"choices": {"text": ["b", "c"], "label": ["A", "B"]}, "answer": "C"}, "answer 'C' is none of"),
    ({"choices": ["b", "c" * 24]}, "choice 1 has 25 tokens, the model 24 positions"),
]


def test_a_bad_line_is_named(runs, tmp_path, capsys):
    good = {"context": "a", "choices": ["b", "c"], "answer": 0}
    rows = [([1, 2], "expected a text, choices and an answer, got '[1, 2]'")]
    for change, message in BAD:
        line = {key: value for key, value in (good | change).items() if value is not None}
        rows.append((line, message))
    for line, message in rows:
        path = written(tmp_path / "bad.jsonl", [good, line])
        assert f"line 2: {message}" in refuse(capsys, "eval", runs["softmax"], "--choices", path)


def test_bad_files_and_runs(runs, tmp_path, capsys, file):
    run, path = runs["softmax"], tmp_path / "bad.jsonl"
    for text, message in {b"\n": "holds no questions", b"\xff": "not UTF-8", b"{": "line 1: not JSON"}.items():
        path.write_bytes(text)
        assert message in refuse(capsys, "eval", run, "--choices", path)
    assert "No such file" in refuse(capsys, "eval", run, "--choices", tmp_path / "none.jsonl")
    assert "leave --lengths out" in refuse(capsys, "eval", run, "--choices", file, "--lengths", 8)
    assert "has only full, got 'rnn'" in refuse(capsys, "eval", run, "--choices", file, "--form", "rnn")


def test_the_weights_are_those_asked_for(runs, file, weights_asked):
    assert here("eval", runs["lion_s"], "--choices", file, "--form", "full", "--ema", "--checkpoint", "last") == 0
    assert weights_asked == [{"checkpoint": "last", "ema": True}]
