"""Models of long sequences (Long Range Arena) with any mixer: a class of each, or what is hidden in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.block import MLPS
from lion.layers.blocks import BLOCKS
from lion.layers.decay import Decay
from lion.layers.hippo import USUAL_SPECTRUM
from lion.layers.layout import AS_THEY_STAND, Layout
from lion.layers.marks import Marks
from lion.layers.norms import NORMS, BatchNorm
from lion.layers.s5 import ACTIVATIONS
from lion.models.base import Model
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.init import INITS
from lion.models.language import LanguageModel
from lion.models.positions import interpolated


@dataclass
class LRAConfig(EncoderConfig):
    """An encoder of long sequences. None in `position_embedding` stands for the convention of the mixer: on where the
    mixer itself knows no order (softmax, Lion-lit), off for decays and rotations.

    `norm_momentum` is the share of the old value in the running averages of BatchNorm. `memory_lr` is a factor on the
    learning rate of decays, step sizes and norms, which weight decay spares (S5's group "ssm"). With `window: k` the
    tokens of each k neighbours see one another and no other, at any depth, until all are pooled: a probe of how much of
    a task is long-range.
    """

    name: str = "lra"
    block: str = setting("s5", choices=BLOCKS)
    mlp: str = setting("half_glu1", choices=(*ACTIVATIONS, *MLPS))
    norm: str = setting("batchnorm", choices=NORMS)
    norm_eps: float = setting(1e-5, above=0)
    norm_momentum: float = setting(0.95, min=0, max=1)
    init: str = setting("lra", choices=INITS)
    init_std: float = setting(0.1, above=0)
    memory_lr: float = setting(1.0, above=0, max=1000)
    window: int | None = setting(None, min=1)

    def resolved(self) -> Self:
        c = super().resolved()
        if c.block != "s5" and c.mlp in ACTIVATIONS:
            raise ValueError(f"mlp: {c.mlp!r} belongs to block 's5', {c.block!r} takes {', '.join(MLPS)}")
        if c.attention.scans != AS_THEY_STAND:
            raise ValueError("attention.scans: a sequence has one order, that in which its tokens come")
        return c

    def with_mixer(self, mixer: str) -> Self:
        return replace(super().with_mixer(mixer), window=self.window)

    def label(self) -> str:
        """With what the tables of this task tell apart beside the mixer's conventions."""
        built = self.resolved()
        own, usual = vars(built.attention), vars(built.with_mixer(self.mixer).resolved().attention)
        usual = usual | {"spectrum": USUAL_SPECTRUM.get(own.get("decay_shape"))}
        parts = [super().label()]
        parts += [f"{own[name]} {words}" for name, words in SAID.items() if own.get(name) != usual.get(name)]
        if getattr(self.attention, "value_start", None) is not None:
            parts.append(f"{self.attention.value_start} values")
        if self.window is not None:
            parts.append(f"window {self.window}")
        return " ".join(parts)


SAID = {"spectrum": "start", "decay_shape": "decay", "decay_gate": "gate"}


class SequenceEncoder(LanguageModel):
    """From ids or pixels to tokens (B, L, dim); a subclass adds its head, and then starts all weights.

    Args:
        config: Shape of the model.
        length: Tokens of the longest sample.
        vocabulary: Ids are below it; None: the inputs are pixels, uint8.
        mean, std: Of pixels in [0, 1].
    """

    Config = LRAConfig

    def __init__(
        self, config: LRAConfig, *, length: int, vocabulary: int | None = None, mean: float = 0.0, std: float = 1.0
    ) -> None:
        super().__init__()
        self.config = c = config.resolved()
        self.length, self.vocabulary, self.mean, self.std = length, vocabulary, mean, std
        self.tokens = nn.Linear(1, c.dim) if vocabulary is None else nn.Embedding(vocabulary, c.dim)
        self.positions = nn.Embedding(length, c.dim) if c.position_embedding else None
        self.encoder = Encoder(c)

    def start(self) -> None:
        """Draw all weights, and tell norms and the optimizer what the config says of them."""
        c = self.config
        INITS[c.init](self, c.init_std)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)
        self.marks = {}
        for path, module in self.named_modules():
            if isinstance(module, BatchNorm):
                module.momentum = c.norm_momentum
            if isinstance(module, (Decay, *NORMS.values())):
                own = (f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))
                self.marks |= dict.fromkeys(own, Marks(lr=c.memory_lr, weight_decay=0))

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """Positions of pixels are interpolated for pictures of another size, those of tokens as in `LanguageModel`."""
        if self.vocabulary is not None or self.positions is None or "positions.weight" not in weights:
            return super().adapt(weights, source)
        old, new = (math.isqrt(n) for n in (len(weights["positions.weight"]), self.longest))
        if old == new:
            return weights
        return {**weights, "positions.weight": interpolated(weights["positions.weight"], (old, old), (new, new))}

    def normalised(self, pixels: Tensor) -> Tensor:
        """uint8 (..) to mean 0 and deviation 1."""
        return (pixels.float() / 255 - self.mean) / self.std

    def encode(self, inputs: Tensor, segments: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """Tokens (B, L, dim), zeros for padding.

        Args:
            inputs: Ids, or pixels as they are (uint8), (B, L).
            segments: Integer (B, L), -1 for padding, on which nothing else depends.
            hidden: (B, L), in place of which inputs the model sees what `hide` gives.

        Raises:
            ValueError: More tokens than there are position embeddings.
        """
        pixels = self.vocabulary is None
        x = self.tokens(self.normalised(inputs)[..., None].to(self.tokens.weight.dtype) if pixels else inputs)
        if hidden is not None:
            x = self.hide(x, hidden)
        layout = Layout.of(x, segments=segments)
        x = self.placed(x, layout.positions_of(x))
        if self.config.window is None:
            return layout.clean(self.encoder(x, layout))
        return layout.clean(self.in_windows(x, layout.valid))

    def in_windows(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """The encoder on each window of x (B, L, dim) as a row of its own."""
        batch, length, window = *x.shape[:2], min(self.config.window, x.shape[1])
        padding = -length % window
        if padding and valid is None:
            valid = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        x = F.pad(x, (0, 0, 0, padding)).view(-1, window, x.shape[-1])
        valid = None if valid is None else F.pad(valid, (0, padding)).view(-1, window)
        return self.encoder(x, Layout.of(x, valid=valid)).view(batch, -1, x.shape[-1])[:, :length]

    def hide(self, x: Tensor, hidden: Tensor) -> Tensor:
        raise ValueError("hidden: only a model that is trained to find them takes hidden inputs")


class LRA(SequenceEncoder):
    """A class of each sequence: encoder, mean of the valid tokens, and a linear head; of a pair of documents, encoded
    by themselves, the head is an MLP of [e1, e2, e1 - e2, e1 e2] (S5).

    Args:
        classes: Width of the head.
        parts: 2 for pairs.
        config, sizes: See `SequenceEncoder`.
    """

    def __init__(self, config: LRAConfig, *, classes: int, parts: int = 1, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        dim, self.parts, self.length = config.dim, parts, parts * self.length
        self.head = (
            nn.Linear(dim, classes)
            if parts == 1
            else nn.Sequential(nn.Linear(4 * dim, dim), nn.GELU(), nn.Linear(dim, classes))
        )
        self.start()

    def forward(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """Logits (B, classes) of ids or pixels (B, L), of pairs (B, 2, L); see `encode`."""
        pooled = self.pooled(inputs.flatten(0, -2), None if segments is None else segments.flatten(0, -2))
        if self.parts == 2:
            first, second = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([first, second, first - second, first * second], -1)
        return self.head(pooled)

    def pooled(self, inputs: Tensor, segments: Tensor | None) -> Tensor:
        """The mean (B, dim) of the valid tokens of (B, L)."""
        x = self.encode(inputs, segments)
        if segments is None:
            return x.mean(1)
        return x.sum(1) / (segments >= 0).sum(1, keepdim=True).clamp_min(1)


@dataclass
class LRAMaskedConfig(LRAConfig):
    name: str = "lra_masked"


class LRAMasked(SequenceEncoder):
    """Tells hidden inputs from those around them: of ids the logits, of pixels the (normalised) intensity.

    Its encoder is that of `LRA`, which starts from it (`init_from`).
    """

    Config = LRAMaskedConfig
    heads = ("decoder.",)

    def __init__(self, config: LRAMaskedConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.hidden = nn.Parameter(torch.zeros(config.dim))
        self.decoder = nn.Linear(config.dim, self.vocabulary or 1)
        self.start()

    def hide(self, x: Tensor, hidden: Tensor) -> Tensor:
        return torch.where(hidden[..., None], self.hidden.to(x.dtype), x)

    def forward(self, inputs: Tensor, segments: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """(B, L, vocabulary or 1) of (B, L)."""
        return self.decoder(self.encode(inputs, segments, hidden))
