import pytest
import torch
import torch.nn.functional as F

from lion.tasks.base import ImageInfo
from lion.tasks.image_classification import ImageClassification, ImageClassificationConfig

INFO = ImageInfo((4, 4), 1, tuple("abcdefg"))


def task(**settings):
    return ImageClassification(ImageClassificationConfig(**settings), INFO)


class Table(torch.nn.Module):
    """Logits looked up by the first pixel."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(10, 7, generator=torch.Generator().manual_seed(0)))

    def forward(self, images):
        return self.logits[images[:, 0, 0, 0].long()]


def batch():
    image = torch.arange(6.0)[:, None, None, None].expand(6, 1, 4, 4).contiguous()
    return {"image": image, "label": torch.tensor([0, 1, 2, 3, 4, 5])}


def test_loss_is_a_sum_with_its_weight():
    model, b = Table(), batch()
    sums = task(label_smoothing=0.1).loss(model, b)
    expected = F.cross_entropy(model(b["image"]), b["label"], label_smoothing=0.1)
    torch.testing.assert_close(sums.loss / sums.weight, expected)


def test_metrics_leave_padding_out():
    model, b = Table(), batch()
    b["mask"] = torch.tensor([True, True, False, True, False, True])
    metrics, logits = task().evaluate(model, b)
    kept = logits[b["mask"]]
    top1 = (kept.argmax(1) == b["label"][b["mask"]]).sum()
    assert metrics["top1"][0] == top1 and metrics["top1"][1] == 4
    five = (kept.topk(5).indices == b["label"][b["mask"]][:, None]).any(1).sum()
    assert metrics["top5"][0] == five


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0, "switch": 0.5}])
def test_mixing_changes_the_batch_and_is_repeatable(settings):
    model, b = Table(), batch()
    torch.manual_seed(0)
    first = [task(**settings).loss(model, b).loss.item() for _ in range(3)]
    torch.manual_seed(0)
    assert first == [task(**settings).loss(model, b).loss.item() for _ in range(3)]
    assert len(set(first)) > 1


def test_two_kinds_of_mixing_switch():
    both = task(mixup=0.8, cutmix=1.0, switch=0.5)
    torch.manual_seed(0)
    whole = [
        torch.equal(x.amin((1, 2, 3)), x.amax((1, 2, 3))) for x in (both.mix(*batch().values())[0] for _ in range(40))
    ]
    assert 5 < sum(whole) < 35  # mixup keeps constant pictures constant, cutmix does not


@pytest.mark.parametrize("switch", [0, 1])
def test_a_switch_at_its_end_leaves_one_kind(switch):
    torch.manual_seed(0)
    mix = task(mixup=0.8, cutmix=1.0, switch=switch).mix
    mixed = [mix(*batch().values())[0] for _ in range(20)]
    assert all(torch.equal(x.amin((1, 2, 3)), x.amax((1, 2, 3))) for x in mixed) == (switch == 0)


def test_preview_is_a_picture():
    grid = task().preview({"image": torch.randn(5, 1, 4, 4)})["inputs"]
    assert grid.dim() == 3 and 0 <= grid.min() and grid.max() <= 1
