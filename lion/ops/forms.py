"""From the arguments of a call to its tokens, and from these to a form: only this file knows the path of a call."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from lion.ops.arguments import Gates, check_values, expand_decay
from lion.ops.delta import delta_sums, with_delta
from lion.ops.dtypes import sum_dtype, wide_dtype
from lion.ops.full import full_sums, product, product_row_sum
from lion.ops.piecewise import in_pieces
from lion.ops.prefix import gradients_to
from lion.ops.rotary import rotate_tokens
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import Settings, resolve_form
from lion.ops.tokens import Sums, Tokens
from lion.ops.vector import full_vector_sums


class Scores(NamedTuple):
    """Scores `Q K^T * M` that are to be computed.

    Attributes:
        tokens: Tokens, rotated if there are angles; with the vectors of a delta rule, if there is one.
        settings: Settings of the scores and their sums.
        form: "product" (Lion-lit in both directions), "full", "chunk" or "rnn".
    """

    tokens: Tokens
    settings: Settings
    form: str


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    valid: Tensor | None,
    segments: Tensor | SegmentIndex | None,
    settings: Settings,
) -> tuple[Scores, Scores | None]:
    """Return the scores of a call, and those of the row sums, if they differ: without decay, or without rotation.

    Must run without autocast.
    """
    checked = isinstance(segments, SegmentIndex)  # prepared masks serve many calls on one batch
    masks = prepared(q, valid, segments)
    valid = masks.valid
    if not checked:
        check_values(gates, valid)
    decays = gates.log_decay is not None
    form = resolve_form(settings.form, q.shape[2], decays or gates.delta, settings.dropout_p)
    if form != "rnn":  # the rnn form widens one piece at a time
        dtype = sum_dtype(q)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    log_decay = expand_decay(gates.log_decay, q)
    tokens = Tokens(q, k, v, log_decay, valid, masks.index, settings.feature_map, own_weight(gates, settings, q))
    if gates.delta:
        tokens = with_delta(tokens, gates)
    if gates.angles is None and gates.prefix is None and settings.normalize != "pre":
        return Scores(tokens, settings, path_of(tokens, settings, form)), None

    if gates.angles is not None or gates.prefix is not None:
        tokens = tokens.featurized()
    rotated = tokens
    if gates.angles is not None:
        rotated = rotate_tokens(tokens, gates.angles)
    if gates.prefix is not None and gates.prefix.requires_grad:
        q, k = gradients_to(gates.prefix, rotated.q, rotated.k, valid)
        rotated = rotated._replace(q=q, k=k, log_decay=rotated.decays().detach())
    if not settings.row_sums:
        return Scores(rotated, settings, path_of(rotated, settings, form)), None
    undivided = replace(settings, normalize="none")
    scores = Scores(rotated, undivided, path_of(rotated, settings, form))
    tokens = tokens._replace(v=v[..., :0])
    if settings.normalize == "pre":
        tokens = tokens._replace(log_decay=None, bonus=None)
    without_dropout = replace(settings, dropout_p=0.0)
    return scores, Scores(tokens, without_dropout, path_of(tokens, without_dropout, form))


def own_weight(gates: Gates, settings: Settings, q: Tensor) -> Tensor | None:
    """Return the weight (H or 1, 1, D or 1) of each token's own key, or None if it counts like other keys."""
    bonus = gates.bonus
    if bonus is None and gates.log_decay is not None and settings.decay_convention == "between":
        bonus = q.new_ones(1)  # `between` masks the diagonal
    if bonus is None:
        return None
    return bonus.to(wide_dtype(q)).reshape(len(bonus), 1, -1)


def path_of(tokens: Tokens, settings: Settings, form: str) -> str:
    """Return the path of a call: its form, or for Lion-lit in full the product `Q (K^T V)` or chunks.

    In one direction or with segments, chunks take the place of the product: never an L x L matrix.
    """
    plain = tokens.log_decay is None and tokens.bonus is None and not tokens.delta
    if form != "full" or not plain or settings.dropout_p:
        return form
    if settings.direction == "both" and tokens.segment is None:
        return "product"
    return "chunk"


def call_sums(scores: Scores, of_rows: Scores | None) -> Sums:
    """Compute the sums over keys (B, H, L, ..) of a call; its row sums are those of `of_rows`, if they differ."""
    sums = sums_of(scores)
    if of_rows is None:
        return sums
    return Sums(sums.numerator, sums_of(of_rows).row_sum)


def sums_of(scores: Scores) -> Sums:
    """Compute the sums over keys (B, H, L, ..) of scores by their form."""
    tokens, settings, form = scores
    if tokens.delta:
        if form == "rnn":
            return in_pieces(tokens, settings, "delta_rnn")
        return delta_sums(tokens, settings, form)
    if form in ("chunk", "rnn"):
        return in_pieces(tokens, settings, form)
    tokens = tokens.masked()
    if form == "product":
        row_sum = product_row_sum(tokens.q, tokens.k) if settings.row_sums else None
        return Sums(product(tokens.q, tokens.k, tokens.v), row_sum)
    if tokens.vector:
        return full_vector_sums(tokens, settings)
    return full_sums(tokens, settings)
