"""Helpers: inputs, error measures, and an oracle written from the mathematics alone (no code of lion)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DECAY_CONVENTIONS = ("source", "target", "symmetric", "between")
DIRECTIONS = ("both", "forward", "backward")
NORMALIZE = ("sum", "none")
ALL_NORMALIZE = ("sum", "max", "pre", "none")
DECAYS = ("lit", "D", "S", "extreme", "vector", "extreme vector")
FORMS = {  # every exact form; small chunks put many borders into short sequences
    "full": dict(form="full"),
    "chunk64": dict(form="chunk", chunk_size=64),
    "chunk5": dict(form="chunk", chunk_size=5),
    "rnn1": dict(form="rnn", chunk_size=1),
    "rnn64": dict(form="rnn", chunk_size=64),
}
SMALL_FORMS = {  # forms with chunk borders inside about twenty tokens
    "full": dict(form="full"),
    "chunk4": dict(form="chunk", chunk_size=4),
    "rnn1": dict(form="rnn", chunk_size=1),
    "rnn4": dict(form="rnn", chunk_size=4),
}


def pairwise(*factors: tuple) -> list[tuple[Any, ...]]:
    """Choose few combinations that cover all pairs of values of two factors, if no three factors interact."""
    pairs = {}
    for row in itertools.product(*factors):
        pairs[row] = set(itertools.combinations(enumerate(row), 2))
    missing = set.union(*pairs.values())
    rows = []
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        rows.append(best)
    return rows


def grid(*factors: tuple, **settings: tuple) -> list[tuple[Any, ...]]:
    """Choose combinations as `pairwise` does: the values of the factors, followed by the settings as a dictionary."""
    rows = []
    for row in pairwise(*factors, *settings.values()):
        how = dict(zip(settings, row[len(factors) :]))
        rows.append((*row[: len(factors)], how))
    return rows


class Inputs(NamedTuple):
    """Tensors of a call of an operator."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    angles: Tensor | None = None
    erase: Tensor | None = None
    read: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    def gates(self) -> dict[str, Tensor]:
        """Return the tensors other than q, k and v by name."""
        return {name: x for name, x in self.given().items() if name not in "qkv"}

    def on(self, function: Callable, **arguments):
        return function(self.q, self.k, self.v, **self.gates(), **arguments)

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return self._replace(**{name: change(x) for name, x in self.given().items()})

    def to(self, dtype: torch.dtype) -> Inputs:
        return self.map(lambda x: x.to(dtype))

    def leaves(self) -> Inputs:
        """Return new tensors that require gradients."""
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def grads(self) -> dict[str, Tensor]:
        """Return the gradients of all leaves; zeros for leaves outside the graph (the decay of a single token)."""
        found = {}
        for name, x in self.given().items():
            found[name] = torch.zeros_like(x) if x.grad is None else x.grad
        return found

    def at(self, tokens: Tensor | slice, rows: slice = slice(None)) -> Inputs:
        """Return some tokens of some rows of the batch."""
        chosen = {}
        for name, x in self.given().items():
            if x.dim() == 4 or (name in ("log_decay", "beta") and x.dim() == 3):
                x = x[rows]
            if name == "angles":
                chosen[name] = x[..., tokens, :]
            elif name != "bonus" and x.dim() > 2:
                chosen[name] = x[:, :, tokens]
        return self._replace(**chosen)

    def tokens(self, row: int, index: Tensor) -> Inputs:
        """Return the sequence of the tokens `index` of one row of the batch, with batch size 1."""
        return self.at(index, slice(row, row + 1))


def make(
    decay: str,
    length: int,
    *,
    batch: int = 2,
    heads: int = 3,
    dim: int = 4,
    value_dim: int = 6,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Inputs:
    """Make positive features and decays; values are float32 numbers, so that wider dtypes represent them exactly."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    q = F.softplus(normal(batch, heads, length, dim))
    k = F.softplus(normal(batch, heads, length, dim))
    v = normal(batch, heads, length, value_dim)
    if decay == "lit":
        log_decay = None
    elif decay == "D":
        log_decay = F.logsigmoid(normal(heads) + 1)
    elif decay == "S":
        log_decay = F.logsigmoid(2 * normal(batch, heads, length) + 2)
    elif decay == "vector":
        log_decay = F.logsigmoid(2 * normal(batch, heads, length, dim) + 2)
    elif decay == "fixed vector":
        log_decay = F.logsigmoid(normal(heads, dim) + 1)
    else:  # gates of 0 between gates of 1
        shape = q.shape if decay == "extreme vector" else q.shape[:3]
        forget = torch.rand(shape, generator=rng) < 0.2
        log_decay = torch.where(forget, math.log(1e-30), math.log(0.99))
    return Inputs(q, k, v, log_decay).to(dtype)


def case(inputs: Inputs, what: str = "", seed: int = 3) -> Inputs:
    """Add further arguments to `inputs`, by name and shape: "bonus H", "angles BHL", "beta"."""
    batch, heads, length, dim = inputs.q.shape
    rng = torch.Generator().manual_seed(seed)
    shapes = {
        "beta": (batch, heads, length),
        "erase": (batch, heads, length, dim),
        "read": (batch, heads, length, dim),
        "bonus H": (heads,),
        "bonus HD": (heads, dim),
        "angles L": (length, dim // 2),
        "angles HL": (heads, length, dim // 2),
        "angles B1L": (batch, 1, length, dim // 2),
        "angles BHL": (batch, heads, length, dim // 2),
    }
    made = {}
    for one in filter(None, what.split(", ")):
        name = one.split()[0]
        x = torch.rand(shapes[one], generator=rng)
        ranges = {"beta": x, "bonus": 0.2 + 2 * x, "angles": 6 * x - 3}
        made[name] = ranges.get(name, x - 0.5).to(inputs.q.dtype)
    return inputs._replace(**made)


def signed(inputs: Inputs) -> Inputs:
    """Return inputs with features of both signs, so that row sums may vanish."""
    return inputs._replace(q=inputs.q - 0.7, k=inputs.k - 0.7)


def signed_for(inputs: Inputs, normalize: str) -> Inputs:
    """Return features of both signs where the normalisation takes them."""
    return signed(inputs) if normalize in ("max", "none") else inputs


def unit_keys(inputs: Inputs) -> Inputs:
    """Return signed queries and keys of norm 1, as the delta rule requires."""
    inputs = signed(inputs)
    return inputs._replace(k=F.normalize(inputs.k.double(), dim=-1).to(inputs.k.dtype))


def error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Compute the largest error over the largest value (or `floor`, for vanishing gradients); NaN if any is NaN."""
    assert got.shape == expected.shape
    expected = expected.double()
    worst = (got.double() - expected).abs().max().item()
    largest = expected.abs().max().item()
    return worst / max(largest, floor) if worst else 0.0


def assert_close(got: Tensor, expected: Tensor, tolerance: float, what: str = "", floor: float = 0.0) -> None:
    found = error(got, expected, floor)
    assert found <= tolerance, f"{what}: error {found:.2e}, at most {tolerance:.2e} allowed"  # False for NaN


def backward(y: Tensor, inputs: Inputs, seed: int = 1) -> dict[str, Tensor]:
    """Compute the gradients of a random projection of `y`, which is the same for every dtype."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    (y * weights.to(y.dtype)).sum().backward()
    return inputs.grads()


# The oracle


def oracle_entry(lam: list[float], i: int, j: int, decay_convention: str) -> float:
    """Compute M_ij of one sequence with decays `lam`: a product over the tokens between i and j."""
    first = min(i, j)
    last = max(i, j)
    if decay_convention == "between":
        between = lam[first + 1 : last]
    elif (decay_convention, i > j) in (("source", True), ("target", False)):  # the decay of the earlier token
        between = lam[first:last]
    else:
        between = lam[first + 1 : last + 1]
    return math.prod(between)


def oracle_mask(lam: list[float], decay_convention: str, direction: str) -> Tensor:
    places = range(len(lam))
    rows = []
    for i in places:
        rows.append([oracle_entry(lam, i, j, decay_convention) for j in places])
    mask = torch.tensor(rows, dtype=torch.float64)
    return {"both": mask, "forward": mask.tril(), "backward": mask.triu()}[direction]


def oracle_masks(inputs: Inputs, decay_convention: str, direction: str) -> Tensor:
    """Compute the masks (B, H, L, L), or (B, H, D, L, L) for vector decays."""
    batch, heads, length, dim = inputs.q.shape
    log_decay = torch.zeros(heads) if inputs.log_decay is None else inputs.log_decay
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(batch, heads, length)
    if log_decay.dim() == 2:
        log_decay = log_decay[None, :, None].expand(batch, heads, length, dim)
    lam = log_decay.double().exp()
    if lam.dim() == 4:
        lam = lam.transpose(2, 3)
    masks = [oracle_mask(row, decay_convention, direction) for row in lam.flatten(0, -2).tolist()]
    return torch.stack(masks).unflatten(0, lam.shape[:-1])


def oracle_parts(inputs: Inputs, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the numerator, from rotated scores, and the row sum, from unrotated scores."""
    q = inputs.q.double()
    k = inputs.k.double()
    bonus = 1 if inputs.bonus is None else inputs.bonus.double().reshape(q.shape[1], 1, -1)

    def weights(q: Tensor, k: Tensor) -> Tensor:
        if masks.dim() == 4:
            weights = (q @ k.mT) * masks
        else:
            weights = torch.einsum("bhid,bhjd,bhdij->bhij", q, k, masks)
        return weights + torch.diag_embed((q * k * (bonus - 1)).sum(-1))

    turned = weights(oracle_rotate(q, inputs.angles), oracle_rotate(k, inputs.angles))
    return turned @ inputs.v.double(), weights(q, k).sum(-1)


def oracle_rotate(x: Tensor, angles: Tensor | None) -> Tensor:
    """Multiply pairs (p, p + D/2), as complex numbers, by exp(i angle)."""
    if angles is None:
        return x
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles.double())
    return torch.cat([turned.real, turned.imag], -1)


def oracle_delta(inputs: Inputs, direction: str, undecayed_erase: bool = False) -> Tensor:
    """Compute `S_i = (A - e r^T) S_{i-1} + w v^T`, `y = q S`; `both`: minus `(q . w) v` once.

    A is `Diag(lambda)`, and r is multiplied by lambda, unless the erase is undecayed.
    """
    turned = {}
    for name in ("q", "k", "erase", "read"):
        x = getattr(inputs, name)
        turned[name] = x if x is None else oracle_rotate(x.double(), inputs.angles)
    q = turned["q"]
    k = turned["k"]
    v = inputs.v.double()
    w = k if inputs.beta is None else inputs.beta.double()[..., None] * k
    e = w if turned["erase"] is None else turned["erase"]
    r = k if turned["read"] is None else turned["read"]
    batch, heads, length, dim = q.shape
    log_decay = torch.zeros(heads) if inputs.log_decay is None else inputs.log_decay
    if log_decay.dim() <= 2:  # (H,) or (H, D)
        log_decay = log_decay.reshape(1, heads, 1, -1)
    if log_decay.dim() == 3:
        log_decay = log_decay[..., None]
    lam = log_decay.double().exp().expand(q.shape)
    if not undecayed_erase:
        r = r * lam
    out = torch.zeros_like(v)
    places = range(length)
    for scan, order in (("forward", places), ("backward", reversed(places))):
        if direction not in (scan, "both"):
            continue
        S = q.new_zeros(batch, heads, dim, v.shape[-1])
        for i in order:
            A = torch.diag_embed(lam[:, :, i]) - e[:, :, i, :, None] * r[:, :, i, None]
            S = A @ S + w[:, :, i, :, None] * v[:, :, i, None]
            out[:, :, i] += (q[:, :, i, None] @ S).squeeze(2)
    if direction == "both":
        out -= (q * w).sum(-1, keepdim=True) * v
    return out


def oracle_attention(
    inputs: Inputs,
    *,
    decay_convention: str = "source",
    direction: str = "both",
    normalize: str = "sum",
    scale: float | None = None,
    eps: float = 1e-6,
    undecayed_erase: bool = False,
) -> Tensor:
    if scale is None:
        scale = 1 / math.sqrt(inputs.q.shape[-1])
    if not {"beta", "erase", "read"}.isdisjoint(inputs.given()):
        return oracle_delta(inputs, direction, undecayed_erase) * scale
    numerator, rowsum = oracle_parts(inputs, oracle_masks(inputs, decay_convention, direction))
    if normalize == "pre":  # row sums of the scores before the mask
        free = inputs._replace(log_decay=None, bonus=None)
        rowsum = oracle_parts(free, oracle_masks(free, decay_convention, direction))[1]
    return oracle_normalized(numerator, rowsum.unsqueeze(-1), normalize, scale, eps)


def oracle_normalized(numerator: Tensor, rowsum: Tensor, normalize: str, scale: float, eps: float = 1e-6) -> Tensor:
    if normalize == "none":
        return scale * numerator
    if normalize == "max":
        return scale * numerator / (scale * rowsum).abs().clamp_min(1)
    return numerator / rowsum.clamp_min(eps)


# Memory


class Allocations(TorchDispatchMode):
    """A recorder of the shapes of all tensors that operators allocate, including backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):  # a view of an argument is not an allocation
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:
                self.shapes.append(tuple(x.shape))
        return out

    def largest(self) -> int:
        return max(map(math.prod, self.shapes))


class Denormals(TorchDispatchMode):
    """A counter of the denormal numbers that operators write, by operator, including backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ or "slice" in func.__name__:  # uninitialised memory, or a view
            return out
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                count = ((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum().item()
                if count:
                    self.counts[func.__name__] = self.counts.get(func.__name__, 0) + count
        return out
