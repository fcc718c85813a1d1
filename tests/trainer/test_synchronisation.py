"""A training step never waits for the device: it reads no value of a tensor, and no shape depends on values."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lion.ops import arguments, modes
from tests.helpers import on_a_book, tiny_recipe
from tests.trainer.helpers import trainer
from tools.compose import resolve

pytest.importorskip("sklearn")
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.equal, aten.masked_select, aten._unique2}
ACCUMULATED = [
    "trainer.micro_batch=2",
    "trainer.ema=0.9",
    "trainer.clip_grad=1",
    "model.depth=2",
    "optim.lr_batch=null",
]


class NeverWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        masks = args[1] if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) else ()
        assert not any(x is not None and x.dtype == torch.bool for x in masks), f"{func}: a shape depends on a mask"
        return func(*args, **(kwargs or {}))


def recipe_of(kind, folder):
    if kind == "vit":
        changes = {"batch_size": 8, "micro_batch": 4, "clip_grad": 1.0, "ema": 0.9}
        mixup = {"mixup": 0}  # torchvision reads its random numbers on the host, where they are drawn
        return resolve(tiny_recipe(folder, trainer=changes, task=mixup))
    name = {"bert": "mlm_tiny_lion_s", "gpt": "gpt2_tiny_lion_s"}[kind]
    return resolve(name, [*on_a_book(folder), *ACCUMULATED])


@pytest.mark.parametrize("kind", ["vit", "bert", "gpt"])
def test_a_training_step_never_waits_for_the_device(kind, tmp_path, monkeypatch):
    for module in (modes, arguments):
        monkeypatch.setattr(module, "may_wait", lambda device: False)  # as on a GPU
    t = trainer(recipe_of(kind, tmp_path), tmp_path / "run")
    step, taken = t.train_step, []

    def train_step(*args):
        if not t.state.step:  # the first step also draws the samples for the log, once
            return step(*args)
        with NeverWaiting():
            taken.append(step(*args))
        t.stopping = True
        return taken[-1]

    t.train_step = train_step
    t.fit()
    assert len(taken) == 1 and taken[0][0].isfinite()


def test_the_check_finds_what_waits():
    x = torch.arange(3)
    for wait in (x.sum().item, x.nonzero, lambda: bool(x.any()), lambda: x[x > 1], lambda: x.masked_select(x > 1)):
        with NeverWaiting(), pytest.raises(AssertionError):
            wait()
