"""The base class of language models: token embeddings, optional position embeddings, and an encoder."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from lion.layers.layout import Layout
from lion.layers.mixers.decay import Decay
from lion.layers.positions import ScaledSinusoidal
from lion.models.base import Model
from lion.models.encoder import Encoder
from lion.ops.arguments import check_dense, mismatch


class TokenModel(Model):
    """A model of tokens (B, L) below `vocabulary`; its constructor is `Kind(config, vocabulary=.., length=..)`.

    A subclass sets `tokens`, `positions` (None: no position embeddings) and `encoder`.
    """

    tokens: nn.Embedding | nn.Linear
    positions: nn.Embedding | ScaledSinusoidal | None
    encoder: Encoder
    several_ids: ClassVar[bool] = False  # whether a token has several ids, (B, L, n)

    @property
    def longest(self) -> int | None:
        """The number of tokens of the longest row that the model accepts; None if there is no limit."""
        if self.positions is None:
            return None
        return self.positions.num_embeddings

    def units(self) -> list[nn.Module]:
        return list(self.encoder.blocks)

    def embed(self, inputs: Tensor) -> Tensor:
        """Return the embeddings (B, L, dim) of token ids (B, L); embeddings are returned unchanged."""
        if inputs.is_floating_point():
            return inputs
        return self.tokens(inputs)

    def laid_out(self, inputs: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Layout]:
        """Return the inputs that this process computes, of whole rows (B, L, ..), and their layout.

        Raises:
            ValueError: Inputs of another shape, more tokens than position embeddings, or fewer than processes that
                share the rows.
        """
        self.check_inputs(inputs)
        layout = Layout.of(inputs, segments=segments)
        if self.part is None:
            return inputs, layout
        return self.own(inputs), layout.split(inputs, self.part)

    def check_inputs(self, inputs: Tensor) -> None:
        """Check the shape of inputs, and the number of tokens of a row.

        Raises:
            ValueError: Inputs of another shape, or more tokens than position embeddings.
        """
        check_dense("tokens", inputs)
        dims = 3 if inputs.is_floating_point() or self.several_ids else 2
        if inputs.dim() != dims:
            raise mismatch("tokens", "integers (B, L) or embeddings (B, L, dim)", inputs)
        length = inputs.shape[1]
        if self.longest is not None and length > self.longest:
            raise ValueError(f"tokens: {length} in one row, this model has only {self.longest} position embeddings")

    def check_split(self, count: int) -> None:
        self.encoder.check_split(count)

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """Return `weights` with as many position embeddings as this model has, starting from the first.

        If this model has more position embeddings than `source`, the weights do not fit.
        """
        if not isinstance(self.positions, nn.Embedding) or "positions.weight" not in weights:
            return weights
        return {**weights, "positions.weight": weights["positions.weight"][: self.longest]}

    def placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings x (B, L, dim) plus the embeddings of their positions (B or 1, L), if any."""
        if self.positions is None:
            return x
        return x + self.positions(positions.clamp(min=0))  # padding in front has position -1


def drop_biases(model: nn.Module, *kinds: type[nn.Module]) -> None:
    """Remove the biases of all modules of these kinds, except in decays."""
    kept: set[nn.Module] = set()
    for decay in model.modules():
        if isinstance(decay, Decay):
            kept.update(decay.modules())
    for module in model.modules():
        if isinstance(module, kinds) and module not in kept:
            module.register_parameter("bias", None)
