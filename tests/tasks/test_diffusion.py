import math

import pytest
import torch
import yaml

from lion.inference.diffusion import SCHEDULES, Process
from lion.models.dit import DiTConfig
from lion.samples.images import ImageInfo
from lion.samples.seeds import place_keys
from lion.tasks.diffusion import Diffusion, DiffusionConfig, scaled, to_bytes
from tests import helpers
from tests.helpers import here, pictures, state_of, tiny_recipe
from tests.layers.helpers import close, invalid
from tests.tasks.helpers import rows_of
from tests.trainer.helpers import are_same, train

INFO = ImageInfo((4, 4), 1, ("a", "b", "c"), (0.5,), (0.5,))
LATENTS = ImageInfo((4, 4), 4, ("a", "b", "c"), (0.0,) * 4, (1.0,) * 4)


def task(info=INFO, **settings):
    return Diffusion(DiffusionConfig(**settings), info)


def model_of(t):
    torch.manual_seed(0)
    model = t.build_model(DiTConfig("lion_s", 12, 2, 3))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def batch(count=6, **more):
    image = torch.randint(256, (count, 1, 4, 4), dtype=torch.uint8)
    return {"image": image, "label": torch.arange(count) % 3, **more}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [10, 1000])
def test_a_step_at_a_time_is_the_closed_form(schedule, count):
    """Compare mean and variance of x_t with the recursion x_t = sqrt(1 - b_t) x_t-1 + sqrt(b_t) noise."""
    process, variances = Process(schedule, count), SCHEDULES[schedule](count)
    mean, variance = 1.0, 0.0
    ones, zeros = torch.ones(1, 1, dtype=torch.double), torch.zeros(1, 1, dtype=torch.double)
    for t, beta in enumerate(variances.tolist()):
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        at = torch.tensor([t])
        assert process.noisy(ones, zeros, at).item() == pytest.approx(mean, rel=1e-9)
        assert process.noisy(zeros, ones, at).item() == pytest.approx(math.sqrt(variance), rel=1e-9)
    assert mean < 0.01 and 0 < variances.min() and variances.max() <= 0.999


def test_schedules_are_the_published_ones():
    linear, cosine = (Process(name, 1000).alphas_cumprod for name in ("linear", "cosine"))
    close(SCHEDULES["linear"](1000)[[0, -1]], torch.tensor([1e-4, 0.02]).double())
    assert linear[-1].item() == pytest.approx(4.04e-5, rel=1e-2)  # DDPM's value
    for t in (0, 250, 500, 900):
        f = [math.cos((u + 0.008) / 1.008 * math.pi / 2) ** 2 for u in ((t + 1) / 1000, 0)]
        assert cosine[t].item() == pytest.approx(f[0] / f[1], rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "steps", "bound"),
    [
        ("linear", 1, None),
        ("cosine", 7, None),
        ("linear", 1000, None),
        ("cosine", 1, 1.0),
        ("linear", 7, 1.0),
        ("cosine", 1000, 1.0),
    ],
)
def test_ddim_undoes_exact_noise(schedule, steps, bound):
    torch.manual_seed(0)
    process = Process(schedule, 1000)
    x, noise = torch.rand(5, 2, 3, dtype=torch.double) * 2 - 1, torch.randn(5, 2, 3, dtype=torch.double)
    last, seen = torch.full((5,), 999), []

    def predict(y, times):
        seen.append(times[0].item())
        kept = process.alphas_cumprod[times][:, None, None]
        return (y - kept.sqrt() * x) / (1 - kept).sqrt()

    found = process.denoise(predict, process.noisy(x, noise, last), steps=steps, bound=bound)
    close(found, x, 1e-6)
    assert len(seen) == steps and seen[0] == 999 and (steps == 1 or seen[-1] == 0) and sorted(set(seen))[::-1] == seen


def test_fresh_noise_keeps_the_distribution():
    """Check DDIM and DDPM on a normal distribution, whose noise is known exactly."""
    torch.manual_seed(0)
    process = Process("cosine", 200)

    def predict(x, times):  # x_0 ~ N(0, 0.25)
        kept = process.alphas_cumprod[times][:, None]
        return x * (1 - kept).sqrt() / (0.25 * kept + 1 - kept)

    start = torch.randn(20_000, 1, dtype=torch.double)
    for eta in (0.0, 1.0):
        found = process.denoise(predict, start, steps=200, eta=eta, draw=lambda step: torch.randn_like(start))
        assert found.std().item() == pytest.approx(0.5, rel=0.03)
        follows = torch.corrcoef(torch.cat([start, found], 1).T)[0, 1].item()
        assert follows > 0.99 if eta == 0 else abs(follows) < 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Process("linear", 10).times(11), "steps: expected 1 to 10, got 11"),
        (lambda: denoised(eta=2.0), "eta: expected 0 to 1"),
        (lambda: denoised(eta=0.5), "draw: eta=0.5 adds noise"),
        (lambda: Process("x", 10), "schedule: expected one of cosine, linear, got 'x'"),
        (lambda: DiffusionConfig(steps=10), r"shown_steps: expected at most task\.steps=10, got 50"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    invalid(message, call)


def denoised(eta):
    return Process("linear", 10).denoise(lambda x, t: x, torch.zeros(1, 1), steps=2, eta=eta)


def test_guidance_needs_dropped_labels():
    """Check that training without dropped labels allows only guidance 1, and training without labels only 0."""
    for dropout, only in ((0, 1), (1, 0)):
        t = task(label_dropout=dropout, shown_guidance=only, steps=20, shown_steps=5)
        model, classes = model_of(t), torch.tensor([0, 1])
        assert t.generate(model, classes, keys(2), steps=1, guidance=only).isfinite().all()
        with pytest.raises(ValueError, match=f"^guidance: task.label_dropout={dropout} allows only {only}, got 1.5"):
            t.generate(model, classes, keys(2), steps=1, guidance=1.5)
        invalid(
            f"^shown_guidance: task.label_dropout={dropout} allows only {only}", DiffusionConfig, label_dropout=dropout
        )
        DiffusionConfig(label_dropout=dropout, shown=0)


def test_bytes_come_back():
    image = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    x = scaled(image)
    assert (x.min(), x.max()) == (-1, 1) and torch.equal(to_bytes(x), image)
    assert to_bytes(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]
    latents = torch.randn(2, 4, 4, 4, dtype=torch.half)
    assert torch.equal(scaled(latents), latents.float())


@pytest.mark.parametrize(("dropout", "labels"), [(0.3, [0, 1, 2, 0, 1, 2]), (1, [3] * 6)])  # 1: no class is learned
def test_the_labels_of_an_evaluation(dropout, labels):
    model = Recorder()
    held_out = batch(mask=torch.ones(6, dtype=torch.bool), key=torch.arange(6))
    task(label_dropout=dropout, shown=0).evaluate(model, held_out)
    assert model.labels.tolist() == labels


class Recorder(torch.nn.Module):
    """A model that records its inputs and predicts zero noise."""

    def forward(self, x, times, labels):
        self.x, self.times, self.labels = x, times, labels
        return torch.zeros_like(x)


def white(count, **more):
    """Return a batch of white images, which are 1 everywhere as inputs of the model."""
    image = torch.full((count, 1, 4, 4), 255, dtype=torch.uint8)
    return {"image": image, "label": torch.zeros(count, dtype=torch.long), **more}


def test_the_loss_is_of_the_noise_and_some_labels_are_dropped():
    t, model = task(label_dropout=0.3), Recorder()
    sums = t.loss(model, batch(5000))
    assert (sums.loss / sums.weight).item() == pytest.approx(1, rel=0.02) and sums.weight == 5000
    assert (model.labels == 3).float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert model.times.min() == 0 and model.times.max() == 999
    assert t.loss(model, white(5000)).weight == 5000
    kept = t.process.alphas_cumprod[model.times].float()
    early = model.times < 200
    close(model.x[early].mean(), kept[early].sqrt().mean(), 0.01)


def test_evaluation_asks_all_the_same():
    t = task()
    model = model_of(t)
    b = batch(mask=torch.tensor([True] * 5 + [False]), key=torch.arange(6) * 977)
    whole = t.evaluate(model, b)
    parts = [t.evaluate(model, rows_of(b, slice(i, i + 2))) for i in (0, 2, 4)]
    close(whole.outputs, torch.cat([p.outputs for p in parts]))
    assert whole.sums["loss"][1] == 5
    for name, pair in whole.sums.items():  # float64 sums of float32 outputs, for different batch sizes
        for i in range(2):
            close(pair[i], sum(p.sums[name][i] for p in parts), atol=1e-6, rtol=1.3e-6)
    of_parts = [whole.sums[f"loss_part{i}"] for i in range(1, 5)]
    close(sum(total for total, _ in of_parts), whole.sums["loss"][0])
    assert sum(count for _, count in of_parts) == 5
    torch.manual_seed(1)
    assert torch.equal(t.evaluate(model, b).outputs, whole.outputs)
    other = t.evaluate(model, {**b, "key": b["key"] + 1})
    assert not torch.isclose(other.sums["loss"][0], whole.sums["loss"][0])


def keys(count, seed=0):
    return place_keys(seed, torch.arange(count))


def test_samples_depend_on_seed_and_place_alone():
    t = task(steps=20, shown_steps=5)
    model, classes = model_of(t), torch.tensor([0, 1, 2, 0, 1])
    for eta in (0.0, 0.7):
        how = {"steps": 5, "eta": eta, "guidance": 2.0}
        whole = t.generate(model, classes, keys(5), **how)
        parts = [t.generate(model, *part, **how) for part in zip(classes.split(2), keys(5).split(2))]
        close(whole, torch.cat(parts), 1e-5)
        assert not torch.allclose(whole, t.generate(model, classes, keys(5, seed=1), **how))
        assert not torch.allclose(whole[0], whole[3])
    pictures = t.sample(model, classes, keys(5), steps=5)
    assert pictures.dtype == torch.uint8 and pictures.shape == (5, 1, 4, 4)
    assert torch.equal(pictures, to_bytes(t.generate(model, classes, keys(5), steps=5)))


def test_guidance():
    t = task(steps=20, shown_steps=5)
    model, classes, none = model_of(t), torch.tensor([0, 1, 2, 0]), torch.full((4,), 3)

    def found(guidance, classes=classes):
        return t.generate(model, classes, keys(4), steps=1, guidance=guidance)

    x, asked = [], []
    model.register_forward_pre_hook(lambda _, inputs: (x.append(inputs[0]), asked.append(inputs[2].tolist())) and None)
    found(1.0), found(0.0), found(3.0)
    assert asked == [[0, 1, 2, 0], [3] * 4, [0, 1, 2, 0, 3, 3, 3, 3]]
    close(found(1.0), found(1 + 1e-9))  # 1 + 1e-9 runs the model twice
    close(found(0.0), found(5.0, none))
    kept = t.process.alphas_cumprod[-1].item()
    times = torch.full((4,), 19)
    with torch.no_grad():
        conditioned, unconditioned = (model(x[0], times, labels) for labels in (classes, none))
    noise = unconditioned + 3 * (conditioned - unconditioned)
    expected = ((x[0] - math.sqrt(1 - kept) * noise) / math.sqrt(kept)).clamp(-1, 1)
    close(found(3.0), expected)


def test_latents_have_no_bound_and_are_no_images():
    t = task(LATENTS, steps=20, shown_steps=5)
    model = model_of(t)
    x = t.sample(model, torch.tensor([0, 1]), keys(2), steps=3)
    assert x.dtype == torch.float32 and x.shape == (2, 4, 4, 4) and x.abs().max() > 1
    b = {"image": torch.randn(2, 4, 4, 4), "label": torch.tensor([0, 1])}
    assert t.loss(model, b).loss.isfinite() and t.progress(model, b) == {} == t.preview(model, b)


def test_tensorboard_shows_the_same_noise_and_the_data_beside_it():
    t = task(steps=20, shown=5, shown_steps=4)
    model, b = model_of(t), batch()
    first, second = t.progress(model, b), t.progress(model, b)
    assert first.keys() == {"data", "samples"} and first["data"].shape == first["samples"].shape
    assert torch.equal(first["samples"], second["samples"])
    assert task(steps=20, shown=0).progress(model, b) == {}


@pytest.mark.slow
def test_a_range_of_times_without_images_does_not_count_as_divergence(tmp_path):
    """Train with so few images that no image of val has a time of the second range."""
    pictures(tmp_path / "images", {"train": {"a": 8, "b": 8}, "val": {"a": 2, "b": 2}})
    path = tiny_recipe(tmp_path, trainer={"batch_size": 8, "steps": 4, "eval_every": 2, "save_every": 2})
    values = yaml.safe_load(path.read_text())
    values["data"] = {"name": "imagefolder", "root": str(tmp_path / "images"), "image_size": [8, 8]}
    path.write_text(yaml.safe_dump(values | {"task": {"name": "diffusion", "shown": 0}}))
    assert here("train", path, "--no-eval") == 0
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").glob("best-*"))


def test_a_diffusion_task_predicts_no_classes():
    t = task()
    helpers.refused(r"generates images and classifies none: \./run\.sh sample RUN", t.check_prediction)
    assert t.outputs(model_of(t), {"image": batch()["image"]}).shape == (6, 1, 4, 4)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("diffusion")
    path = tiny_recipe(folder, trainer={"ema": 0.9, "steps": 8})
    values = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**values, "task": {"name": "diffusion", "shown": 4, "shown_steps": 3}}))
    return path


@pytest.mark.slow
def test_a_resumed_run_is_the_run_that_was_not_stopped(recipe, tmp_path):
    straight = train(recipe, tmp_path / "a")
    train(recipe, tmp_path / "b", stop_at=4)
    resumed = train(recipe, tmp_path / "b")
    assert are_same(straight.model, resumed.model)
    assert are_same(straight.ema, resumed.ema)
    assert state_of(tmp_path / "a", "best")["best"] == state_of(tmp_path / "b", "best")["best"]


@pytest.mark.slow
def test_it_learns(recipe, tmp_path):
    longer = ["trainer.steps=150", "trainer.eval_every=150", "trainer.save_every=150", "task.schedule=cosine"]
    t = train(recipe, tmp_path / "run", *longer)
    assert t.state.best["value"] < 0.5  # 1: loss of predicting zero noise


def test_a_clamped_image_determines_the_noise():
    process, seen = Process("linear", 1000), []
    x, (now, then) = torch.full((1, 1), 2.0, dtype=torch.double), process.times(2)
    process.denoise(lambda x, times: seen.append(x) or torch.zeros_like(x), x, steps=2, bound=1.0)
    kept, left = (process.alphas_cumprod[t].item() for t in (now, then))
    noise = (2 - math.sqrt(kept)) / math.sqrt(1 - kept)
    assert seen[1].item() == pytest.approx(math.sqrt(left) + math.sqrt(1 - left) * noise)


def test_the_noise_of_evaluation_does_not_follow_from_the_time():
    t, model, count = task(), Recorder(), 2000
    t.evaluate(model, white(count, mask=torch.ones(count, dtype=torch.bool), key=torch.arange(count) * 977))
    kept = t.process.alphas_cumprod[model.times].float()[:, None]
    noise = (model.x.flatten(1) - kept.sqrt()) / (1 - kept).sqrt()
    assert torch.cat([model.times[:, None], noise], 1).mT.corrcoef()[0, 1:].abs().max() < 0.1
