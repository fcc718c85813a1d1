"""Sets of scores of a call: masks, feature maps and rotations, and the choice of a form."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lion.ops.arguments import Gates, check_values, expand_decay, sum_dtype
from lion.ops.delta import delta_parts, with_delta
from lion.ops.full import Scale, add_diagonal, masked_parts, product_parts, undecayed_parts
from lion.ops.modes import reuses_memory
from lion.ops.piecewise import in_pieces
from lion.ops.prefix import gradients_to
from lion.ops.rotary import rotate_each
from lion.ops.segments import SegmentIndex, prepared
from lion.ops.settings import Settings, resolve_form
from lion.ops.tokens import ScoreSettings, TokenBlock
from lion.ops.vector import full_vector_parts


class ScoreSet(NamedTuple):
    """Tokens whose scores are multiplied by one mask.

    Attributes:
        tokens: Tokens, rotated if there are angles; with the vectors of a delta rule, if there is one.
        how: Form, mask and sums.
        bonus: Weights (H,) or (H, D) of each token's own key, or None.
        no_decay: Whether all decays are 1.
        dropout_p: Probability of dropping a score.
    """

    tokens: TokenBlock
    how: ScoreSettings
    bonus: Tensor | None
    no_decay: bool
    dropout_p: float = 0.0


def score_sets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    valid: Tensor | None,
    segments: Tensor | SegmentIndex | None,
    settings: Settings,
) -> tuple[ScoreSet, ScoreSet | None]:
    """Return the scores of a call, and a second set for the row sums, if those use other scores than the numerator.

    Must run without autocast.
    """
    log_decay, beta, bonus, angles, prefix, erase, read, _ = gates
    no_decay = log_decay is None
    form = resolve_form(settings.form, q.shape[2], gates.delta or not no_decay, settings.dropout_p)
    rowsum, undecayed = settings.normalize != "none", settings.undecayed_erase
    how = ScoreSettings(
        form, settings.decay_convention, settings.direction, True, rowsum, settings.chunk_size, undecayed
    )
    feature_map = settings.feature_map
    checked = isinstance(segments, SegmentIndex)  # prepared masks serve many calls on one batch
    index, valid = prepared(q, valid, segments)
    if not checked:
        check_values(gates, valid)
    if form != "rnn":  # the rnn form widens one piece at a time
        q, k, v = (x.to(sum_dtype(x)) for x in (q, k, v))
    if feature_map is not None and (angles is not None or prefix is not None):  # both apply to mapped q and k
        q, k, feature_map = *TokenBlock(q, k, v, v, valid, feature_map=feature_map).featurized()[:2], None
    *rotated, erase, read = rotate_each(angles, valid, q, k, erase, read)
    if prefix is not None and prefix.requires_grad:
        rotated, log_decay = gradients_to(prefix, *rotated, valid), log_decay.detach()
    decays = expand_decay(log_decay, q)
    tokens = TokenBlock(*rotated, v, decays, valid, index, feature_map)
    if gates.delta:
        return ScoreSet(with_delta(tokens, beta, erase, read), how, None, no_decay), None
    scores = ScoreSet(tokens, how, bonus, no_decay, settings.dropout_p)
    if not separate_rowsum(settings.normalize, angles):
        return scores, None
    others, plain = tokens._replace(q=q, k=k, v=v[..., :0]), settings.normalize == "pre"
    if plain:
        others = others._replace(gate=expand_decay(None, q))
    sums = ScoreSet(others, how, None if plain else bonus, plain or no_decay)
    return scores._replace(how=how._replace(rowsum=False)), sums


def separate_rowsum(normalize: str, angles: Tensor | None) -> bool:
    """Return whether the row sum uses other scores than the numerator: without decay, or without rotation."""
    return normalize == "pre" or (normalize != "none" and angles is not None)


def all_parts(scores: ScoreSet, sums: ScoreSet | None, scale: Scale | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator, multiplied by `scale` of the row sum if that is given, and the row sum."""
    if sums is None:
        return score_parts(scores, scale)
    total = score_parts(sums)[1]
    return score_parts(scores, None if scale is None else (lambda _: scale(total)))[0], total


def score_parts(scores: ScoreSet, scale: Scale | None = None) -> tuple[Tensor, Tensor | None]:
    """Compute the numerator and the row sum of one set of scores; see `all_parts`."""
    tokens, how, bonus, no_decay, dropout_p = scores
    if tokens.delta:
        if how.form == "rnn":
            return finished(in_pieces(tokens, None, how._replace(form="delta_rnn")), scale)
        return finished(delta_parts(tokens, how), scale)
    if bonus is not None:
        bonus = bonus.to(tokens.gate.dtype).reshape(bonus.shape[0], 1, -1)  # (H, 1, D or 1)
    how = how._replace(include_diagonal=bonus is None and (no_decay or how.decay_convention != "between"))
    undecayed = no_decay and how.include_diagonal and how.form == "full"
    product = undecayed and not dropout_p
    if product and not (how.direction == "both" and tokens.segment_index is None):
        how = how._replace(form="chunk")  # one direction or segments: chunks, never an L x L matrix
    if how.form in ("chunk", "rnn"):
        return finished(in_pieces(tokens, bonus, how), scale)
    tokens = tokens.masked()
    q, k, v, log_decay = tokens[:4]
    if product:
        return product_parts(q, k, v, rowsum=how.rowsum, scale=scale)
    decayed = full_vector_parts if log_decay.shape[-1] > 1 else masked_parts
    numerator, total = (undecayed_parts if undecayed else decayed)(tokens, how, dropout_p)
    if not how.include_diagonal:
        numerator, total = add_diagonal(numerator, total, q, k, v, bonus, log_decay.dtype, dropout_p)
    return finished((numerator, total), scale)


def finished(parts: tuple[Tensor, Tensor | None], scale: Scale | None) -> tuple[Tensor, Tensor | None]:
    return parts if scale is None else (scaled(parts[0], scale(parts[1])), parts[1])


def scaled(numerator: Tensor, factor: Tensor | float) -> Tensor:
    if reuses_memory():
        return numerator.mul_(factor)  # in place: inference in the rnn form keeps a single copy of its outputs
    return (numerator * factor).to(numerator.dtype)
