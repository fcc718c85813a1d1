"""A toy task without images: points on two sides of a plane."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from lion.layers.optim_factors import OptimFactors
from lion.samples import base as data
from lion.tasks.base import Outcome, Sums, Task
from lion.tasks.metrics import Mean, MetricOfMeans, MetricOfPass, MetricOfRows
from lion.trainer.evaluate import evaluate
from lion.trainer.loop import Trainer
from lion.trainer.optim import OptimConfig, ScheduleConfig
from lion.trainer.plan import TrainerConfig, make_plan
from lion.trainer.runtime import Runtime, seed_everything
from lion.trainer.state import RunData
from tests.trainer.helpers import stopped_at


class Points(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(size, 4, generator=generator)
        self.label = (self.x.sum(1) + torch.randn(size, generator=generator) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "label": self.label[index]}


@dataclass(frozen=True)
class Info(data.Info):
    kind = "points"

    sides: int = 2

    @classmethod
    def from_dict(cls, values):
        return cls(**values)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = nn.Parameter(torch.full((4, 4), 0.1))
        self.optim_factors = {"step": OptimFactors(lr=0.1, weight_decay=0)}

    def forward(self, x):
        return x + F.silu(self.linear(x)) @ self.step

    def prefill(self, x):
        return Block.forward(self, x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2)
        self.register_buffer("steps", torch.zeros(4))

    def units(self):
        return list(self.blocks)

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def prefill(self, x):
        for block in self.blocks:
            x = block.prefill(x)
        return self.head(x)

    def step(self, x, state):
        return self.head(self.blocks[0].prefill(x)), state


def matthews(prediction, label):
    """Compute the correlation coefficient of two sides; 0 if all points are on one side."""
    table = torch.zeros(2, 2, dtype=torch.double).index_put_((label, prediction), torch.tensor(1.0).double(), True)
    (tn, fp), (fn, tp) = table.tolist()
    scale = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    return (tp * tn - fp * fn) / scale if scale else 0.0


def sum_of_first(task, model, batches, gather):
    """Sum the first number of all samples."""
    share = torch.cat([batch["x"][batch["mask"], 0] for batch in batches])
    return sum(part.sum().item() for part in gather(share.double()))


METRICS = {
    "perplexity": MetricOfMeans("perplexity", function=math.exp, of=("loss",), higher_is_better=False),
    "matthews": MetricOfRows("matthews", function=matthews, of=("prediction", "label")),
    "order": MetricOfRows("order", function=lambda x: (x * torch.arange(1, 1 + len(x))).sum(), of=("first",)),
    "loss": Mean("loss", higher_is_better=False),
    "pass": MetricOfPass("pass", measure=sum_of_first),
}


@dataclass
class Config:
    metrics: tuple = tuple(METRICS)


class Sides(Task):
    Config, Info, unit = Config, Info, "points"

    @staticmethod
    def metrics_of(config):
        return tuple(METRICS[name] for name in config.metrics)

    def build_model(self, config):
        return Net()

    def loss(self, model, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum")
        return Sums(loss, loss.new_tensor(len(batch["x"])))

    def evaluate(self, model, batch):
        logits, mask = self.outputs(model, batch), batch["mask"]
        loss = F.cross_entropy(logits, batch["label"], reduction="none")
        rows = {"prediction": logits.argmax(1), "label": batch["label"], "first": batch["x"][:, 0].double()}
        return Outcome({"loss": ((loss * mask).sum(), mask.sum())}, logits, rows)

    def outputs(self, model, batch):
        return model(batch["x"])

    def example(self, size, device):
        raise NotImplementedError

    def progress(self, model, batch):
        self.streamed = model.prefill(batch["x"]), model.step(batch["x"], None)[0], model(batch["x"])
        return {}


@dataclass
class Settings:
    trainer: TrainerConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    seed: int = 0


def settings(**trainer):
    own = {"batch_size": 16, "steps": 6, "eval_every": 2, "save_every": 2, "log_every": 1, "compile": False, "ema": 0.9}
    return Settings(TrainerConfig(**{**own, **trainer}), OptimConfig(lr=1e-2, weight_decay=0.1), ScheduleConfig())


def splits(**more):
    return data.Splits(Points(64, 0), Points(23, 1), None, Info(), more=more)


def trainer(folder, metrics=("perplexity", "loss"), runtime=None, kind=Sides, more=None, **changes):
    runtime = runtime or Runtime(torch.device("cpu"))
    plan = make_plan(settings(**changes), samples=64, world=runtime.world)
    seed_everything(0)
    folder.mkdir(exist_ok=True, parents=True)
    task = kind(Config(metrics), Info())
    return Trainer(plan, task, task.build_model(None), splits(**more or {}), folder, runtime)


def measure(runtime, micro=4):
    """Compute all metrics of the untrained model, in every process of the runtime."""
    seed_everything(0)
    task = Sides(Config(), Info())
    plan = make_plan(settings(batch_size=micro * runtime.world), samples=64, world=runtime.world)
    return evaluate(task.build_model(None), RunData(splits(), plan, runtime).held_out()["val"], task, runtime)


def train_sharded(group, folder):
    """Stop and resume a sharded run in every process of a group; return its metrics and groups of parameters."""
    runtime = Runtime(torch.device("cpu"), group.rank(), group.size())
    found = measure(runtime)
    first = stopped_at(trainer(folder / "run", runtime=runtime, parallel="fsdp"), 3)
    assert not first.fit() and first.state.step == 3
    resumed = trainer(folder / "run", runtime=runtime, parallel="fsdp")
    assert resumed.fit()
    prompt, token, whole = resumed.task.streamed
    assert torch.equal(prompt, whole) and token.shape == whole.shape
    groups = [(g["lr"], g["weight_decay"], len(g["params"])) for g in resumed.optimizer.param_groups]
    return found, groups
