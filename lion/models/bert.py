"""BERT as in M2-BERT, with any mixer."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import fill, setting
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import Dropout
from lion.layers.layout import ROW_MAJOR, valid_of
from lion.layers.norms import NO_NORM
from lion.layers.positions import POSITIONS
from lion.layers.weights import rows_of
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.init import INITS
from lion.models.tokens import TokenModel, drop_biases
from lion.ops.modes import may_wait
from lion.ops.settings import number

PLAIN_SCORES = {"attention": {"feature_map": "identity", "normalize": "none"}}  # scale 1/sqrt(d)


@dataclass
class BertConfig(EncoderConfig):
    """Settings of a BERT. None in `position_embedding` and `attention.out_norm` selects the convention of the mixer.

    By convention, position embeddings are on if the mixer alone does not know the order of tokens (softmax, Lion-lit),
    and off for decays and rotations. Lion-lit has a layer norm after the attention. LightNet keeps its RMSNorm, and the
    other mixers have no norm there.

    `max_positions` is the length of the longest row that position embeddings allow. `token_types` is the number of
    token types with embeddings (2 in BERT, for the sentences of a pair); 0: none. The number of token embeddings is
    rounded up to a multiple of `pad_vocabulary`, only for speed.

    Crammed BERT (2212.14034) has `scaled_sinusoidal` positions, no biases, and a masked head without `head_transform`,
    which leaves only the tied embeddings. `bias=false` removes the biases of every Linear in the encoder and of the
    masked head; the gates of decays keep their biases.
    """

    name: str = "bert"
    block: str = setting("post_norm", choices=BLOCKS)
    norm_eps: float = setting(1e-12, above=0)
    init: str = setting("bert", choices=INITS)
    position_kind: str = setting("learned", choices=POSITIONS)
    max_positions: int = setting(512, min=1, max=2**24)
    token_types: int = setting(0, min=0, max=65_536)
    pad_vocabulary: int = setting(1, min=1, max=65_536)
    bias: bool = True
    head_transform: bool = True

    token_outputs: ClassVar[bool] = True
    released: ClassVar[dict[str, dict[str, Any]]] = dict.fromkeys(("lion_lit", "lion_d", "lion_s"), PLAIN_SCORES)
    conventions: ClassVar[dict[str, str]] = {
        **EncoderConfig.conventions,
        "output norm": "attention.out_norm",
    }

    def resolved(self) -> Self:
        c = super().resolved()
        if c.attention.scans != ROW_MAJOR:
            raise ValueError("attention.scans: text has one order, the order of its tokens")
        out_norm = "layernorm" if c.mixer == "lion_lit" else NO_NORM
        c.attention = fill(c.attention, {"out_norm": out_norm})
        return c


class MaskedHead(nn.Module):
    """The head of masked language modelling, from tokens x (.., dim) to logits (.., rows).

    Linear, GELU and norm (the `transform`) come before the product with the token embeddings (rows, dim).
    """

    def __init__(self, dim: int, rows: int, norm_eps: float, *, transform: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.transform = None
        self.norm = None
        self.bias = None
        if transform:
            self.transform = nn.Linear(dim, dim, bias=bias)
            self.norm = nn.LayerNorm(dim, eps=norm_eps)
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        if self.transform is not None and self.norm is not None:
            x = self.norm(F.gelu(self.transform(x)))
        if self.bias is None:
            return F.linear(x, embeddings)
        return F.linear(x, embeddings, self.bias[: len(embeddings)])


class BertEncoder(TokenModel):
    """Embeddings with a norm, and an encoder.

    A subclass adds a head, and then initialises all weights by `config.init`.

    Args:
        config: Settings of the model.
        vocabulary: Number of token ids, which start at 0.
        length: Largest number of tokens of a training sample.

    Raises:
        ValueError: A number below 1, or `length` exceeds the number of position embeddings.
    """

    def __init__(self, config: BertConfig, *, vocabulary: int, length: int) -> None:
        super().__init__()
        self.config = c = config.resolved()
        number("vocabulary", vocabulary, Integral, 1)
        number("length", length, Integral, 1)
        self.vocabulary = vocabulary
        self.length = length
        rows = -(-vocabulary // c.pad_vocabulary) * c.pad_vocabulary
        self.tokens = nn.Embedding(rows, c.dim)
        self.positions = None
        if c.position_embedding:
            self.positions = POSITIONS[c.position_kind](c.max_positions, c.dim)
        self.types = None
        if c.token_types:
            self.types = nn.Embedding(c.token_types, c.dim)
        self.norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.dropout = Dropout(c.dropout)
        self.encoder = Encoder(c)
        if not c.bias:
            drop_biases(self.encoder, nn.Linear)
        if self.longest is not None and length > self.longest:
            raise ValueError(f"data.length: {length} tokens, but model.max_positions allows only {self.longest}")

    def encode(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """Return the input of the head, (B, L, dim), with zeros for padding.

        Args:
            tokens: Token ids (B, L), or their embeddings (B, L, dim).
            segments: Integer (B, L), separate documents: tokens attend only to their document, and positions restart in
                each document. -1 is padding, on which nothing else depends. Or boolean (B, L), False for padding.
            types: Types of the tokens (B, L), below `token_types`; None: all 0.

        Raises:
            ValueError: More tokens than position embeddings, or types without embeddings.
        """
        tokens, layout = self.laid_out(tokens, segments)
        x = self.embed(tokens)
        x = self.placed(x, layout.positions_of(x))
        if self.types is None:
            if types is not None:
                raise ValueError("types: this model has no embeddings of token types (model.token_types)")
        elif types is None:
            x = x + rows_of(self.types, 1, x.device)[0]
        else:
            x = x + self.types(self.own(types))
        x = self.dropout(self.norm(x), layout)
        return layout.clean(self.encoder(x, layout))


class Bert(BertEncoder):
    """A masked language model, with a head tied to the token embeddings."""

    Config = BertConfig
    heads = ("tokens.", "head.")

    def __init__(self, config: BertConfig, *, vocabulary: int, length: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        c = self.config
        rows = len(self.tokens.weight)
        self.head = MaskedHead(c.dim, rows, c.norm_eps, transform=c.head_transform, bias=c.bias)
        INITS[c.init](self, c.init_std)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        types: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, L, vocabulary) of all tokens, or (B, K, vocabulary) of the tokens at `places` (B, K).

        The other arguments are those of `encode`. The logits of padding have no meaning. If rows are split, L counts
        the tokens of this process, and so do places.
        """
        hidden = self.encode(tokens, segments, types)
        if places is not None:
            places = places[..., None].expand(-1, -1, hidden.shape[-1])
            hidden = hidden.gather(1, places)  # (B, K, dim)
        return self.logits(hidden)

    def logits(self, x: Tensor) -> Tensor:
        """Map (.., dim), as of `encode`, to logits (.., vocabulary)."""
        embeddings = rows_of(self.tokens, self.vocabulary, x.device)
        return self.head(x, embeddings)[..., : self.vocabulary]


@dataclass
class BertClassifierConfig(BertConfig):
    """Settings of a BERT with one output per sequence; `classifier_dropout` applies before the last layer."""

    name: str = "bert_classifier"
    classifier_dropout: float = setting(0.1, min=0, max=1)

    token_outputs: ClassVar[bool] = False

    def resolved(self) -> Self:
        c = super().resolved()
        if all(c.attention.at(layer).direction == "forward" for layer in range(c.depth)):
            raise ValueError("attention.direction 'forward': the first token, [CLS], is read and would see no other")
        return c


class BertClassifier(BertEncoder):
    """A BERT that maps a sequence to `outputs` numbers.

    The first token, [CLS], passes a linear layer and tanh (the pooler, as in the original BERT), dropout, and a last
    linear layer. Fine-tuning on another task keeps the pooler, and starts with a new last layer.
    """

    Config = BertClassifierConfig
    config: BertClassifierConfig
    heads = ("classifier.",)

    def __init__(self, config: BertClassifierConfig, *, vocabulary: int, length: int, outputs: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        c = self.config
        self.pooler = nn.Linear(c.dim, c.dim)
        self.classifier_dropout = nn.Dropout(c.classifier_dropout)
        self.classifier = nn.Linear(c.dim, outputs)
        INITS[c.init](self, c.init_std)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """Return logits (B, outputs); the arguments are those of `encode`.

        Raises:
            ValueError: A row starts with padding, where values may be read (not on a GPU).
        """
        if segments is not None and may_wait(segments.device) and not valid_of(segments)[:, 0].all():
            raise ValueError("segments: the first token of a row, [CLS], is read; padding stands behind the tokens")
        x = self.encode(tokens, segments, types)
        return self.logits(self.token(x, 0))

    def logits(self, first: Tensor) -> Tensor:
        """Map the first token of each sequence (B, dim), as of `encode`, to logits (B, outputs)."""
        pooled = self.pooler(first).tanh()
        return self.classifier(self.classifier_dropout(pooled))
