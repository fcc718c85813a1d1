"""The encoder: the stack of blocks that all models share."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from lion.config import check_settings, fill, flatten, hints_of, nearest_divisor, setting, to_dict
from lion.layers.blocks import BLOCKS
from lion.layers.blocks.base import MLPS, NO_MLP
from lion.layers.layout import PLAIN, Layout
from lion.layers.mixers import MIXERS, AttentionConfig, mixers_of, resolve_mixer
from lion.layers.mixers.registry import entry_of
from lion.layers.norms import NORMS, NoNorm, check_causal
from lion.layers.rotations import NO_ROTATION
from lion.layers.tpe import TPE
from lion.models.base import ModelConfig
from lion.models.init import INITS


@dataclass
class EncoderConfig(ModelConfig):
    """Settings of an encoder, before conventions apply: None selects the convention of the mixer and the model.

    `resolved` applies these conventions. `preset` selects the model of the paper or of the released code, where the two
    differ. `tpe` is the number of hidden states of MD-TPE (`lion.layers.tpe`), which precedes the blocks; 0: no MD-TPE.
    By convention, the position embedding of a model, of any kind, is on if nothing else encodes the order of tokens.
    """

    mixer: str = setting(choices=MIXERS, hint="a module with mixers is imported first (imports: [MODULE] in a recipe)")
    dim: int = setting(min=1, max=65_536)
    depth: int = setting(min=1, max=1_000)
    num_heads: int = setting(min=1)
    preset: str = setting("paper", choices=("paper", "released"))
    block: str = setting("pre_norm", choices=BLOCKS)
    mlp: str = setting("mlp", choices=MLPS)
    mlp_ratio: float = setting(4.0, above=0, max=1000)
    norm: str = setting("layernorm", choices=NORMS)
    norm_eps: float = setting(1e-6, above=0)
    dropout: float = setting(0.0, min=0, max=1)
    drop_path: float = setting(0.0, min=0, max=0.99)
    init: str = setting("deit", choices=INITS)
    init_std: float = setting(0.02, above=0)
    position_embedding: bool | None = None
    tpe: int | None = setting(None, min=0, max=65_536)
    attention: AttentionConfig = field(default_factory=AttentionConfig)

    conditions: ClassVar[bool] = False  # whether the model passes a `context` to its blocks
    token_outputs: ClassVar[bool] = False  # whether the model has an output for each token, which a direction restricts
    # by mixer: settings that differ in the authors' code of this model
    released: ClassVar[dict[str, dict[str, Any]]] = {}
    # by wording in `label`: settings that are None if a model follows the conventions
    conventions: ClassVar[dict[str, str]] = {
        "positions": "position_embedding",
        "feature map": "attention.feature_map",
        "row sum": "attention.normalize",
        "decay convention": "attention.decay_convention",
        "decay temperature": "attention.decay_temperature",
        "TPE": "tpe",
        "rotation": "attention.rotation",
    }

    @classmethod
    def types(cls, values: dict[str, Any]) -> dict[str, type]:
        mixer = values.get("mixer")
        if not isinstance(mixer, str) or mixer not in MIXERS:
            return {}
        kind = MIXERS[mixer].layer.Config
        if kind is AttentionConfig:
            return {}
        return {"attention": kind}

    def __post_init__(self) -> None:
        entry_of(self.mixer)
        check_settings(self)
        if self.dim % self.num_heads:
            near = nearest_divisor(self.num_heads, self.dim)
            raise ValueError(f"num_heads {self.num_heads} does not divide dim {self.dim}, nearest: {near}")
        self.resolved()

    def resolved(self) -> Self:
        """Return a copy with every None replaced by its convention: the settings of the model that is built.

        Raises:
            ValueError: An unknown mixer, or settings that cannot be combined.
        """
        c = copy.copy(self)
        if self.preset == "released":
            c = fill(c, self.released.get(self.mixer, {}))
        if BLOCKS[c.block].conditional and not self.conditions:
            raise ValueError(f"block: {c.block!r} is conditioned on a class and a time, which only model 'dit' has")
        info = entry_of(c.mixer).layer.info(c.mixer)
        c = fill(c, {"tpe": info.tpe, "attention": {"rotation": info.rotation}})
        try:
            c.attention = resolve_mixer(c.mixer, c.attention)
        except ValueError as error:
            raise ValueError(f"attention.{error}") from None
        if c.token_outputs and c.attention.direction in ("forward", "backward") and len(c.attention.scans) == 1:
            check_causal(c.norm, "norm")
            check_causal(c.attention.out_norm, "attention.out_norm")
        if c.position_embedding is None:
            c.position_embedding = not c.knows_order()
        return c

    def knows_order(self) -> bool:
        """Return whether the encoder of a resolved config knows the order of tokens without position embeddings."""
        knows_order = MIXERS[self.mixer].layer.knows_order(self.mixer, self.attention)
        return knows_order or bool(self.tpe) or self.attention.rotation != NO_ROTATION

    def with_mixer(self, mixer: str) -> Self:
        """Return the config of this model with another mixer and its conventions; dropout rates stay."""
        c = copy.copy(self)
        for f in dataclasses.fields(c):
            if f.default is None:
                setattr(c, f.name, None)
        kind: type = type(self)
        kinds = {**hints_of(kind), **self.types({"mixer": mixer})}
        c.mixer = mixer
        c.attention = kinds["attention"](score_dropout=c.attention.score_dropout)
        return c

    def label(self) -> str:
        """Return the label for rows of a paper's tables: the mixer, and settings that differ from its conventions."""
        attention = self.attention
        plain = copy.deepcopy(self)
        built = self.resolved()
        own = flatten(to_dict(built))
        conventions = {words: path for words, path in self.conventions.items() if path in own}
        for path in conventions.values():
            section, _, name = path.rpartition(".")
            holder = getattr(plain, section) if section else plain
            setattr(holder, name, None)
        usual = flatten(to_dict(plain.resolved()))
        usual["position_embedding"] = not built.knows_order()  # whatever else encodes the order here
        parts = [self.mixer]
        if len(attention.scans) > 1:
            merge = attention.scan_merge
            parts.append("multiscan" if merge == "masks" else f"multiscan ({merge})")
        if attention.direction != type(attention)().direction:
            parts.append(attention.direction)
        for words, path in conventions.items():
            value = own[path]
            if value == usual[path]:
                continue
            if isinstance(value, float):
                parts.append(f"{words} {value:g}")
            elif not value or value == "none":
                parts.append(f"without {words}")
            elif isinstance(value, int):
                parts.append(f"with {words}")
            else:
                parts.append(f"{value} {words}")
        parts += [attention.label(), attention.block_label()]
        return " ".join(filter(None, parts))

    def shape(self) -> str:
        """Return the settings that models must share if their mixers are to be compared."""
        parts = [f"dim {self.dim}", f"depth {self.depth}", f"{self.num_heads} heads"]
        if self.mlp == NO_MLP:
            parts.append("no MLP")
        if self.dropout:
            parts.append(f"dropout {self.dropout:g}")
        if self.attention.score_dropout:
            parts.append(f"score dropout {self.attention.score_dropout:g}")
        return ", ".join(parts)


class Encoder(nn.Module):
    """MD-TPE if configured, `depth` blocks, and a final norm if the blocks need it.

    `config` must be resolved. `grid` is the number of positions along each axis, for tokens with coordinates
    (`Layout.coords`).
    """

    def __init__(self, config: EncoderConfig, grid: tuple[int, ...] | None = None) -> None:
        super().__init__()
        c = config
        self.tpe = None
        if c.tpe:
            self.tpe = TPE(c.dim, c.tpe, grid)
        kind = BLOCKS[c.block]
        self.blocks = nn.ModuleList()
        for layer in range(c.depth):
            rate = None
            if c.drop_path:
                rate = c.drop_path * layer / max(c.depth - 1, 1)
            block = kind(
                c.dim,
                c.num_heads,
                mixer=c.mixer,
                attention=c.attention.at(layer),
                mlp=c.mlp,
                mlp_ratio=c.mlp_ratio,
                norm=c.norm,
                norm_eps=c.norm_eps,
                dropout=c.dropout,
                drop_path=rate,
            )
            self.blocks.append(block)
        if kind.final_norm:
            self.norm = NORMS[c.norm](c.dim, eps=c.norm_eps)
        else:
            self.norm = NoNorm()

    def forward(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> Tensor:
        """Map (B, L, dim) to (B, L, dim); `context` is passed to every block."""
        layout = self.prepared(x, layout)
        for stage in self.stages:
            x = stage(x, layout, context)
        return self.norm(x, layout)

    @property
    def stages(self) -> list[Any]:
        """The modules that tokens pass, in order; in a stream each module has a separate state."""
        if self.tpe is None:
            return list(self.blocks)
        return [self.tpe, *self.blocks]

    @property
    def causal(self) -> bool:
        """Return whether the encoder streams, which requires that every stage streams."""
        return all(stage.causal for stage in self.stages)

    def initial_state(self, batch: int) -> list[Any]:
        """Return the state of every stage before the first token."""
        return [stage.initial_state(batch) for stage in self.stages]

    def prefill(self, x: Tensor, layout: Layout = PLAIN, context: Any = None) -> tuple[Tensor, list[Any]]:
        """Return the output of `forward` for a prompt, and the states after it."""
        layout = self.prepared(x, layout)
        states = []
        for stage in self.stages:
            x, state = stage.prefill(x, layout, context)
            states.append(state)
        return self.norm(x, layout), states

    def step(
        self, x: Tensor, states: list[Any], *, context: Any = None, valid: Tensor | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Return the output of `forward` for the next tokens x (B, C, dim), and the states after them.

        `valid` (B, C) is False for padding.

        Raises:
            ValueError: Another number of states than that of the stages, or a state of another mixer.
        """
        if len(states) != len(self.stages):
            raise ValueError(f"state: expected {len(self.stages)} states of blocks, got {len(states)}")
        new = []
        for stage, state in zip(self.stages, states):
            x, state = stage.step(x, state, context=context, valid=valid)
            new.append(state)
        return self.norm(x, Layout.of(x, valid)), new

    def check_split(self, count: int) -> None:
        """Check that the tokens of a row may be split over `count` processes.

        Raises:
            ValueError: They may not, with these settings.
        """
        try:
            for mixer in mixers_of(self):
                mixer.check_split(count)
            if self.tpe is not None:
                self.tpe.check_split(count)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None

    def prepared(self, x: Tensor, layout: Layout) -> Layout:
        """Return the layout, with the fields added that all blocks share."""
        for stage in self.stages:
            layout = stage.prepare(x, layout)
        return layout
