"""Training with rows split over 2, 3 and 4 real processes against training in one process, in float64."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset

from lion.config import build
from lion.layers.layout import Layout
from lion.layers.mixers import LionAttention
from lion.models import MODELS
from lion.ops import Part
from lion.samples.base import Splits
from lion.samples.images import ImageInfo
from lion.samples.labels import TokenLabelsInfo
from lion.samples.sequences import SequenceInfo
from lion.samples.text import LabelledTextInfo, TextInfo
from lion.tasks import TASKS
from lion.trainer.compilation import compile_blocks, missing_compiler
from lion.trainer.loop import Trainer
from lion.trainer.plan import make_plan
from lion.trainer.runtime import Runtime, seed_everything
from tests.helpers import ended, on_a_book, refuse
from tests.layers.helpers import close
from tests.processes import in_processes, in_ranks
from tests.trainer.helpers import lines, stopped_at
from tools.evaluate import measure_forms

from .toys import settings

pytestmark = pytest.mark.process
LENGTH, ROWS, STEPS = 11, 16, 2
TEXT = TextInfo(17, LENGTH, "bytes", "", {"pad": 0, "mask": 1})
MEASURED = ("loss", "gradient_norm", "accuracy", "perplexity", "above_chance")
CLASSES = LabelledTextInfo(17, LENGTH, "bytes", "", {"pad": 0}, classes=("a", "b", "c"))
IMAGES = ImageInfo((6, 4), 2, CLASSES.classes, (0.5, 0.4), (0.3, 0.2))
SCANS = {"scans": ["row_snake", "column_snake"]}
PUBLISHED = {"block": "published"}
SMALL = {"dim": 12, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
SIZES = {"image_classification": {**SMALL, "patch_size": 2}}


IDS = SequenceInfo(3, LENGTH, 7)
PAIRS = SequenceInfo(2, LENGTH, 7, parts=2)
PIXELS = SequenceInfo(3, LENGTH, mean=0.4, std=0.3)
LABELS = TokenLabelsInfo(3, LENGTH, LENGTH, 7, 2)
KINDS = {  # the task's name, facts about its data, and settings of the model
    "lra": ("lra", IDS, {"mixer": "lion_s_hippo"}),
    "lra pairs": ("lra", PAIRS, {"mixer": "lion_lit", "window": 4}),
    "lra pixels": ("lra", PIXELS, {"mixer": "lion_d", "norm": "layernorm"}),
    "lra masked": ("lra_masked", IDS, {"mixer": "gla", "norm": "layernorm"}),
    "bert": ("masked_lm", TEXT, {"mixer": "lion_s"}),
    "bert dropout": ("masked_lm", TEXT, {"mixer": "lion_s", "dropout": 0.2}),
    "bert positions": ("masked_lm", TEXT, {"mixer": "softmax", "num_heads": 6, "token_types": 2}),
    "tokens": ("token_classification", LABELS, {"mixer": "retnet"}),
    "bert classes": ("sequence_classification", CLASSES, {"mixer": "rwkv6", "classifier_dropout": 0.0}),
    "gpt": ("causal_lm", TEXT, {"mixer": "kda", "attention": PUBLISHED}),
    "gpt lightnet": ("causal_lm", TEXT, {"mixer": "lightnet", "tpe": 2, "dropout": 0.1}),
    "vit": ("image_classification", IMAGES, {"mixer": "lion_s"}),
    "vit cls": ("image_classification", IMAGES, {"mixer": "lion_lit", "readout": "cls", "cls_place": "middle"}),
    "vit distilled": ("image_classification", IMAGES, {"mixer": "hydra", "distilled": True, "mlp": "none"}),
    "vit lightnet": ("image_classification", IMAGES, {"mixer": "lightnet", "tpe": 2}),
    "vit scans": ("image_classification", IMAGES, {"mixer": "lion_s", "num_heads": 6, "attention": SCANS}),
}
ALL = tuple(KINDS)


class Rows(Dataset):
    """Rows of a batch: packed and padded documents, if the task has segments."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: x[index] for name, x in self.batch.items()}


def rows(task, name: str) -> Rows:
    torch.manual_seed(5)
    batch = task.example(ROWS, "cpu")
    if "label" in batch:
        batch["label"] = torch.arange(ROWS) % 2
    if "segments" in batch or name.startswith("gpt"):
        segments = torch.zeros_like(batch["tokens"])
        if "label" not in batch:  # several documents in a row
            segments = (torch.rand(segments.shape) < 0.2).long().cumsum(-1)
        count = torch.randint(6, 15, (ROWS,) + (1,) * (segments.dim() - 1))  # tokens of each row, before padding
        batch["segments"] = segments.masked_fill(torch.arange(LENGTH) >= count, -1)
    return Rows(batch)


def teacher(images):
    return images.flatten(1)[:, : len(CLASSES.classes)]


def trainer(name: str, folder: Path, runtime: Runtime, **changes) -> Trainer:
    kind, info, model = KINDS[name]
    distilled = "distilled" in model
    task = TASKS[kind](TASKS[kind].Config(**({"teacher": "toy"} if distilled else {})), info)
    task.teacher = teacher if distilled else None
    data = rows(task, name)
    how = {"batch_size": 8, "steps": STEPS, "eval_every": STEPS, "clip_grad": 1.0, **changes}
    plan = make_plan(settings(**how), samples=ROWS, world=runtime.world)
    seed_everything(0)
    config = build(MODELS[task.default_model].Config, {**SIZES.get(kind, SMALL), **model}, source=str)
    net = task.build_model(config).double()
    seed_everything(plan.seed + runtime.batch_rank)
    folder.mkdir(exist_ok=True, parents=True)
    made = Trainer(plan, task, net, Splits(data, data, None, info), folder, runtime)
    skip = made.state.guard.skip
    made.state.guard.skip = lambda *values: skip(*values).to(torch.float32)  # as the fused optimizer takes it
    return made


def work(group, names, folder, sequence=None, stop_at=None, **changes) -> dict[str, dict]:
    """Train in this process, one of those that share rows; return all weights."""
    torch.Tensor.float = torch.Tensor.double  # losses, and what gradients are multiplied by, are float32 otherwise
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sequence = sequence or count
    mesh = init_device_mesh("cpu", (count // sequence, sequence), mesh_dim_names=("data", "sequence"))
    part = None if sequence == 1 else Part.of(mesh.get_group("sequence"))
    runtime, found = Runtime(torch.device("cpu"), rank, count, part), {}
    changes = {"parallel": "sequence", "sequence": sequence, **changes}
    for name in names:
        made = stopped_at(trainer(name, Path(folder) / name, runtime, **changes), stop_at)
        assert made.fit() == (stop_at is None)
        found[name] = weights = made.model.state_dict()
        for key, x in weights.items():
            weights[key] = x.full_tensor() if hasattr(x, "full_tensor") else x
    return found


def stop_after_one_step(group, names, folder):
    return work(group, names, folder, stop_at=1)


def mesh(group, name, folder, parallel):
    return work(group, (name,), folder, sequence=2, parallel=parallel)


def same(got: dict[str, dict], expected: dict[str, dict]) -> None:
    for name in got:
        close(got[name], expected[name], 1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train every kind in one process."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, in_processes(1, work, ALL, folder)[0]


@pytest.mark.parametrize("count", [3, pytest.param(2, marks=pytest.mark.every)])
def test_training_equals_one_process(count, alone, tmp_path):
    folder, expected = alone
    for found in in_processes(count, work, ALL, tmp_path):
        same(found, expected)
    for name in ALL:
        for mine, other in zip(lines(tmp_path / name), lines(folder / name), strict=True):
            compared = [key for key in MEASURED if other.get(key) is not None]
            assert compared and mine.keys() == other.keys()
            for key in compared:
                assert mine[key] == pytest.approx(other[key], rel=1e-9), (count, name, key)


def test_a_mesh_of_data_and_sequence_also_sharded(alone, tmp_path):
    for parallel, name in (("ddp", "lra"), ("fsdp", "gpt")):  # their losses draw no random numbers
        for found in in_processes(4, mesh, name, tmp_path / parallel, parallel):
            same(found, alone[1])


def test_a_run_resumes_in_another_number_of_processes(alone, tmp_path):
    for name, stopped, resumed in (("lra", 2, 4), ("gpt", 4, 1)):
        in_processes(stopped, stop_after_one_step, (name,), tmp_path)
        same(in_processes(resumed, work, (name,), tmp_path)[0], alone[1])


@pytest.fixture
def book(tmp_path):
    """Return a command line that trains a small language model in processes that share rows."""
    return [*on_a_book(tmp_path), "trainer.parallel=sequence"]


@pytest.mark.slow
def test_the_command_trains_and_evaluates(book, tmp_path):
    done = ended(in_ranks(2, "train", "gpt2_tiny_lion_s", *book))
    assert "x 2 (sequence, 2 for each row)" in done.stdout and "rnn" in done.stdout, done.stdout
    run = tmp_path / "runs" / "gpt2_tiny_lion_s"
    assert lines(run)[-1]["step"] == 2
    forms = json.loads((run / "summary.json").read_text())["forms"]
    for name in ("full", "chunk"):
        whole = measure_forms(run, name)[0]
        assert forms[name]["values"] == pytest.approx(whole["values"], rel=1e-5)
        assert forms[name]["peak_bytes"] < 0.8 * whole["peak_bytes"]  # of half the rows


def test_what_cannot_be_shared_is_refused(book, capsys):
    dropped = "model.attention.score_dropout=0"
    for count, setting, message in (
        (40, (), "rows of 33 tokens are too short for 40 processes"),
        (4, ["model.mixer=softmax"], "model.num_heads: 2 cannot be divided among 4 processes, nearest number: 2"),
        (4, ["trainer.sequence=3"], "trainer.sequence: 3 does not divide 4 processes, nearest: 2"),
        (2, [f"{dropped}.1"], f"{dropped} is needed: scores between processes"),
        (3, ["model.tpe=2"], "model.dim: 16 cannot be divided among 3"),
    ):
        assert message in refuse(capsys, "show", "gpt2_tiny_lion_s", *book, "--processes", count, *setting)
    line = refuse(capsys, "show", "dit_tiny_lightnet", "trainer.parallel=sequence", "--processes", 2)
    assert "model.name: DiT does not split" in line


class Layer(LionAttention):
    """A model of one layer."""

    encoder = property(lambda self: self)

    def units(self):
        return [self]


def do_nothing(*args):
    pass


def generated(group) -> list[list[str]]:
    """Return the exchanges and kernels (".") of the compiled forward and backward pass, in their order.

    The kernels are neither built nor run.
    """
    inductor.cpp.simdlen = 0  # no test of the machine's vector instructions, which are compiled
    AsyncCompile.cpp_pybinding = lambda *_: do_nothing
    torch.distributed.destroy_process_group()  # nothing is sent: a process compiles as the first one of two
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    layer, x = Layer(32, 2, "lion_s", form="full"), torch.randn(2, 64, 32, requires_grad=True)
    layer.part = Part.of(torch.distributed.group.WORLD)
    layout = layer.prepare(x, Layout().split(torch.empty(2, 128, 0), layer.part))
    assert compile_blocks(layer)
    _, codes = run_and_get_code(lambda: layer(x, layout).sum().backward())
    calls = re.compile(r"^ +(?:.*_c10d_functional\.(\w+)\.default|cpp_fused|extern_kernels)", re.MULTILINE)
    return [[call or "." for call in calls.findall(code[code.index("def call(") :])] for code in codes]


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler() is not None, reason="no compiler")
def test_compiled_exchanges_overlap_with_kernels():
    """Check that kernels of the own tokens run during an exchange; Inductor alone waits at once in the backward."""
    (codes,) = in_processes(1, generated)
    least = (4, 9) if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else (4, 3)
    for calls, start, kernels in zip(codes, ("all_gather_into_tensor", "reduce_scatter_tensor"), least, strict=True):
        between = calls[calls.index(start) + 1 : calls.index("wait_tensor")]
        assert between.count(".") >= kernels, (start, calls)
