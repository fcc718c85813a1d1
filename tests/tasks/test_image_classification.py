import random

import pytest
import torch
import torch.nn.functional as F

from lion.layers.mixers import AttentionConfig
from lion.models.vit import ViT, ViTConfig
from lion.samples.images import ImageInfo
from lion.tasks.base import unwrapped
from lion.tasks.image_classification import ImageClassification, ImageClassificationConfig, erase
from tests.layers.helpers import close

INFO = ImageInfo((4, 4), 1, tuple("abcdefg"), (0.0,), (1 / 255,))  # normalisation leaves pixels unchanged


def task(**settings):
    return ImageClassification(ImageClassificationConfig(**settings), INFO)


class Table(torch.nn.Module):
    """A model that looks up its logits by the first pixel."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.randn(10, 7, generator=torch.Generator().manual_seed(0)))

    def normalise(self, pixels):
        return pixels.float()

    def forward(self, images):
        return self.logits[images[:, 0, 0, 0].long()]


def batch():
    image = torch.arange(6.0)[:, None, None, None].expand(6, 1, 4, 4).contiguous()
    return {"image": image, "label": torch.tensor([0, 1, 2, 3, 4, 5])}


def test_loss_is_a_sum_with_its_weight():
    model, b = Table(), batch()
    sums = task(label_smoothing=0.1).loss(model, b)
    expected = F.cross_entropy(model(b["image"]), b["label"], label_smoothing=0.1)
    close(sums.loss / sums.weight, expected)


def test_metrics_leave_padding_out():
    model, b = Table(), batch()
    b["mask"] = torch.tensor([True, True, False, True, False, True])
    outcome = task().evaluate(model, b)
    logits, label = outcome.outputs[b["mask"]], b["label"][b["mask"]]
    assert outcome.sums["top1"] == ((logits.argmax(1) == label).sum(), 4)
    assert outcome.sums["top5"][0] == (logits.topk(5).indices == label[:, None]).any(1).sum()


def test_five_classes_have_no_top_5():
    few = ImageClassification(ImageClassificationConfig(), ImageInfo((4, 4), 1, tuple("abcde"), (0.0,), (1 / 255,)))
    assert "top5" not in [metric.name for metric in few.metrics]
    assert "top5" in [metric.name for metric in task().metrics]


BOTH = {"mixup": 0.8, "cutmix": 1.0}


@pytest.mark.parametrize("settings", [{"mixup": 0.8}, {"cutmix": 1.0}, {**BOTH, "switch": 0.5}])
def test_mixing_changes_the_batch_and_is_repeatable(settings):
    def losses():
        torch.manual_seed(0)
        return [task(**settings).loss(Table(), batch()).loss.item() for _ in range(3)]

    first = losses()
    assert first == losses()
    assert len(set(first)) > 1


@pytest.mark.parametrize(("switch", "least", "most"), [(0, 40, 40), (0.5, 5, 35), (1, 0, 39)])
def test_two_kinds_of_mixing_switch(switch, least, most):
    """Mixup keeps constant images constant, cutmix does not."""
    torch.manual_seed(0)
    mix = task(**BOTH, switch=switch).mix
    mixed = [mix(*batch().values())[0] for _ in range(40)]
    constant = sum(torch.equal(x.amin((1, 2, 3)), x.amax((1, 2, 3))) for x in mixed)
    assert least <= constant <= most


def test_views_of_one_image_are_not_mixed_with_each_other():
    """Check that a batch is shuffled: repeated augmentation puts views side by side, and mixing pairs neighbours."""
    model, t, seen = Table(), task(mixup=0.8), []
    mix, images = t.mix, torch.arange(8).repeat_interleave(12)  # 8 images, 12 views each
    t.mix = lambda *both: mix(*(seen.append(both[0]) or both))
    torch.manual_seed(0)
    for _ in range(20):
        t.loss(model, {"image": images[:, None, None, None].expand(-1, 1, 4, 4), "label": images % 7})
    alike = torch.stack([(x == x.roll(1, 0)).all((1, 2, 3)) for x in seen]).float().mean()
    assert 0.05 < alike < 0.2  # 11 / 95 by chance


def test_mixed_labels_are_smoothed():
    model, b, t = Table(), batch(), task(mixup=0.8, label_smoothing=0.1)
    shares = torch.rand(6, 7).softmax(1)
    t.mix = lambda images, labels: (b["image"], shares)
    got = t.loss(model, b).loss
    targets = 0.9 * shares + 0.1 / 7
    close(got, -(targets * model(b["image"]).log_softmax(1)).sum())


NINES = {"image": torch.full((20, 1, 16, 16), 9, dtype=torch.uint8), "label": torch.zeros(20, dtype=torch.long)}


def test_images_are_erased_where_asked_before_they_are_mixed():
    model, seen = Table(), []
    model.register_forward_pre_hook(lambda _, images: seen.append(images[0]))
    for share in (0.0, 1.0):
        task(random_erasing=share).loss(model, NINES)
    t = task(mixup=0.8, random_erasing=1.0)
    t.mix = lambda *both: seen.append(both[0]) or both
    t.loss(Table(), NINES)
    whole, erased, before_mixing = ((images != 9).flatten(1).any(1) for images in seen)
    assert not whole.any() and erased.all() and before_mixing.all()


def test_the_model_has_the_data_s_normalisation_and_names():
    info = ImageInfo((2, 2), 2, ("a", "b"), (0.5, 0.2), (0.25, 0.1))
    t = ImageClassification(ImageClassificationConfig(label_smoothing=0.1), info)
    model = t.build_model(ViTConfig("lion_s", 6, 1, 1, patch_size=1)).eval()
    assert model.classes == ("a", "b") and model.image_shape == (2, 2, 2)
    images = torch.tensor([[0, 255], [51, 128]], dtype=torch.uint8)[None, :, :, None].expand(1, 2, 2, 2)
    expected = torch.tensor([[-2, 2], [0, (128 / 255 - 0.2) / 0.1]])[None, :, :, None].expand(1, 2, 2, 2)
    close(model.normalise(images), expected)
    b = {"image": images, "label": torch.tensor([1]), "mask": torch.tensor([True])}
    with torch.no_grad():
        logits = t.evaluate(model, b).outputs
        loss = F.cross_entropy(logits, b["label"], label_smoothing=0.1)
        close(logits, model(expected))
        assert torch.equal(t.loss(model, b).loss, loss)  # training sees the same pixels


def test_a_wrapped_model_is_called_and_normalises_by_itself():
    """Check that a model wrapped by DDP is called through the wrapper, so that gradients are synchronised."""
    model, b, called = Table(), batch(), []
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped.register_forward_pre_hook(lambda *_: called.append(1))
        assert torch.equal(task().loss(wrapped, b).loss, task().loss(model, b).loss) and called == [1]
    finally:
        torch.distributed.destroy_process_group()
    model.module = None  # a model may have a submodule of this name
    assert unwrapped(model, ViT) is model and unwrapped(wrapped, ViT) is model


def test_preview_is_a_image():
    scans = AttentionConfig(scans=("row_snake", "column_snake"))
    config = ViTConfig("lion_s", 6, 1, 1, patch_size=1, attention=scans)
    model = ViT(config, image_size=(3, 4), channels=1, num_classes=7)
    shown = task().preview(model, {"image": torch.randint(0, 256, (5, 1, 4, 4), dtype=torch.uint8)})
    assert shown.keys() == {"inputs", "scan_row_snake", "scan_column_snake"}
    assert shown["inputs"].dtype == torch.uint8 and shown["inputs"].shape[0] == 3
    rows, columns = shown["scan_row_snake"], shown["scan_column_snake"]
    assert rows.shape == (3, 3 * 24, 4 * 24) and not torch.equal(rows, columns)
    assert torch.equal((rows == 0).all(0), (columns == 0).all(0))  # black pixels are the centres of patches
    assert rows[:, 12, 24].tolist() == [0, 0, 255]  # path from the first patch to its right neighbour: blue
    del model.orders
    model.orders = None
    assert task().preview(model, {"image": torch.zeros(1, 1, 4, 4, dtype=torch.uint8)}).keys() == {"inputs"}


# Random erasing


def rectangles(erased: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return (top, left, height, width) of the erased part of each image (B, H, W), checked to be a rectangle."""
    found = []
    for mask in erased:
        if mask.any():
            ys, xs = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
            assert mask[ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1].all() and mask.sum() == len(ys) * len(xs)
            found.append((ys[0].item(), xs[0].item(), len(ys), len(xs)))
    return found


def test_erasing_is_a_rectangle_of_noise_in_all_channels():
    torch.manual_seed(0)
    images = torch.full((400, 3, 40, 60), 9.0)
    got = erase(images, 0.25)
    erased = (got != 9).any(1)
    assert torch.equal((got != 9).all(1), erased) and images.eq(9).all()
    boxes = rectangles(erased)
    assert 70 < len(boxes) < 130  # of 400 images: five standard deviations around 100
    noise = got[got != 9]
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert not erase(images, 0).ne(9).any() and len(rectangles((erase(images, 1) != 9).any(1))) == 400


def test_erasing_draws_as_timm_does():
    timm = pytest.importorskip("timm.data.random_erasing")
    torch.manual_seed(0)
    random.seed(0)
    images = torch.full((3000, 1, 30, 50), 9.0)
    ours = rectangles((erase(images, 1) != 9).any(1))
    theirs = rectangles((timm.RandomErasing(1, mode="pixel", device="cpu")(images.clone()) != 9).any(1))
    assert len(ours) == len(theirs) == 3000

    def features(boxes):
        """Return area, shape and place of all boxes, each in order."""
        top, left, height, width = torch.tensor(boxes, dtype=torch.double).T
        found = height * width / 1500, (height / width).log(), top / (31 - height), left / (51 - width)
        return [each.sort().values for each in found]

    for a, b in zip(features(ours), features(theirs)):
        grid = torch.cat([a, b]).sort().values
        gap = (torch.searchsorted(a, grid, right=True) - torch.searchsorted(b, grid, right=True)).abs().max() / 3000
        assert gap < 0.05  # Kolmogorov-Smirnov: chance exceeds 0.05 once in 1,000 times


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (8, 8)])
def test_erasing_small_images_leaves_them_whole_or_fits(size):
    torch.manual_seed(0)
    rectangles((erase(torch.full((50, 1, *size), 9.0), 1) != 9).any(1))


def test_labels_are_shuffled_with_their_images():
    t, seen = task(mixup=0.8), []
    t.mix = lambda *both: seen.append(both) or both
    torch.manual_seed(0)
    t.loss(Table(), batch())
    images, labels = seen[0]
    assert images[:, 0, 0, 0].tolist() == labels.tolist() != list(range(6))


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_has_the_alpha_of_its_setting(kind):
    assert task(**{kind: 0.3}).mix.transforms[0].alpha == 0.3
