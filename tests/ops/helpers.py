"""Helpers: inputs, error measures, and an oracle written from the mathematics alone (no code of lion)."""

from __future__ import annotations

import itertools
import math
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
    every = {row: set(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*factors)}
    missing, rows = set().union(*every.values()), []
    while missing:
        rows.append(max(every, key=lambda row: len(every[row] & missing)))
        missing -= every[rows[-1]]
    return rows


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None

    def on(self, function, **arguments):
        return function(*self, **arguments)

    def to(self, dtype: torch.dtype) -> Inputs:
        return type(self)(*(None if x is None else x.to(dtype) for x in self))

    def leaves(self) -> Inputs:
        """Return new tensors that require gradients."""
        return type(self)(*(None if x is None else x.detach().clone().requires_grad_() for x in self))

    def grads(self) -> dict[str, Tensor]:
        """Return the gradients of all leaves; zeros for leaves outside the graph (the decay of a single token)."""
        leaves = {name: x for name, x in self._asdict().items() if x is not None}
        return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}

    def tokens(self, row: int, index: Tensor) -> Inputs:
        """Return the sequence of the tokens `index` of one batch row, with batch size 1."""
        q, k, v, a = self
        q, k, v = (x[row : row + 1, :, index] for x in (q, k, v))
        return Inputs(q, k, v, a[row : row + 1, :, index] if a is not None and a.dim() >= 3 else a)


class Case(NamedTuple):
    """Inputs with further arguments of an operator, and the methods of `Inputs`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None = None
    beta: Tensor | None = None
    bonus: Tensor | None = None
    angles: Tensor | None = None
    erase: Tensor | None = None
    read: Tensor | None = None

    def on(self, function, **arguments):
        extras = {name: x for name, x in zip(self._fields[4:], self[4:]) if x is not None}
        return function(*self[:4], **extras, **arguments)

    to, leaves, grads = Inputs.to, Inputs.leaves, Inputs.grads

    def tokens(self, row: int, index: Tensor) -> Case:
        q, k, v, a = Inputs(*self[:4]).tokens(row, index)
        beta, bonus, angles, erase, read = self[4:]
        beta, erase, read = (None if x is None else x[row : row + 1, :, index] for x in (beta, erase, read))
        if angles is not None:
            angles = (angles[row : row + 1] if angles.dim() == 4 else angles)[..., index, :]
        return Case(q, k, v, a, beta, bonus, angles, erase, read)


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
        return torch.randn(*shape, generator=rng)

    q, k = (F.softplus(normal(batch, heads, length, dim)) for _ in range(2))
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
        lanes = (dim,) if decay == "extreme vector" else ()
        forget = torch.rand(batch, heads, length, *lanes, generator=rng) < 0.2
        log_decay = torch.where(forget, math.log(1e-30), math.log(0.99))
    return Inputs(q, k, v, log_decay).to(dtype)


def case(inputs: Inputs, what: str = "", seed: int = 3) -> Case:
    """Add further arguments to `inputs`, by name and shape: "bonus H", "angles BHL", "beta"."""
    (batch, heads, length, dim), rng = inputs.q.shape, torch.Generator().manual_seed(seed)
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
        name, x = one.split()[0], torch.rand(shapes[one], generator=rng)
        made[name] = {"beta": x, "bonus": 0.2 + 2 * x, "angles": 6 * x - 3}.get(name, x - 0.5).to(inputs.q.dtype)
    return Case(*inputs, **made)


def signed(inputs: Inputs) -> Inputs:
    """Return inputs with features of both signs, so that row sums may vanish."""
    return inputs._replace(q=inputs.q - 0.7, k=inputs.k - 0.7)


def unit_keys(inputs: Inputs) -> Inputs:
    """Return signed queries and keys of norm 1, as the delta rule requires."""
    inputs = signed(inputs)
    return inputs._replace(k=F.normalize(inputs.k.double(), dim=-1).to(inputs.k.dtype))


def error(got: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Compute the largest error over the largest value (or `floor`, for vanishing gradients); NaN if any is NaN."""
    assert got.shape == expected.shape
    expected = expected.double()
    worst, largest = (got.double() - expected).abs().max().item(), expected.abs().max().item()
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
    if i == j:
        return 1.0
    if decay_convention == "between":
        between = range(min(i, j) + 1, max(i, j))
    elif i > j:
        between = range(j, i) if decay_convention == "source" else range(j + 1, i + 1)
    else:
        between = range(i, j) if decay_convention == "target" else range(i + 1, j + 1)
    return math.prod(lam[k] for k in between)


def oracle_mask(lam: list[float], decay_convention: str, direction: str) -> Tensor:
    def allowed(i: int, j: int) -> bool:
        return direction == "both" or (i >= j if direction == "forward" else i <= j)

    places = range(len(lam))
    rows = [[oracle_entry(lam, i, j, decay_convention) if allowed(i, j) else 0.0 for j in places] for i in places]
    return torch.tensor(rows, dtype=torch.float64)


def oracle_masks(inputs: Inputs, decay_convention: str, direction: str) -> Tensor:
    """Compute the masks (B, H, L, L), or (B, H, D, L, L) for vector decays."""
    batch, heads, length, dim = inputs.q.shape
    log_decay = torch.zeros(heads) if inputs.log_decay is None else inputs.log_decay
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(batch, heads, length)
    if log_decay.dim() == 2:
        log_decay = log_decay[None, :, None].expand(batch, heads, length, dim)
    lam = log_decay.double().exp()
    rows = (lam if lam.dim() == 3 else lam.transpose(2, 3)).flatten(0, -2).tolist()
    shape = (batch, heads, length, length) if lam.dim() == 3 else (batch, heads, dim, length, length)
    return torch.stack([oracle_mask(row, decay_convention, direction) for row in rows]).view(shape)


def oracle_parts(inputs: Inputs | Case, masks: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the numerator, from rotated scores, and the row sum, from unrotated scores."""
    q, k, v = (x.double() for x in inputs[:3])
    case = Case(*inputs)
    bonus = 1 if case.bonus is None else case.bonus.double().reshape(q.shape[1], 1, -1)

    def weights(q: Tensor, k: Tensor) -> Tensor:
        if masks.dim() == 4:
            weights = (q @ k.transpose(-1, -2)) * masks
        else:
            weights = torch.einsum("bhid,bhjd,bhdij->bhij", q, k, masks)
        return weights + torch.diag_embed((q * k * (bonus - 1)).sum(-1))

    turned = (q, k) if case.angles is None else (oracle_rotate(q, case.angles), oracle_rotate(k, case.angles))
    return weights(*turned) @ v, weights(q, k).sum(-1)


def oracle_rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Multiply pairs (p, p + D/2), as complex numbers, by exp(i angle)."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles.double())
    return torch.cat([turned.real, turned.imag], -1)


def oracle_delta(case: Case, direction: str, undecayed_erase: bool = False) -> Tensor:
    """Compute `S_i = (A - e r^T) S_{i-1} + w v^T`, `y = q S`; `both`: minus `(q . w) v` once.

    A is `Diag(lambda)`, and r is multiplied by lambda, unless the erase is undecayed.
    """
    q, k, v = (x.double() for x in case[:3])
    e, r = (None if x is None else x.double() for x in (case.erase, case.read))
    if case.angles is not None:
        q, k = oracle_rotate(q, case.angles), oracle_rotate(k, case.angles)
        e, r = (None if x is None else oracle_rotate(x, case.angles) for x in (e, r))
    w = k if case.beta is None else case.beta.double()[..., None] * k
    e, r = w if e is None else e, k if r is None else r
    log_decay = torch.zeros(q.shape[1]) if case.log_decay is None else case.log_decay
    if log_decay.dim() <= 2:  # (H,) or (H, D)
        log_decay = log_decay.reshape(1, q.shape[1], 1, -1)
    lam = log_decay.double().exp().reshape(*log_decay.shape[:3], -1).expand(q.shape)
    out = torch.zeros_like(v)
    for name, places in (("forward", range(q.shape[2])), ("backward", reversed(range(q.shape[2])))):
        if direction not in (name, "both"):
            continue
        S = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
        for i in places:
            row = r[:, :, i, None, :] * (1 if undecayed_erase else lam[:, :, i, None, :])  # (B, H, 1, D)
            A = torch.diag_embed(lam[:, :, i]) - e[:, :, i, :, None] @ row
            S = A @ S + w[:, :, i, :, None] @ v[:, :, i, None, :]
            out[:, :, i] += (q[:, :, i, None, :] @ S).squeeze(2)
    return out - (q * w).sum(-1, keepdim=True) * v if direction == "both" else out


def oracle_attention(
    inputs: Inputs | Case,
    *,
    decay_convention: str = "source",
    direction: str = "both",
    normalize: str = "sum",
    scale: float | None = None,
    eps: float = 1e-6,
    undecayed_erase: bool = False,
) -> Tensor:
    case = Case(*inputs)
    scale = 1 / math.sqrt(case.q.shape[-1]) if scale is None else scale
    if any(x is not None for x in (case.beta, case.erase, case.read)):
        return oracle_delta(case, direction, undecayed_erase) * scale
    numerator, rowsum = oracle_parts(case, oracle_masks(case, decay_convention, direction))
    if normalize == "pre":  # row sums of the scores before the mask
        free = case._replace(log_decay=None, bonus=None)
        rowsum = oracle_parts(free, oracle_masks(free, decay_convention, direction))[1]
    rowsum = rowsum.unsqueeze(-1)
    if normalize == "none":
        return numerator * scale
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
        return max(math.prod(shape) for shape in self.shapes)


class Denormals(TorchDispatchMode):
    """A counter of the denormal numbers that operators write, by operator, including backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = any(word in func.__name__ for word in ("empty", "slice"))  # uninitialised memory, or a view
        for x in () if known else tree_leaves(out):
            if isinstance(x, Tensor) and x.is_floating_point():
                count = ((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum().item()
                if count:
                    self.counts[func.__name__] = self.counts.get(func.__name__, 0) + count
        return out
