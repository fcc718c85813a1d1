"""Questions with several answers: reading them from a file, and batches of their choices as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from lion.config import ConfigError
from lion.samples.base import Batch
from lion.samples.sequences import padded_length

FIELDS = {  # names of each field: here, in lm-eval's tasks, and in HellaSwag, ARC, OpenBookQA, MMLU
    "text": ("context", "question", "query", "ctx", "question_stem"),
    "choices": ("choices", "endings"),
    "answer": ("answer", "gold", "label", "answerKey"),
}


class Tokenizer(Protocol):
    """The methods of a tokenizer that questions need (`data.text.tokenizers`)."""

    name: str

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """The ids before and after a document."""

    def encode(self, text: str) -> list[int]: ...

    def encode_all(self, texts: list[str]) -> list[list[int]]: ...


class Question(NamedTuple):
    """A text, the choices that may follow it, and the index of the right one; `where` is its file and line."""

    text: str
    choices: list[str]
    answer: int
    where: str


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a file of JSON lines.

    Raises:
        ConfigError: A line is not a valid question, or the file holds no questions.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # JSON strings may contain other line separators
    except UnicodeDecodeError:
        raise ConfigError(f"--choices: {path} is not UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"--choices: {path}: {error.strerror}") from None
    found = [read_question(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--choices: {path} holds no questions")
    return found


def read_question(line: str, where: str) -> Question:
    """Parse one line of the file; `where` names the line in messages.

    Raises:
        ConfigError: The line is not a valid question.
    """
    try:
        held = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    if not isinstance(held, dict):
        raise ConfigError(f"{where}: expected a text, choices and an answer, got {line.strip()[:40]!r}")
    text = field_of(held, "text", where)
    choices = field_of(held, "choices", where)
    answer = field_of(held, "answer", where)
    labels = None
    if isinstance(choices, dict) and {"text", "label"} <= choices.keys():  # ARC's
        labels = choices["label"]
        choices = choices["text"]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: expected a string as its text, got {str(text)[:40]!r}")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise ConfigError(f"{where}: expected a list of texts as its choices, got {str(choices)[:40]!r}")
    if len(choices) < 2:
        raise ConfigError(f"{where}: expected at least two choices, got {len(choices)}")
    stripped = list(map(str.strip, choices))
    if "" in stripped:
        raise ConfigError(f"{where}: choice {stripped.index('')} is empty")
    right = place_of(answer, labels, len(choices), where)
    return Question(text, choices, right, where)


def field_of(held: dict[str, Any], name: str, where: str) -> Any:
    """Return the value of a field of a question, under any of its names in `FIELDS`.

    Raises:
        ConfigError: The field is missing, or is there under two names.
    """
    there = [n for n in FIELDS[name] if held.get(n) is not None]
    filled = [n for n in there if held[n] != ""] or there
    if not filled:
        raise ConfigError(f"{where}: no {name} ({' or '.join(FIELDS[name])}), it has {', '.join(held) or 'nothing'}")
    if len(filled) > 1:
        raise ConfigError(f"{where}: both {filled[0]!r} and {filled[1]!r}; keep one of them")
    return held[filled[0]]


def place_of(answer: Any, labels: Any, count: int, where: str) -> int:
    """Return the index of the right choice, counted from 0.

    Args:
        answer: The index, as a number or as text; or one of `labels`.
        labels: The labels of the choices, or None if the choices have no labels.
        count: Number of choices.
        where: The line, for messages.

    Raises:
        ConfigError: The answer fits none of the choices.
    """
    if labels is not None:
        if not isinstance(labels, list) or len(labels) != count or answer not in labels:
            raise ConfigError(f"{where}: answer {answer!r} is none of the labels of the {count} choices: {labels}")
        return labels.index(answer)
    written = isinstance(answer, str) and answer.strip().isdecimal() and len(answer) < 10  # int() limits digits
    number = answer
    if written:
        number = int(answer)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
        raise ConfigError(f"{where}: expected an answer of 0 to {count - 1}, got {answer!r}")
    return number


class Row(NamedTuple):
    """A text followed by a choice, as tokens; the last `tokens_of_choice` tokens are those of the choice."""

    ids: list[int]
    tokens_of_choice: int
    bytes: int
    question: int
    choice: int
    right: bool


def encode(questions: list[Question], tokenizer: Tokenizer, longest: int | None) -> tuple[list[Row], int]:
    """Encode all choices of all questions.

    Each text begins with the tokens that begin a document. An empty text becomes the token between two documents.

    Args:
        questions: The questions.
        tokenizer: The tokenizer of the run.
        longest: Number of positions of the model, or None if there is no limit.

    Returns:
        One row per choice, and the number of questions whose text was truncated at the beginning.

    Raises:
        ConfigError: A choice has more tokens than the model has positions, or a text is empty and the tokenizer has no
            token between documents.
    """
    begin, end = tokenizer.frame
    rows = []
    cut = set()
    for i, question in enumerate(questions):
        text = question.text
        where = question.where
        try:
            before = tokenizer.encode(text.rstrip())
            wholes = tokenizer.encode_all([joined(text, choice) for choice in question.choices])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for j, (choice, whole) in enumerate(zip(question.choices, wholes)):
            same = shared(before, whole)  # a token that spans the end of the text belongs to the choice
            ids = [*begin, *whole]
            if not begin and not same:
                ids = [*end, *whole]
            size = len(whole) - same
            if not size:
                raise ConfigError(f"{where}: choice {j} adds no tokens to the text")
            if size == len(ids):
                raise ConfigError(
                    f"{where}: the text is empty, and tokenizer {tokenizer.name!r} has no token that begins a document"
                )
            if longest is not None and size > longest:
                raise ConfigError(f"{where}: choice {j} has {size} tokens, the model {longest} positions")
            if longest is not None and len(ids) > longest + 1:  # the last token is predicted, and is no input
                ids = ids[-longest - 1 :]
                cut.add(i)
            row = Row(
                ids=ids,
                tokens_of_choice=size,
                bytes=len(choice.encode()),
                question=i,
                choice=j,
                right=j == question.answer,
            )
            rows.append(row)
    return rows, len(cut)


def shared(a: list[int], b: list[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))


def joined(text: str, choice: str) -> str:
    """Join a text and a choice, with a blank between them unless there is white space already."""
    if not text or text[-1].isspace() or choice[0].isspace():
        return f"{text}{choice}"
    return f"{text} {choice}"


@dataclass(frozen=True)
class Choices:
    """Batches of `size` rows, the shortest rows first, that can be iterated repeatedly. The last batch is filled up."""

    rows: list[Row]
    size: int

    @property
    def longest(self) -> int:
        """Number of input tokens of the longest row."""
        return max(len(row.ids) for row in self.rows) - 1

    def __len__(self) -> int:
        return -(-len(self.rows) // self.size)

    def __iter__(self) -> Iterator[Batch]:
        rows = sorted(self.rows, key=lambda row: len(row.ids))
        for start in range(0, len(rows), self.size):
            some = rows[start : start + self.size]
            length = 1 + padded_length(len(some[-1].ids) - 1, self.longest)
            real = torch.arange(self.size) < len(some)
            some += some[:1] * (self.size - len(some))  # all batches have the same number of rows
            tokens = torch.zeros(self.size, length, dtype=torch.long)
            segments = torch.full_like(tokens, -1)
            for i, row in enumerate(some):
                tokens[i, : len(row.ids)] = torch.tensor(row.ids)
                segments[i, : len(row.ids)] = 0
            batch = {"tokens": tokens, "segments": segments, "mask": real}
            for name in Row._fields[1:]:
                batch[name] = torch.tensor([getattr(row, name) for row in some])
            yield batch
