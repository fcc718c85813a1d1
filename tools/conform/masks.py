"""Checks of what a token must not depend on: padding, other documents, and later tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tools.conform.measure import LEAK, LENGTH, SAME, Measure, case, difference, differences, gradients
from tools.conform.subject import Calls, Subject

LOUD = 10.0  # scale of the content of padding and of replaced tokens, so that a small leak shows
SIDES = {"left": (5, 0), "right": (0, 5), "left and right": (3, 2)}  # tokens of padding before and after


def pad(x: Tensor, before: int, after: int, content: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return x (1, L, D) with padding of some content, and the mask of its valid tokens."""
    length = x.shape[1]
    padded = x.new_zeros(1, before + length + after, x.shape[2]) + content
    padded[:, before : before + length] = x
    valid = torch.zeros(padded.shape[:2], dtype=torch.bool)
    valid[:, before : before + length] = True
    return padded, valid


def padding(subject: Subject) -> Iterator[Measure]:
    """Compare the outputs of a padded row with those of the row alone."""
    run, x = subject.fresh(), subject.tokens(1, LENGTH)
    with torch.no_grad():
        alone = run(x)
        for side, (before, after) in SIDES.items():
            noise = LOUD * subject.tokens(1, LENGTH + before + after, seed=1)
            padded, valid = pad(x, before, after, noise)
            with case(side):
                y = run(padded, valid=valid)
            yield Measure(difference(y[valid], alone[0]), SAME, f"padding {side}")


def nan_in_padding(subject: Subject) -> Iterator[Measure]:
    """Compare outputs and gradients for padding of NaN with those for padding of zeros."""
    run, x = subject.fresh(), subject.tokens(1, LENGTH)
    for side, (before, after) in SIDES.items():
        with case(side):
            zeros, valid = pad(x, before, after, 0.0)
            y, grads = gradients(run, zeros, valid=valid)
            broken, broken_grads = gradients(run, pad(x, before, after, torch.nan)[0], valid=valid)
        yield Measure(difference(broken[valid], y[valid]), SAME, f"outputs, padding {side}")
        value, name = differences(broken_grads, grads)
        yield Measure(value, SAME, f"gradient of {name}, padding {side}")


def packed(subject: Subject) -> Iterator[Measure]:
    """Compare the outputs of documents packed into one row with those of each document alone."""
    run = subject.fresh()
    for lengths in ((9, 15), (1, 7, 12)):
        parts = [LOUD ** (i % 2) * subject.tokens(1, length, seed=i) for i, length in enumerate(lengths)]
        ids = [torch.full((1, length), i) for i, length in enumerate(lengths)]
        with torch.no_grad(), case(f"documents of {lengths} tokens"):
            whole = run(torch.cat(parts, 1), segments=torch.cat(ids, 1)).split(lengths, 1)
            for i, (y, part) in enumerate(zip(whole, parts)):
                where = f"document {i + 1} of {len(lengths)}, documents of {', '.join(map(str, lengths))} tokens"
                yield Measure(difference(y, run(part)), SAME, where)


def causal_in_evaluation(subject: Subject) -> Iterator[Measure]:
    return later_tokens(subject, train=False)


def causal_in_training(subject: Subject) -> Iterator[Measure]:
    return later_tokens(subject, train=True)


def later_tokens(subject: Subject, train: bool) -> Iterator[Measure]:
    """Compare the outputs of the first tokens before and after all later tokens are replaced."""
    x, other = subject.tokens(2, LENGTH), LOUD * subject.tokens(2, LENGTH, seed=1)
    for first in (1, LENGTH // 2, LENGTH - 1):
        y, changed = (
            seeded(subject.fresh(train=train), torch.cat([x[:, :first], t[:, first:]], 1)) for t in (x, other)
        )
        value = difference(changed[:, :first], y[:, :first])
        yield Measure(value, LEAK, f"the first {first} of {LENGTH} tokens, others replaced")


def seeded(run: Calls, x: Tensor) -> Tensor:
    """Return the output, where two calls draw the same dropout."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return run(x)
