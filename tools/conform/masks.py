"""Checks of what a token must not depend on: padding, other documents, and later tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tools.conform.measure import BEYOND, LEAK, LENGTH, SAME, Measure, case, compare, difference, gradients
from tools.conform.subject import Calls, Subject

LOUD = 10.0  # scale of the content of padding and of replaced tokens, so that a small leak shows
SIDES = {"left": (5, 0), "right": (0, 5), "left and right": (3, 2)}  # tokens of padding before and after
CUTS = {LENGTH: (1, LENGTH // 2, LENGTH - 1), BEYOND: (1, 64, 65, BEYOND - 1)}  # by length, first tokens that are kept
DOCUMENTS = {LENGTH: ((9, 15), (1, 7, 16)), BEYOND: ((130, 1, 169), (64, 64, 172))}  # by length, rows of documents


def pad(x: Tensor, before: int, after: int, content: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return x (1, L, D) with padding of some content, and the mask of its valid tokens."""
    length = x.shape[1]
    padded = x.new_zeros(1, before + length + after, x.shape[2]) + content
    padded[:, before : before + length] = x
    valid = torch.zeros(padded.shape[:2], dtype=torch.bool)
    valid[:, before : before + length] = True
    return padded, valid


def padding(subject: Subject) -> Iterator[Measure]:
    """Compare the rows of a batch, each with padding on another side, with the row alone."""
    for length in (LENGTH, BEYOND):
        run, x = subject.fresh(), subject.tokens(1, length)
        noise = LOUD * subject.tokens(1, length + 5, seed=1)
        padded, valid = map(torch.cat, zip(*(pad(x, before, after, noise) for before, after in SIDES.values())))
        with torch.no_grad(), case(f"{length} tokens"):
            alone, y = run(x), run(padded, valid=valid)
        for i, side in enumerate(SIDES):
            yield Measure(difference(y[i, valid[i]], alone[0]), SAME, f"padding {side} of {length} tokens")


def nan_in_padding(subject: Subject) -> Iterator[Measure]:
    """Compare outputs and gradients for padding of NaN with those for padding of zeros."""
    run, x = subject.fresh(), subject.tokens(1, LENGTH)
    for side, (before, after) in SIDES.items():
        with case(side):
            zeros, valid = pad(x, before, after, 0.0)
            expected = gradients(run, zeros, valid=valid)
            found = gradients(run, pad(x, before, after, torch.nan)[0], valid=valid)
        yield from compare(found, expected, SAME, f", padding {side}")


def packed(subject: Subject) -> Iterator[Measure]:
    """Compare the outputs of documents packed into the rows of a batch with those of each document alone."""
    for length, batch in DOCUMENTS.items():
        run, x = subject.fresh(), subject.tokens(len(batch), length)
        ids = torch.stack([torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in batch])
        x[ids == 1] *= LOUD
        with torch.no_grad(), case(f"{length} tokens"):
            whole = run(x, segments=ids)
            for row, lengths in enumerate(batch):
                for i in range(len(lengths)):
                    own = ids[row] == i
                    where = f"document {i + 1} of {len(lengths)}, documents of {', '.join(map(str, lengths))} tokens"
                    alone = subject.fresh()(x[row : row + 1, own])
                    yield Measure(difference(whole[row, own], alone[0]), SAME, where)


def later_tokens(subject: Subject, train: bool) -> Iterator[Measure]:
    """Compare the outputs of the first tokens before and after all later tokens are replaced."""
    for length, cuts in CUTS.items():
        x, other = subject.tokens(2, length), LOUD * subject.tokens(2, length, seed=1)
        y = seeded(subject.fresh(train=train), x)
        for first in cuts:
            changed = seeded(subject.fresh(train=train), torch.cat([x[:, :first], other[:, first:]], 1))
            value = difference(changed[:, :first], y[:, :first])
            yield Measure(value, LEAK, f"the first {first} of {length} tokens, others replaced")


def seeded(run: Calls, x: Tensor) -> Tensor:
    """Return the output, where two calls draw the same dropout."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return run(x)
