"""Tests of the models for timm: their logits are those of our ViT, bit for bit, through the interfaces of timm."""

import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lion.layers.mixers import set_form
from lion.layers.mixers.config import AttentionConfig
from lion.models.vit import ViT, ViTConfig
from lion.recipe import load_recipe
from tests.helpers import ROOT
from tests.layers.helpers import close, invalid

timm = pytest.importorskip("timm")
room = pytest.importorskip("lion.timm")
configs = pytest.importorskip("lion.timm.vision_transformer")
weights = pytest.importorskip("lion.timm.weights")
timm_optim = pytest.importorskip("timm.optim")
timm_layers = pytest.importorskip("timm.layers")
feature_extraction = pytest.importorskip("torchvision.models.feature_extraction")

TINY = [name for name in configs.CONFIGS if "tiny" in name]
EACH = pytest.mark.parametrize("name", TINY)
SIDE, PATCH, CLASSES = (64, 48), 16, 5


def made(name, size=SIDE, depth=2, **settings):
    """Return a small model of timm."""
    return timm.create_model(name, img_size=size, **{"depth": depth, "num_classes": CLASSES, **settings})


def randomise(model):
    """Set random weights with which every part of a model affects the logits."""
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    return model.eval()


def pair(name, size=SIDE):
    """Return a small model for timm and our ViT, with the same weights."""
    theirs = randomise(made(name, size))
    ours = vit(name, size)
    taken, held = weights.timm_weights(ours.state_dict()), theirs.state_dict()
    assert {n: w.shape for n, w in taken.items()} == {n: w.shape for n, w in held.items()}
    back = {weights.timm_name(name): name for name in ours.state_dict()}
    ours.load_state_dict({back[name]: value for name, value in held.items()})
    return theirs, ours.eval()


def vit(name, size=SIDE, **changes):
    c = configs.CONFIGS[name]
    kept = {key: value for key, value in vars(c).items() if key not in ("attention", "depth")}
    config = ViTConfig(**{**kept, "depth": 2, "attention": changes.get("attention", c.attention)})
    return ViT(config, image_size=size, channels=3, num_classes=CLASSES)


def images(size=SIDE, count=2):
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))


@EACH
def test_logits_and_gradients_are_those_of_our_vit_in_every_form_and_checkpointing_keeps_them(name):
    theirs, ours = pair(name)
    ours(images()).square().sum().backward()
    back = {weights.timm_name(name): p.grad for name, p in ours.named_parameters()}
    for enable in (False, True):
        theirs.set_grad_checkpointing(enable)
        theirs.zero_grad()
        theirs(images()).square().sum().backward()
        for n, p in theirs.named_parameters():
            assert torch.equal(p.grad, back[n]), n
    seen = []
    for form in ("full", "chunk", "rnn"):
        set_form(theirs, form, 4)
        set_form(ours, form, 4)
        with torch.no_grad():
            seen.append(ours(images()))
            assert torch.equal(theirs(images()), seen[-1]) and seen[-1].std() > 0.05
    close(seen[1:], seen[:1] * 2, 1e-4)


RECIPES = {"lion_": "lion_s", "lion_lit_": "lion_lit", "lion_d_": "lion_d", "lion_s_": "lion_s"}
RECIPES |= {f"lion_{mixer}_multiscan_": f"lion_{mixer}_multiscan" for mixer in "ds"}


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_the_registered_models_are_those_of_the_recipes(name):
    variant, size = name.removeprefix("vit_").removesuffix("_patch16_224").rsplit("_", 1)
    file = f"lightnet/lightnet_{size}" if "lightnet" in variant else f"deit_{size}_{RECIPES[f'{variant}_']}"
    expected = vars(load_recipe(ROOT / f"recipes/{file}.yaml").model.resolved())
    assert vars(configs.CONFIGS[name].resolved()) == {**expected, "drop_path": 0}
    assert timm.is_model(name) and timm.list_models(name) == [name]


@EACH
@torch.no_grad()
def test_symbolic_traces_and_images_of_other_sizes(name):
    """Check `set_input_size` and `dynamic_img_size` against our model, whose positions are interpolated."""
    other = (32, 80)
    theirs, ours = pair(name)
    found = timm_layers.create_feature_extractor(theirs, {"blocks.0": "first", "head": "logits"})(images())
    assert torch.equal(found["logits"], theirs(images()))
    assert torch.equal(found["first"][:, -12:], theirs.forward_intermediates(images(), [0], output_fmt="NLC")[1][0])
    larger = vit(name, other)
    larger.load_state_dict(larger.adapt(ours.state_dict(), ours))
    expected = larger.eval()(images(other))
    dynamic = made(name, dynamic_img_size=True).eval()
    dynamic.load_state_dict(theirs.state_dict())
    for size in (SIDE, other, SIDE):
        model = theirs if size == SIDE else larger
        close(dynamic(images(size)), model(images(size)), 1e-5)
    theirs.set_input_size(other)
    close(theirs(images(other)), expected, 1e-5)


@pytest.mark.parametrize("name", ["vit_lion_d_multiscan_tiny_patch16_224", "vit_lion_lightnet_tiny_patch16_224"])
def test_images_of_two_sizes_have_their_gradients(name):
    """Check two sizes with one number of patches in a backward pass, recomputed or not, after an evaluation of one."""
    model = randomise(made(name, depth=1, dynamic_img_size=True, drop_path_rate=0.0))
    tall, wide = images((64, 32)), images((32, 64))
    with torch.inference_mode():
        model(tall)

    def gradients(*batches):
        model.zero_grad()
        sum(model(x).square().mean() for x in batches).backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = [gradients(tall), gradients(wide)]
    for recompute in (False, True):
        model.set_grad_checkpointing(recompute)
        for both, one, other in zip(gradients(tall, wide), *alone, strict=True):
            close(both, one + other)


def test_averages_keep_orders_and_coordinates():
    model = randomise(made(TINY[-1], depth=1))
    mean = AveragedModel(model, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    for _ in range(20):
        mean.update_parameters(model)
    assert torch.equal(mean(images()), model(images())) and not [*model.buffers()]


@torch.no_grad()
def test_features_heads_and_pooling():
    theirs, ours = pair("vit_lion_s_tiny_patch16_224")
    x, blocks = images(), []
    for block in ours.encoder.blocks:
        block.register_forward_hook(lambda _, inputs, y: blocks.append(y))
    logits = ours(x)
    final, maps = theirs.forward_intermediates(x)
    for tokens, grid in zip(blocks, maps):
        assert torch.equal(grid.flatten(2).mT, tokens[:, 1:]) and grid.shape == (2, 192, 4, 3)
    assert torch.equal(final, ours.encoder.norm(blocks[-1])) and torch.equal(final, theirs.forward_features(x))
    pooled = theirs.forward_head(final, pre_logits=True)
    assert torch.equal(pooled, final.mean(1)) and torch.equal(theirs.forward_head(final), logits)
    assert torch.equal(theirs.get_classifier()(pooled), logits)

    theirs.reset_classifier(0)
    assert torch.equal(theirs(x), pooled)
    theirs.reset_classifier(7, "token")
    assert torch.equal(theirs(x), theirs.head(final[:, 0]))
    features = timm.create_model("vit_lion_tiny_patch16_224", img_size=SIDE, depth=4, features_only=True)
    assert [y.shape for y in features(x)] == [(2, 192, 4, 3)] * 3
    assert features.feature_info.channels() == [192] * 3 and features.feature_info.reduction() == [16] * 3


@torch.no_grad()
def test_causal_models_and_masked_patches():
    """Check `is_causal` against our model in direction "forward", and a mask against the tokens that are left."""
    for name in ("vit_lion_s_tiny_patch16_224", "vit_lion_lightnet_tiny_patch16_224"):
        theirs, ours = pair(name)
        forward = vit(name, attention=type(configs.CONFIGS[name].resolved().attention)(direction="forward"))
        forward.load_state_dict(ours.state_dict())
        assert torch.equal(theirs(images(), is_causal=True), forward.eval()(images()))
    theirs, _ = pair("vit_lion_s_tiny_patch16_224")
    x, keys = images(), (torch.arange(13) < 10)[None, None, None]
    y = theirs.forward_features(x, attn_mask=keys)[:, :10]
    x[:, :, 48:] = 0  # the last three patches
    close(y, theirs.forward_features(x, attn_mask=keys)[:, :10], 0)
    assert not torch.allclose(y, theirs.forward_features(x)[:, :10])


def test_parameters_are_grouped_for_optimizers():
    model = made("vit_lion_lightnet_tiny_patch16_224")
    plain, decayed = timm_optim.param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
    assert plain["weight_decay"] == 0 and {id(p) for p in model.tpe.parameters()} <= {id(p) for p in plain["params"]}
    assert id(model.head.weight) in {id(p) for p in decayed["params"]}
    groups = timm_optim.param_groups_layer_decay(model, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    scales = [scale[id(p)] for p in (model.tpe.weight, model.blocks[0].attn.qkv.weight, model.head.weight)]
    assert scales == [0.125, 0.25, 1] and scale[id(model.patch_embed.proj.weight)] == 0.125


@torch.no_grad()
def spoil(model):
    """Overwrite all weights and buffers."""
    for t in (*model.parameters(), *model.buffers()):
        t.fill_(torch.nan if t.is_floating_point() else 1)


@EACH
def test_models_start_as_ours_and_are_initialised_after_the_meta_device(name):
    torch.manual_seed(0)
    started, ours = made(name), vit(name)
    model = made(name, device="meta")
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"meta"}
    model = model.to_empty(device="cpu")
    model.load_state_dict(started.state_dict())  # the coordinates are in no file of weights
    with torch.no_grad():
        assert torch.equal(model.eval()(images()), started.eval()(images()))
    spoil(model)
    model.init_weights()
    assert torch.equal(model.place.coords, started.place.coords) and model(images()).isfinite().all()
    for n, p in ours.named_parameters():
        n = weights.timm_name(n)
        for other in (started, model):
            new = other.get_parameter(n)
            if n != "cls_token" and p.numel() > 500:  # timm starts cls at 1e-6, DeiT at 0.02
                close(new.std(), p.std(), atol=1e-9, rtol=0.15, msg=n)
                close(new.mean(), p.mean(), atol=0.01, rtol=0.1, msg=n)
            assert new.isfinite().all()


@pytest.mark.slow
def test_biases_of_convolutions_are_initialised_after_the_meta_device():
    kind = room.attention("lion_s", conv_width=3)
    sizes = dict(embed_dim=30, num_heads=3, depth=1)
    model = made("vit_tiny_patch16_224", 32, device="meta", attn_layer=kind, **sizes).to_empty(device="cpu")
    spoil(model)
    model.init_weights(needs_reset=True)
    assert model.blocks[0].attn.conv.bias is not None
    assert [name for name, t in model.named_parameters() if not t.isfinite().all()] == []


def test_prefix_tokens_do_not_decay():
    model = made("vit_lion_s_tiny_patch16_224", 32, depth=1, reg_tokens=3)
    assert model.place.special.tolist() == [True] * 4 + [False] * 4
    assert model.place().coords[:, 4:].tolist() == [[0, 0, 1, 1], [0, 1, 0, 1]]
    seen = []
    model.blocks[0].attn.decays[0].register_forward_hook(lambda _, inputs, gating: seen.append(gating.log_decay))
    model(images((32, 32)))
    assert (seen[0][..., :4] == 0).all() and (seen[0][..., 4:] < 0).all()


@pytest.mark.parametrize("kind", ["mlp", "mlp_tanh", "glu", "glu_bare", "glu_gelu"])
@torch.no_grad()
def test_every_mlp_has_the_values_of_ours(kind):
    config = ViTConfig("lion_d", 30, 1, 3, mlp=kind, mlp_ratio=2.5, patch_size=PATCH)
    theirs = randomise(configs.LionVisionTransformer(img_size=32, num_classes=CLASSES, **configs.arguments(config)))
    ours = ViT(config, image_size=(32, 32), channels=3, num_classes=CLASSES)
    ours.load_state_dict({n: theirs.state_dict()[weights.timm_name(n)] for n in ours.state_dict()})
    assert torch.equal(theirs(images((32, 32))), ours.eval()(images((32, 32))))
    assert theirs.blocks[0].mlp.fc2.in_features == 75


def test_softmax_is_timms_own_attention():
    arguments = configs.arguments(ViTConfig("softmax", 12, 1, 3))
    assert arguments["attn_layer"] is timm_layers.Attention and arguments["global_pool"] == "token"


HOMELESS = {
    "block": "post_norm",
    "cls_place": "middle",
    "mlp": "none",
    "distilled": True,
    "norm": "batchnorm",
    "mixer": "fox",
}


def test_what_timm_has_no_place_for_is_refused():
    def arguments(mixer="lion_s", **settings):
        return configs.arguments(ViTConfig(mixer, 12, 2, 3, **settings))

    for name, value in HOMELESS.items():
        invalid(f"^{name}: timm's VisionTransformer has no place for {value!r}", arguments, **{name: value})
    both_ways, turned = AttentionConfig(direction="alternating"), AttentionConfig(rotation="rope")
    invalid("attention.direction: timm's VisionTransformer has", arguments, attention=both_ways)
    invalid("attention.rotation: timm's softmax attention has no place for it", arguments, "softmax", attention=turned)


def test_wrong_arguments_of_a_model_are_refused():
    invalid("patch_drop_rate: not available", timm.create_model, "vit_lion_tiny_patch16_224", patch_drop_rate=0.1)
    with pytest.raises(TypeError, match="not_an_argument"):
        timm.create_model("vit_lion_tiny_patch16_224", not_an_argument=1)


@pytest.mark.slow
def test_a_training_step_of_timm():
    """Check dropout rates, and that timm's optimizer factory and EMA accept a model."""
    torch.manual_seed(0)
    rates = dict(drop_rate=0.1, drop_path_rate=0.2, proj_drop_rate=0.1, attn_drop_rate=0.1, pos_drop_rate=0.1)
    model = made("vit_lion_s_tiny_patch16_224", 32, num_classes=2, in_chans=1, **rates)
    assert model.blocks[1].drop_path2.drop_prob == pytest.approx(0.2)
    averaged = timm.utils.ModelEmaV3(model, decay=0.5)
    optimizer = timm_optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    x, y = torch.randn(8, 1, 32, 32), torch.arange(8) % 2
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        averaged.update(model)
        losses.append(loss.item())
    assert sum(losses[-3:]) < sum(losses[:3]) / 2 and averaged.module(x).isfinite().all()
