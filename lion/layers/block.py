"""What a block is made of, and the block of most encoders. A new one is one file and its line in `BLOCKS`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.layers import AttentionConfig, make_mixer
from lion.layers.layout import PLAIN, Layout
from lion.layers.norms import NORMS


class Mlp(nn.Module):
    """Linear, GELU, Linear."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class TanhMlp(Mlp):
    """The same with GELU's approximation through tanh, as in OpenAI's GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Glu(nn.Module):
    """Gated linear unit with SiLU: `W_o (silu(W_g x) * W_v x)`."""

    bias = True
    activation = staticmethod(F.silu)

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 2 * hidden, bias=self.bias)
        self.fc2 = nn.Linear(hidden, dim, bias=self.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, -1)
        return self.fc2(self.activation(gate) * value)


class BareGlu(Glu):
    """The same without biases, as in LightNet."""

    bias = False


class GeluGlu(Glu):
    """The same with GELU, as in crammed BERT."""

    activation = staticmethod(F.gelu)


MLPS = {"mlp": Mlp, "mlp_tanh": TanhMlp, "glu": Glu, "glu_bare": BareGlu, "glu_gelu": GeluGlu}


class DropPath(nn.Module):
    """Stochastic depth: a whole sample's branch is dropped at `rate`, the others scaled up.

    The rate is a buffer: as a float, every layer's own rate would compile a graph of its own.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.register_buffer("rate", torch.tensor(rate), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        keep = 1 - self.rate
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < keep
        return x * (kept / keep).to(x.dtype)


class Block(nn.Module):
    """One layer of an encoder: a mixer, and what a subclass puts around it (MLPs, norms, residuals).

    `drop_path` is this layer's stochastic depth rate, None where the model has none.
    """

    final_norm: ClassVar[bool]  # whether what the last of them gives is not normalised yet
    conditional: ClassVar[bool] = False  # whether it needs a `context`
    Dropout: ClassVar[type[nn.Module]] = nn.Dropout

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
        """What comes after the mixer, and its norm."""
        self.norm2 = NORMS[norm](dim, eps=norm_eps)
        self.mlp = MLPS[mlp](dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> Tensor:
        """(B, L, dim) -> (B, L, dim); layout, padding and streaming as in `Mixer`.

        `context` is what a model tells all its blocks beside (a class, a moment of a diffusion); most read none.
        """
        x = layout.clean(x)
        mixed = self.attention(self.before(x, layout, context), layout)
        return self.after(x, mixed, layout, context)

    def before(self, x: Tensor, layout: Layout, context: Any) -> Tensor:
        """What the mixer is given."""
        raise NotImplementedError

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Any) -> Tensor:
        """What comes after the mixing of tokens."""
        raise NotImplementedError

    def prefill(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> tuple[Tensor, Any]:
        x = layout.clean(x)
        mixed, state = self.attention.prefill(self.before(x, layout, context), layout)
        return self.after(x, mixed, layout, context), state

    def step(self, x: Tensor, state: Any, context: Any = None, valid: Tensor | None = None) -> tuple[Tensor, Any]:
        layout = Layout.of(x, valid)
        x = layout.clean(x)
        mixed, state = self.attention.step(self.before(x, layout, context), state, valid)
        return self.after(x, mixed, layout, context), state

    def prepare(self, x: Tensor, layout: Layout) -> Layout:
        """The layout with what every block makes of it alike."""
        return self.attention.prepare(x, layout)

    @property
    def causal(self) -> bool:
        return self.attention.causal

    def initial_state(self, batch: int) -> Any:
        return self.attention.initial_state(batch)


class PreNorm(Block):
    """`x + mixer(norm(x))`, `x + mlp(norm(x))`."""

    final_norm = True

    def before(self, x: Tensor, layout: Layout, context: Any) -> Tensor:
        return self.norm1(x, layout)

    def after(self, x: Tensor, mixed: Tensor, layout: Layout, context: Any) -> Tensor:
        x = x + self.drop_path(self.dropout(mixed))
        return x + self.drop_path(self.dropout(self.mlp(self.norm2(x, layout))))
