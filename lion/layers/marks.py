"""What a module asks of the optimizer for its own parameters."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Marks(NamedTuple):
    """Factors of the learning rate and of the weight decay; 0 takes it away.

    A module marks its parameters with an attribute `marks: dict[str, Marks]`, by their names in the module.
    """

    lr: float = 1.0
    weight_decay: float = 1.0


def marks_of(model: nn.Module) -> dict[str, Marks]:
    """The marks of all parameters that have any, by full name.

    Raises:
        ValueError: A module marks what it does not have.
    """
    found = {}
    for path, module in model.named_modules():
        for name, marks in getattr(module, "marks", {}).items():
            if not hasattr(module, name):
                raise ValueError(f"{type(module).__name__} marks {name!r}, which is no parameter of it")
            if getattr(module, name) is not None:
                found[f"{path}.{name}" if path else name] = marks
    return found
