"""Image classifiers in transformers."""

import pytest
import torch

pytest.importorskip("transformers")

from lion.runs import open_run
from lion.transformers import LionForImageClassification, from_run
from tests.helpers import here, tiny_recipe
from tests.layers.helpers import close, invalid
from tests.transformers.tiny import made


def pixels(count=2):
    return torch.randint(256, (count, 1, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def made_vit(**fields):
    return made(LionForImageClassification, "vit", num_labels=3, **fields)


@torch.no_grad()
def test_logits_are_those_of_our_model(tmp_path):
    model = made_vit().float()
    images = pixels()
    wanted = model.model(images)
    assert wanted.std() > 0.1
    close(model((images / 255 - 0.4) / 0.3).logits, wanted)
    model.save_pretrained(tmp_path)
    again = LionForImageClassification.from_pretrained(tmp_path)
    close(again.state_dict(), model.state_dict(), 0)
    close(again(images).logits, wanted)
    states = again(images, output_hidden_states=True).hidden_states
    assert len(states) == 3 and states[0].shape == (2, 7, 16)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_take_what_the_processor_gives(dtype):
    model = made_vit().float()
    images = (pixels() / 255 - 0.4) / 0.3
    wanted = model(images).logits
    close(model.to(dtype)(images).logits.float(), wanted, atol=0.05, rtol=0.05)


def test_a_distilled_model_trains_the_mean_of_its_heads():
    model = made_vit(model={"distilled": True})
    labels = torch.tensor([0, 2])
    evaluated, trained = (m(pixels(), labels=labels) for m in (model.eval(), model.train()))
    close(evaluated.logits, trained.logits)
    close(trained.loss, torch.nn.functional.cross_entropy(trained.logits, labels))
    trained.loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_other_images_are_refused():
    model = made_vit()
    invalid(r"images: expected \(B, 1, 8, 12\)", model, torch.zeros(1, 3, 8, 12))
    invalid("output_attentions: linear mixers", model, pixels(), output_attentions=True)


@pytest.mark.slow
def test_a_run_is_opened_by_its_name(tmp_path, monkeypatch):
    assert here("train", tiny_recipe(tmp_path), "--no-eval") == 0
    run, images = tmp_path / "runs" / "tiny", torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    monkeypatch.chdir(tmp_path)
    loaded = open_run(run)
    for name in (run, "tiny", loaded):
        model = from_run(name)
        with torch.inference_mode():
            close(model.model(images), loaded.model(images))


@torch.no_grad()
def test_constants_of_a_model_whose_weights_stay_on_a_disk(tmp_path):
    pytest.importorskip("accelerate")
    model, images = made_vit().float(), pixels()
    model.save_pretrained(tmp_path)
    place = {"device_map": {"model": "disk"}, "offload_folder": str(tmp_path / "offloaded")}
    away = LionForImageClassification.from_pretrained(tmp_path, **place)
    close(away(images).logits, model(images).logits)
