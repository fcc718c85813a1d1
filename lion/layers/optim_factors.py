"""Factors of the learning rate and the weight decay, which a module sets for its parameters."""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import nn


class OptimFactors(NamedTuple):
    """Factors of the learning rate and of the weight decay of a parameter; 0 turns either off.

    A module sets them in an attribute `optim_factors: dict[str, OptimFactors]`. The keys are the names in the module's
    `named_parameters`: "step", "gate.weight". Factors of several modules for one parameter multiply.
    """

    lr: float = 1.0
    weight_decay: float = 1.0


def undecayed(*names: str) -> dict[str, OptimFactors]:
    """Return the factors of parameters without weight decay, by their names in a module."""
    return dict.fromkeys(names, OptimFactors(weight_decay=0))


def optim_factors(model: nn.Module) -> dict[str, OptimFactors]:
    """Return the factors that the modules of a model set, by full name of the parameter.

    Raises:
        ValueError: A module sets factors for a name that is not one of its parameters. A parameter that is None (a
            bias) is skipped.
    """
    found: dict[str, OptimFactors] = {}
    for path, module in model.named_modules():
        factors = getattr(module, "optim_factors", {})
        own = dict(module.named_parameters(remove_duplicate=False)) if factors else {}
        for name, factor in factors.items():
            if name in own:
                full = f"{path}.{name}" if path else name
                found[full] = OptimFactors(*map(operator.mul, found.get(full, OptimFactors()), factor))
            elif not is_none(module, name):
                raise ValueError(f"{type(module).__name__}.optim_factors: {name!r} is not one of its parameters")
    return found


def is_none(module: nn.Module, name: str) -> bool:
    """Return whether the attribute of this dotted name exists and is None."""
    try:
        return operator.attrgetter(name)(module) is None
    except AttributeError:
        return False
