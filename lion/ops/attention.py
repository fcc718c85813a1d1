"""The entry to all forms: validation, masks, normalisation, and the choice of form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lion.ops import rnn
from lion.ops.chunk import chunk_parts
from lion.ops.decay import DIRECTIONS, GATES, make_clocks
from lion.ops.full import masked_parts, product_parts
from lion.ops.vector import chunk_vector_parts, full_vector_parts

FORMS = ("full", "chunk", "rnn")
NORMALIZE = ("sum", "none")
FULL_UP_TO = 256  # tokens; measured with `./run.sh bench ops`: above it the chunk form trains faster


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    form: str = "full",
    direction: str = "both",
    normalize: str = "sum",
    gate: str = "source",
    scale: float | None = None,
    chunk_size: int = 64,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
) -> Tensor:
    """Linear attention `Y = scale(Q K^T * M) V` with the decay mask M (LION, Eq. 13 and 14).

    Every form computes the same function; they differ in cost. `full` is dense in L (without decay it is
    the product `Q (K^T V)`), `chunk` is linear in L and parallel, `rnn` is linear and sequential with
    memory that does not grow with L. `full` and `chunk` are static graphs for `torch.compile`.

    Args:
        q, k: Queries and keys (B, H, L, D), feature map applied.
        v: Values (B, H, L, E).
        log_decay: log lambda <= 0: None (Lion-lit), (H,) (Lion-D) or (B, H, L) (Lion-S); with a lambda for each
            key dimension (H, D) or (B, H, L, D).
        form: "full", "chunk", "rnn" or "auto" (by length).
        direction: "both", "forward" or "backward"; the diagonal is counted once in each.
        normalize: "sum" divides each row by its sum (at least `eps`), for positive feature maps;
            "none" multiplies by `scale`.
        gate: Which tokens' decays lie between two tokens: "source", "target" or "symmetric";
            see `lion.ops.decay`.
        scale: Factor on the scores under `normalize="none"`, default 1/sqrt(D). It cancels under "sum".
        chunk_size: Tokens a chunk at most; for `rnn`, tokens a step.
        valid: Boolean (B, L). Tokens that are not valid behave as if deleted, whatever they hold;
            their output is 0.
        segments: Integer (B, L). Tokens interact only within their segment; -1 is padding. The tokens of
            a segment stand together (padding between them is allowed).
        eps: Smallest row sum.
        dropout_p: Dropout on the scores, form "full" only.

    Returns:
        (B, H, L, E) in the dtype of `v`.

    Raises:
        ValueError: An argument of the wrong shape, dtype or name.
    """
    numerator, rowsum = linear_attention_parts(
        q,
        k,
        v,
        log_decay,
        form=form,
        direction=direction,
        gate=gate,
        chunk_size=chunk_size,
        valid=valid,
        segments=segments,
        dropout_p=dropout_p,
        rowsum=_choice("normalize", normalize, NORMALIZE) == "sum",
    )
    return finish(numerator, rowsum, scale=q.shape[-1] ** -0.5 if scale is None else scale, eps=eps)


def finish(numerator: Tensor, rowsum: Tensor | None, *, scale: float, eps: float) -> Tensor:
    """The one division: numerator (B, H, L, E) over row sum (B, H, L), or times `scale` where there is none.

    Without gradients the result takes the numerator's memory.
    """
    if rowsum is None:
        factor = scale
    else:  # an empty row is 0, and so is its gradient, also where 1 / eps overflows
        factor = rowsum.clamp_min(eps).reciprocal().masked_fill(rowsum == 0, 0)[..., None]
    if not torch.is_grad_enabled():
        return numerator.mul_(factor)  # in place: inference in the rnn form holds its outputs once
    return (numerator * factor).to(numerator.dtype)


def linear_attention_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    form: str = "full",
    direction: str = "both",
    gate: str = "source",
    chunk_size: int = 64,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    dropout_p: float = 0.0,
    rowsum: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and float32 row sum (B, H, L), undivided: several scans can be added up first.

    Arguments as in `linear_attention`; `rowsum=False` leaves the second part out (None).
    """
    _check(q, k, v, log_decay, valid, segments)
    _choice("direction", direction, DIRECTIONS)
    _choice("gate", gate, GATES)
    form = resolve_form(_choice("form", form, (*FORMS, "auto")), q.shape[2], log_decay is not None, dropout_p)
    if dropout_p and form != "full":
        raise ValueError(f"dropout_p: score dropout exists in the full form only, got form={form!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")

    with no_autocast(q):
        plain = log_decay is None
        wide = torch.promote_types(q.dtype, torch.float32)
        log_decay = _lanes(log_decay, q).to(wide)  # (B or 1, H or 1, L, D or 1)
        run, valid = _runs(valid, segments)

        if form == "rnn":
            return rnn.rnn_parts(
                q, k, v, log_decay, valid, run, gate=gate, direction=direction, rowsum=rowsum, chunk_size=chunk_size
            )
        if valid is not None:  # select, never multiply: padding may hold NaN
            q, k, v, log_decay = (x.masked_fill(~valid[:, None, :, None], 0) for x in (q, k, v, log_decay))
        if plain and form == "full" and not dropout_p:
            if direction == "both" and run is None:
                return product_parts(q, k, v, rowsum=rowsum)
            form = "chunk"  # a product with borders: still never an L x L matrix
        if log_decay.shape[-1] > 1:
            forward, backward = make_clocks(log_decay.mT, run, gate=gate, direction=direction)
            if form == "full":
                return full_vector_parts(q, k, v, forward, backward, rowsum=rowsum, dropout_p=dropout_p)
            return chunk_vector_parts(q, k, v, forward, backward, rowsum=rowsum, chunk_size=chunk_size)
        forward, backward = make_clocks(log_decay[..., 0], run, gate=gate, direction=direction)
        if form == "full":
            return masked_parts(q, k, v, forward, backward, rowsum=rowsum, dropout_p=dropout_p)
        return chunk_parts(q, k, v, forward, backward, rowsum=rowsum, chunk_size=chunk_size)


def step(
    state: rnn.State,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    normalize: str = "sum",
    gate: str = "target",
    scale: float | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, rnn.State]:
    """One causal step: the output of `direction="forward"` for the next token(s), and the state after it.

    Args:
        state: `initial_state(k, v)` or what the last step returned. Under the `source` gate it is stored
            already decayed by the last token.
        q, k: (B, H, C, D); v: (B, H, C, E), C = 1 for streaming; log_decay: None, (H,), (H, D), (B, H, C) or
            (B, H, C, D).

    Returns:
        (B, H, C, E) in the dtype of `v`, and the new state.
    """
    _check(q, k, v, log_decay, None, None)
    _choice("gate", gate, GATES)
    rowsum = _choice("normalize", normalize, NORMALIZE) == "sum"
    tokens = rnn.Tokens(q, k, v, _lanes(log_decay, q).to(state.z.dtype))
    flag = rnn.inclusive(gate, "forward")
    with no_autocast(q):
        y, row, state, _ = rnn.advance(state, None, tokens, inclusive=flag, diagonal=1, rowsum=rowsum)
    return finish(y, row, scale=q.shape[-1] ** -0.5 if scale is None else scale, eps=eps).to(v.dtype), state


def _lanes(log_decay: Tensor | None, q: Tensor) -> Tensor:
    """Every kind of decay as (B or 1, H or 1, L, D or 1): a number is a vector of one lane."""
    if log_decay is None:
        return q.new_zeros((), dtype=torch.float32).expand(1, 1, q.shape[2], 1)
    if log_decay.dim() <= 2:  # (H,) or (H, D), the same for every token
        per_head = log_decay[:, None] if log_decay.dim() == 1 else log_decay
        return per_head[None, :, None].expand(-1, -1, q.shape[2], -1)
    return log_decay[..., None] if log_decay.dim() == 3 else log_decay


def no_autocast(x: Tensor) -> torch.autocast:
    """A region that computes in the dtypes given; gates and row sums stay in float32 on every device."""
    return torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False)


def resolve_form(form: str, length: int, decays: bool = True, dropout_p: float = 0.0) -> str:
    """The form that "auto" stands for: full while it is the faster one to train, chunk above."""
    if form != "auto":
        return form
    return "full" if length <= FULL_UP_TO or not decays or dropout_p else "chunk"


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def _check(q, k, v, log_decay, valid, segments) -> None:
    def expect(ok: bool, name: str, expected: str, x: Tensor) -> None:
        if not ok:
            raise ValueError(f"{name}: expected {expected}, got {str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}")

    expect(q.dim() == 4 and q.is_floating_point(), "q", "floating point (B, H, L, D)", q)
    batch, heads, length = q.shape[:3]
    expect(length > 0, "q", "at least one token", q)
    expect(k.shape == q.shape and k.dtype == q.dtype, "k", f"{q.dtype} {tuple(q.shape)}, as q", k)
    expect(
        v.dim() == 4 and v.shape[:3] == q.shape[:3] and v.dtype == q.dtype,
        "v",
        f"{q.dtype} {(batch, heads, length)} + (E,)",
        v,
    )
    if log_decay is not None:
        dim = q.shape[3]
        shapes = ((heads,), (heads, dim), (batch, heads, length), (batch, heads, length, dim))
        expected = f"floating point {', '.join(map(str, shapes[:-1]))} or {shapes[-1]}"
        expect(log_decay.shape in shapes and log_decay.is_floating_point(), "log_decay", expected, log_decay)
    if valid is not None:
        expect(valid.shape == (batch, length) and valid.dtype == torch.bool, "valid", f"bool {(batch, length)}", valid)
    if segments is not None:
        whole = not (segments.is_floating_point() or segments.is_complex() or segments.dtype == torch.bool)
        expect(segments.shape == (batch, length) and whole, "segments", f"integer {(batch, length)}", segments)


def _runs(valid: Tensor | None, segments: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Segments as a non-decreasing count (B, L), padding belonging to the segment before it; and all valid tokens."""
    if segments is None:
        return None, valid
    segments = segments.long()
    valid = segments >= 0 if valid is None else valid & (segments >= 0)
    ids = segments.masked_fill(~valid, -1)
    place = torch.arange(ids.shape[1], device=ids.device)
    filled = ids.gather(1, torch.where(valid, place, 0).cummax(1).values)  # padding takes the id before it
    starts = valid & (filled != F.pad(filled[:, :-1], (1, 0), value=-1))
    ordered = ids.sort(1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1) + (ordered[:, 0] >= 0)
    together, message = (starts.sum(1) == distinct).all(), "segments: the tokens of a segment must stand together"
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        torch._assert_async(together, message)  # a graph and a GPU are not waited for
    elif not together:
        raise ValueError(f"{message}, got an id that comes back")
    return starts.cumsum(1), valid
