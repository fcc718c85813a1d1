"""Recipes of image generation: model shapes and training settings are those of the papers."""

from dataclasses import replace

import pytest

from lion.runs import count_parameters
from lion.trainer.optim import learning_rate
from lion.trainer.plan import make_plan
from tests.helpers import ROOT, built, check_settings
from tools.compose import resolve

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


def millions(model):
    return count_parameters(model) / 1e6


def to_tens(number):
    return round(number, -1)


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_dit(size, patch):
    recipe, model, samples = built(f"dit_{size}_patch{patch}")
    depth, dim, heads = DIT[size]
    shape = {"mixer": "softmax", "depth": depth, "dim": dim, "num_heads": heads, "patch_size": (patch, patch)}
    block = {"block": "adaln_zero", "mlp": "mlp_tanh", "norm": "layernorm", "norm_eps": 1e-6}
    check_settings(recipe.model.resolved(), {**shape, **block, "position_embedding": True})
    assert round(millions(model)) == {"s": 33, "b": 130 + (patch == 8), "l": 458, "xl": 675}[size]
    assert model.length == (32 // patch) ** 2 and model.image_shape == (4, 32, 32) and model.none == 1000
    assert recipe.about.row.startswith(f"DiT-{size.upper()}/{patch} ")
    plan = make_plan(recipe, samples=samples, world=1)
    rates = {
        learning_rate(n, config=recipe.schedule, peak=1e-4, warmup=plan.warmup, total=plan.total) for n in (0, 10**5)
    }
    assert rates == {1e-4}
    assert (plan.total, samples) == (400_000, 1_281_167)
    check_settings(
        recipe,
        {
            "about.expected": f"{FID[size][PATCHES.index(patch)]} FID-50K",
            "optim.lr": 1e-4,
            "optim.betas": (0.9, 0.999),
            "optim.weight_decay": 0,
            "trainer.batch_size": 256,
            "trainer.ema": 0.9999,
            "task.steps": 1000,
            "task.schedule": "linear",
            "task.label_dropout": 0.1,
        },
    )


@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize("size", SIZES)
def test_lightnet(size, patch):
    """Check shapes and settings; the paper prints 33, 131, 470 and 680 M parameters.

    The second and third numbers are met exactly as printed. The first is met if truncated instead of rounded, the last
    if rounded to tens.
    """
    recipe, model, _ = built(f"lightnet_gen_{size}_patch{patch}")
    depth, dim, heads = LIGHTNET[size]
    shape = {"mixer": "lightnet", "depth": depth, "dim": dim, "num_heads": heads, "patch_size": (patch, patch)}
    order = {"tpe": 64, "position_embedding": False, "attention.rotation": "lrpe", "attention.direction": "both"}
    output = {"attention.out_gate": "sigmoid", "attention.out_norm": "rmsnorm"}
    check_settings(recipe.model.resolved(), shape | order | output)
    assert model.length == (32 // patch) ** 2 + 2
    if patch == 2:
        rounded, printed = {"s": (int, 33), "b": (round, 131), "l": (round, 470), "xl": (to_tens, 680)}[size]
        assert rounded(millions(model)) == printed
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
    for overrides, length, counts in (
        ([], 258, "33.6, 131.1, 470.3 and 678.8 M"),
        (["model.block=adaln_zero"], 256, "49.8, 196.1, 699.0 and 1,016.1 M"),
    ):
        models = [built(f"lightnet_gen_{size}_patch2", *overrides)[1] for size in SIZES]
        assert {model.length for model in models} == {length}
        *most, last = (f"{millions(model):,.1f}" for model in models)
        assert f"{', '.join(most)} and {last} M" == counts
        assert counts in " ".join(said.split())


@pytest.mark.parametrize("mixer", ["softmax", "lightnet"])
@pytest.mark.slow
def test_those_for_a_cpu_differ_by_mixer_and_patch(mixer):
    models = {p: built(f"dit_cifar10_{mixer}_patch{p}")[1] for p in PATCHES}
    assert [m.length for m in models.values()] == [256, 64, 16]
    assert all(m.config.modulates and m.image_shape == (3, 32, 32) for m in models.values())
    recipe, model, _ = built(f"dit_tiny_{mixer}")
    assert recipe.data.name == "digits" and model.length == 16 and model.config.modulates
