"""GPT-2 in plain eager PyTorch, in the style of nanoGPT: a baseline for the times of our language models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import ConfigError
from lion.layers.mixers import SOFTMAX
from lion.models.base import ModelConfig
from lion.models.gpt import GPT, GPTConfig
from lion.recipe import Recipe

PLAIN = "softmax, plain eager"


class PlainAttention(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        B, L, dim = x.shape
        q, k, v = (t.view(B, L, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(dim, 2))  # (B, H, L, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, L, dim))


class PlainMlp(nn.Module):
    def __init__(self, dim: int, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim, bias=bias)
        self.fc2 = nn.Linear(4 * dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attention = PlainAttention(dim, heads, bias)
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        self.mlp = PlainMlp(dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PlainGPT(nn.Module):
    """A GPT from tokens (B, L) to logits (B, L, vocabulary).

    Parameters have the names of our `GPT`, without the prefix `encoder.`.
    """

    def __init__(self, vocabulary: int, length: int, dim: int, depth: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, bias) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    @classmethod
    def of(cls, model: GPT) -> Self:
        """Return a plain model with the weights of a model that passes `check_plain`."""
        c = model.config
        plain = cls(model.tokens.num_embeddings, model.length, c.dim, c.depth, c.num_heads, c.bias)
        plain.load_state_dict({name.removeprefix("encoder."): value for name, value in model.state_dict().items()})
        return plain.to(model.tokens.weight.device)


def check_plain(config: ModelConfig) -> None:
    """Check that `PlainGPT` implements the model.

    Raises:
        ConfigError: The model has a part that `PlainGPT` lacks.
    """
    if isinstance(config, GPTConfig):
        names = ("dim", "depth", "num_heads", "bias", "pad_vocabulary", "init", "init_std")
        plain = GPTConfig(mixer=SOFTMAX, **{name: getattr(config, name) for name in names})
        if config.resolved() == plain.resolved():
            return
    raise ConfigError("--plain: only a GPT without dropout and other additions has a plain version, omit --plain")


def plain_step(model: PlainGPT, recipe: Recipe, tokens: Tensor) -> Callable[[], object]:
    """Return a plain training step on samples (B, L + 1).

    AdamW and gradient clipping are PyTorch's. Matrix products run at PyTorch's default float32 precision, whatever
    precision the other models in the same benchmark use.
    """
    optim, clip = recipe.optim, recipe.trainer.clip_grad
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)

    def step() -> None:
        timed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        torch.set_float32_matmul_precision(timed)

    return step
