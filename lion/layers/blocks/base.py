"""The parts of a block, its base class, and the block of most encoders.

A new block is one file and its line in `BLOCKS`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers.constants import Constants, number_constant
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import AttentionConfig, make_mixer
from lion.layers.norms import NORMS


class Mlp(nn.Module):
    """An MLP: linear layer, GELU, linear layer."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TanhMlp(Mlp):
    """An MLP with the tanh approximation of GELU, as in OpenAI's GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Glu(nn.Module):
    """Gated linear unit with SiLU: `W_o (silu(W_g x) * W_v x)`."""

    bias = True

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=self.bias)
        self.fc2 = nn.Linear(hidden, dim, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        return self.fc2(self.activation(gate) * value)

    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x)


class BareGlu(Glu):
    """Gated linear unit with SiLU and without biases, as in LightNet."""

    bias = False


class GeluGlu(Glu):
    """Gated linear unit with GELU, as in crammed BERT."""

    def activation(self, x: Tensor) -> Tensor:
        return F.gelu(x)


NO_MLP = "none"  # a block of its mixer alone, as in Hydra and Vim
MLPS = {"mlp": Mlp, "mlp_tanh": TanhMlp, "glu": Glu, "glu_bare": BareGlu, "glu_gelu": GeluGlu, NO_MLP: nn.Identity}


class DropPath(Constants):
    """Stochastic depth: drops the whole branch of a sample with probability `rate`, and scales up the others.

    With `model.window`, each window of a sample is dropped or kept on its own.

    The rate is a tensor. As a float, each layer's rate would compile a separate graph.
    """

    rate: Tensor

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.hold(partial(number_constant, "rate", rate))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < keep
        return x * (kept / keep.clamp(min=torch.finfo(keep.dtype).tiny)).to(x.dtype)  # 0 at a rate of 1


class Dropout(nn.Dropout):
    """Dropout of single features of tokens (B, L, dim).

    Processes that share rows have the same random numbers: each draws the mask of whole rows, and cuts its part.
    """

    def forward(self, x: Tensor, layout: Layout = PLAIN) -> Tensor:
        if layout.part is None or not self.training or not self.p:
            return super().forward(x)
        mask = super().forward(x.new_ones(len(x), layout.part.length, x.shape[-1]))
        return x * layout.part.own(mask).clone()  # a view would keep the mask of whole rows in memory


class Block(nn.Module):
    """A layer of an encoder: a mixer, and the MLPs, norms and residual connections that a subclass adds.

    `drop_path` is the stochastic depth rate of this layer; None if the model does not use stochastic depth.
    """

    final_norm: ClassVar[bool]  # whether the output of the last block still needs a norm
    conditional: ClassVar[bool] = False  # whether the block needs a `context`
    Dropout: ClassVar[type[nn.Module]] = Dropout

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mixer: str,
        attention: AttentionConfig,
        mlp: str = "mlp",
        mlp_ratio: float = 4.0,
        norm: str = "layernorm",
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        drop_path: float | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = NORMS[norm](dim, eps=norm_eps)
        self.attention = make_mixer(mixer, dim, num_heads, attention)
        self.add_mlp(dim, mlp=mlp, mlp_ratio=mlp_ratio, norm=norm, norm_eps=norm_eps, dropout=dropout)
        self.dropout = self.Dropout(dropout)
        self.drop_path = nn.Identity() if drop_path is None else DropPath(drop_path)

    def add_mlp(self, dim: int, *, mlp: str, mlp_ratio: float, norm: str, norm_eps: float, dropout: float) -> None:
        """Add the MLP after the mixer, and the norm of the MLP; neither for "none"."""
        self.norm2: nn.Module | None = None
        self.mlp: nn.Module | None = None
        if mlp != NO_MLP:
            self.norm2 = NORMS[norm](dim, eps=norm_eps)
            self.mlp = MLPS[mlp](dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> Tensor:
        """Map (B, L, dim) to (B, L, dim); layout, padding and streaming as in `Mixer`.

        `context` conditions all blocks of a model (on a class and a diffusion time); most blocks ignore it.
        """
        x = layout.clean(x)
        mixed = self.attention(self.before(x, layout, context), layout)
        return self.after(x, mixed, layout, context)

    def before(self, x: Tensor, layout: Layout, context: Any) -> Tensor:
        """Return the input of the mixer."""
        raise NotImplementedError

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Any) -> Tensor:
        """Return the output of the block from its input `x` and the output `mixed` of the mixer."""
        raise NotImplementedError

    def prefill(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> tuple[Tensor, Any]:
        x = layout.clean(x)
        mixed, state = self.attention.prefill(self.before(x, layout, context), layout)
        return self.after(x, mixed, layout, context), state

    def step(self, x: Tensor, state: Any, *, context: Any = None, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        layout = Layout.of(x, valid)
        x = layout.clean(x)
        mixed, state = self.attention.step(self.before(x, layout, context), state, valid)
        return self.after(x, mixed, layout, context), state

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        """Return the layout, with the fields added that are the same in every block."""
        return self.attention.prepare(x, layout)

    @property
    def causal(self) -> bool:
        return self.attention.causal

    def initial_state(self, batch: int) -> Any:
        return self.attention.initial_state(batch)


class PreNorm(Block):
    """The pre-norm block: `x + mixer(norm(x))`, then `x + mlp(norm(x))`, if there is an MLP."""

    final_norm = True

    def before(self, x: Tensor, layout: Layout, context: Any) -> Tensor:
        return self.norm1(x, layout)

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Any) -> Tensor:
        x = x + self.drop_path(self.dropout(mixed, layout))
        if self.mlp is None or self.norm2 is None:
            return x
        return x + self.drop_path(self.dropout(self.mlp(self.norm2(x, layout)), layout))
