import itertools
import re

import pytest
import torch

from lion.layers.mixers import LINEAR, SOFTMAX, AttentionConfig
from lion.layers.mixers.lightnet import LightNetConfig
from lion.layers.mixers.state_space import StateSpaceConfig
from lion.models.vit import ViT, ViTConfig
from lion.ops import SCAN_MERGES
from tests.layers.helpers import close, doubles, invalid
from tests.models.helpers import adapted, check_forms


def vit(mixer="lion_s", size=(8, 8), channels=3, classes=5, known=None, **settings):
    config = ViTConfig(mixer=mixer, **{"dim": 12, "depth": 2, "num_heads": 3, "patch_size": 2, **settings})
    return ViT(config, image_size=size, channels=channels, num_classes=classes, **(known or {}))


GRIDS = (((8, 8), 2), ((6, 10), (3, 2)), ((4, 4), 4))  # sizes of images and of patches


@pytest.mark.parametrize("mixer, grid", list(zip((SOFTMAX, *LINEAR), itertools.cycle(GRIDS))))
def test_shapes_and_gradients(mixer, grid):
    size, patch = grid
    model = vit(mixer, size, patch_size=patch)
    logits = model(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_conventions_follow_the_mixer():
    configs = {m: ViTConfig(m, 12, 1, 3).resolved() for m in [SOFTMAX, *LINEAR]}
    found = {m: (c.position_embedding, c.readout) for m, c in configs.items()}
    blind = {"lion_lit", "linear_transformer", "performer"}  # without decay the mixer knows no order of tokens
    assert found == {"softmax": (True, "cls")} | {m: (m in blind, "mean") for m in LINEAR}
    assert ViTConfig("lion_s", 12, 1, 3, position_embedding=True, readout="cls").readout == "cls"
    bare = ViTConfig("lightnet", 12, 1, 3, tpe=0, attention=LightNetConfig(rotation="none"))
    assert bare.resolved().position_embedding  # without rotation and TPE, both directions know no order either
    assert bare.label() == "lightnet without TPE without rotation"
    full = ViTConfig("lightnet", 12, 1, 3)
    assert (full.resolved().tpe, full.resolved().attention.rotation, full.label()) == (64, "lrpe", "lightnet")


SNAKES = {"scans": ("row_snake", "column_snake")}
WITH_CLS = ("lion_d", "lion_s", "lion_s_vector", "lion_s_hippo", "retnet", "lightnet", "deltanet")
MULTISCAN = [(m, {**SNAKES, "scan_merge": merge}) for m in ("lion_d", "lion_s") for merge in SCAN_MERGES]


@pytest.mark.parametrize(("mixer", "attention"), [*((m, {}) for m in WITH_CLS), *MULTISCAN])
def test_forms_agree(mixer, attention):
    model = vit(mixer, (20, 14), attention=AttentionConfig(**attention)).double().eval()
    check_forms(model, doubles(2, 3, 20, 14))


def test_readout_of_cls_sees_the_patches():
    model = vit("lion_s", readout="cls").eval()
    images = torch.randn(1, 3, 8, 8)
    assert not torch.allclose(model(images), model(-images))


def test_cls_is_not_read_where_it_sees_no_patch():
    for mixer, direction, depth in ((SOFTMAX, "forward", 2), ("lion_s", "forward", 2), ("lion_s", "alternating", 1)):
        attention = AttentionConfig(direction=direction)
        assert ViTConfig(mixer, 12, depth, 3, attention=attention).resolved().readout == "mean"
        message = "readout 'cls' sees no patch, because cls is first and all layers go for"
        invalid(message, ViTConfig, mixer, 12, depth, 3, attention=attention, readout="cls")
    again = AttentionConfig(direction="alternating")
    assert ViTConfig("lion_s", 12, 2, 3, attention=again, readout="cls").readout == "cls"


def test_drop_path_rises_over_the_layers():
    blocks = vit(depth=5, drop_path=0.2).encoder.blocks
    assert [block.drop_path.rate.item() for block in blocks] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_places_are_buffers_that_no_checkpoint_holds():
    model = vit(size=(4, 6), attention=AttentionConfig(**SNAKES))
    assert model.coords.tolist() == [[-1, 0, 0, 0, 1, 1, 1], [-1, 0, 1, 2, 0, 1, 2]]
    assert model.orders.tolist() == [[0, 1, 2, 3, 6, 5, 4], [0, 1, 4, 5, 2, 3, 6]]
    assert not any("coords" in name or "orders" in name for name in model.state_dict())
    assert vit().orders is None


@pytest.mark.parametrize("mixer", [SOFTMAX, "gla"])
def test_places_of_patches_without_a_position_embedding(mixer):
    """Check that MD-TPE and MD-LRPE distinguish patches that change places, because they see rows and columns.

    Without a cls token the readout is the mean.
    """
    patches = torch.randn(1, 3, 4, 6)
    turned = patches.clone()
    turned[..., :2, :2], turned[..., :2, 2:4] = patches[..., :2, 2:4], patches[..., :2, :2]
    bare = {"position_embedding": False, "attention": AttentionConfig(direction="both")}
    for settings in ({"tpe": 3}, {"attention": AttentionConfig(rotation="lrpe")}):
        torch.manual_seed(0)
        model = vit(mixer, (4, 6), cls=False, init_std=0.5, **{**bare, **settings}).eval()
        assert model.cls is None and model.length == 6 and model.config.readout == "mean"
        assert model.coords.tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
        assert (model(patches) - model(turned)).abs().max() > 1e-4
    torch.manual_seed(0)
    blind = vit(SOFTMAX, (4, 6), cls=False, init_std=0.5, **bare).eval()
    close(blind(patches), blind(turned))


def test_tpe_learns_on_images_of_any_size():
    source, target = (vit("lion_s", size, tpe=3) for size in ((8, 12), (16, 10)))
    source(torch.randn(2, 3, 8, 12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in source.encoder.tpe.parameters())
    target.load_state_dict(target.adapt(source.state_dict(), source))


KNOWN = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "classes": tuple("abcde")}


def test_images_go_in_as_they_are():
    model = vit(known=KNOWN).eval()
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    by_hand = (pixels.double().movedim(1, -1) / 255 - torch.tensor(KNOWN["mean"])) / torch.tensor(KNOWN["std"])
    by_hand = by_hand.movedim(-1, 1).float()
    with torch.inference_mode():
        logits = model(pixels)
        assert model.normalise(pixels).dtype == torch.float32
        close(model.normalise(pixels), by_hand)
        assert torch.equal(logits, model(model.normalise(pixels)))  # floating-point images count as normalised
        close(logits, model(by_hand))
        for dtype in (torch.double, torch.bfloat16):
            assert model.to(dtype)(pixels).dtype == dtype
            close(model(pixels).float(), logits, 2e-6 if dtype == torch.double else 0.05)


def test_properties_of_the_data_are_not_in_the_weights():
    """Check that older checkpoints load, and that metadata of the data are not stored in weights files."""
    plain, model = vit(), vit(known=KNOWN)
    assert model.classes == KNOWN["classes"] and plain.classes == ()
    assert plain.state_dict().keys() == model.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    assert model.mean.flatten().tolist() == pytest.approx(KNOWN["mean"])
    assert vit(known={"mean": [0.5]}).mean.shape == (3, 1, 1)  # one for all


def test_other_images_are_refused():
    for shape, dtype in (
        ((2, 1, 8, 8), "uint8"),
        ((2, 3, 8, 10), "float32"),
        ((3, 8, 8), "uint8"),
        ((2, 8, 8, 3), "uint8"),
        ((2, 3, 8, 8), "int64"),
    ):
        got = re.escape(f"expected (B, 3, 8, 8), uint8 or normalised floating point, got {shape}, {dtype}")
        invalid(got, vit(), torch.zeros(shape, dtype=getattr(torch, dtype)))


def test_what_does_not_fit_is_refused():
    middle = "cls_place 'middle' needs the cls token, one scan, and no distillation"
    for message, settings in (
        (r"model\.patch_size: 3 does not divide image height 8, nearest: 2", {"patch_size": 3}),
        (
            r"12 does not divide image height 50, nearest: 2, or \[10, 12\] \(height, width",
            {"size": (50, 96), "patch_size": 12},
        ),
        ("num_heads 5 does not divide dim 12, nearest: 4", {"num_heads": 5}),
        ("readout 'cls' needs the cls token; use 'mean'", {"mixer": SOFTMAX, "cls": False, "readout": "cls"}),
        (middle, {"mixer": "vim", "cls_place": "middle", "cls": False}),
        (middle, {"mixer": "vim", "cls_place": "middle", "distilled": True}),
        (middle, {"cls_place": "middle", "attention": AttentionConfig(**SNAKES)}),
        (r"std: expected one number per channel, 3, got \[0.2, 0.3\]", {"known": {"std": [0.2, 0.3]}}),
    ):
        invalid(message, vit, **settings)


def test_positions_are_interpolated_to_another_grid():
    source, target = vit("lion_lit", (8, 12)), vit("lion_lit", (16, 10))
    with torch.no_grad():  # a linear function of the grid
        y, x = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
        source.position[:] = torch.cat([torch.full((1,), 9.0), (y + 10 * x).flatten()])[None, :, None]
    weights = target.adapt(source.state_dict(), source)
    assert weights.keys() == source.state_dict().keys() and weights["position"].shape == target.position.shape
    assert weights["position"][0, 0].eq(9).all()  # the embedding of cls is not interpolated
    got = weights["position"][0, 1:, 0].view(8, 5)
    inner = got[2:-2, 1:-1]  # without the edges: values at the pixel centres of the old grid
    y, x = ((torch.arange(n) + 0.5) * old / n - 0.5 for n, old in ((8, 4), (5, 6)))
    assert (inner - (y[2:-2, None] + 10 * x[1:-1])).abs().max() < 0.35
    assert (got.diff(dim=0) > 0).all() and (got.diff(dim=1) > 0).all()
    target.load_state_dict({**target.state_dict(), "position": weights["position"]})


def test_positions_are_interpolated_to_as_many_patches_of_another_grid():
    source, target = vit("lion_lit", (8, 12)), vit("lion_lit", (12, 8))
    with torch.no_grad():  # the column of the grid
        source.position[0, 1:] = torch.arange(6.0).repeat(4)[:, None]
    got = adapted(target, source)[0, 1:, 0].view(6, 4)
    assert got.diff(dim=0).abs().max() < 1e-5 and (got.diff(dim=1) > 0).all()


def test_nothing_is_interpolated_without_need():
    a, b = vit("lion_lit", (8, 12)), vit("lion_s", (16, 10))
    assert torch.equal(adapted(a, a), a.position)
    assert "position" not in a.adapt(b.state_dict(), b)  # one of the models has no position embedding
    assert torch.equal(adapted(b, a), a.position)


@pytest.mark.parametrize("cls", [True, False])
def test_positions_reach_a_model_with_or_without_cls(cls):
    """Check that position embeddings of patches are interpolated to another size, while that of cls is new."""
    source, target = (vit(position_embedding=True, cls=c, size=(n, n)) for c, n in ((not cls, 8), (cls, 16)))
    with torch.no_grad():
        source.position[:, int(not cls) :] = 3.0
    position = adapted(target, source)
    assert position.shape == target.position.shape
    assert torch.allclose(position[:, int(cls) :], torch.tensor(3.0))
    assert torch.equal(position[:, : int(cls)], target.position[:, : int(cls)])


def test_positions_of_cls_reach_a_distilled_model():
    source, target = (vit(position_embedding=True, cls=True, distilled=d) for d in (False, True))
    position = adapted(target, source)
    close(position[:, [0, *range(2, position.shape[1])]], source.position)
    assert torch.equal(position[:, 1], target.position[:, 1])
    only = vit(position_embedding=True, cls=False, distilled=True)  # each token keeps its role
    assert torch.equal(adapted(only, source)[:, 0], only.position[:, 0])
    assert torch.equal(adapted(source, only)[:, 0], source.position[:, 0])
    close(adapted(only, target), target.position[:, 1:])


@pytest.mark.parametrize("mixer", [SOFTMAX, "vim"])
@torch.no_grad()
def test_cls_in_the_middle(mixer):
    """Check the order of tokens, the grid, and the readout, against the same model with its parts called one by one."""
    model = vit(mixer, (6, 10), cls_place="middle", position_embedding=True, init_std=0.5).double().eval()
    images = doubles(2, 3, 6, 10)
    patches = model.patch(images).flatten(2).mT
    x = torch.cat([patches[:, :7], model.cls.expand(2, -1, -1), patches[:, 7:]], 1) + model.position
    close(model(images), model.head(model.encoder(x, model.layout)[:, 7]))
    assert model.special.nonzero().tolist() == [[7]]
    assert model.coords[:, [6, 7, 8]].mT.tolist() == [[1, 1], [-1, -1], [1, 2]]
    larger = vit(mixer, (12, 10), cls_place="middle", position_embedding=True).double()
    grown = adapted(larger, model)
    assert torch.equal(grown[:, 15], model.position[:, 7]) and grown.shape == larger.position.shape
    first = vit(mixer, (12, 10), position_embedding=True).double()  # another place of cls, the same grid
    moved = adapted(first, model)
    assert torch.equal(moved[:, 0], model.position[:, 7])
    assert torch.equal(moved[:, 1:], torch.cat([grown[:, :15], grown[:, 16:]], 1))
    same = vit(mixer, (6, 10), position_embedding=True).double().adapt(model.state_dict(), model)["position"]
    close(same, model.position[:, [7, *range(7), *range(8, 16)]])  # of a grid of the same size


def test_cls_in_the_middle_is_read_in_one_direction():
    forward = ViTConfig("vim", 12, 2, 3, cls_place="middle", attention=StateSpaceConfig(direction="forward"))
    assert forward.resolved().readout == "cls"


def test_vim_starts_as_published():
    model = vit("vim", (64, 64), patch_size=16, init="vim", dim=192, depth=4, classes=1000)
    assert model.patch.weight.std().item() == pytest.approx(768**-0.5, rel=0.02) and not model.patch.bias.any()
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.02) and not model.head.bias.any()
    for block in model.encoder.blocks:
        mixer, bound = block.attention, 384**-0.5 / 2  # of PyTorch's Linear, over the square root of 4 blocks
        assert mixer.proj.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
        assert mixer.inputs.weight.std().item() == pytest.approx((3 * 192) ** -0.5, rel=0.02)
        assert mixer.sides[1].step_bias.min() < -4
