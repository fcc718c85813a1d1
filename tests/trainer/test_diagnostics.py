"""Tests of decay histograms: equal to TensorBoard's, without copying the values to the CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import make_histogram

from lion.models.vit import ViT, ViTConfig
from lion.samples.images import ImageInfo
from lion.tasks.image_classification import ImageClassification, ImageClassificationConfig
from lion.trainer.diagnostics import decay_histograms, progress_of
from lion.trainer.log import EDGES, histogram

VALUES = {
    "uniform": torch.rand(1000, generator=torch.Generator().manual_seed(0)),
    "near 1": 1 - torch.rand(20, 7, generator=torch.Generator().manual_seed(1)) ** 8,
    "ends": torch.tensor([0.0, 1.0, 1.0, 1e-30]),
    "edges": torch.tensor([1e-12, 1.1e-12, 0.5]),
    "one": torch.tensor([0.25]),
    "negative": torch.linspace(-3, 5, 99),
}


@pytest.mark.parametrize("name", VALUES)
def test_as_tensorboard_makes_them(tmp_path, name):
    values = VALUES[name]
    got, expected = histogram(values), make_histogram(values.numpy(), SummaryWriter(str(tmp_path)).default_bins)
    assert got.bucket_limits == list(expected.bucket_limit) and got.bucket_counts == list(expected.bucket)
    assert (got.min, got.max, got.num) == (values.min(), values.max(), values.numel())
    assert got.sum == values.double().sum() and got.sum_squares == values.double().square().sum()
    assert got.sum == pytest.approx(expected.sum, rel=1e-5)


def test_nan_is_not_counted_in_a_bin():
    assert histogram(torch.full((3,), float("nan"))) is None
    assert sum(histogram(torch.tensor([0.5, float("nan")])).bucket_counts) == 1


class Watch(TorchDispatchMode):
    """A mode that records the largest tensor copied from the device to the CPU, including numbers read there."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, torch.Tensor) and a.device.type != "cpu"]
        if given and isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self.largest = max(self.largest, out.numel())
        return out


def digits(device):
    """Return a task, its model, a batch, and the number of decays of a layer."""
    info = ImageInfo((8, 8), 1, tuple("ab"), (0.0,), (1.0,))
    task = ImageClassification(ImageClassificationConfig(), info)
    model = task.build_model(ViTConfig("lion_s_vector", 64, 2, 2, patch_size=2)).to(device)
    assert isinstance(model, ViT)
    return task, model, {**task.example(4, device), "mask": torch.ones(4, dtype=torch.bool, device=device)}, 4 * 17 * 64


def test_no_tensor_of_a_layers_size_reaches_the_cpu(monkeypatch):
    """Watch every method that reads values on the CPU: only numbers as many as the bins may be read."""
    task, model, batch, size = digits("cpu")
    read = []

    def watched(method):
        def call(self, *args, **kwargs):
            read.append(self.numel())
            return method(self, *args, **kwargs)

        return call

    for name in ("cpu", "numpy", "tolist", "item", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
    found = decay_histograms(model, batch, task)
    monkeypatch.undo()
    assert found.keys() == {"blocks.0", "blocks.1"} and read and max(read) < len(EDGES) + 10 < size
    for counted in found.values():
        assert counted.num == sum(counted.bucket_counts) == size and 0 <= counted.min <= counted.max <= 1
        for part in counted:
            assert all(isinstance(x, (int, float)) for x in (part if isinstance(part, list) else [part]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_no_tensor_of_a_layers_size_leaves_the_gpu():
    task, model, batch, size = digits("cuda")
    with Watch() as watch:
        found = decay_histograms(model, batch, task)
    assert found.keys() == {"blocks.0", "blocks.1"} and 0 < watch.largest < len(EDGES) + 10 < size


def test_progress_is_shown_in_evaluation_mode():
    class Artist:
        def progress(self, model, batch):
            assert not model.training and not torch.is_grad_enabled()
            return {"drawn": torch.rand(3, 2, 2)}

    model, batch = torch.nn.Linear(1, 1).train(), {"x": torch.zeros(1)}
    assert progress_of(model, batch, Artist())["drawn"].shape == (3, 2, 2) and model.training
