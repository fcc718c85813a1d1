"""A program that uses the public interface, for a type checker; `tests/tools/test_api.py` runs mypy on it.

A comment `type: ignore` marks a mistake that the checker must find.
"""

from typing import Any, assert_type

import torch
from torch import Tensor

import lion


def layers(x: Tensor) -> None:
    assert_type(lion.linear_attention(x, x, x, form="chunk"), Tensor)
    lion.linear_attention(x, x)  # type: ignore[call-arg]
    layer = lion.LionAttention(dim=8, num_heads=2, direction="forward")
    assert_type(layer.forward(x, lion.Layout.of(x, valid=torch.ones(2, 3, dtype=torch.bool))), Tensor)
    lion.Layout.of(x, valid=True)  # type: ignore[arg-type]
    assert_type(layer.prefill(x)[0], Tensor)
    lion.set_form(layer, 3)  # type: ignore[arg-type]


def runs(ids: list[int], splits: Any) -> None:
    run = lion.open_run("quickstart", ema=True)
    assert_type(run.recipe.trainer.batch_size, int)
    lion.open_run("quickstart", steps=1)  # type: ignore[call-arg]
    assert_type(lion.evaluate(run, splits), list[dict[str, Any]])
    assert_type(lion.train("quickstart", trainer={"steps": 1}).recipe.trainer.batch_size, int)
    lion.train(3)  # type: ignore[arg-type]
    model = lion.load("gpt")
    assert_type(model.streams, bool)
    assert_type(lion.load_recipe("recipes/quickstart.yaml").trainer.batch_size, int)
