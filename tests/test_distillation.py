"""Distillation: its losses by hand and against DeiT's formulas, teachers, and a distilled run in all forms."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

import lion
from lion.config import ConfigError
from lion.models.base import ImageClassifier
from lion.samples.images import ImageInfo
from lion.tasks import TASKS
from lion.tasks.base import unwrapped
from lion.teachers import open_teacher
from tests.helpers import here, refuse, refused, tiny_recipe
from tests.layers.helpers import close
from tools.compose import build_data, make_task, resolve

INFO = ImageInfo((8, 8), 1, ("a", "b", "c"), mean=(0.3,), std=(0.4,))
LABELS, LOGITS = torch.tensor([0, 2]), torch.tensor([[1.0, 0.0, -1.0], [0.5, 0.2, 0.1]])
TAUGHT, TAUGHT_LABELS = torch.tensor([[0.0, 3.0, 0.0], [0.0, 0.0, 2.0]]), torch.tensor([1, 2])


class Student(torch.nn.Module):
    """A model with given outputs that normalises like a classifier."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs
        self.mean, self.std = torch.full((1, 1, 1), 0.3), torch.full((1, 1, 1), 0.4)

    def normalise(self, pixels):
        return (pixels.float() / 255 - self.mean) / self.std

    def forward(self, images):
        return self.outputs


def loss(outputs, **settings):
    kind = TASKS["image_classification"]
    task, seen = kind(kind.Config(teacher="x", **settings), INFO), []
    task.teacher = lambda pixels: seen.append(pixels) or TAUGHT
    image = torch.randint(256, (2, 1, 8, 8), dtype=torch.uint8)
    found = task.loss(Student(outputs), {"image": image, "label": LABELS})
    close(seen[0], image / 255)  # the teacher sees the student's images, before normalisation
    return found.loss


def hard(logits, labels=TAUGHT_LABELS):
    return F.cross_entropy(logits, labels, reduction="sum")


def test_hard_distillation_is_a_second_label():
    plain = hard(LOGITS, LABELS)
    close(loss(LOGITS), 0.5 * plain + 0.5 * hard(LOGITS))
    close(loss(LOGITS, teacher_share=0.25), 0.75 * plain + 0.25 * hard(LOGITS))
    close(loss((LOGITS, LOGITS.flip(0))), 0.5 * plain + 0.5 * hard(LOGITS.flip(0)))


def test_soft_distillation_is_a_divergence_at_a_temperature():
    t = 3.0
    p, q = (TAUGHT / t).softmax(-1), (LOGITS / t).softmax(-1)
    divergence = t**2 * (p * (p.log() - q.log())).sum() / 3  # classes
    close(loss(LOGITS, distillation="soft", temperature=t), 0.5 * hard(LOGITS, LABELS) + 0.5 * divergence)
    assert loss(TAUGHT, distillation="soft", teacher_share=1.0).item() == pytest.approx(0, abs=1e-6)


DISTILLED = ("model.distilled=true", "task.teacher=x")


def model_of(*overrides):
    recipe = resolve("quickstart", overrides)
    return make_task(recipe, build_data(recipe).info).build_model(recipe.model)


@pytest.mark.parametrize("mixer", ["lion_s", "softmax"])
def test_a_distilled_model_has_a_second_token_and_head(mixer):
    model = model_of(f"model.mixer={mixer}", *DISTILLED).double()
    assert model.length == model_of(f"model.mixer={mixer}").length + 1
    for head in (model.head, model.head_distill):
        torch.nn.init.normal_(head.weight)
    images = torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8)
    model.eval()
    mean = model(images)
    alone = []
    for name in ("head", "head_distill"):
        muted = copy.deepcopy(model)
        torch.nn.init.zeros_(getattr(muted, name).weight)
        alone.append(muted(images))
    close(mean, alone[0] + alone[1])
    first, second = model.train()(images)
    close((first + second) / 2, mean)
    assert not torch.allclose(first, second)


def test_settings_that_cannot_be_combined_are_refused():
    refused(r"set task\.teacher", model_of, "model.distilled=true")
    with pytest.raises(ConfigError, match="sees no patch"):
        resolve("quickstart", ["model.distilled=true", "model.attention.direction=forward", "task.teacher=x"])
    refused(r"valid: hard, soft|did you mean", resolve, "quickstart", ["task.distillation=sof"])


@pytest.mark.slow
def test_a_run_is_distilled_from_a_run_and_evaluated_in_all_forms(tmp_path, capsys):
    teacher = tiny_recipe(tmp_path, "teacher", model={"mixer": "softmax"})
    assert here("train", teacher, "--no-eval") == 0
    where = [f"task.teacher={tmp_path / 'runs' / 'teacher'}", "model.distilled=true"]
    student = tiny_recipe(tmp_path, "student")
    assert "; its time and memory are not counted" in shown(capsys, student, *where)
    assert here("train", student, *where) == 0
    forms = json.loads((tmp_path / "runs" / "student" / "summary.json").read_text())["forms"]
    assert {"full", "chunk", "rnn"} <= set(forms) and all(form["deviation"] < 1e-4 for form in forms.values())
    model = lion.load(tmp_path / "runs" / "student", compile=False)
    assert model(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 10)


def shown(capsys, *argv):
    assert here("show", *argv) == 0
    return capsys.readouterr().out


def refuse_teacher(capsys, student, tmp_path, name):
    return refuse(capsys, "train", student, "run.name=other", f"task.teacher={tmp_path / 'runs' / name}")


@pytest.mark.slow
def test_a_teacher_of_other_data_is_refused(tmp_path, capsys):
    assert here("train", tiny_recipe(tmp_path, "teacher"), "--no-eval") == 0
    capsys.readouterr()
    folder = str(tmp_path / "runs" / "teacher")
    refused("trained on 10 other classes", open_teacher, folder, INFO)
    info = build_data(resolve("quickstart")).info
    with pytest.raises(ConfigError, match=r"has images \(1, 8, 8\), expected \(1, 16, 8\)"):
        open_teacher(folder, ImageInfo((16, 8), 1, info.classes, mean=info.mean, std=info.std))
    assert "no recipe.yaml in" in refuse_teacher(capsys, tiny_recipe(tmp_path, "student"), tmp_path, "nobody")
    teacher = open_teacher(folder, info)
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training
    pixels = torch.rand(2, 1, 8, 8)
    own = unwrapped(teacher.model, ImageClassifier)
    close(teacher(pixels), own((pixels - own.mean) / own.std))


@pytest.mark.slow
def test_teachers_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    made = timm.create_model("resnet10t", num_classes=3, in_chans=1)
    torch.save(made.state_dict(), tmp_path / "w.pth")
    teacher = open_teacher(f"timm:resnet10t:{tmp_path / 'w.pth'}", INFO)
    assert teacher(torch.rand(2, 1, 32, 32)).shape == (2, 3)
    gone = f"timm:resnet10t:{tmp_path / 'gone.pth'}"
    for name in ("timm:resnet10z", gone, "timm:resnet10t"):  # unknown, missing, no network
        refused(r"task.teacher: 'timm:.*' (cannot be loaded|has 1000 classes)", open_teacher, name, INFO)
    made = timm.create_model("vit_tiny_patch16_224", num_classes=3, in_chans=1)
    torch.save(made.state_dict(), tmp_path / "v.pth")
    name = f"timm:vit_tiny_patch16_224:{tmp_path / 'v.pth'}"
    refused(r"does not take images \(1, 8, 8\) \(Input height \(8\) doesn't match", open_teacher, name, INFO)


def test_the_mean_excludes_the_distillation_token():
    model, seen = model_of(*DISTILLED).eval(), {}
    model.encoder.register_forward_hook(lambda *call: seen.update(tokens=call[-1]))
    for name in ("head", "head_distill"):
        getattr(model, name).register_forward_pre_hook(lambda _, x, name=name: seen.update({name: x[0]}))
    model(torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8))
    others = [i for i in range(model.length) if i != 1]  # cls, then the distillation token
    close(seen["head"], seen["tokens"][:, others].mean(1))
    close(seen["head_distill"], seen["tokens"][:, 1])
