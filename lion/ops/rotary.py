"""Rotation of q and k by position: a complex decay is a real decay times a rotation.

With `lambda = |lambda| exp(i theta)`, the factor between two tokens at distance n is `|lambda|^n exp(i theta n)`. Its
angle is a difference of positions times theta. It is therefore enough to rotate pairs of key dimensions by an angle for
each token (RoPE, LRPE, the complex states of S4D and HiPPO), and the mask M stays real:

    Re( q_i conj(k_j) exp(i (a_i - a_j)) ) = rotate(q_i, a_i) . rotate(k_j, a_j)
"""

from __future__ import annotations

import torch
from torch import Tensor

from lion.ops.dtypes import wide_dtype
from lion.ops.tokens import Tokens, mask_tokens, optional


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the pair (x_p, x_{p + D/2}) of every token of x (B, H, L, D) by `angles` (.., L, D/2), in radians.

    The angles broadcast to (B, H, L, D/2) and may be parameters. The result has the dtype of `x`. Pass large angles in
    float64, where one more full turn changes nothing.

    Raises:
        ValueError: An odd D, or angles for another number of pairs than D/2.
    """
    if angles.shape[-1] * 2 != x.shape[-1]:
        raise ValueError(f"angles: expected one for each pair of {x.shape[-1]} dimensions, got {angles.shape[-1]}")
    wide = wide_dtype(x)
    real, imaginary = x.to(wide).chunk(2, -1)
    angles = angles.to(torch.promote_types(angles.dtype, wide))
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], -1).to(x.dtype)


def rotate_pair(angles: Tensor | None, valid: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys (B, H, L, D), rotated if there are angles.

    With `valid`, invalid tokens are zeroed first, so that their values do not reach the gradients of shared angles.
    """
    if angles is None:
        return q, k
    if angles.dim() == 4:
        angles = mask_tokens(angles, valid)
    return rotate(mask_tokens(q, valid), angles), rotate(mask_tokens(k, valid), angles)


def rotate_tokens(tokens: Tokens, angles: Tensor) -> Tokens:
    """Return tokens with rotated queries, keys, and vectors of a delta rule."""
    valid = tokens.valid
    if angles.dim() == 4:
        angles = mask_tokens(angles, valid)

    def rotated(x: Tensor) -> Tensor:
        return rotate(mask_tokens(x, valid), angles)

    return tokens._replace(
        q=rotated(tokens.q),
        k=rotated(tokens.k),
        erase=optional(rotated, tokens.erase),
        read=optional(rotated, tokens.read),
    )


def rotary_angles(coords: Tensor, frequencies: Tensor) -> Tensor:
    """Compute the angles (.., L, D/2) in float64: the sum over all axes of position times frequency.

    A float32 angle is off by 4e-3 at position 100,000 and by 1 at 10 million. Here the error is 1e-9.

    Args:
        coords: Positions (axes, L) or (B, axes, L). Tokens without a position, -1 in all axes (cls), are not rotated.
        frequencies: Radians per position, fixed or learned: (axes, D/2), or (H, axes, D/2) with separate ones for each
            head.

    Returns:
        Angles (L, D/2), (H, L, D/2) or, with coords of a batch, (B, 1 or H, L, D/2).
    """
    positions = coords.masked_fill((coords < 0).all(-2, keepdim=True), 0).double().mT  # (.., L, axes)
    positions = positions[:, None] if positions.dim() == 3 else positions
    return (positions[..., None] * frequencies.double()[..., None, :, :]).sum(-2)


def rope_frequencies(
    dim: int, base: float = 10_000.0, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the frequencies `base^(-2p / D)` of the D/2 pairs of one axis, (1, D/2), for an even D = `dim`."""
    if dim % 2:
        raise ValueError(f"dim: rotation acts on pairs of dimensions, got an odd {dim}")
    return base ** -(torch.arange(0, dim, 2, device=device, dtype=dtype) / dim)[None]
