"""Sequences that a causal model continues, token by token, in three ways that agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lion.layers.mixers import SOFTMAX
from lion.layers.softmax import reserve
from lion.models.gpt import GPT
from lion.tasks.seeds import derive, uniform

MODES = {
    "attention": "the whole sequence anew for each token",
    "kv": "keys and values of all tokens are kept (softmax)",
    "rnn": "a state of constant size is kept (linear mixers)",
}


PIECE = 256  # tokens of a prompt that are read at once
ROOM = 256  # tokens for which a KV cache is made larger at once, at most


def streaming_mode(model: GPT) -> str:
    """The mode in which a model goes on from a state."""
    return "kv" if model.config.mixer == SOFTMAX else "rnn"


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the logits over `temperature` (0: the likeliest token, no draw), then only the
    `top_k` likeliest, then of these the fewest that hold `top_p` of the probability."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def choose(self, logits: Tensor, chance: Tensor) -> Tensor:
        """A token (B,) for each row of logits (B, vocabulary), by chance (B,) in [0, 1)."""
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.double() / self.temperature
        if self.top_k is None:
            ranked, ids = scaled.sort(dim=-1, descending=True, stable=True)
        else:
            ranked, ids = scaled.topk(min(self.top_k, scaled.shape[-1]))
        shares = ranked.softmax(-1)
        held = shares.cumsum(-1) - shares < self.top_p
        held[:, 0] = True  # the likeliest always stays, at `top_p` 0 it alone
        shares = shares * held
        up_to = shares.cumsum(-1)
        place = torch.searchsorted(up_to, chance[:, None].double() * up_to[:, -1:], right=True)
        return ids.gather(1, place.clamp(max=ids.shape[1] - 1))[:, 0]


@dataclass
class Continuation:
    """Sequences so far, one a prompt, of any lengths, and what the model says of the next token of each.

    Args:
        model: In evaluation mode.
        mode: One of `MODES`.
        rows: Token ids of each sequence.
        logits: (B, vocabulary) after the last of them.
        state: Of the model, to go on from; None in mode attention.
    """

    model: GPT
    mode: str
    rows: list[list[int]]
    logits: Tensor
    state: Any = None
    room: int = 0  # tokens that the state has room for

    @classmethod
    def of(cls, model: GPT, mode: str, prompts: Sequence[Sequence[int]]) -> Self:
        """That of prompts alone.

        Raises:
            ValueError: The model has no such mode, a prompt is empty, or longer than the position embeddings.
        """
        if mode not in ("attention", streaming_mode(model)):
            raise ValueError(
                f"mode: mixer {model.config.mixer!r} has attention and {streaming_mode(model)}, got {mode!r}"
            )
        rows = [list(prompt) for prompt in prompts]
        if not rows or not all(rows):
            raise ValueError("prompt: expected at least one token")
        if mode == "attention":
            return cls(model, mode, rows, recomputed(model, rows))
        check_room(model, rows, 0)
        return cls(model, mode, rows, *read(model, rows))

    def generate(self, count: int, sampling: Sampling, seed: int) -> Iterator[list[int]]:
        """`count` times the next token of every row, which then stands in `rows`.

        A draw depends on (seed, row, place) alone: what goes on from a stored state is what it would have been.

        Raises:
            ValueError: They would be more than there are position embeddings.
        """
        if self.mode != "attention":
            check_room(self.model, self.rows, count)
        for left in range(count, 0, -1):
            if not self.room:
                self.room = min(ROOM, left)
                self.state = reserve(self.state, self.room + 1)  # a cache that is full is a graph of its own
            keys = [derive(seed, i, len(row)) for i, row in enumerate(self.rows)]
            chance = uniform(torch.tensor(keys, device=self.logits.device), 1)[:, 0]
            chosen = sampling.choose(self.logits, chance)
            self.append(chosen)
            yield chosen.tolist()

    @torch.inference_mode()
    def append(self, tokens: Tensor) -> None:
        """The next token (B,) of every row."""
        for row, token in zip(self.rows, tokens.tolist()):
            row.append(token)
        if self.mode == "attention":
            self.logits = recomputed(self.model, self.rows)
            return
        logits, self.state = self.model.step(tokens[:, None], self.state)
        self.logits, self.room = logits[:, -1], max(0, self.room - 1)


def check_room(model: GPT, rows: list[list[int]], count: int) -> None:
    """Raises ValueError: `count` more tokens would go beyond the position embeddings."""
    longest = max(map(len, rows))
    if model.longest is not None and longest + count > model.longest:
        raise ValueError(
            f"tokens: {longest} and {count} more are beyond the model's {model.longest} positions; take "
            f"{max(0, model.longest - longest)} at most, or mode attention, which reads the last {model.longest}"
        )


@torch.inference_mode()
def read(model: GPT, rows: list[list[int]]) -> tuple[Tensor, Any]:
    """Logits (B, vocabulary) after rows, and the state to go on from.

    They are read in pieces: beside the state of the model, memory does not grow with their length.
    """
    tokens, valid = padded(rows, model.tokens.weight.device)
    state = reserve(model.initial_state(len(rows)), tokens.shape[1])
    last = torch.zeros(len(rows), model.config.dim, dtype=model.tokens.weight.dtype, device=tokens.device)
    with torch.compiler.set_stance("force_eager"):  # what is compiled is the step of one token
        for piece, real in zip(tokens.split(PIECE, 1), valid.split(PIECE, 1)):
            x, state = model.encode_next(piece, state, None if real.all() else real)
            last = torch.where(real.any(1, keepdim=True), of_last(x, real), last)
    return model.logits(last[:, None])[:, 0], state


@torch.inference_mode()
def recomputed(model: GPT, rows: list[list[int]]) -> Tensor:
    """Logits (B, vocabulary) after the last tokens of rows; beyond the position embeddings of the last that fit."""
    longest = model.longest or max(map(len, rows))
    tokens, valid = padded([row[-longest:] for row in rows], model.tokens.weight.device)
    return model.logits(of_last(model.encode(tokens), valid)[:, None])[:, 0]  # padding comes later, and is not seen


def padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows as tokens (B, L), and which of these are no padding, (B, L)."""
    lengths = torch.tensor([len(row) for row in rows], device=device)
    valid = torch.arange(int(lengths.max()), device=device) < lengths[:, None]
    tokens = torch.zeros_like(valid, dtype=torch.long)
    tokens[valid] = torch.tensor([token for row in rows for token in row], device=device)
    return tokens, valid


def of_last(x: Tensor, valid: Tensor) -> Tensor:
    """Of x (B, L, dim) that of each row's last token, (B, dim); where a row has none it means nothing."""
    return x[torch.arange(len(x), device=x.device), valid.sum(1) - 1]
