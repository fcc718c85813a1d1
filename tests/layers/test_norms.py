"""Batch normalisation of valid tokens: against PyTorch, with padding, and over processes."""

import json

import pytest
import torch
from torch import nn

from lion.layers.layout import PLAIN, Layout
from lion.layers.norms import BatchNorm, RMSNorm
from tests.helpers import here, tiny_recipe
from tests.processes import in_ranks

from .helpers import close, doubles

DIM = 6


def norm(**settings) -> BatchNorm:
    torch.manual_seed(0)
    made = BatchNorm(DIM, **settings).double()
    with torch.no_grad():
        made.weight.normal_(), made.bias.normal_()
    return made


def test_without_padding_it_is_pytorchs():
    own = norm(momentum=0.9)
    x = 3 * doubles(4, 10, DIM) + 1
    other = nn.BatchNorm1d(DIM, momentum=0.1).double()
    other.load_state_dict(
        {"weight": own.weight, "bias": own.bias, "running_mean": own.mean, "running_var": own.var}, False
    )
    given = x.clone().requires_grad_()
    again = x.clone().requires_grad_()
    y = own(given)
    want = other(again.mT).mT
    close(y, want)
    y.sin().sum().backward(), want.sin().sum().backward()
    close(given.grad, again.grad)
    close(own.weight.grad, other.weight.grad)
    close(own.mean, other.running_mean)
    close(own.var, 0.9 + 0.1 * x.flatten(0, 1).var(0, unbiased=False))  # as in S5
    own.eval(), other.eval()
    other.running_var.copy_(own.var)
    close(own(x), other(x.mT).mT)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_for_nothing(side):
    lengths = (9, 4, 1)
    x = doubles(3, 9, DIM)
    valid = torch.arange(9) < torch.tensor(lengths)[:, None]
    valid = valid.flip(1) if side == "left" else valid
    alone = norm()
    padded = norm()
    kept = x[valid][None].clone().requires_grad_()
    want = alone(kept)
    want.sin().sum().backward()
    for junk in (0.0, 1e6, -3.0):
        given = x.masked_fill(~valid[..., None], junk).requires_grad_()
        padded.zero_grad()
        fresh = norm()
        y = fresh(given, Layout.of(given, valid))
        close(y[valid][None], want)
        y[valid].sin().sum().backward()
        close(given.grad[valid][None], kept.grad)
        assert (given.grad[~valid] == 0).all()
        for name in ("mean", "var"):
            close(getattr(fresh, name), getattr(alone, name))


def test_evaluation_changes_nothing_and_reads_the_running_values():
    own = norm()
    x = doubles(2, 5, DIM)
    own(x)
    own.eval()
    before = own.mean.clone(), own.var.clone()
    y = own(x, PLAIN)
    assert torch.equal(own.mean, before[0]) and torch.equal(own.var, before[1])
    close(y[:1], own(x[:1]))  # samples are independent


def test_statistics_are_float32_in_bf16():
    own = norm().float()
    x = (torch.randn(8, 500, DIM) * 1e-2 + 5).bfloat16()
    y = own(x)
    assert y.dtype == torch.bfloat16 and own.mean.dtype == torch.float32
    close(own.mean, 0.1 * x.float().mean((0, 1)), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_normalise_by_the_whole_batch(tmp_path):
    """Check that one process and two have equal losses, which statistics of half a batch would change."""
    pytest.importorskip("sklearn")
    losses = {}
    for processes in (1, 2):
        model = {"norm": "batchnorm", "drop_path": 0.0}
        trainer = {"log_every": 1, "steps": 4, "eval_every": 4}
        path = tiny_recipe(tmp_path, f"p{processes}", task={"mixup": 0.0}, model=model, trainer=trainer)
        if processes == 1:
            assert here("train", path, "--no-eval") == 0
        else:
            done = in_ranks(processes, "train", path, "--no-eval")
            assert done.returncode == 0, done.stderr
        written = (tmp_path / "runs" / f"p{processes}" / "metrics.jsonl").read_text().splitlines()
        losses[processes] = [v["loss"] for v in map(json.loads, written)]
    assert len(losses[1]) == 5 and losses[2] == pytest.approx(losses[1], rel=2e-5)


def test_rms_norm_is_float32_under_autocast(recwarn):
    x = torch.randn(2, 5, DIM, dtype=torch.bfloat16)
    norm = RMSNorm(DIM)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.float32 and not [w for w in recwarn if "dtype" in str(w.message)]
    assert torch.equal(y, norm(x.float()))
    assert norm.bfloat16()(x).dtype == torch.bfloat16
