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
    rows = [["check", "result", "measured", "limit", ""]]
    failures = []
    for result in results:
        value = limit = "-"
        if result.worst:
            value, limit = f"{result.worst.value:.2g}", f"{result.worst.limit:.2g}"
        rows.append([result.name, result.status, value, limit, remark(result)])
        if result.status == FAILS:
            failures.append(f"{result.name} fails: {CHECKS[result.name].meaning}: {extent(result)}")
    parts = [f"{subject.name}: width {subject.dim}, {count:,} parameters, torch {torch.__version__}"]
    parts.append("\n".join(aligned(rows)))
    if failures:
        parts.append("\n".join(failures))
    statuses = [result.status for result in results]
    tally = [f"{statuses.count(status)} {words}" for status, words in TALLY.items()]
    parts.append(", ".join(tally))
    return "\n\n".join(parts)


def remark(result: Result) -> str:
    """Return the case of the largest value if it is not 0, or why there is no value."""
    if result.worst:
        if result.worst.value:
            return result.worst.where
        return ""
    if result.status == FAILS:
        return "raises an error"
    return result.detail


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
        percent = f"{100 * value:.2g}" if value < 1 else f"{100 * value:,.0f}"
        size = f"largest difference {percent} %"
    return f"{size} ({result.worst.where})"


def as_json(subject: Subject, results: list[Result]) -> dict[str, Any]:
    """Return all measurements; a value that is not finite becomes null."""
    checks = []
    for result in results:
        worst: dict[str, Any] = {"value": None, "limit": None}
        if result.worst:
            worst = number(result.worst)
        check = {
            "name": result.name,
            "result": result.status,
            "detail": result.detail,
            "meaning": CHECKS[result.name].meaning if result.status == FAILS else None,
            "measures": [number(measure) for measure in result.measures],
        }
        checks.append(check | worst)
    return {
        "layer": subject.name,
        "dim": subject.dim,
        "causal": subject.causal,
        "torch": torch.__version__,
        "checks": checks,
    }


def number(measure: Measure) -> dict[str, Any]:
    value = float(measure.value)
    return {"value": value if math.isfinite(value) else None, "limit": measure.limit, "where": measure.where}
