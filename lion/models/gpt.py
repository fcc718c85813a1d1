"""GPT-2's decoder as in nanoGPT, with any causal mixer."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from functools import cache
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.blocks.base import Dropout
from lion.layers.layout import ROW_MAJOR, Layout
from lion.layers.mixers import AttentionConfig
from lion.layers.mixers.base import check_state, state_type
from lion.layers.weights import rows_of
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.init import INITS
from lion.models.tokens import TokenModel, drop_biases
from lion.ops.settings import number


@cache
def causal(config: type[AttentionConfig]) -> type[AttentionConfig]:
    """Return a subclass of `config` that allows only direction "forward", so that no token sees a later one.

    Mixers use their causal decay convention: "target" (Eq. 5), or "between" in RWKV-6.
    """

    def reduce(self: AttentionConfig) -> tuple[Any, ...]:
        """Pickle the class by `config`, because it has no place in a module."""
        return new_causal, (config,), vars(self)

    name = f"Causal{config.__name__}"
    direction = setting("forward", choices=("forward",))
    fields = [("direction", str, direction)]
    return make_dataclass(name, fields, bases=(config,), namespace={"__reduce__": reduce})


def new_causal(config: type) -> AttentionConfig:
    """Return an instance of `causal(config)` without fields, which unpickling adds."""
    kind = causal(config)
    return kind.__new__(kind)


CausalAttentionConfig = causal(AttentionConfig)


@dataclass
class GPTConfig(EncoderConfig):
    """Settings of a GPT. None in `position_embedding` selects the convention of the mixer.

    By convention, position embeddings are on if the mixer alone does not know the order of tokens (softmax, Lion-lit,
    linear Transformer), and off for decays and rotations.

    `bias=false` removes the biases of projections, MLPs and layer norms, as in nanoGPT; gates of decays, short
    convolutions and norms of heads keep theirs. The number of token embeddings is rounded up to a multiple of
    `pad_vocabulary` (64 in nanoGPT), only for speed.
    """

    name: str = "gpt"
    norm_eps: float = setting(1e-5, above=0)
    init: str = setting("gpt2", choices=INITS)
    attention: AttentionConfig = field(default_factory=CausalAttentionConfig)
    bias: bool = True
    pad_vocabulary: int = setting(1, min=1, max=65_536)

    token_outputs: ClassVar[bool] = True

    @classmethod
    def types(cls, values: dict[str, Any]) -> dict[str, type]:
        kinds = super().types(values)
        return {"attention": causal(kinds.get("attention", AttentionConfig))}

    def resolved(self) -> Self:
        c = super().resolved()
        if c.attention.scans != ROW_MAJOR:
            raise ValueError("attention.scans: text has one order, the order of its tokens")
        if c.attention.direction != "forward":
            raise ValueError(f"attention.direction: {c.attention.direction!r} sees later tokens, use 'forward'")
        return c


@state_type
class GPTState(NamedTuple):
    """The state of a GPT.

    Attributes:
        position: Position (B,) of the next token.
        blocks: States of all blocks, after the state of MD-TPE if there is one.
    """

    position: Tensor
    blocks: list[Any]


class GPT(TokenModel):
    """A causal language model: embeddings, an encoder, and a head tied to the token embeddings.

    Args:
        config: Settings of the model.
        vocabulary: Number of token ids, which start at 0.
        length: Number of tokens of a training sequence, and of position embeddings.

    Raises:
        ValueError: A number below 1.

    With `segments`, tokens see only their segment, and positions restart in each segment.
    """

    Config = GPTConfig
    heads = ("tokens.",)

    def __init__(self, config: GPTConfig, *, vocabulary: int, length: int) -> None:
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
            self.positions = nn.Embedding(length, c.dim)
        self.dropout = Dropout(c.dropout)
        self.encoder = Encoder(c)
        if not c.bias:
            drop_biases(self, nn.Linear, nn.LayerNorm)
        INITS[c.init](self, c.init_std)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return logits (B, L, vocabulary) of the token after each of the tokens (B, L), those of this process.

        `segments` (B, L) is -1 for padding, or boolean and False for padding.

        Raises:
            ValueError: More tokens than position embeddings.
        """
        return self.logits(self.encode(tokens, segments))

    def encode(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return the input of the head, (B, L, dim), for tokens (B, L), or their embeddings (B, L, dim).

        `segments` is that of `forward`.
        """
        tokens, layout = self.laid_out(tokens, segments)
        x = self.embed(tokens)
        return self.encoder(self.embedded(x, layout), layout)

    def embedded(self, x: Tensor, layout: Layout) -> Tensor:
        """Return the input of the encoder for token embeddings x (B, L, dim)."""
        x = self.placed(x, layout.positions_of(x))
        return self.dropout(x, layout)

    def logits(self, x: Tensor) -> Tensor:
        """Map (.., dim) to logits (.., vocabulary)."""
        embeddings = rows_of(self.tokens, self.vocabulary, x.device)
        return F.linear(x, embeddings)[..., : self.vocabulary]

    @property
    def streams(self) -> bool:
        return self.encoder.causal

    def initial_state(self, batch: int) -> GPTState:
        position = self.tokens.weight.new_zeros(batch, dtype=torch.long)
        return GPTState(position, self.encoder.initial_state(batch))

    def prefill(self, inputs: Tensor, valid: Tensor | None = None) -> tuple[Tensor, GPTState]:
        """Return logits (B, L, vocabulary) after each token of prompts (B, L), and the state after them.

        Raises:
            ValueError: Prompts of another shape, or more tokens than position embeddings.
        """
        x, state = self.encode_first(inputs, valid)
        return self.logits(x), state

    def encode_first(self, inputs: Tensor, valid: Tensor | None = None) -> tuple[Tensor, GPTState]:
        """Return the input of the head (B, L, dim) for prompts (B, L), and the state after them."""
        if self.part is not None:
            raise ValueError("prefill: a stream is not split over processes")
        self.check_inputs(inputs)
        x = self.embed(inputs)
        layout = Layout.of(x, valid)
        x = self.embedded(x, layout)
        x, blocks = self.encoder.prefill(x, layout)
        return x, GPTState(layout.next_position(x), blocks)

    def step(self, inputs: Tensor, state: GPTState, valid: Tensor | None = None) -> tuple[Tensor, GPTState]:
        """Return logits (B, C, vocabulary) after each of the next tokens (B, C), and the state after them.

        A step beyond the position embeddings fails; `longest` is their number.

        Raises:
            ValueError: A state of another model, or of another number of sequences.
        """
        x, state = self.encode_next(inputs, state, valid)
        return self.logits(x), state

    def encode_next(self, inputs: Tensor, state: GPTState, valid: Tensor | None = None) -> tuple[Tensor, GPTState]:
        """Return the input of the head (B, C, dim) for the next tokens (B, C), and the state after them."""
        x = self.embed(inputs)
        check_state(state, GPTState, x)
        layout = Layout.after(x, state.position, valid)
        x = self.embedded(x, layout)
        x, blocks = self.encoder.step(x, state.blocks, valid=valid)
        return x, GPTState(state.position + layout.tokens_of(x), blocks)
