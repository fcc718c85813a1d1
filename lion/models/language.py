"""What models of text share: token embeddings, positions where there are any, and an encoder."""

from __future__ import annotations

from torch import Tensor, nn

from lion.layers.decay import Decay
from lion.models.base import Model
from lion.models.encoder import Encoder


class LanguageModel(Model):
    """A model of tokens (B, L) below `vocabulary`, made as `Kind(config, vocabulary=.., length=..)`.

    A subclass makes `tokens`, `positions` (None: no position embeddings) and `encoder`.
    """

    tokens: nn.Embedding
    positions: nn.Embedding | None
    encoder: Encoder

    @property
    def longest(self) -> int | None:
        """Tokens of the longest row that it can read; None where there is no limit."""
        return None if self.positions is None else self.positions.num_embeddings

    def units(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """A model with fewer positions takes the first of them; for one with more they do not fit."""
        if self.positions is None or "positions.weight" not in weights:
            return weights
        return {**weights, "positions.weight": weights["positions.weight"][: self.longest]}

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Embeddings x (B, L, dim) of tokens, with those of their positions (B or 1, L), if any.

        Raises:
            ValueError: More tokens than there are position embeddings.
        """
        if self.positions is None:
            return x
        if x.shape[1] > self.longest:
            raise ValueError(f"tokens: {x.shape[1]} in a row, this model has embeddings of {self.longest} positions")
        return x + self.positions(positions.clamp(min=0))  # padding in front has none


def drop_biases(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Take the biases of all modules of these kinds away, but for those of decays."""
    kept = {part for decay in model.modules() if isinstance(decay, Decay) for part in decay.modules()}
    for module in model.modules():
        if isinstance(module, kinds) and module not in kept:
            module.register_parameter("bias", None)
