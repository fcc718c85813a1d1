"""The entry to all forms: the choice of form, masks, and normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.arguments import (
    as_lanes,
    as_runs,
    check_chunk_size,
    check_gates,
    check_masks,
    check_tokens,
    choice,
    no_autocast,
    sum_dtype,
)
from lion.ops.blockwise import blockwise_parts
from lion.ops.decay import DECAY_CONVENTIONS, DIRECTIONS, make_directions
from lion.ops.delta import delta_parts
from lion.ops.features import check_feature_map
from lion.ops.full import add_diagonal, masked_parts, product_parts
from lion.ops.piecewise import How, in_pieces
from lion.ops.rnn import Tokens
from lion.ops.rotary import rotate_pair
from lion.ops.vector import full_vector_parts

FORMS = ("full", "chunk", "rnn")
NORMALIZE = ("sum", "max", "pre", "none")
FULL_UP_TO = 256  # tokens; above it the chunk form trains (`./run.sh bench ops`) and runs (`bench inference`) faster


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    angles: Tensor | None = None,
    feature_map: str | None = None,
    form: str = "full",
    direction: str = "both",
    normalize: str = "sum",
    decay_convention: str = "source",
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
        q, k: Queries and keys (B, H, L, D), through the feature map unless it is given. Gates on the key are folded
            into k.
        v: Values (B, H, L, E). Float16 is computed in float32, as its sums would overflow; bfloat16 is not.
        log_decay: log lambda <= 0: None (Lion-lit), (H,) (Lion-D) or (B, H, L) (Lion-S); with a lambda for each
            key dimension (H, D) or (B, H, L, D). What is above 0 counts as 0: a lambda is at most 1.
        beta: (B, H, L) in [0, 1]: the delta rule (see `lion.ops.delta`) in place of decays, for keys of norm 1.
            Takes `normalize="none"`.
        bonus: (H,) or (H, D): weight of a token's own key, `sum_d bonus_d q_id k_id` on the diagonal, in place of 1.
        angles: (L, D/2), (H, L, D/2) or (B, 1 or H, L, D/2): rotation of q and k (`lion.ops.rotary`). Row sums are
            those of the unrotated scores; rotate q and k before the call where they should not be.
        feature_map: An entry of `lion.ops.features` that q and k have yet to go through; without gradients, chunks and
            steps then hold no copy of them.
        form: "full", "chunk", "rnn", "auto" (by length), or "blockwise" (`lion.ops.blockwise`).
        direction: "both", "forward" or "backward"; the diagonal is counted once in each.
        normalize: "sum" divides each row by its sum c (at least `eps`), for positive feature maps; "max" by
            `max(|c|, 1)` (xLSTM), both directions added up first; "pre" by the sum without decay, taken before the mask
            (appendix B.1-B.3); "none" does not. `max` and `none` take `scale`.
        decay_convention: Which tokens' decays lie between two tokens: "source", "target", "symmetric" or "between";
            see `lion.ops.decay`.
        scale: Factor on the scores, default 1/sqrt(D). It cancels under "sum" and "pre".
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
        ValueError: An argument of the wrong shape, dtype or name, or two that do not go together.
        RuntimeError: Under `torch.jit.trace`.
    """
    numerator, rowsum = linear_attention_parts(
        q,
        k,
        v,
        log_decay,
        beta=beta,
        bonus=bonus,
        angles=angles,
        feature_map=feature_map,
        form=form,
        direction=direction,
        normalize=normalize,
        decay_convention=decay_convention,
        chunk_size=chunk_size,
        valid=valid,
        segments=segments,
        dropout_p=dropout_p,
    )
    return finish(numerator, rowsum, normalize, scale=default_scale(scale, q), eps=eps).to(v.dtype)


def default_scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def finish(numerator: Tensor, rowsum: Tensor | None, normalize: str, *, scale: float, eps: float) -> Tensor:
    """The one division: numerator (B, H, L, E) by what `normalize` makes of the row sum (B, H, L).

    Without gradients the result takes the numerator's memory.
    """
    if rowsum is None:
        factor = scale
    elif normalize == "max":
        factor = (scale / (scale * rowsum).abs().clamp_min(1))[..., None]
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
    beta: Tensor | None = None,
    bonus: Tensor | None = None,
    angles: Tensor | None = None,
    feature_map: str | None = None,
    form: str = "full",
    direction: str = "both",
    normalize: str = "sum",
    decay_convention: str = "source",
    chunk_size: int = 64,
    valid: Tensor | None = None,
    segments: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Numerator (B, H, L, E) and float32 row sum (B, H, L), undivided: several scans can be added up first.

    Arguments as in `linear_attention`; with `normalize="none"` there is no row sum (None). Beside float16 tokens the
    numerator is float32.
    """
    check_tokens(q, k, v)
    check_gates(q, log_decay, beta, bonus, angles)
    check_masks(q, valid, segments)
    check_names(direction, decay_convention, normalize)
    check_feature_map(feature_map)
    plain = log_decay is None and beta is None
    form = resolve_form(choice("form", form, (*FORMS, "blockwise", "auto")), q.shape[2], not plain, dropout_p)
    if dropout_p and form != "full":
        raise ValueError(f"dropout_p: score dropout exists in the full form only, got form={form!r}")
    check_chunk_size(chunk_size)
    check_pairs(normalize, log_decay, beta, bonus, form, dropout_p)

    how = dict(form=form, direction=direction, decay_convention=decay_convention, chunk_size=chunk_size)
    with no_autocast(q):
        run, valid = as_runs(valid, segments)
        if form != "rnn":  # which widens a piece at a time
            q, k, v = (x.to(sum_dtype(x)) for x in (q, k, v))
        if angles is not None and feature_map is not None:  # rotation comes after it
            q, k, feature_map = *Tokens(q, k, v, v, valid, phi=feature_map).mapped()[:2], None
        turned = rotate_pair(q, k, angles, valid)
        if beta is not None:
            tokens = Tokens(*turned, v, beta[..., None], valid, run, feature_map)
            if form == "rnn":
                return in_pieces(tokens, None, How("delta", decay_convention, direction, True, False, chunk_size))
            return delta_parts(tokens, form=form, direction=direction, chunk_size=chunk_size)
        tokens = Tokens(*turned, v, as_lanes(log_decay, q, cut=form != "rnn"), valid, run, feature_map)
        apart = separate_rowsum(normalize, angles)
        rowsum = normalize != "none" and not apart
        numerator, total = _parts(tokens, bonus, plain, rowsum=rowsum, dropout_p=dropout_p, **how)
        if apart:  # of other scores than the numerator's: once more, with values of width 0
            tokens = tokens._replace(q=q, k=k, v=v[..., :0])
            if normalize == "pre":
                tokens, bonus, plain = tokens._replace(gate=as_lanes(None, q)), None, True
            total = _parts(tokens, bonus, plain, rowsum=True, dropout_p=0.0, **how)[1]
        return numerator, total


def separate_rowsum(normalize: str, angles: Tensor | None) -> bool:
    """Whether the row sum is that of other scores than the numerator's: without decay, or without rotation."""
    return normalize == "pre" or (normalize != "none" and angles is not None)


def _parts(
    tokens: Tokens,
    bonus: Tensor | None,
    plain: bool,
    *,
    form: str,
    direction: str,
    decay_convention: str,
    chunk_size: int,
    rowsum: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor | None]:
    """Numerator and row sum of one set of scores; `plain`: no decay."""
    if bonus is not None:
        bonus = bonus.to(tokens.gate.dtype).reshape(bonus.shape[0], 1, -1)  # (H, 1, D or 1)
    own = bonus is None and (plain or decay_convention != "between")
    product = plain and own and form == "full" and not dropout_p
    if product and not (direction == "both" and tokens.run is None):
        form = "chunk"  # a product with borders: still never an L x L matrix
    if form in ("chunk", "rnn"):
        return in_pieces(tokens, bonus, How(form, decay_convention, direction, own, rowsum, chunk_size))
    q, k, v, log_decay, _, run, _ = tokens.kept()
    if product:
        return product_parts(q, k, v, rowsum=rowsum)

    how = dict(own=own, rowsum=rowsum)
    if form == "full":
        full = full_vector_parts if log_decay.shape[-1] > 1 else masked_parts
        how |= dict(decay_convention=decay_convention, direction=direction, dropout_p=dropout_p)
        numerator, total = full(q, k, v, log_decay, run, **how)
    else:
        directions = make_directions(log_decay, run, decay_convention=decay_convention, direction=direction)
        numerator, total = blockwise_parts(q, k, v, directions, chunk_size=chunk_size, **how)
    if not own:
        numerator, total = add_diagonal(numerator, total, q, k, v, bonus, log_decay.dtype)
    return numerator, total


def resolve_form(form: str, length: int, decays: bool = True, dropout_p: float = 0.0) -> str:
    """The form that "auto" stands for: full while it is the faster one to train and to run, chunk above."""
    if form != "auto":
        return form
    return "full" if length <= FULL_UP_TO or not decays or dropout_p else "chunk"


def check_names(direction: str, decay_convention: str, normalize: str) -> None:
    choice("direction", direction, DIRECTIONS)
    choice("decay_convention", decay_convention, DECAY_CONVENTIONS)
    choice("normalize", normalize, NORMALIZE)


def check_pairs(
    normalize: str,
    log_decay: Tensor | None,
    beta: Tensor | None,
    bonus: Tensor | None,
    form: str = "full",
    dropout_p: float = 0.0,
) -> None:
    """Arguments that do not go together."""
    if beta is not None:
        if log_decay is not None or bonus is not None:
            raise ValueError("beta: the delta rule takes neither log_decay nor bonus")
        if normalize != "none":
            raise ValueError(f"beta: the delta rule takes normalize='none', got {normalize!r}")
        if dropout_p:
            raise ValueError("dropout_p: the delta rule has no scores to drop")
    vectors = log_decay is not None and log_decay.dim() in (2, 4)
    if form == "blockwise" and (beta is not None or vectors):
        raise ValueError("form: 'blockwise' takes no decay or one a token and head, use 'chunk'")
