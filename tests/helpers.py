"""Helpers of several tests: tiny recipes, small data sets, and command-line calls."""

import functools
import json
import os
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lion.config import ConfigError, merge
from lion.runs import build_on_meta
from lion.trainer.checkpoint_files import load_state, newest
from tools import __main__ as commands
from tools.cli import run_command
from tools.compose import describe_data, make_task, resolve

ROOT = Path(__file__).resolve().parent.parent

TINY = {
    "data": {"name": "digits"},
    "task": {"name": "image_classification", "mixup": 0.4},
    "model": {
        "mixer": "lion_s",
        "dim": 16,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "drop_path": 0.1,
        "position_embedding": True,
    },
    "optim": {"lr": 2e-3},
    "schedule": {"warmup": 2},
    "trainer": {"batch_size": 64, "steps": 6, "eval_every": 3, "save_every": 3, "log_every": 2, "compile": False},
}


BOOK = """
data.name=text data.tokenizer=bytes data.length=34 model.depth=1 model.dim=16 model.num_heads=2 schedule.warmup=1
trainer.batch_size=4 trainer.micro_batch=4 trainer.steps=2 trainer.epochs=null trainer.eval_every=2
trainer.compile=false trainer.precision=fp32
"""


def tiny_recipe(folder: Path, name: str = "tiny", **changes) -> Path:
    """Write a recipe file that trains in a second, with runs in `folder/runs`."""
    path = Path(folder) / f"{name}.yaml"
    path.write_text(yaml.safe_dump(merge(merge(TINY, {"run": {"root": str(Path(folder) / "runs")}}), changes)))
    return path


@functools.cache
def built(name: str, *overrides: str):
    """Return a resolved recipe, its model without storage, and the number of its samples; do not change them."""
    recipe = resolve(name, overrides)
    info, samples, _ = describe_data(recipe, look=False)
    return recipe, build_on_meta(make_task(recipe, info), recipe.model), samples


def check_settings(settings, expected: dict) -> None:
    """Compare settings with values by name, as in `optim.lr`."""
    found = {name: attrgetter(name)(settings) for name in expected}
    assert found == expected


def on_a_book(folder: Path) -> list[str]:
    """Write a text; return settings with which a recipe of language models trains for two steps on its bytes."""
    book = folder / "book.txt"
    book.write_text("\n".join(f"line {i} of a book" for i in range(400)))
    places = [f"data.path={book}", f"data.root={folder / 'tokens'}", f"run.root={folder / 'runs'}"]
    return [*BOOK.split(), *places]


def picture(seed: int, size=(30, 20), mode="RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


def pictures(root, layout, grey=False):
    """Write noise images of several sizes; `layout` is {split: {class: count}}."""
    for split, classes in layout.items():
        for name, count in classes.items():
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                mode = "L" if grey or i % 2 == 0 else "RGB"
                picture(i, (30 + i, 20), mode).save(root / split / name / f"{i}.png")


def glue_folder(root: Path, tasks, rows: int = 24, seed: int = 0) -> Path:
    """Write GLUE tasks as JSON lines with the columns of the Hub; the first letter of a text determines its label."""
    from data.text.glue import TASKS

    rng = np.random.default_rng(seed)
    for name in tasks:
        task = TASKS[name]
        (root / name).mkdir(parents=True)
        for split in ("train", *task.validation):
            lines = []
            for i in range(rows):
                label = i % (len(task.classes) or 6)
                texts = ["".join(rng.choice(list("xyz "), rng.integers(1, 30))) for _ in task.columns]
                values = {column: "abcdef"[label] + text for column, text in zip(task.columns, texts)}
                lines.append(json.dumps({**values, "label": label if task.classes else label * 0.8, "idx": i}))
            (root / name / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return root


class Largest(TorchDispatchMode):
    """A mode that counts operations and records the elements of the largest tensor that one returns, by `chosen`."""

    def __init__(self, chosen=torch.is_tensor) -> None:
        super().__init__()
        self.chosen = chosen
        self.operations = self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for x in tree_leaves(out):
            if torch.is_tensor(x) and self.chosen(x):
                self.elements = max(self.elements, x.numel())
        return out


def state_of(run: Path, kind: str = "last") -> dict:
    """Load the newest checkpoint of a kind of a run."""
    return load_state(newest(Path(run), kind).state)


def refuse(capsys: pytest.CaptureFixture, *argv, code: int = 2) -> str:
    """Run a command that must fail with exit code `code` and a single line on stderr; return the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as error:
        run_command(commands.main, [str(a) for a in argv])
    out = capsys.readouterr()
    assert error.value.code == code, out.err
    assert out.err.count("\n") == 1 and out.err.startswith("error: "), out.err
    return out.err


def refusal(function, *args, **settings) -> str:
    """Return the message, of one line, with which a function refuses its arguments."""
    with pytest.raises(ConfigError) as error:
        function(*args, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def refused(pattern: str, function, *args, **settings) -> None:
    """Assert that a function refuses its arguments with a message of one line, in which the pattern is found."""
    message = refusal(function, *args, **settings)
    assert re.search(pattern, message), message


def here(*args) -> int:
    """Run `python -m tools ...` in this process, which saves the start-up time of a new process."""
    return commands.main([str(a) for a in args])


def printed(capsys: pytest.CaptureFixture, *args) -> str:
    """Run a command that must succeed, and return what it printed."""
    capsys.readouterr()
    assert here(*args) == 0
    return capsys.readouterr().out


def trained(recipe: Path, *args) -> Path:
    """Train a recipe with runs in the folder `runs` beside it, without evaluation; return the run."""
    assert here("train", recipe, "--no-eval", *args) == 0
    return recipe.parent / "runs" / recipe.stem


def read_lines(path: Path) -> list:
    """Return what stands in a file of JSON lines."""
    return list(map(json.loads, path.read_text().splitlines()))


def column(rows, name: str) -> list:
    """Return the values of one key in all rows."""
    return [row[name] for row in rows]


def assert_equal(found, expected) -> None:
    """Assert that tensors are equal bit for bit, also those of mappings and sequences."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def assert_in(text: str, *parts: str) -> None:
    """Assert that a text contains every part."""
    for part in parts:
        assert part in text, (part, text)


def command(*args: str, env: dict | None = None, timeout: float = 300) -> subprocess.CompletedProcess:
    """Run `python -m tools ...` in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "tools", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def ended(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """Check that a command has ended without an error; return it."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done
