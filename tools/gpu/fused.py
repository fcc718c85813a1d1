"""Tracing of the fused form (`lion.ops.flex`) on a CPU, where the library itself does not use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from lion.config import ConfigError
from lion.ops.settings import FULL_UP_TO

FUSED = "fused"  # name of the fused form, in place of a form of the library
FUSED_CHUNKS = "fused_chunks"  # the same, in chunks of `SMALL` tokens
SMALL = 32


def gradients_on_a_cpu() -> Any:
    """Enable gradients of `flex_attention` on a CPU: disable a check; the dense operator behind it has gradients."""
    return mock.patch("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@contextmanager
def as_checked() -> Iterator[None]:
    """Trace graphs with the fused form wherever graphs for a GPU use it, as if its check had passed."""
    from lion.ops.flex import suits

    with mock.patch("lion.ops.api.fused_applies", suits), gradients_on_a_cpu():
        yield


@contextmanager
def taken(form: str) -> Iterator[str]:
    """Trace graphs in `form`, which may be fused; yield the name of the form to pass to the library.

    Raises:
        ConfigError: The library has no fused form of the traced operator.
    """
    if form not in (FUSED, FUSED_CHUNKS):
        yield form
        return
    from lion.ops import flex

    answers: list[bool] = []

    def applies(q: Any, v: Any, gates: Any, settings: Any) -> bool:
        answers.append(flex.suits(q, v, gates, settings))
        return answers[-1]

    with ExitStack() as stack:
        stack.enter_context(mock.patch("lion.ops.api.fused_applies", applies))
        stack.enter_context(gradients_on_a_cpu())
        if form == FUSED_CHUNKS:
            stack.enter_context(mock.patch.multiple(flex, WHOLE_UP_TO=SMALL, CHUNK=SMALL))
        yield "auto"
    if not answers or not all(answers):
        raise ConfigError(
            "no fused form: it requires a row sum of positive scores, and one decay per token and head, a decay per "
            f"head in float32, or no decay and at most {FULL_UP_TO} tokens"
        )
