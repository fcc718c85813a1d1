"""Tensors that the arguments of a module determine, such as coordinates: not learned, and not in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lion.layers.layout import grid_layout

Make = Callable[[], Mapping[str, Tensor | None]]


class Constants(nn.Module):
    """A module with constants, which it makes again when it is moved or converted: `to_empty` leaves no values.

    They are attributes and no buffers, which others average (`AveragedModel(use_buffers=True)`).
    """

    makers: Mapping[tuple[str, ...], Make] = {}

    def hold(self, make: Make) -> None:
        """Set the constants that `make` returns by name. They replace earlier ones of the same names.

        `make` is stored, so it must be possible to pickle it.
        """
        values = make()
        for name, value in values.items():
            setattr(self, name, value)
        self.makers = {**self.makers, tuple(values): make}

    def remake(self, device: torch.device) -> None:
        """Make the constants again, on a device."""
        for make in self.makers.values():
            with torch.device(device):
                values = make()
            for name, value in values.items():
                setattr(self, name, value if value is None else value.to(getattr(self, name).dtype))

    def held(self) -> list[Tensor]:
        """Return the constants."""
        found = (getattr(self, name) for names in self.makers for name in names)
        return [value for value in found if value is not None]

    def replace(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace every constant by `fn` of it."""
        for names in self.makers:
            for name in names:
                value = getattr(self, name)
                if value is not None:
                    setattr(self, name, fn(value))

    @property
    def on_meta(self) -> bool:
        return any(value.is_meta for value in self.held())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Constants:
        """Move or convert the tensors; `to_empty` ends here, once for each parent of a shared module."""
        before = self.held()
        super()._apply(fn, recurse)
        self.replace(fn)
        if not self.on_meta and any(new is not old for new, old in zip(self.held(), before)):
            self.remake(self.held()[0].device)
        return self

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, metadata: dict, *args: Any) -> None:
        """Load the module's own tensors; `load_state_dict(assign=True)` takes them from the meta device here."""
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        if metadata.get("assign_to_params_buffers") and self.on_meta:
            self.remake(next((value.device for value in state_dict.values()), torch.device("cpu")))


def constants_of(model: nn.Module) -> list[Tensor]:
    """Return the constants of all parts of a model."""
    found = []
    for part in model.modules():
        if isinstance(part, Constants):
            found += part.held()
    return found


def number_constant(name: str, value: float) -> dict[str, Tensor]:
    return {name: torch.tensor(value)}


def grid_constants(height: int, width: int, **settings: Any) -> dict[str, Tensor | None]:
    """Return coordinates, special tokens and scan orders of an image's tokens, as in `grid_layout`."""
    layout = grid_layout(height, width, **settings)
    return {"coords": layout.coords, "special": layout.special, "orders": layout.orders}
