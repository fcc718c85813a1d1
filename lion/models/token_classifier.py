"""A model that predicts a class for every token, with any mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from lion.config import setting
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import MLPS
from lion.layers.blocks.s5 import ACTIVATIONS
from lion.layers.norms import NORMS
from lion.models.init import INITS
from lion.models.lra import LRAConfig, SequenceEncoder


@dataclass
class TokenClassifierConfig(LRAConfig):
    """Settings of a token classifier: those of an encoder of long sequences, by default with pre-norm blocks."""

    name: str = "token_classifier"
    block: str = setting("pre_norm", choices=BLOCKS)
    mlp: str = setting("mlp", choices=(*ACTIVATIONS, *MLPS))
    norm: str = setting("layernorm", choices=NORMS)
    init: str = setting("bert", choices=INITS)

    token_outputs: ClassVar[bool] = True


class SumOfEmbeddings(nn.Embedding):
    """Embeddings of tokens with several ids each: ids (.., n) -> the sum of n embeddings (.., dim)."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).sum(-2)


class TokenClassifier(SequenceEncoder):
    """A classifier of tokens: encoder, and a linear head on every token."""

    Config = TokenClassifierConfig
    several_ids = True

    def __init__(self, config: TokenClassifierConfig, *, classes: int, vocabulary: int, **sizes: Any) -> None:
        super().__init__(config, vocabulary=vocabulary, **sizes)
        self.tokens = SumOfEmbeddings(vocabulary, config.dim)
        self.head = nn.Linear(config.dim, classes)
        self.start()

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return logits (B, L, classes) of the ids of tokens (B, L, ids); see `encode`."""
        return self.logits(self.encode(tokens, segments))

    def logits(self, x: Tensor) -> Tensor:
        """Map (B, L, dim), as of `encode`, to logits (B, L, classes)."""
        return self.head(x)
