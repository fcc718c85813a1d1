"""Checks of equal results of several calls: in batches, compiled, in steps, in chunks, with other strides, twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from lion.trainer.compilation import can_compile, missing_compiler
from tools.conform.measure import BEYOND, LENGTH, SAME, Measure, case, compare, difference, gradients, not_finite
from tools.conform.subject import NotOffered, Subject

LENGTHS = (1, 2, 31, 32, 33)  # also a prime, 2^k, 2^k + 1
SEEN = 16  # tokens of a call before a longer one
CHUNKS = (1, 5, 16, 64)
STREAMS = ((1, LENGTH), (LENGTH // 2, LENGTH), (120, 136))  # tokens of a prompt, and with the steps after it
SCALES = (1.0, 30.0)  # of activations; the second one saturates gates, and its limits grow with the rounding errors


def batch(subject: Subject) -> Iterator[Measure]:
    """Compare the rows of a batch with the same rows alone."""
    run, x = subject.fresh(), subject.tokens(3, LENGTH)
    with torch.no_grad():
        y = run(x)
        for i in range(len(x)):
            yield Measure(difference(y[i], run(x[i : i + 1])[0]), SAME, f"row {i + 1} of {len(x)}")


def compiled(subject: Subject) -> Iterator[Measure]:
    """Compare outputs and gradients of the compiled layer with those of the eager one."""
    if not can_compile("inductor"):
        raise NotOffered(missing_compiler())
    x, run = subject.tokens(2, LENGTH), subject.fresh()
    expected = gradients(subject.fresh(), x)
    run.layer.compile(dynamic=False)
    yield from compare(gradients(run, x), expected, SAME)


def steps(subject: Subject) -> Iterator[Measure]:
    """Compare a prompt and the steps after it with one call on all tokens."""
    for scale, (prompt, length) in itertools.product(SCALES, STREAMS):
        run = subject.fresh()
        x, where = scale * subject.tokens(2, length), f"prompt of {prompt} tokens, activations times {scale:g}"
        with torch.no_grad(), case(where):
            y, state = run.adapted.prefill(x[:, :prompt].clone())
            outputs = [y]
            for i in range(prompt, length):
                y, state = run.adapted.step(x[:, i : i + 1].clone(), state)
                outputs.append(y)
            value = difference(torch.cat(outputs, 1), run(x))
        yield Measure(value, scale * SAME, where)


def chunk_sizes(subject: Subject) -> Iterator[Measure]:
    """Compare outputs and gradients in chunks of several sizes with those of the layer as constructed."""
    for scale in SCALES:
        x = scale * subject.tokens(2, LENGTH)
        expected = gradients(subject.fresh(), x)
        for size in CHUNKS:
            run, where = subject.fresh(), f"chunks of {size}, activations times {scale:g}"
            with case(where):
                run.adapted.set_chunk_size(size)
                found = gradients(run, x)
            yield from compare(found, expected, scale * SAME, f", {where}")


def lengths(subject: Subject) -> Iterator[Measure]:
    """Count numbers that are not finite, in outputs and gradients, at lengths that tiles and chunks do not expect."""
    run = subject.fresh()
    for length in LENGTHS:
        with case(f"length {length}"):
            y, grads = gradients(run, subject.tokens(2, length))
        yield Measure(not_finite(y, *grads.values()), 0, f"length {length}")


def positions(subject: Subject) -> Iterator[Measure]:
    """Compare a long call after a short one with the same call of a new copy: tables of positions must grow."""
    x, run = subject.tokens(1, BEYOND), subject.fresh()
    with torch.no_grad(), case(f"{BEYOND} tokens"):
        run(x[:, :SEEN])
        value = difference(run(x), subject.fresh()(x))
    yield Measure(value, SAME, f"{BEYOND} tokens after a call of {SEEN}")


def contiguity(subject: Subject) -> Iterator[Measure]:
    """Compare the outputs for inputs of other strides with those for a contiguous input."""
    run, x = subject.fresh(), subject.tokens(2, LENGTH)
    views = {
        "tokens and channels transposed": x.mT.contiguous().mT,
        "batch and tokens transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "every other channel of a tensor": torch.stack([x, x], -1).flatten(2)[..., ::2],
        "one row expanded": x[:1].expand(2, -1, -1),
    }
    with torch.no_grad():
        for kind, view in views.items():
            with case(kind):
                value = difference(run.direct(view), run(view.contiguous()))
            yield Measure(value, SAME, kind)


def inputs_unchanged(subject: Subject) -> Iterator[Measure]:
    """Compare the arguments after a call with copies made before."""
    run, x = subject.fresh(), subject.tokens(2, LENGTH)
    masks = {
        "valid": torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 5]]),
        "segments": (torch.arange(LENGTH) >= LENGTH // 2).long().expand(2, -1).contiguous(),
    }
    calls = {"x alone": {}}
    for name, mask in masks.items():
        if name in run.offers:
            calls[name] = {name: mask.clone()}
    for kind, mask in calls.items():
        given = x.clone()
        with torch.no_grad():
            run.direct(given, **mask)
        yield Measure(int((given != x).sum()), 0, f"x, in a call with {kind}")
        for name, tensor in mask.items():
            yield Measure(int((tensor != masks[name]).sum()), 0, name)


def deterministic(subject: Subject) -> Iterator[Measure]:
    """Compare two equal calls, in outputs and gradients, bit for bit."""
    run, x = subject.fresh(), subject.tokens(2, LENGTH)
    first = gradients(run, x)
    yield from compare(gradients(run, x), first, 0)
