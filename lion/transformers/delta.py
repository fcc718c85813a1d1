"""The gated delta rule with the signature of `fla` and `transformers`, for models such as Qwen3-Next and Qwen3.5.

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale q_t S_t    (2412.06464)

The functions run on any device, compiled, and keep packed documents apart. `use_delta_rule` puts them into a model.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.activations import ACT2FN

from lion.ops import Gates, linear_attention, prefill
from lion.ops.dtypes import wide_dtype
from lion.ops.features import unit as normalized
from lion.ops.modes import may_wait
from lion.ops.settings import CHUNK_SIZE, check_chunk_size
from lion.trainer.compilation import can_compile
from lion.transformers.masks import check_ends, documents_of_ends

KERNEL = ("cu_seqlens_cpu", "chunk_indices", "chunk_indices_cpu")  # options of fla that do not change the result


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    chunk_size: int = CHUNK_SIZE,
    compile: bool = True,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule of whole sequences, in chunks.

    Args:
        q, k: Queries and keys (B, L, H, K).
        v: Values (B, L, HV, V), where HV is a multiple of H: each key head serves HV / H neighbouring value heads.
        g: Logarithms of the decays (B, L, HV), at most 0.
        beta: Writing strengths (B, L, HV).
        scale: Factor of the outputs; by default 1/sqrt(K).
        initial_state: State before the first token (B, HV, K, V), or of each document (N, HV, K, V).
        output_final_state: Whether to return the state after the last token, or of each document.
        use_qk_l2norm_in_kernel: Whether to divide queries and keys by their norms.
        cu_seqlens: Ends of N documents in one row, after a 0 (N + 1,).
        head_first: Whether the axes of heads and tokens are exchanged, (B, H, L, ..), as in early versions of `fla`.
        chunk_size: Tokens per chunk.
        compile: Whether to compile the computation, if there is a compiler.
        others: Options of `fla` that are None or False, or that only concern its kernels (`KERNEL`).

    Returns:
        Outputs (B, L, HV, V) in the dtype of `q`, and the state in float32 or wider, or None.

    Raises:
        ValueError: No tokens, a chunk size below 1, positive values in `g`, `cu_seqlens` with several rows or with ends
            that do not rise from 0 to L, or an option that would change the result.
    """
    check_chunk_size(chunk_size)
    for name, value in others.items():
        if name not in KERNEL and value is not None and value is not False:
            raise ValueError(f"chunk_gated_delta_rule: {name}: this option of fla is not available")
    if may_wait(g.device) and (g > 0).any():
        raise ValueError(
            "g: expected logarithms of decays, at most 0; callers with the order (beta, g) use "
            "chunk_gated_delta_rule_beta_g"
        )
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: expected packed documents in one row, got {q.shape[0]} rows")
    dtype = q.dtype
    if head_first:
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    length = q.shape[1]
    if length == 0:
        raise ValueError(f"q: expected at least one token, got the shape {tuple(q.shape)}")
    run = computed
    if compile and not torch.compiler.is_compiling():
        run = compiled()
    keep = initial_state is not None or output_final_state
    segments = None
    valid = None
    if cu_seqlens is not None and keep:  # documents with states become rows
        check_ends("cu_seqlens", cu_seqlens, length)
        lengths = cu_seqlens.diff().tolist()
        q, k, v, g, beta = (pad_sequence(x[0].split(lengths), batch_first=True) for x in (q, k, v, g, beta))
        valid = torch.arange(q.shape[1], device=q.device) < cu_seqlens.diff()[:, None]
    elif cu_seqlens is not None:
        segments = documents_of_ends("cu_seqlens", cu_seqlens, length)
    y, state = run(
        q,
        k,
        v,
        g,
        beta,
        initial=initial_state,
        segments=segments,
        valid=valid,
        scale=scale,
        unit=use_qk_l2norm_in_kernel,
        final=output_final_state,
        chunk_size=chunk_size,
    )
    if valid is not None:
        y = y[valid][None]
    if head_first:
        y = y.transpose(1, 2)
    return y.to(dtype), state


def chunk_gated_delta_rule_beta_g(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, *others: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute `chunk_gated_delta_rule` for callers that pass beta before g."""
    return chunk_gated_delta_rule(q, k, v, g, beta, *others, **named)


@functools.cache
def compiled() -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return `computed`, compiled if there is a compiler, else with a warning."""
    if can_compile("inductor"):
        return torch.compile(computed)  # lengths that change become symbolic
    return computed


def computed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial: Tensor | None,
    segments: Tensor | None,
    valid: Tensor | None,
    scale: float | None,
    unit: bool,
    final: bool,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Return outputs (B, L, HV, V), and the state if `final`, for the arguments of `chunk_gated_delta_rule`."""
    groups = v.shape[2] // k.shape[2]
    q = q.repeat_interleave(groups, 2)
    k = k.repeat_interleave(groups, 2)
    wide = wide_dtype(q)
    q, k, v, g, beta = (x.transpose(1, 2).to(wide) for x in (q, k, v, g, beta))
    if unit:
        q = normalized(q)
        k = normalized(k)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    q = q * scale
    written = 0  # number of tokens that write the first state, each a row of it along a vector of the standard basis
    if initial is not None:
        written = q.shape[-1]
        basis = torch.eye(written, dtype=wide, device=k.device)
        basis = basis.expand(k.shape[0], k.shape[1], -1, -1)
        q = F.pad(q, (0, 0, written, 0))
        k = torch.cat([basis, k], 2)
        v = torch.cat([initial.to(wide), v], 2)
        g = F.pad(g, (written, 0))
        beta = F.pad(beta, (written, 0), value=1.0)
        if valid is not None:
            valid = F.pad(valid, (written, 0), value=True)
    gates = Gates(g, beta)
    how: dict[str, Any] = {
        "normalize": "none",
        "decay_convention": "target",
        "scale": 1.0,
        "chunk_size": chunk_size,
    }
    final_state = None
    if final:
        y, state = prefill(q, k, v, gates, valid=valid, **how)
        final_state = state.S
    else:
        how |= {"form": "chunk", "direction": "forward"}
        y = linear_attention(q, k, v, gates, valid=valid, segments=segments, **how)
    return y[:, :, written:].transpose(1, 2), final_state


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """Compute the causal convolution of each channel of (B, channels, L) with W taps `weight` (channels, W).

    With `seq_idx` (B, L), the number of each token's document, or the ends `cu_seq_lens_q` of the documents of one row,
    no tap reads another document.
    """
    length = hidden_states.shape[-1]
    taps = weight.shape[-1]
    if seq_idx is None and cu_seq_lens_q is not None:
        seq_idx = documents_of_ends("cu_seq_lens_q", cu_seq_lens_q, length)
    x = hidden_states.to(weight.dtype)
    y = torch.zeros_like(x)
    for back in range(taps):
        shifted = F.pad(x, (back, 0))[..., :length]
        if seq_idx is not None and back:
            same = seq_idx == F.pad(seq_idx, (back, 0), value=-1)[:, :length]
            shifted = shifted * same[:, None]
        y = y + shifted * weight[:, taps - 1 - back, None]
    if bias is not None:
        y = y + bias[:, None]
    if activation is not None:
        y = ACT2FN[activation](y)
    return y.to(hidden_states.dtype)


def use_delta_rule(model: nn.Module, *, compile: bool = True) -> int:
    """Replace the functions of Gated DeltaNet in the code of a model of `transformers`, for all models of its class.

    Its layers then train on packed documents (`seq_idx` and `cu_seq_lens_q`, as `DataCollatorWithFlattening` returns
    them), without the packages `fla` and `causal_conv1d`.

    Returns:
        The number of layers that use them.

    Raises:
        ValueError: The model has no such layer.
    """
    ours: dict[str, Callable[..., Any]] = {
        "torch_chunk_gated_delta_rule": functools.partial(chunk_gated_delta_rule, compile=compile),
        "causal_conv1d_fn": causal_conv1d_fn,
    }
    count = 0
    for kind, number in Counter(map(type, model.modules())).items():
        code = vars(sys.modules[kind.__module__])
        if "GatedDeltaNet" in kind.__name__ and ours.keys() <= code.keys():
            for name, function in ours.items():
                code[name] = known_arguments(function)
            count += number
    if not count:
        raise ValueError(f"use_delta_rule: {type(model).__name__} has no layer of Gated DeltaNet that this replaces")
    return count


def known_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that ignores named arguments which `function` lacks, as the layers of `transformers` expect."""
    names = set(inspect.signature(function).parameters)

    def call(*args: Any, **named: Any) -> Any:
        known = {name: value for name, value in named.items() if name in names}
        return function(*args, **known)

    return call
