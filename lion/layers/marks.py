"""Marks: factors of learning rate and weight decay that a module sets for its parameters."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import nn


class Marks(NamedTuple):
    """Factors of the learning rate and of the weight decay of a parameter; 0 turns either off.

    A module marks its parameters with an attribute `marks: dict[str, Marks]`. The keys are the names in the module's
    `named_parameters`: "step", "gate.weight".
    """

    lr: float = 1.0
    weight_decay: float = 1.0


def marks_of(model: nn.Module) -> dict[str, Marks]:
    """Return the marks of all marked parameters of a model, by full name.

    Raises:
        ValueError: A module marks a name that is not one of its parameters. A parameter that is None (a bias) is
            skipped.
    """
    found = {}
    for path, module in model.named_modules():
        marks = getattr(module, "marks", {})
        own = dict(module.named_parameters(remove_duplicate=False)) if marks else {}
        for name, mark in marks.items():
            if name in own:
                found[f"{path}.{name}" if path else name] = mark
            elif not is_none(module, name):
                raise ValueError(f"{type(module).__name__} marks {name!r}, which is not one of its parameters")
    return found


def is_none(module: nn.Module, name: str) -> bool:
    """Return whether the attribute of this dotted name exists and is None."""
    try:
        return operator.attrgetter(name)(module) is None
    except AttributeError:
        return False
