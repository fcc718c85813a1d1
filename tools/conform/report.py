"""Results of a layer as a table for people and as JSON."""

from __future__ import annotations

import math
from typing import Any

import torch

from tools.cli import aligned
from tools.conform.measure import Measure
from tools.conform.subject import Subject
from tools.conform.suite import ABSENT, CHECKS, FAILS, HOLDS, Result

TALLY = {HOLDS: "hold", FAILS: "fail", ABSENT: "not offered"}


def as_text(subject: Subject, results: list[Result]) -> str:
    """Return a table of all checks, then what each failure means."""
    count = sum(parameter.numel() for parameter in subject.layer.parameters())
    title = f"{subject.name}: width {subject.dim}, {count:,} parameters, torch {torch.__version__}"
    rows = [["check", "result", "measured", "limit", ""]]
    for result in results:
        numbers = [f"{number:.2g}" for number in result.worst[:2]] if result.worst else ["-", "-"]
        rows.append([result.name, result.status, *numbers, remark(result)])
    failures = [f"{r.name} fails: {CHECKS[r.name].meaning}: {extent(r)}" for r in results if r.status == FAILS]
    failures += [""] if failures else []
    tally = ", ".join(f"{sum(r.status == s for r in results)} {words}" for s, words in TALLY.items())
    return "\n".join([title, "", *aligned(rows), "", *failures, tally])


def remark(result: Result) -> str:
    """Return the case of the largest value if it is not 0, or why there is no value."""
    if result.worst:
        return result.worst.where if result.worst.value else ""
    return "raises an error" if result.status == FAILS else result.detail


def extent(result: Result) -> str:
    """Return how much and where a check fails, in words."""
    if result.worst is None:
        return result.detail
    value, counted = result.worst.value, CHECKS[result.name].counted
    if math.isinf(value):
        size = "not finite"
    elif counted:
        size = f"{counted}: {value}"
    else:
        size = f"largest difference {100 * value:{'.2g' if value < 1 else ',.0f'}} %"
    return f"{size} ({result.worst.where})"


def as_json(subject: Subject, results: list[Result]) -> dict[str, Any]:
    """Return all measurements; a value that is not finite becomes null."""
    checks = [
        {
            "name": r.name,
            "result": r.status,
            "detail": r.detail,
            "meaning": CHECKS[r.name].meaning if r.status == FAILS else None,
            "measures": [number(measure) for measure in r.measures],
            **(number(r.worst) if r.worst else {"value": None, "limit": None}),
        }
        for r in results
    ]
    settings = {"layer": subject.name, "dim": subject.dim, "causal": subject.causal, "torch": torch.__version__}
    return {**settings, "checks": checks}


def number(measure: Measure) -> dict[str, Any]:
    value = float(measure.value)
    return {"value": value if math.isfinite(value) else None, "limit": measure.limit, "where": measure.where}
