"""The fused form (`lion.ops.flex`) in graphs that are traced on a CPU, where the library does not take it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

FUSED = "fused"  # in the place of a form: the full one, where it is fused


def gradients_on_a_cpu() -> Any:
    """A context in which `flex_attention` has gradients on a CPU: its dense operator has, a check refuses them."""
    return mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@contextmanager
def as_checked() -> Iterator[None]:
    """A context in which graphs take the fused form wherever a GPU's would, once it has passed its check."""
    from lion.ops.flex import suits

    with mock.patch("lion.ops.api.fused_applies", suits), gradients_on_a_cpu():
        yield


@contextmanager
def taken(form: str) -> Iterator[str]:
    """A context in which graphs are traced in a form, and the form to ask the library for.

    Raises:
        ValueError: What was traced cannot be fused.
    """
    if form != FUSED:
        yield form
        return
    from lion.ops.flex import expressible

    answers: list[bool] = []

    def applies(q: Any, v: Any, gates: Any, settings: Any) -> bool:
        answers.append(expressible(gates, settings))
        return answers[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch("lion.ops.api.fused_applies", applies))
        stack.enter_context(gradients_on_a_cpu())
        yield "full"
    if not answers or not all(answers):
        raise ValueError("no fused form: it takes one row sum of positive scores, and one decay a token and head")
