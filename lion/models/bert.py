"""BERT as in M2-BERT, with any mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import fill, setting
from lion.layers.blocks import BLOCKS
from lion.layers.layout import AS_THEY_STAND, Layout
from lion.layers.norms import NO_NORM
from lion.layers.positions import POSITIONS
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.init import INITS
from lion.models.language import LanguageModel, drop_biases

PLAIN_SCORES = {"attention": {"feature_map": "identity", "normalize": "none"}}  # scale 1/sqrt(d)


@dataclass
class BertConfig(EncoderConfig):
    """A BERT. None in `position_embedding` and `attention.out_norm` stands for the convention of the mixer.

    Position embedding: on where the mixer itself knows no order (softmax, Lion-lit), off for decays and rotations.
    Norm behind the attention: in Lion-lit alone.

    `max_positions` is the longest row that position embeddings allow. `token_types` are the kinds of segments that
    have embeddings of their own (BERT's 2, the sentences of a pair); 0: none. The vocabulary's embeddings are as many
    as the next multiple of `pad_vocabulary`, for speed alone.

    Crammed BERT (2212.14034) has `scaled_sinusoidal` positions, no biases (`bias=false`: of all Linear in the encoder
    and of the masked head; gates of decays keep theirs), and a masked head without `head_transform`: the tied
    embeddings alone.
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

    released: ClassVar[dict[str, dict[str, Any]]] = dict.fromkeys(("lion_lit", "lion_d", "lion_s"), PLAIN_SCORES)
    conventions: ClassVar[dict[str, str]] = {
        **EncoderConfig.conventions,
        "output norm": "attention.out_norm",
    }

    def resolved(self) -> Self:
        c = super().resolved()
        if c.attention.scans != AS_THEY_STAND:
            raise ValueError("attention.scans: text has one order, that in which its tokens come")
        c.attention = fill(c.attention, {"out_norm": "layernorm" if c.mixer == "lion_lit" else NO_NORM})
        return c


class MaskedHead(nn.Module):
    """From tokens x (.., dim) to logits (.., rows): Linear, GELU, norm (the `transform`), and the token embeddings
    (rows, dim)."""

    def __init__(self, dim: int, rows: int, norm_eps: float, *, transform: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.transform = nn.Linear(dim, dim, bias=bias) if transform else None
        self.norm = nn.LayerNorm(dim, eps=norm_eps) if transform else None
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        if self.transform is not None:
            x = self.norm(F.gelu(self.transform(x)))
        return F.linear(x, embeddings, self.bias)


class BertEncoder(LanguageModel):
    """Embeddings with a norm, and encoder; a subclass adds its head, and then draws all weights by `config.init`.

    Args:
        config: Shape of the model.
        vocabulary: Token ids are below it.
        length: Tokens of a training sample, at most.

    Raises:
        ValueError: `length` is more than there are position embeddings.
    """

    def __init__(self, config: BertConfig, *, vocabulary: int, length: int) -> None:
        super().__init__()
        self.config = c = config.resolved()
        self.vocabulary, self.length = vocabulary, length
        rows = -(-vocabulary // c.pad_vocabulary) * c.pad_vocabulary
        self.tokens = nn.Embedding(rows, c.dim)
        self.positions = POSITIONS[c.position_kind](c.max_positions, c.dim) if c.position_embedding else None
        self.types = nn.Embedding(c.token_types, c.dim) if c.token_types else None
        self.norm = nn.LayerNorm(c.dim, eps=c.norm_eps)
        self.dropout = nn.Dropout(c.dropout)
        self.encoder = Encoder(c)
        if not c.bias:
            drop_biases(self.encoder, nn.Linear)
        if self.longest is not None and length > self.longest:
            raise ValueError(f"data.length: {length} tokens, model.max_positions has embeddings of {self.longest}")

    def encode(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """What a head is given, (B, L, dim), zeros for padding.

        Args:
            tokens: Ids (B, L).
            segments: Integer (B, L), documents that do not see one another, each with positions of its own; -1 is
                padding, which nothing else depends on.
            types: Of each token (B, L), below `token_types`; None: all 0.

        Raises:
            ValueError: More tokens than there are position embeddings, or types without embeddings.
        """
        x = self.tokens(tokens)
        layout = Layout.of(x, segments=segments)
        x = self.placed(x, layout.positions_of(x))
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self.types(types))
        elif types is not None:
            raise ValueError("types: this model has no embeddings of token types (model.token_types)")
        return layout.clean(self.encoder(self.dropout(self.norm(x)), layout))


class Bert(BertEncoder):
    """Masked language model: a head tied to the token embeddings."""

    Config = BertConfig
    heads = ("tokens.", "head.")

    def __init__(self, config: BertConfig, *, vocabulary: int, length: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        c = self.config
        rows, how = self.tokens.num_embeddings, {"transform": c.head_transform, "bias": c.bias}
        self.head = MaskedHead(c.dim, rows, c.norm_eps, **how)
        INITS[c.init](self, c.init_std)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        types: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, L, vocabulary) for each of the tokens, or (B, K, vocabulary) for those at `places` (B, K) alone;
        the other arguments are those of `encode`. The logits of padding mean nothing."""
        hidden = self.encode(tokens, segments, types)
        if places is not None:
            hidden = hidden.take_along_dim(places[..., None], 1)  # (B, K, dim)
        return self.head(hidden, self.tokens.weight)[..., : self.vocabulary]


@dataclass
class BertClassifierConfig(BertConfig):
    """A BERT that reads a sequence as a whole; `classifier_dropout` stands before the last layer."""

    name: str = "bert_classifier"
    classifier_dropout: float = setting(0.1, min=0, max=1)


class BertClassifier(BertEncoder):
    """From a sequence to `outputs` numbers: its first token, [CLS], through dense and tanh (the pooler, as in the
    original BERT), dropout, and a linear layer. Another task keeps the pooler, and starts with a new last layer."""

    Config = BertClassifierConfig
    heads = ("classifier.",)

    def __init__(self, config: BertClassifierConfig, *, vocabulary: int, length: int, outputs: int) -> None:
        super().__init__(config, vocabulary=vocabulary, length=length)
        c = self.config
        self.pooler = nn.Linear(c.dim, c.dim)
        self.classifier_dropout = nn.Dropout(c.classifier_dropout)
        self.classifier = nn.Linear(c.dim, outputs)
        INITS[c.init](self, c.init_std)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """Logits (B, outputs); arguments as those of `encode`."""
        first = self.encode(tokens, segments, types)[:, 0]  # (B, dim)
        return self.classifier(self.classifier_dropout(self.pooler(first).tanh()))
