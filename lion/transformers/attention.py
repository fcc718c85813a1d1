"""Lion-lit and Lion-D as attention functions of existing models: `attn_implementation="lion_lit"`.

A model of `transformers` calls an attention function with its queries, keys and values, so decays that depend on tokens
are not available. The functions keep the model's cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from lion.config import present
from lion.layers.mixers.linear import linear_mixers
from lion.ops import Settings, linear_attention, no_autocast
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.features import apply_feature_map
from lion.ops.full import weighted_sum
from lion.ops.scale import normalized

LIT, FIXED = "lion_lit", "lion_d"
DECAY = "lion_decay"  # attribute of an attention module: the parameters a (H,) of Lion-D
DIRECTIONS = {torch.int32: "forward", torch.int64: "both"}  # by dtype of a mask of ours, which models only pass on
PLAIN: dict[Callable[..., Any], torch.dtype] = {
    causal_mask_function: torch.int32,
    bidirectional_mask_function: torch.int64,
}
CROSS = "cross-attention is not available, so that encoder-decoder models are not"
OTHER = ("softcap", "s_aux", "position_bias")  # arguments that change the scores of softmax attention


def register_attention() -> None:
    """Register "lion_lit" and "lion_d", each with its mask function.

    Without a mask function, `transformers` passes no mask, and padding would be ignored in silence.
    """
    for name in (LIT, FIXED):
        AttentionInterface.register(name, partial(attention, name))
        AttentionMaskInterface.register(name, segments_mask)


def check_attention(model: nn.Module) -> None:
    """Check that the attention of a model can be replaced by `attn_implementation`.

    `transformers` does not report it, and such a model computes softmax attention as before.

    Raises:
        ValueError: The model, or a model in it, computes attention itself, as DeBERTa does.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            check_class(type(module))


def check_class(kind: type[PreTrainedModel]) -> None:
    if not kind._can_set_attn_implementation():
        raise ValueError(f"attn_implementation: {kind.__name__} computes attention itself, without attention functions")


def add_decays(model: PreTrainedModel, kind: type[nn.Module], folder: str | Path | None = None) -> None:
    """Add the learned decays of Lion-D, `lambda = sigmoid(a)` with a ~ N(0, 1) per head, to all modules of a class.

    `from_pretrained` does not load decays, because the class of the model has none: pass its folder to this function.

    Args:
        model: A model of `transformers`.
        kind: Class of its attention modules, such as `LlamaAttention`.
        folder: Where `save_pretrained` has saved the decays; new ones by default. The heads of the model may differ.

    Raises:
        ValueError: The model has no such module, or computes attention itself, or the folder does not have its decays.
    """
    check_attention(model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    if not found:
        raise ValueError(f"add_decays: {type(model).__name__} has no module of the class {kind.__name__}")
    prefix = f"{model.base_model_prefix}."
    saved = {}
    if folder is not None:
        for name, a in saved_decays(Path(folder)).items():
            saved[name.removeprefix(prefix)] = a
    for name, module in found.items():
        config: Any = vars(module).get("config", model.config)  # models of two towers have two configs
        heads = config.num_attention_heads
        decays: Tensor | None = torch.randn(heads)
        if folder is not None:
            decays = saved.get(f"{name.removeprefix(prefix)}.{DECAY}")
        if decays is None or decays.shape != (heads,):
            raise ValueError(f"add_decays: {folder} does not have {heads} decays for {name}")
        module.register_parameter(DECAY, nn.Parameter(decays.to(model.device)))


def saved_decays(folder: Path) -> dict[str, Tensor]:
    """Return the decays in a folder of `save_pretrained`, by their names in the model that was saved."""
    saved = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if name.endswith(f".{DECAY}"):
                    saved[name] = file.get_tensor(name)
    return saved


def attention(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return (outputs (B, L, H, E), None) of linear attention for queries (B, H, L, D) and keys (B, H or fewer, T, D).

    The L queries belong to the last of the T tokens. Scores are normalised by the sum of their row, so that `scaling`
    has no effect.

    Raises:
        ValueError: A mask or an argument that linear attention does not have, cross-attention, or Lion-D without its
            decays.
    """
    for other in OTHER:
        if others.get(other) is not None:
            raise ValueError(f"{name}: {other} is not available, it belongs to the scores of softmax attention")
    if attention_mask is not None and attention_mask.dtype not in DIRECTIONS:
        raise ValueError(
            f"{name}: attention_mask: expected the mask of this function, got {str(attention_mask.dtype)[6:]} "
            f"{tuple(attention_mask.shape)}; a mask of pairs of tokens cannot be expressed"
        )
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        direction = "forward" if is_causal else "both"
    else:
        direction = DIRECTIONS[attention_mask.dtype]
    queries = query.shape[2]
    tokens = key.shape[2]
    if crosses(module, direction) or queries > tokens or (queries != tokens and direction == "both"):
        raise ValueError(f"{name}: {type(module).__name__}: {CROSS}")
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, 1)
    value = value.repeat_interleave(groups, 1)
    mixer = linear_mixers()[name]
    convention = mixer.decay_convention
    if direction == "forward":
        convention = mixer.causal_decay_convention
    settings = Settings(
        form="auto",
        direction=direction,
        feature_map=mixer.feature_map,
        normalize=mixer.normalize,
        decay_convention=convention,
        dropout_p=dropout,
    )
    log_decay = decays(name, module)
    over = last_rows if queries < tokens else linear_attention
    y = over(query, key, value, log_decay, segments=attention_mask, settings=settings)
    return y.transpose(1, 2).contiguous(), None


def last_rows(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, *, segments: Tensor | None, settings: Settings
) -> Tensor:
    """Compute causal attention of queries (B, H, L, D), the last L of T tokens, for keys (B, H, T, D).

    The scores are L x T. Otherwise the arguments are those of `linear_attention`; a decay is one number for each head.
    """
    queries = q.shape[2]
    tokens = k.shape[2]
    places = torch.arange(tokens, device=q.device)
    distance = places[tokens - queries :, None] - places
    hidden = distance < 0
    if segments is not None:
        own = segments[:, tokens - queries :, None]
        padding = segments < 0
        places = (~padding).cumsum(1)[:, None]  # (B, 1, T): padding has no decay
        distance = places[..., tokens - queries :, None] - places[..., None, :]
        hidden = (hidden | (own != segments[:, None]) | padding[:, None])[:, None]  # (B, 1, L, T)
        k = k.masked_fill(padding[:, None, :, None], 0)  # padding may hold NaN
        v = v.masked_fill(padding[:, None, :, None], 0)
        q = q.masked_fill((own < 0)[:, None], 0)
    with no_autocast(q):
        q = apply_feature_map(settings.feature_map, q)
        k = apply_feature_map(settings.feature_map, k)
        scores = (q @ k.mT).to(wide_dtype(q))
        if log_decay is not None:
            scores = scores * (log_decay[:, None, None] * distance.clamp_min(0)).exp()
        weights = scores.masked_fill(hidden, 0)
        sums = weighted_sum(weights, v.to(sum_dtype(v)), settings)
        return normalized(sums, settings, q.shape[-1]).to(v.dtype)


def crosses(module: nn.Module, direction: str) -> bool:
    """Return whether a module attends to another sequence, or belongs to a model with such modules.

    Lengths do not show it: both sequences may be equally long.
    """
    if getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__:
        return True
    config = getattr(module, "config", None)
    paired = getattr(module, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return direction == "both" and paired


def decays(name: str, module: nn.Module) -> Tensor | None:
    """Return the logarithms of the decays (H,), None in Lion-lit."""
    if name == LIT:
        return None
    a = getattr(module, DECAY, None)
    if a is None:
        raise ValueError(
            f"{name}: {type(module).__name__} has no decays, call lion.transformers.add_decays(model, "
            f"{type(module).__name__}) first"
        )
    return F.logsigmoid(a.to(wide_dtype(a)))


def segments_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: PreTrainedConfig | None = None,
    **_: Any,
) -> Tensor:
    """Return the documents of the keys (B, T), -1 for padding; the dtype determines the direction (`DIRECTIONS`).

    The arguments are those of all mask functions of `transformers`.

    Raises:
        ValueError: The mask is neither causal nor of both directions, within documents, or of two sequences, or a model
            computes attention itself, and would add the documents to its scores.
    """
    if config is not None and not torch.compiler.is_compiling() and type(config) in MODEL_MAPPING:
        kinds = MODEL_MAPPING[type(config)]
        if not isinstance(kinds, tuple):
            kinds = (kinds,)
        for kind in kinds:
            if kind is not None:
                check_class(kind)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask: expected padding (B, L), got {tuple(attention_mask.shape)}; "
            "a mask of pairs of tokens cannot be expressed"
        )
    if mask_function is bidirectional_mask_function and q_length != kv_length:
        raise ValueError(f"attention_mask: {CROSS}")
    if q_offset + q_length != kv_offset + kv_length:
        raise ValueError("attention_mask: a static cache has keys after the queries, use a dynamic one")
    if mask_function in PLAIN:
        documents = torch.zeros(batch_size, kv_length, dtype=PLAIN[mask_function], device=device)
    else:
        pairs = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        documents = documents_of(present(pairs, "attention_mask")[:, 0])
    if attention_mask is None:
        return documents
    return documents.masked_fill(~attention_mask[:, kv_offset : kv_offset + kv_length].bool(), -1)


def documents_of(pairs: Tensor) -> Tensor:
    """Return the documents (B, L) of a mask of pairs (B, L, L), in which each token attends to its document.

    Raises:
        ValueError: Another mask.
    """
    if pairs.shape[1] == pairs.shape[2]:
        before = F.pad(pairs.diagonal(-1, 1, 2), (1, 0), value=False)  # whether a token attends to the one before it
        documents = (~before).cumsum(1)
        same = documents[:, :, None] == documents[:, None]
        for dtype, expected in ((torch.int32, same.tril()), (torch.int64, same)):
            if torch.equal(pairs, expected):
                return documents.to(dtype)
    raise ValueError(
        "attention_mask: linear attention has masks of documents, causal or in both directions, and no others "
        "(sliding windows, prefixes)"
    )
