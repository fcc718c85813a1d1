"""Recipes of image generation: model shapes and training settings are those of the papers."""

import functools
from dataclasses import replace

import pytest

from lion.runs import build_on_meta, count_parameters
from lion.trainer.optim import learning_rate
from lion.trainer.plan import make_plan
from tests.helpers import ROOT
from tools.compose import describe_data, make_task, resolve

SIZES, PATCHES = ("s", "b", "l", "xl"), (2, 4, 8)
DIT = {"s": (12, 384, 6), "b": (12, 768, 12), "l": (24, 1024, 16), "xl": (28, 1152, 16)}  # depth, dim, heads
LIGHTNET = {"s": (18, 384, 6), "b": (18, 768, 6), "l": (36, 1024, 16), "xl": (42, 1152, 16)}  # recipes.md 7.3
TABLE_8 = {  # FID of LightNet after 400,000 steps, by size and patch
    "s": ("75.61", "94.90", "143.31"),
    "b": ("36.45", "59.81", "113.02"),
    "l": ("17.42", "37.54", "89.51"),
    "xl": ("15.52", "31.51", "87.22"),
}
FID = {  # 2212.09748, Table 4, by size and patch
    "s": ("68.40", "100.41", "153.60"),
    "b": ("43.47", "68.38", "122.74"),
    "l": ("23.33", "45.64", "118.87"),
    "xl": ("19.47", "43.01", "106.41"),
}


@functools.cache
def built(name, *overrides):
    """Return a resolved recipe, its model without storage, and the number of its samples."""
    recipe = resolve(name, overrides)
    info, samples, _ = describe_data(recipe, look=False)
    return recipe, build_on_meta(make_task(recipe, info), recipe.model), samples


def millions(model):
    return count_parameters(model) / 1e6


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_dit(size, patch):
    recipe, model, samples = built(f"dit_{size}_patch{patch}")
    depth, dim, heads = DIT[size]
    m = recipe.model.resolved()
    assert (m.mixer, m.depth, m.dim, m.num_heads, m.patch_size) == ("softmax", depth, dim, heads, (patch, patch))
    assert (m.block, m.mlp, m.norm, m.norm_eps, m.position_embedding) == (
        "adaln_zero",
        "mlp_tanh",
        "layernorm",
        1e-6,
        True,
    )
    assert round(millions(model)) == {"s": 33, "b": 130 + (patch == 8), "l": 458, "xl": 675}[size]
    assert model.length == (32 // patch) ** 2 and model.image_shape == (4, 32, 32) and model.none == 1000
    assert recipe.about.expected == f"{FID[size][PATCHES.index(patch)]} FID-50K"
    assert recipe.about.row.startswith(f"DiT-{size.upper()}/{patch} ")
    optim, plan = recipe.optim, make_plan(recipe, samples=samples, world=1)
    assert (optim.lr, optim.betas, optim.weight_decay) == (1e-4, (0.9, 0.999), 0)
    rates = {
        learning_rate(n, config=recipe.schedule, peak=1e-4, warmup=plan.warmup, total=plan.total) for n in (0, 10**5)
    }
    assert rates == {1e-4}
    assert (plan.total, recipe.trainer.batch_size, recipe.trainer.ema, samples) == (400_000, 256, 0.9999, 1_281_167)
    assert (recipe.task.steps, recipe.task.schedule, recipe.task.label_dropout) == (1000, "linear", 0.1)


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_lightnet(size, patch):
    """Check shapes and settings; the paper prints 33, 131, 470 and 680 M parameters.

    The second and third numbers are met exactly as printed. The first is met if truncated instead of rounded, the last
    if rounded to tens.
    """
    recipe, model, _ = built(f"lightnet_gen_{size}_patch{patch}")
    depth, dim, heads = LIGHTNET[size]
    m = recipe.model.resolved()
    assert (m.mixer, m.depth, m.dim, m.num_heads, m.patch_size) == ("lightnet", depth, dim, heads, (patch, patch))
    assert (m.tpe, m.attention.rotation, m.position_embedding) == (64, "lrpe", False)
    assert (m.attention.direction, m.attention.out_gate, m.attention.out_norm) == ("both", "sigmoid", "rmsnorm")
    assert model.length == (32 // patch) ** 2 + 2
    if patch == 2:
        count = millions(model)
        assert {"s": int(count), "b": round(count), "l": round(count), "xl": round(count, -1)}[size] == {
            "s": 33, "b": 131, "l": 470, "xl": 680,
        }[size]  # fmt: skip
    assert recipe.about.row == f"LightNet's Table 8, LightNet-{size.upper()}/{patch}"
    assert recipe.about.expected == f"{TABLE_8[size][PATCHES.index(patch)]} FID-50K"
    dit = resolve(f"dit_{size}_patch{patch}")
    for part in ("task", "data", "schedule", "trainer"):
        assert getattr(recipe, part) == getattr(dit, part)
    assert recipe.optim == replace(dit.optim, betas=(0.9, 0.98))  # Table 9


def test_the_long_run_of_table_2():
    recipe, usual = (resolve(f"lightnet_gen_xl_patch2{name}") for name in ("_long", ""))
    assert (recipe.trainer.steps, recipe.trainer.batch_size) == (800_000, 1024)  # 5.1
    assert recipe.about.expected == "5.35 FID-50K" and recipe.model == usual.model


def test_ablations():
    """Check the ablations of LightNet-B/2 in Table 6."""
    whole = millions(built("lightnet_gen_b_patch2")[1])
    recipe, model, _ = built("lightnet_gen_b_patch2_no_tpe")
    assert recipe.model.resolved().attention.rotation == "lrpe" and model.position is None
    assert whole - millions(model) == pytest.approx(256 * 768 / 1e6)
    assert recipe.about.expected == "42.74 FID-50K"
    recipe, model, _ = built("lightnet_gen_b_patch2_no_lrpe")
    assert recipe.model.resolved().tpe == 64 and recipe.model.resolved().attention.rotation == "none"
    assert millions(model) == whole and model.position is None
    assert recipe.about.expected == "42.37 FID-50K"
    both = built("lightnet_gen_b_patch2", "model.tpe=0", "model.attention.rotation=none")[1]
    assert both.position is not None  # otherwise the model would have no position information


@pytest.mark.slow
def test_modulated_blocks_would_be_half_as_large_again():
    """Check the numbers of parameters that recipes/dit/README.md names, with tokens and with adaLN-Zero."""
    said = (ROOT / "recipes/dit/README.md").read_text()
    for tokens in (True, False):
        models = [built(f"lightnet_gen_{s}_patch2", *[] if tokens else ["model.block=adaln_zero"])[1] for s in SIZES]
        assert {model.length for model in models} == {256 + 2 * tokens}
        *most, last = (f"{millions(model):,.1f}" for model in models)
        assert f"{', '.join(most)} and {last} M" in " ".join(said.split())
        assert [most, last] == (
            [["33.6", "131.1", "470.3"], "678.8"] if tokens else [["49.8", "196.1", "699.0"], "1,016.1"]
        )


@pytest.mark.parametrize("mixer", ["softmax", "lightnet"])
@pytest.mark.slow
def test_those_for_a_cpu_differ_by_mixer_and_patch(mixer):
    models = {p: built(f"dit_cifar10_{mixer}_patch{p}")[1] for p in PATCHES}
    assert [m.length for m in models.values()] == [256, 64, 16]
    assert all(m.config.modulates and m.image_shape == (3, 32, 32) for m in models.values())
    recipe, model, _ = built(f"dit_tiny_{mixer}")
    assert recipe.data.name == "digits" and model.length == 16 and model.config.modulates
