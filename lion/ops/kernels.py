"""Triton kernels of scalar decays: states between chunks, outputs, and gradients (Eq. 13, 14 and the chunk form).

A sequence is cut into N chunks of C tokens; a short one is a single chunk, which is the full form. `low` and `up`
(B H, N C) are prefix sums of the log decays within each chunk, times log2(e), and `end` (B H, N) is the sum of a chunk.
For the conventions, see `lion.ops.decay`:

    source: low exclusive, up inclusive    target: low inclusive, up exclusive    symmetric: both inclusive

Within a chunk and between chunks, with S_c the state that enters chunk c from the left and S'_c that from the right:

    M_ij = 2^(low_i - low_j) for j <= i, and 2^(up_j - up_i) for j > i
    (Q K^T * M) V = sum over the chunk of (q_i k_j) M_ij v_j  +  2^low_i q_i S_c  +  2^(end_c - up_i) q_i S'_c
    S_{c+1} = 2^end_c S_c + sum_j 2^(end_c - low_j) k_j v_j^T
    S'_{c-1} = 2^end_c S'_c + sum_j 2^up_j k_j v_j^T

No exponent is positive, because all sums are those of one chunk. The row sums are the same sums with v_j = 1, from
states z. The gradients of keys and values read states G of the queries and of the gradients of the rows, from the other
side. No kernel adds to memory that another program writes, so that two runs have the same bits.

`D` and `E` are the dimensions of keys and values. `DECAY`, `BELOW`, `ABOVE`, `SUMS`, `VALID` and `PACKED` say whether
there are decays, pairs j <= i, pairs j >= i, row sums, padding and segments; `MAP` is the feature map. A program has
`ROWS` tokens, and a step of its loop `BLOCK` tokens. `PRECISION` is that of products of float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums_kernel(
    a, low, up, end, L, N, LOW_INCLUSIVE: tl.constexpr, UP_INCLUSIVE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute the prefix sums of the log decays a (B H, L) within each chunk, in float64."""
    c = tl.program_id(0)
    bh = tl.program_id(1)
    i = c * C + tl.arange(0, C)
    x = tl.load(a + bh * L + i, i < L, 0.0).to(tl.float64) * 1.4426950408889634
    inclusive = tl.cumsum(x, 0)
    exclusive = inclusive - x
    place = bh * N * C + i
    tl.store(low + place, (inclusive if LOW_INCLUSIVE else exclusive).to(tl.float32))
    tl.store(up + place, (inclusive if UP_INCLUSIVE else exclusive).to(tl.float32))
    tl.store(end + bh * N + c, tl.min(inclusive, 0).to(tl.float32))  # the last one, because no decay is above 1


@triton.jit
def phi(x, MAP: tl.constexpr):
    """Return the feature map of x (tokens, D), float32."""
    x = x.to(tl.float32)
    if MAP == "silu_shifted":
        x = x * tl.sigmoid(x) + 0.5
        x = x * tl.rsqrt(tl.sum(x * x, 1))[:, None]
    elif MAP == "elu1":
        x = tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0.0)))
    return x


@triton.jit
def phi_gradient(x, d, MAP: tl.constexpr):
    """Return the gradient of x (tokens, D) from the gradient d of phi(x)."""
    x = x.to(tl.float32)
    if MAP == "silu_shifted":
        s = tl.sigmoid(x)
        u = x * s + 0.5
        n = tl.rsqrt(tl.sum(u * u, 1))[:, None]
        d = n * (d - u * (n * n * tl.sum(u * d, 1)[:, None])) * (s + x * s * (1 - s))
    elif MAP == "elu1":
        d = d * tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0.0)))
    return d


@triton.jit
def load_tokens(x, stride, i, real, DIM: tl.constexpr):
    """Load rows i of x (L, DIM), 0 where `real` is False."""
    d = tl.arange(0, DIM)
    return tl.load(x + i[:, None] * stride + d[None, :], real[:, None], 0.0)


@triton.jit
def are_real(i, length, valid, b, VALID: tl.constexpr):
    """Return whether tokens i exist and are valid."""
    real = i < length
    if VALID:
        real = real & (tl.load(valid + b * length + i, real, 0) != 0)
    return real


@triton.jit
def load_keys(k, stride, j, real, MAP: tl.constexpr, D: tl.constexpr):
    """Load phi(k_j) of keys j of k (L, D), 0 where `real` is False."""
    x = phi(load_tokens(k, stride, j, real, D), MAP)
    return tl.where(real[:, None], x, 0.0).to(k.dtype.element_ty)


@triton.jit
def load_sums(low, up, i, DECAY: tl.constexpr):
    """Load the prefix sums of tokens i, 0 without decays."""
    if DECAY:
        low_i = tl.load(low + i)
        up_i = tl.load(up + i)
    else:
        low_i = 0.0 * i
        up_i = 0.0 * i
    return low_i, up_i


@triton.jit
def load_segments(segment, b, length, i, PACKED: tl.constexpr):
    if PACKED:
        found = tl.load(segment + b * length + i, (i >= 0) & (i < length), -1)
    else:
        found = 0 * i
    return found


@triton.jit
def mask_of(
    low_i, up_i, low_j, up_j, i, j, seg_i, seg_j,
    DECAY: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Return M_ij of queries i and keys j, whose shapes are (rows, 1) and (1, columns), or the other way round."""
    below = i >= j
    if DECAY:
        m = tl.exp2(tl.minimum(tl.where(below, low_i - low_j, up_j - up_i), 0.0))
    else:
        m = tl.full(below.shape, 1.0, tl.float32)
    if not ABOVE:
        m = tl.where(below, m, 0.0)
    if not BELOW:
        m = tl.where(i <= j, m, 0.0)
    if PACKED:
        m = tl.where(seg_i == seg_j, m, 0.0)
    return m


@triton.jit
def enters_at(c, right, C: tl.constexpr):
    """Return the token whose segment the state of chunk c comes from: the one before the chunk, or the one after it."""
    return tl.where(right == 1, (c + 1) * C, c * C - 1)


@triton.jit
def row_factors(z, i, real, SCALE, EPS, SUMS: tl.constexpr):
    """Return the factors 1 / z_i of rows i, or the scale if rows are not divided."""
    if SUMS:
        z_i = tl.load(z + i, real, 0.0)
        factor = tl.where(z_i == 0, 0.0, 1 / tl.maximum(z_i, EPS))
    else:
        factor = tl.full(i.shape, 1.0, tl.float32) * SCALE
    return factor


@triton.jit
def load_state(S, z_of_S, right: tl.constexpr, bh, heads, N, c, D: tl.constexpr, E: tl.constexpr):
    """Load the state (D, E) and its z (D,) that enter chunk c from the left or from the right."""
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    place = (right * heads + bh) * N + c
    return tl.load(S + place * D * E + d[:, None] * E + e[None, :]), tl.load(z_of_S + place * D + d)


@triton.jit
def reach_of(
    low_i, up_i, end, number, c, seg_i, segment, b, length, right: tl.constexpr,
    DECAY: tl.constexpr, PACKED: tl.constexpr, KEYS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the decays between tokens of chunk c and the state that enters it, 0 for one of another segment.

    As queries, tokens read states of keys; as keys (`KEYS`), they read states of queries, from the other side.
    """
    reach = tl.full(low_i.shape, 1.0, tl.float32)
    if DECAY:
        last = tl.load(end + number + c)
        if KEYS:
            reach = tl.exp2(up_i if right == 0 else last - low_i)
        else:
            reach = tl.exp2(low_i if right == 0 else last - up_i)
    if PACKED:
        other = load_segments(segment, b, length, enters_at(c, right, C), PACKED)
        reach = tl.where(seg_i == other, reach, 0.0)
    return reach


@triton.jit
def states_kernel(
    k, v, z, delta, valid, segment, low, up, end, S, z_of_S,
    H, L, N, SCALE, EPS, k_b, k_h, k_l, v_b, v_h, v_l,
    GRADIENT: tl.constexpr, FIRST: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, SUMS: tl.constexpr,
    VALID: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the states that enter each chunk from the left, or from the right: S (2, B H, N, D, E), z (2, B H, N, D).

    The states are those of keys and values; with `GRADIENT`, those of queries (`k`) and gradients of outputs (`v`).
    """
    bh = tl.program_id(0)
    right = tl.program_id(1) + FIRST
    b = bh // H
    h = bh % H
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    sums = up if (right == 1) != GRADIENT else low
    state = tl.zeros((D, E), tl.float32)
    total = tl.zeros((D,), tl.float32)
    for step in range(N):
        c = N - 1 - step if right == 1 else step
        place = (right * tl.num_programs(0) + bh) * N + c
        tl.store(S + place * D * E + d[:, None] * E + e[None, :], state.to(S.dtype.element_ty))
        tl.store(z_of_S + place * D + d, total)
        kept = 1.0
        if DECAY:
            last = tl.load(end + bh * N + c)
            kept = tl.exp2(last)
        edge = tl.where(right == 1, c * C, tl.minimum((c + 1) * C, L) - 1)
        own = load_segments(segment, b, L, edge, PACKED)
        if PACKED:
            entered = load_segments(segment, b, L, enters_at(c, right, C), PACKED)
            kept = tl.where(entered == own, kept, 0.0)
        state = state * kept
        total = total * kept
        for first in range(0, C, BLOCK):
            j = c * C + first + tl.arange(0, BLOCK)
            real = are_real(j, L, valid, b, VALID)
            if PACKED:
                real = real & (load_segments(segment, b, L, j, PACKED) == own)
            key = phi(load_tokens(k + b * k_b + h * k_h, k_l, j, real, D), MAP)
            key = tl.where(real[:, None], key, 0.0)
            if DECAY:
                t = tl.load(sums + bh * N * C + j)
                key = key * tl.exp2(t if right == 1 else last - t)[:, None]
            value = load_tokens(v + b * v_b + h * v_h, v_l, j, real, E)
            one = tl.full((BLOCK,), 1.0, tl.float32)
            if GRADIENT:
                factor = row_factors(z + bh * L, j, real, SCALE, EPS, SUMS)
                value = (value.to(tl.float32) * factor[:, None]).to(k.dtype.element_ty)
                one = -tl.load(delta + bh * L + j, real, 0.0)
            state = tl.dot(tl.trans(key.to(value.dtype)), value, state, input_precision=PRECISION)
            total += tl.sum(key * one[:, None], 0)


@triton.jit
def outputs_kernel(
    q, k, v, valid, segment, low, up, end, S, z_of_S, y, z,
    H, L, N, SCALE, EPS, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l,
    STATES: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
    SUMS: tl.constexpr, VALID: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the outputs y (B, L, H, E) and the row sums z (B H, L) of `ROWS` queries."""
    c = tl.program_id(0) // (C // ROWS)
    bh = tl.program_id(1)
    heads = tl.num_programs(1)
    b = bh // H
    h = bh % H
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    low += bh * N * C
    up += bh * N * C
    narrow = q.dtype.element_ty
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = are_real(i, L, valid, b, VALID)
    q_i = phi(load_tokens(q + b * q_b + h * q_h, q_l, i, real, D), MAP).to(narrow)
    low_i, up_i = load_sums(low, up, i, DECAY)
    seg_i = load_segments(segment, b, L, i, PACKED)
    numerator = tl.zeros((ROWS, E), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    for first in range(0, tl.minimum(C, L - c * C), BLOCK):
        j = c * C + first + tl.arange(0, BLOCK)
        key = are_real(j, L, valid, b, VALID)
        k_j = load_keys(k, k_l, j, key, MAP, D)
        low_j, up_j = load_sums(low, up, j, DECAY)
        seg_j = load_segments(segment, b, L, j, PACKED)
        m = mask_of(
            low_i[:, None], up_i[:, None], low_j[None, :], up_j[None, :], i[:, None], j[None, :],
            seg_i[:, None], seg_j[None, :], DECAY, BELOW, ABOVE, PACKED,
        )  # fmt: skip
        weights = tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION) * m
        row_sum += tl.sum(weights, 1)
        numerator = tl.dot(weights.to(narrow), load_tokens(v, v_l, j, key, E), numerator, input_precision=PRECISION)
    if STATES:
        for right in tl.static_range(2):
            if (right == 0 and BELOW) or (right == 1 and ABOVE):
                state, total = load_state(S, z_of_S, right, bh, heads, N, c, D, E)
                reach = reach_of(low_i, up_i, end, bh * N, c, seg_i, segment, b, L, right, DECAY, PACKED, False, C)
                numerator += reach[:, None] * tl.dot(q_i, state, input_precision=PRECISION)
                row_sum += reach * tl.sum(q_i.to(tl.float32) * total[None, :], 1)
    factor = tl.full((ROWS,), 1.0, tl.float32) * SCALE
    if SUMS:
        factor = tl.where(row_sum == 0, 0.0, 1 / tl.maximum(row_sum, EPS))
        tl.store(z + bh * L + i, row_sum, i < L)
    e = tl.arange(0, E)
    out = tl.where(real[:, None], numerator * factor[:, None], 0.0)
    tl.store(y + ((b * L + i[:, None]) * H + h) * E + e[None, :], out.to(y.dtype.element_ty), (i < L)[:, None])


@triton.jit
def queries_kernel(
    q, k, v, valid, segment, low, up, end, S, z_of_S, y, z, dy, dq, delta, d_low, d_up,
    H, L, N, SCALE, EPS, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, dy_b, dy_h, dy_l,
    STATES: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
    SUMS: tl.constexpr, VALID: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `ROWS` queries, (B, L, H, D), and of their sums as queries, `d_low` and `d_up`."""
    c = tl.program_id(0) // (C // ROWS)
    bh = tl.program_id(1)
    heads = tl.num_programs(1)
    b = bh // H
    h = bh % H
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    low += bh * N * C
    up += bh * N * C
    narrow = q.dtype.element_ty
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = are_real(i, L, valid, b, VALID)
    q_i = phi(load_tokens(q, q_l, i, real, D), MAP).to(narrow)
    wide = load_tokens(dy + b * dy_b + h * dy_h, dy_l, i, real, E).to(tl.float32)
    wide = wide * row_factors(z + bh * L, i, real, SCALE, EPS, SUMS)[:, None]
    g_i = wide.to(narrow)
    of_sums = tl.zeros((ROWS,), tl.float32)
    if SUMS:  # minus the gradients of the row sums; that of a divisor `EPS` is 0
        of_sums = tl.sum(wide * load_tokens(y + (b * L * H + h) * E, H * E, i, real, E).to(tl.float32), 1)
        of_sums = tl.where(tl.load(z + bh * L + i, real, 0.0) > EPS, of_sums, 0.0)
    tl.store(delta + bh * L + i, of_sums, i < L)
    low_i, up_i = load_sums(low, up, i, DECAY)
    seg_i = load_segments(segment, b, L, i, PACKED)
    dq_i = tl.zeros((ROWS, D), tl.float32)
    of_low = tl.zeros((ROWS,), tl.float32)
    of_up = tl.zeros((ROWS,), tl.float32)
    if STATES:
        for right in tl.static_range(2):
            if (right == 0 and BELOW) or (right == 1 and ABOVE):
                state, total = load_state(S, z_of_S, right, bh, heads, N, c, D, E)
                reach = reach_of(low_i, up_i, end, bh * N, c, seg_i, segment, b, L, right, DECAY, PACKED, False, C)
                part = tl.dot(g_i, tl.trans(state), input_precision=PRECISION) - of_sums[:, None] * total[None, :]
                part *= reach[:, None]
                of_rows = tl.sum(part * q_i.to(tl.float32), 1)
                if right == 0:
                    of_low += of_rows
                else:
                    of_up -= of_rows
                dq_i += part
    for first in range(0, tl.minimum(C, L - c * C), BLOCK):
        j = c * C + first + tl.arange(0, BLOCK)
        key = are_real(j, L, valid, b, VALID)
        k_j = load_keys(k, k_l, j, key, MAP, D)
        v_j = load_tokens(v, v_l, j, key, E)
        low_j, up_j = load_sums(low, up, j, DECAY)
        seg_j = load_segments(segment, b, L, j, PACKED)
        m = mask_of(
            low_i[:, None], up_i[:, None], low_j[None, :], up_j[None, :], i[:, None], j[None, :],
            seg_i[:, None], seg_j[None, :], DECAY, BELOW, ABOVE, PACKED,
        )  # fmt: skip
        d_scores = (tl.dot(g_i, tl.trans(v_j), input_precision=PRECISION) - of_sums[:, None]) * m
        if DECAY:
            d_log = d_scores * tl.dot(q_i, tl.trans(k_j), input_precision=PRECISION)
            below = i[:, None] >= j[None, :]
            of_low += tl.sum(tl.where(below, d_log, 0.0), 1)
            of_up -= tl.sum(tl.where(below, 0.0, d_log), 1)
        dq_i = tl.dot(d_scores.to(narrow), k_j, dq_i, input_precision=PRECISION)
    d = tl.arange(0, D)
    dq_i = phi_gradient(load_tokens(q, q_l, i, real, D), dq_i, MAP)
    dq_i = tl.where(real[:, None], dq_i, 0.0).to(narrow)
    tl.store(dq + ((b * L + i[:, None]) * H + h) * D + d[None, :], dq_i, (i < L)[:, None])
    if DECAY:
        tl.store(d_low + bh * L + i, of_low, i < L)
        tl.store(d_up + bh * L + i, of_up, i < L)


@triton.jit
def keys_kernel(
    q, k, v, valid, segment, low, up, end, G, z_of_G, z, delta, dy, dk, dv, d_low, d_up,
    H, L, N, SCALE, EPS, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, dy_b, dy_h, dy_l,
    STATES: tl.constexpr, MAP: tl.constexpr, DECAY: tl.constexpr, BELOW: tl.constexpr, ABOVE: tl.constexpr,
    SUMS: tl.constexpr, VALID: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `ROWS` keys and values, (B, L, H, D or E), and of their sums as keys.

    `d_low` and `d_up` hold the gradients of the sums as queries, to which those as keys are added.
    """
    c = tl.program_id(0) // (C // ROWS)
    bh = tl.program_id(1)
    heads = tl.num_programs(1)
    b = bh // H
    h = bh % H
    q += b * q_b + h * q_h
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    dy += b * dy_b + h * dy_h
    low += bh * N * C
    up += bh * N * C
    narrow = q.dtype.element_ty
    j = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = are_real(j, L, valid, b, VALID)
    k_j = load_keys(k, k_l, j, real, MAP, D)
    v_j = load_tokens(v, v_l, j, real, E)
    low_j, up_j = load_sums(low, up, j, DECAY)
    seg_j = load_segments(segment, b, L, j, PACKED)
    dk_j = tl.zeros((ROWS, D), tl.float32)
    dv_j = tl.zeros((ROWS, E), tl.float32)
    of_low = tl.zeros((ROWS,), tl.float32)
    of_up = tl.zeros((ROWS,), tl.float32)
    if STATES:
        for right in tl.static_range(2):
            if (right == 0 and ABOVE) or (right == 1 and BELOW):
                state, total = load_state(G, z_of_G, right, bh, heads, N, c, D, E)
                reach = reach_of(low_j, up_j, end, bh * N, c, seg_j, segment, b, L, right, DECAY, PACKED, True, C)
                part = tl.dot(v_j, tl.trans(state), input_precision=PRECISION) + total[None, :]
                part *= reach[:, None]
                of_keys = tl.sum(part * k_j.to(tl.float32), 1)
                if right == 1:
                    of_low -= of_keys
                else:
                    of_up += of_keys
                dk_j += part
                dv_j += tl.dot(k_j, state, input_precision=PRECISION) * reach[:, None]
    for first in range(0, tl.minimum(C, L - c * C), BLOCK):
        i = c * C + first + tl.arange(0, BLOCK)
        query = are_real(i, L, valid, b, VALID)
        q_i = phi(load_tokens(q, q_l, i, query, D), MAP).to(narrow)
        factor = row_factors(z + bh * L, i, query, SCALE, EPS, SUMS)
        g_i = (load_tokens(dy, dy_l, i, query, E).to(tl.float32) * factor[:, None]).to(narrow)
        of_sums = tl.load(delta + bh * L + i, query, 0.0)
        low_i, up_i = load_sums(low, up, i, DECAY)
        seg_i = load_segments(segment, b, L, i, PACKED)
        m = mask_of(
            low_i[None, :], up_i[None, :], low_j[:, None], up_j[:, None], i[None, :], j[:, None],
            seg_i[None, :], seg_j[:, None], DECAY, BELOW, ABOVE, PACKED,
        )  # fmt: skip
        weights = tl.dot(k_j, tl.trans(q_i), input_precision=PRECISION) * m  # (keys, queries)
        dv_j = tl.dot(weights.to(narrow), g_i, dv_j, input_precision=PRECISION)
        d_weights = tl.dot(v_j, tl.trans(g_i), input_precision=PRECISION) - of_sums[None, :]
        dk_j = tl.dot((d_weights * m).to(narrow), q_i, dk_j, input_precision=PRECISION)
        if DECAY:
            d_log = d_weights * weights
            below = i[None, :] >= j[:, None]
            of_low -= tl.sum(tl.where(below, d_log, 0.0), 1)
            of_up += tl.sum(tl.where(below, 0.0, d_log), 1)
    d = tl.arange(0, D)
    e = tl.arange(0, E)
    exists = (j < L)[:, None]
    dk_j = phi_gradient(load_tokens(k, k_l, j, real, D), dk_j, MAP)
    row = (b * L + j[:, None]) * H + h
    tl.store(dk + row * D + d[None, :], tl.where(real[:, None], dk_j, 0.0).to(narrow), exists)
    tl.store(dv + row * E + e[None, :], tl.where(real[:, None], dv_j, 0.0).to(narrow), exists)
    if DECAY:
        place = bh * L + j
        tl.store(d_low + place, tl.load(d_low + place, j < L, 0.0) + of_low, j < L)
        tl.store(d_up + place, tl.load(d_up + place, j < L, 0.0) + of_up, j < L)
