"""What a module asks of the optimizer for its own parameters."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import nn


class Marks(NamedTuple):
    """Factors of the learning rate and of the weight decay; 0 takes it away.

    A module marks its parameters with an attribute `marks: dict[str, Marks]`, by their names in the module, as
    `named_parameters` has them: "step", "gate.weight".
    """

    lr: float = 1.0
    weight_decay: float = 1.0


def marks_of(model: nn.Module) -> dict[str, Marks]:
    """The marks of all parameters that have any, by full name.

    Raises:
        ValueError: A module marks what is no parameter of it; one that is None (a bias) is passed over.
    """
    found = {}
    for path, module in model.named_modules():
        marks = getattr(module, "marks", {})
        own = dict(module.named_parameters(remove_duplicate=False)) if marks else {}
        for name, mark in marks.items():
            if name in own:
                found[f"{path}.{name}" if path else name] = mark
            elif not is_none(module, name):
                raise ValueError(f"{type(module).__name__} marks {name!r}, which is no parameter of it")
    return found


def is_none(module: nn.Module, name: str) -> bool:
    """Whether what the dotted name leads to is there, and None."""
    try:
        return operator.attrgetter(name)(module) is None
    except AttributeError:
        return False
