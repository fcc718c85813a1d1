"""Models of long sequences (Long Range Arena) with any mixer, which classify sequences or predict masked inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lion.config import setting
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import MLPS
from lion.layers.blocks.s5 import ACTIVATIONS
from lion.layers.layout import ROW_MAJOR, Layout, valid_of
from lion.layers.mixers.decay import Decay
from lion.layers.mixers.hippo import USUAL_SPECTRUM
from lion.layers.mixers.parts import HEAD_NORMS
from lion.layers.norms import NORMS, BatchNorm
from lion.layers.optim_factors import OptimFactors
from lion.models.base import Model
from lion.models.encoder import Encoder, EncoderConfig
from lion.models.init import INITS
from lion.models.positions import interpolated
from lion.models.tokens import TokenModel
from lion.ops.modes import may_wait
from lion.ops.settings import number


@dataclass
class LRAConfig(EncoderConfig):
    """Settings of an encoder of long sequences. None in `position_embedding` selects the convention of the mixer.

    By convention, position embeddings are on if the mixer alone does not know the order of tokens (softmax, Lion-lit),
    and off for decays and rotations.

    `norm_momentum` is the share of the old value in the running averages of BatchNorm. `memory_lr` is a factor on the
    learning rate of decays, step sizes and norms, which are exempt from weight decay (S5's group "ssm"). `window: k`
    cuts a sequence into windows of k neighbouring tokens. At every depth tokens see only their window, until all tokens
    are pooled. This shows how much of a task is long-range.
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
        if c.attention.scans != ROW_MAJOR:
            raise ValueError("attention.scans: a sequence has one order, the order of its tokens")
        return c

    def with_mixer(self, mixer: str) -> Self:
        return replace(super().with_mixer(mixer), window=self.window)

    def label(self) -> str:
        """Return the label, with the settings that the tables of this task compare beyond conventions of the mixer."""
        built = self.resolved()
        own = vars(built.attention)
        usual = vars(built.with_mixer(self.mixer).resolved().attention)
        usual = usual | {"spectrum": USUAL_SPECTRUM.get(own.get("decay_shape", ""))}
        parts = [super().label()]
        for name, words in LABEL_WORDS.items():
            if own.get(name) != usual.get(name):
                parts.append(f"{own[name]} {words}")
        start = getattr(self.attention, "value_start", None)
        if start is not None:
            parts.append(f"{start} values")
        if self.window is not None:
            parts.append(f"window {self.window}")
        return " ".join(parts)


LABEL_WORDS = {"spectrum": "start", "decay_shape": "decay", "decay_gate": "gate"}


class SequenceEncoder(TokenModel):
    """An encoder from ids or pixels to tokens (B, L, dim). A subclass adds a head, and then calls `start`.

    Args:
        config: Settings of the model.
        length: Number of tokens of the longest sample.
        vocabulary: Number of ids, which start at 0; None: the inputs are uint8 pixels.
        mean, std: Mean and standard deviation of pixels in [0, 1].

    Raises:
        ValueError: A number that is out of range.
    """

    Config = LRAConfig
    positions: nn.Embedding | None

    def __init__(
        self, config: LRAConfig, *, length: int, vocabulary: int | None = None, mean: float = 0.0, std: float = 1.0
    ) -> None:
        super().__init__()
        self.config = c = config.resolved()
        number("length", length, Integral, 1)
        if vocabulary is not None:
            number("vocabulary", vocabulary, Integral, 1)
        number("std", std, Real, 1e-6)
        self.length = length
        self.vocabulary = vocabulary
        self.mean = mean
        self.std = std
        if vocabulary is None:
            self.tokens = nn.Linear(1, c.dim)
        else:
            self.tokens = nn.Embedding(vocabulary, c.dim)
        self.positions = None
        if c.position_embedding:
            self.positions = nn.Embedding(length, c.dim)
        self.encoder = Encoder(c)

    def start(self) -> None:
        """Initialise all weights, and apply the settings of the config to norms and to factors for the optimizer."""
        c = self.config
        INITS[c.init](self, c.init_std)
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=0.02)
        self.optim_factors: dict[str, OptimFactors] = {}
        slow = OptimFactors(lr=c.memory_lr, weight_decay=0)
        slow_kinds: tuple[type, ...] = (Decay, *NORMS.values(), *HEAD_NORMS.values())
        for path, module in self.named_modules():
            if isinstance(module, BatchNorm):
                module.momentum = c.norm_momentum
            for name, _ in module.named_parameters(recurse=False):
                if isinstance(module, slow_kinds) or name in getattr(module, "memory", ()):
                    self.optim_factors[f"{path}.{name}"] = slow

    def adapt(self, weights: dict[str, Tensor], source: Model) -> dict[str, Tensor]:
        """Return `weights` with position embeddings adapted to this model.

        Pixel positions of square images are interpolated for another size; others are as in `TokenModel`.
        """
        longest = self.longest
        if self.vocabulary is not None or longest is None or "positions.weight" not in weights:
            return super().adapt(weights, source)
        positions = weights["positions.weight"]
        old = math.isqrt(len(positions))
        new = math.isqrt(longest)
        if old**2 != len(positions) or new**2 != longest:
            return super().adapt(weights, source)
        if old == new:
            return weights
        return {**weights, "positions.weight": interpolated(positions, (old, old), (new, new))}

    def normalised(self, pixels: Tensor) -> Tensor:
        """Return uint8 pixels (..) normalised to mean 0 and standard deviation 1."""
        return (pixels.float() / 255 - self.mean) / self.std

    def embed(self, inputs: Tensor) -> Tensor:
        if self.vocabulary is None and not inputs.is_floating_point():
            pixels = self.normalised(inputs)[..., None]
            return self.tokens(pixels.to(self.tokens.weight.dtype))
        return super().embed(inputs)

    def encode(self, inputs: Tensor, segments: Tensor | None = None, hidden: Tensor | None = None) -> Tensor:
        """Return tokens (B, L, dim), with zeros for padding; those of this process, if rows are split.

        Args:
            inputs: Ids, or uint8 intensities of pixels, (B, L), or their embeddings (B, L, dim).
            segments: Integer (B, L), -1 for padding, or boolean, False for padding, on which nothing else depends. With
                a window, one document a row, from the start of the row.
            hidden: Boolean (B, L), True for masked inputs, which `hide` replaces.

        Raises:
            ValueError: More tokens than position embeddings, or rows that the windows do not suit.
        """
        own, layout = self.laid_out(inputs, segments)
        x = self.embed(own)
        if hidden is not None:
            x = self.hide(x, self.own(hidden))
        x = self.placed(x, layout.positions_of(x))
        window = self.config.window
        if window is None:
            return layout.clean(self.encoder(x, layout))
        check_windows(segments)
        if self.part is None:
            return layout.clean(self.in_windows(x, layout.valid, window))
        places = torch.arange(inputs.shape[1], device=x.device).expand(inputs.shape[:2])
        valid = None
        if segments is not None:
            valid = valid_of(segments)
        windows = Layout.of(inputs, valid, places // window)  # as segments, which cross borders of parts
        return layout.clean(self.encoder(x, windows.split(inputs, self.part)))

    def in_windows(self, x: Tensor, valid: Tensor | None, window: int) -> Tensor:
        """Run the encoder on each window of x (B, L, dim) as a separate row."""
        batch, length, dim = x.shape
        window = min(window, length)
        padding = -length % window
        if padding and valid is None:
            valid = torch.ones(batch, length, dtype=torch.bool, device=x.device)
        x = F.pad(x, (0, 0, 0, padding)).view(-1, window, dim)
        if valid is not None:
            valid = F.pad(valid, (0, padding)).view(-1, window)
        x = self.encoder(x, Layout.of(x, valid=valid))
        return x.view(batch, -1, dim)[:, :length]

    def hide(self, x: Tensor, hidden: Tensor) -> Tensor:
        raise ValueError("hidden: only model 'lra_masked' takes masked inputs")


def check_windows(segments: Tensor | None) -> None:
    """Check that every row is one document that begins with the row, where values may be read (not on a GPU).

    Raises:
        ValueError: A row is packed or padded on the left; windows are counted from the start of the row.
    """
    if segments is None or not may_wait(segments.device):
        return
    if ((segments[:, 1:] != segments[:, :-1]) & valid_of(segments)[:, 1:]).any():
        raise ValueError("segments: with a window, a row is one document, with padding behind it alone")


class LRA(SequenceEncoder):
    """A classifier of sequences: encoder, mean of the valid tokens, and a linear head.

    The two documents of a pair are encoded separately, and the head is an MLP of [e1, e2, e1 - e2, e1 e2] (S5, with
    the tanh GELU of flax).

    Args:
        classes: Number of classes.
        parts: Number of documents per sample, 1, or 2 for pairs.
        config, sizes: See `SequenceEncoder`.
    """

    def __init__(self, config: LRAConfig, *, classes: int, parts: int = 1, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        number("parts", parts, Integral, 1, 2)
        self.parts = parts
        self.length = parts * self.length
        dim = config.dim
        self.head: nn.Module
        if parts == 1:
            self.head = nn.Linear(dim, classes)
        else:
            self.head = nn.Sequential(nn.Linear(4 * dim, dim), nn.GELU("tanh"), nn.Linear(dim, classes))
        self.start()

    def forward(self, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
        """Return logits (B, classes) of ids or pixels (B, L), or of pairs (B, 2, L); see `encode`.

        Raises:
            ValueError: Inputs of another shape.
        """
        shape = tuple(inputs.shape)
        if self.parts == 1 and len(shape) != 2:
            raise ValueError(f"inputs: expected (B, L), got {shape}")
        if self.parts == 2 and (len(shape) != 3 or shape[1] != 2):
            raise ValueError(f"inputs: expected (B, 2, L), got {shape}")
        inputs = inputs.flatten(0, -2)
        if segments is not None:
            segments = segments.flatten(0, -2)
        return self.logits(self.pooled(inputs, segments))

    def logits(self, pooled: Tensor) -> Tensor:
        """Map the means (B, dim) of sequences, or (2 B, dim) of the documents of pairs, to logits (B, classes)."""
        if self.parts == 2:
            first, second = pooled.unflatten(0, (-1, 2)).unbind(1)
            pooled = torch.cat([first, second, first - second, first * second], -1)
        return self.head(pooled)

    def pooled(self, inputs: Tensor, segments: Tensor | None) -> Tensor:
        """Return the mean (B, dim) over the valid tokens of inputs (B, L)."""
        total = self.total(self.encode(inputs, segments))
        if segments is None:
            return total / inputs.shape[1]
        return total / valid_of(segments).sum(1, keepdim=True).clamp_min(1)


@dataclass
class LRAMaskedConfig(LRAConfig):
    name: str = "lra_masked"

    token_outputs: ClassVar[bool] = True


class LRAMasked(SequenceEncoder):
    """A model that predicts masked inputs: the logits of ids, or the (normalised) intensity of pixels.

    The encoder is the same as in `LRA`, which can start from these weights (`init_from`).
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
        """Return predictions (B, L, vocabulary or 1) for inputs (B, L)."""
        return self.logits(self.encode(inputs, segments, hidden))

    def logits(self, x: Tensor) -> Tensor:
        """Map (B, L, dim), as of `encode`, to predictions (B, L, vocabulary or 1)."""
        return self.decoder(x)
