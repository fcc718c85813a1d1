"""The table of checks, and their results for a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch

from tools.conform import calls, masks, numerics
from tools.conform.measure import LayerError, Measure, error_line
from tools.conform.subject import NotOffered, Subject


class Check(NamedTuple):
    """A check of layers.

    Attributes:
        run: Function that measures a layer.
        meaning: What a failure means.
        needs: What an adapter must offer (`Calls.offers`), or "causal".
        counted: What the measured values count; "" for differences relative to the largest value.
    """

    run: Callable[[Subject], Iterable[Measure]]
    meaning: str
    needs: str = ""
    counted: str = ""


COMPILE = "compiled equals eager"
INFINITE = "numbers that are not finite"
CHECKS = {
    "padding": Check(masks.padding, "padding changes the outputs of valid tokens", "valid"),
    "nan in padding": Check(masks.nan_in_padding, "NaN in padding reaches valid outputs or gradients", "valid"),
    "packed documents": Check(masks.packed, "a packed document depends on the others in its row", "segments"),
    "causal in evaluation": Check(partial(masks.later_tokens, train=False), "outputs depend on later tokens", "causal"),
    "causal in training": Check(
        partial(masks.later_tokens, train=True), "in training mode, outputs depend on later tokens", "causal"
    ),
    "batch equals single": Check(calls.batch, "a row depends on the other rows of its batch"),
    COMPILE: Check(calls.compiled, "torch.compile changes the result"),
    "steps equal whole": Check(calls.steps, "steps with a state differ from one call on all tokens", "streaming"),
    "chunk sizes": Check(calls.chunk_sizes, "the result depends on the chunk size", "chunk sizes"),
    "ragged lengths": Check(calls.lengths, "some lengths raise errors or are not finite", counted=INFINITE),
    "longer than seen": Check(calls.positions, "sequences longer than an earlier call are computed wrongly"),
    "non-contiguous input": Check(calls.contiguity, "the result depends on the strides of the input"),
    "inputs unchanged": Check(calls.inputs_unchanged, "the layer writes to its inputs", counted="changed numbers"),
    "deterministic": Check(calls.deterministic, "two equal calls in evaluation differ"),
    "bfloat16": Check(numerics.bf16, "bfloat16 is further from float32 than rounding explains"),
    "extreme inputs": Check(numerics.extremes, "small or large inputs lead to NaN or infinity", counted=INFINITE),
    "gradients": Check(numerics.slopes, "a gradient is not the slope of the loss"),
    "no dead parameter": Check(
        numerics.alive, "a parameter gets no gradient and cannot be trained", counted="parameters"
    ),
}
REASONS = {
    "valid": "forward has no argument `valid`",
    "segments": "forward has no argument `segments`",
    "streaming": "no methods `prefill` and `step`",
    "chunk sizes": "no method `set_chunk_size`",
    "causal": "checked with --causal",
}
HOLDS, FAILS, ABSENT = "holds", "fails", "not offered"


class Result(NamedTuple):
    """Result of a check.

    Attributes:
        name: Name of the check, a key of `CHECKS`.
        status: `HOLDS`, `FAILS` or `ABSENT`.
        detail: The worst case, the error of the layer, or the reason why the check does not apply.
        worst: The measurement that exceeds its limit most, or comes nearest to it.
        measures: All measurements.
    """

    name: str
    status: str
    detail: str
    worst: Measure | None = None
    measures: tuple[Measure, ...] = ()


def examine(subject: Subject, names: Iterable[str] = CHECKS) -> list[Result]:
    """Run checks on a layer, by default all."""
    calls = subject.fresh()
    offers = calls.offers | ({"causal"} if subject.causal else set())
    return [examine_one(subject, name, offers, REASONS | calls.reasons) for name in names]


def examine_one(subject: Subject, name: str, offers: set[str], reasons: dict[str, str]) -> Result:
    check = CHECKS[name]
    if check.needs and check.needs not in offers:
        return Result(name, ABSENT, reasons[check.needs])
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            measures = tuple(check.run(subject))
    except NotOffered as reason:
        return Result(name, ABSENT, str(reason))
    except Exception as error:  # the layer may raise anything
        return Result(name, FAILS, str(error) if isinstance(error, LayerError) else error_line(error))
    worst = max(measures, key=lambda measure: measure.excess)
    return Result(name, HOLDS if worst.holds else FAILS, worst.where, worst, measures)
