"""The linear mixers as attention layers of timm: classes for the argument `attn_layer`."""

from __future__ import annotations

import copyreg
import warnings
from abc import ABCMeta
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn

from lion.config import nearest, present
from lion.layers.layout import PLAIN
from lion.layers.mixers import LINEAR, MIXERS
from lion.layers.mixers.attention import Inputs, Windows
from lion.layers.mixers.linear import LionAttention as Layer
from lion.ops.modes import holds
from lion.timm.grid import Grid, Placed, copy_own

M = TypeVar("M", bound=nn.Module)
PASSED = {"qkv_bias": "qkv_bias", "score_dropout": "attn_drop"}  # settings that are arguments of timm's layers
SHARED = ("qkv", "proj", "q_norm", "k_norm", "proj_drop", "place")  # parts that are the same in all directions


class Made(ABCMeta):
    """The type of the classes that `attention` makes; pickle makes them again, because they have no place in a module.

    timm keeps the class `attn_layer` in a model. Subclasses may be abstract.
    """


def reduce_class(kind: Made) -> str | tuple[Any, ...]:
    """Return how pickle makes a class: by its arguments, or by its name if a module holds it."""
    own = vars(kind)
    if "settings" not in own:
        return kind.__qualname__
    return made, (own["name"], tuple(sorted(own["settings"].items())))


copyreg.pickle(Made, reduce_class)


@register_notrace_module
class TimmAttention(Layer, metaclass=Made):
    """A linear mixer with the constructor and the `forward` of `timm.layers.Attention`; `attention` makes subclasses.

    Names of weights are those of timm (`qkv`, `proj`), so softmax weights can be loaded; decays are in `decays`.

    Args:
        dim, num_heads: Width of the tokens, and number of heads.
        qkv_bias, proj_bias: Whether the projections have biases.
        qk_norm: Whether queries and keys are normalised by `norm_layer(head_dim)`, before the feature map.
        scale_norm: Not available; the setting `out_norm` of `attention` normalises the output of the heads.
        attn_drop: Dropout of scores. Only the full form has scores, and only mixers without a delta rule.
        proj_drop: Dropout of the output.
        norm_layer: Constructor of the norms of queries and keys.
        device, dtype: Device and floating-point type of the parameters.

    Raises:
        ValueError: Arguments that the mixer does not support.
    """

    name: ClassVar[str]  # an entry of `LINEAR`
    settings: ClassVar[dict[str, Any]]  # settings of `AttentionConfig`
    place: Grid | None
    causal_twin: TimmAttention | None

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if scale_norm:
            raise ValueError("scale_norm: use the setting out_norm, as in lion.timm.attention(.., out_norm='rmsnorm')")
        if not qk_norm:
            norm_layer = nn.Identity
        if norm_layer is None:
            raise ValueError("qk_norm: needs norm_layer")
        settings = {"qkv_bias": qkv_bias, "score_dropout": attn_drop, **self.settings}
        with torch.device(device or torch.get_default_device()):
            super().__init__(dim, num_heads, self.name, **settings)
            self.q_norm = norm_layer(self.head_dim)
            self.k_norm = norm_layer(self.head_dim)
        if not proj_bias:
            self.proj.register_parameter("bias", None)
        self.proj_drop = nn.Dropout(proj_drop)
        self.register_module("place", None)  # the `Grid` of a model whose tokens have places
        self.to(dtype=dtype)
        twin = None
        if self.config.direction == "both":
            forward = {**self.settings, "direction": "forward"}
            kind = attention(self.name, **forward)
            twin = kind(
                dim,
                num_heads,
                qkv_bias,
                qk_norm,
                scale_norm,
                proj_bias,
                attn_drop,
                proj_drop,
                norm_layer,
                device="meta",
            )
            twin = borrower(twin, self, SHARED)
        self.__dict__["causal_twin"] = twin  # without weights of its own, and not registered as a module

    def forward(  # type: ignore[override]  # timm's arguments
        self, x: Tensor, attn_mask: Tensor | Placed | None = None, is_causal: bool = False
    ) -> Tensor:
        """Mix tokens x (B, L, dim).

        Args:
            attn_mask: A mask of padding, boolean (True for tokens) or added to scores (0 for tokens, minus infinity or
                the smallest number of its type for padding): (B, 1, 1, L), or (B, 1, L, L) with the same keys in every
                row. Rows of padding may also be empty. B and L may be 1 where they broadcast. Models pass `Placed`.
            is_causal: Whether no token sees a later one: direction "forward" for this call, with its convention of
                decays (`AttentionConfig`). Together with `attn_mask`, both apply.

        Raises:
            ValueError: A mask that linear attention cannot express. On a GPU and in a compiled graph, rows that differ
                raise an asynchronous assertion instead.
        """
        if is_causal and self.config.direction != "forward":
            return self.causally(x, attn_mask)
        layout = PLAIN
        if self.place is not None:
            layout = self.place()
        if isinstance(attn_mask, Placed):
            layout = attn_mask.layout
            attn_mask = attn_mask.mask
        if attn_mask is not None:
            layout = layout.masked(x, keys_of(attn_mask, x))
        return self.proj_drop(super().forward(x, layout))

    def read(self, x: Tensor, windows: Windows) -> Inputs:
        inputs = super().read(x, windows)
        q = self.q_norm(inputs.q)
        k = self.k_norm(inputs.k)
        return inputs._replace(q=q, k=k)

    def causally(self, x: Tensor, attn_mask: Tensor | Placed | None) -> Tensor:
        """Mix tokens x (B, L, dim) in direction "forward", with the same parameters.

        Raises:
            ValueError: The layer has direction "backward", several scans, a norm over tokens, or new parameters in a
                part that is not in `SHARED`.
        """
        if self.config.direction == "backward":
            raise ValueError("is_causal: not available with direction 'backward'")
        if len(self.config.scans) > 1:
            raise ValueError("is_causal: not available with several scans")
        twin = present(self.causal_twin, "causal_twin")
        twin.check_causal()
        if not borrows(twin, self, SHARED):  # a part was replaced, or this is a copy of `DataParallel`
            twin = borrower(twin, self, SHARED)
            self.__dict__["causal_twin"] = twin
        return twin(x, attn_mask)

    def set_form(self, form: str, chunk_size: int | None = None) -> None:
        super().set_form(form, chunk_size)
        if self.causal_twin is not None:
            self.causal_twin.set_form(form, chunk_size)

    def train(self, mode: bool = True) -> TimmAttention:
        if self.causal_twin is not None:
            self.causal_twin.train(mode)
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Initialise all parameters, except those of linear layers, which timm initialises."""
        with torch.device(self.qkv.weight.device):
            new = type(self)(self.qkv.in_features, self.num_heads, self.qkv.bias is not None)
            copy_own(new, self)

    def _load_from_state_dict(self, weights: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        """Load weights; decays keep their initialisation where those of softmax attention are loaded, without decays.

        Weights with some parts of the decays are those of a linear layer, which have to be complete.
        """
        own = {}
        parts = set()
        for name, value in self.state_dict().items():
            part = name.partition(".")[0]
            if part not in SHARED:
                own[prefix + name] = value
                parts.add(part)
        if own and f"{prefix}qkv.weight" in weights and not own.keys() & weights.keys():
            weights.update(own)
            warnings.warn(
                f"these weights of softmax attention have no {' and '.join(sorted(parts))} of {self.name!r}, which "
                "keep their initialisation: train the model further",
                stacklevel=2,
            )
        super()._load_from_state_dict(weights, prefix, *rest)


def borrower(twin: M, own: nn.Module, shared: Collection[str] = (), path: str = "") -> M:
    """Return a copy of `twin` that reads the parameters and buffers of `own`, and has its `shared` parts.

    Raises:
        ValueError: `own` has tensors or parts that `twin` does not have; `path` is the place of both.
    """
    made = object.__new__(type(twin))
    made.__dict__ = {**vars(twin), "_parameters": own._parameters, "_buffers": own._buffers, "_modules": {}}
    made._modules.update(twin._modules)
    for kind in ("_parameters", "_buffers", "_modules"):
        for name in vars(own)[kind]:
            if name not in vars(twin)[kind]:
                where = f"{path}{name}"
                raise ValueError(f"is_causal: {where} was added; adapters are available in {', '.join(SHARED)} alone")
    for name, part in own._modules.items():
        if name in shared or part is None:
            made._modules[name] = part
        else:
            made._modules[name] = borrower(present(twin._modules[name], name), part, path=f"{path}{name}.")
    return made


def borrows(twin: nn.Module, own: nn.Module, shared: Collection[str] = ()) -> bool:
    """Return whether `twin` is a `borrower` of the present parts of `own`."""
    if twin._parameters is not own._parameters or twin._buffers is not own._buffers:
        return False
    for name, part in own._modules.items():
        if name not in twin._modules:
            return False
        mine = twin._modules[name]
        if name in shared or part is None:
            if mine is not part:
                return False
        elif mine is None or not borrows(mine, part):
            return False
    return True


def attention(mixer: str = "lion_s", **settings: Any) -> type[TimmAttention]:
    """Return the class of a linear mixer for the argument `attn_layer` of timm's models.

    Args:
        mixer: A linear mixer of `lion.LionAttention`: "lion_lit", "lion_d", "lion_s", "lightnet", "gla", ..
        **settings: Settings of `AttentionConfig`, except `qkv_bias` and `score_dropout`, which timm passes: `form`,
            `chunk_size`, `direction`, `feature_map`, ..

    Raises:
        ValueError: An unknown mixer, or a setting that timm passes.
    """
    for name, argument in PASSED.items():
        if name in settings:
            raise ValueError(f"{name}: timm passes it to the layer, as {argument}")
    if mixer in MIXERS and mixer not in LINEAR:
        raise ValueError(f"mixer: expected a linear mixer, {', '.join(LINEAR)}; got {mixer!r}")
    if mixer not in LINEAR:
        raise ValueError(f"mixer: unknown linear mixer {mixer!r}, {nearest(mixer, LINEAR)}")
    for name, value in settings.items():
        if isinstance(value, list):
            settings[name] = tuple(value)
    return made(mixer, tuple(sorted(settings.items())))


@cache
def made(mixer: str, settings: tuple[tuple[str, Any], ...]) -> type[TimmAttention]:
    layer = MIXERS[mixer].layer
    bases: tuple[type, ...] = (TimmAttention, layer)
    if layer is Layer:
        bases = (TimmAttention,)
    return type(layer.__name__, bases, {"name": mixer, "settings": dict(settings)})


LionAttention = attention("lion_s")


def keys_of(mask: Tensor, x: Tensor) -> Tensor:
    """Return the boolean mask (B, L) of the keys that a mask of pairs lets every token of x (B, L, dim) see.

    Raises:
        ValueError: A mask that is not one of padding.
    """
    batch, length = x.shape[:2]
    fits = (1, batch), (1,), (1, length), (length,)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"attn_mask: expected boolean or floating point, got {str(mask.dtype)[6:]}")
    if mask.dim() == 2:
        mask = mask[None, None]
    if mask.dim() != 4 or any(size not in sizes for size, sizes in zip(mask.shape, fits)):
        raise ValueError(
            f"attn_mask: expected (B, 1, 1, L) or (B, 1, L, L) with B={batch} and L={length}, got {tuple(mask.shape)}; "
            "linear attention has one mask for all heads"
        )
    pairs = mask[:, 0].expand(batch, -1, -1)
    if mask.dtype != torch.bool:
        hidden = pairs <= torch.finfo(mask.dtype).min
        pairs = pairs == 0
        check((pairs | hidden).all(), "a bias of scores")
    keys = pairs.any(1)
    if mask.shape[2] > 1:
        same = pairs == keys[:, None]
        empty = ~keys[:, :, None] & ~pairs.any(2, keepdim=True)
        check((same | empty).all(), "different keys for different queries")
    return keys


def check(right: Tensor, what: str) -> None:
    message = f"attn_mask: {what}, which linear attention cannot express; expected padding, or is_causal=True"
    if not holds(right, message):
        raise ValueError(message)
