"""Model cards of exported runs: use, results in every form, training, and licence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from data.text.labelled import COLUMNS
from lion.config import ConfigError
from lion.distribution import NAME
from lion.files import read_json
from lion.recipe import Recipe
from lion.recipe_files import RECIPE, SUMMARY
from lion.runs import ENVIRONMENT, LoadedRun, count_parameters
from lion.samples.sequences import PIXELS
from tools.compose import metric_of
from tools.evaluate import as_table

LICENCE = "mit"
PIPELINES = {  # by Auto class
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForImageClassification": "image-classification",
}
PREPARE = {
    "text-classification": ("AutoTokenizer", '"A sentence."'),
    "fill-mask": ("AutoTokenizer", '"Paris is the [MASK] of France."'),
    "text-generation": ("AutoTokenizer", '"Once upon a time"'),
    "image-classification": ("AutoImageProcessor", 'Image.open("image.png").convert("{mode}")'),
}
READ = ("text", "labelled text", "images")  # kinds of data with a tokenizer or an image processor


def card(run: LoadedRun, recipe: Recipe, auto: str) -> str:
    """Return the model card (`README.md`) of a run that the Auto class `auto` loads, with results of these weights."""
    metric, task = metric_of(recipe), PIPELINES[auto]
    summary = json_of_run(run.folder / SUMMARY)
    if run.ema or summary.get("best_step") != run.checkpoint["step"]:
        summary = {}  # of the weights of another step, or not averaged
    split, best = summary.get("split", "val"), {} if run.ema else run.checkpoint.get("best", {})
    value = summary.get("value", best.get("value", math.nan))
    data, name = recipe.data.describe(), recipe.run.name
    c = recipe.model
    read = type(run.task.info).kind in READ
    head: dict[str, Any] = {"library_name": "transformers", "license": LICENCE}
    grey = getattr(run.task.info, "channels", 3) == 1
    if read and not grey:  # a pipeline needs a tokenizer or an image processor, and opens images in colour
        head["pipeline_tag"] = task
    head["tags"] = ["lion", "linear-attention", c.mixer]
    if math.isfinite(value):
        result = {"task": {"type": task}, "dataset": {"name": data, "type": recipe.data.name, "split": split}}
        result["metrics"] = [{"type": metric.name, "name": metric.title, "value": round(value, 6)}]
        head["model-index"] = [{"name": name, "results": [result]}]
    facts = [
        ("model", f"`{c.name}`, {c.label()}, {c.shape()}, {count_parameters(run.model):,} parameters"),
        ("data", data),
        ("step of the weights", f"{run.checkpoint['step']:,}"),
        ("batch", f"{recipe.trainer.batch_size:,}"),
        ("seed", recipe.seed),
        ("row", recipe.about.row or "-"),
    ]
    trained = json_of_run(run.folder / ENVIRONMENT)
    facts += [(key, trained[key]) for key in ("torch", "device", "commit") if trained.get(key)]
    rows = "\n".join(f"| {key} | {text} |" for key, text in facts)
    imports = "".join(f"import {module}  # registers the mixer or the task\n" for module in recipe.imports)
    code = usage(auto, task, grey, run.folder) if read else usage_of_ids(auto, run)
    return f"""---
{yaml.safe_dump(head, sort_keys=False)}---

# {name}

A model for {task} with the mixer `{c.mixer}`, for the package `{NAME}`.

## Use

```bash
pip install '.[transformers]'  # in a clone of the package
```

```python
{imports}{code}```

`import lion; lion.set_form(model, "rnn")` sets the form: `full`, `chunk` or `rnn`. The logits agree up to rounding.

## Results

{results(summary, metric, split, value)}
## Training

| | |
|---|---|
{rows}

All settings: [{RECIPE}]({RECIPE}). `lion convert FOLDER FOLDER/{RECIPE} OUT` makes a run of this folder again.

## Licence

The code is under the MIT licence. The licence of the training data may restrict the use of the weights.
"""


def usage(auto: str, task: str, grey: bool, folder: Path) -> str:
    """Return the lines of Python that load and call the model of a run."""
    prepare, example = PREPARE[task]
    if task == "text-classification" and len(json_of_run(folder / COLUMNS)) == 2:
        example = '"A first sentence.", "A second one."'
    reads = ""
    if task == "image-classification":
        reads = "from PIL import Image\n"
    example = example.format(mode="L" if grey else "RGB")
    call = "logits = model(**inputs).logits"
    if task == "text-generation":
        call = "ids = model.generate(**inputs, max_new_tokens=20)"
    return (
        f"{reads}from transformers import {auto}, {prepare}\n\n"
        f'model = {auto}.from_pretrained("FOLDER", trust_remote_code=True)\n'
        f'inputs = {prepare}.from_pretrained("FOLDER")({example}, return_tensors="pt")\n'
        f"{call}\n"
    )


def usage_of_ids(auto: str, run: LoadedRun) -> str:
    """Return the lines of Python that load and call a model of ids that no tokenizer makes."""
    batch, ids = run.task.example(1, "cpu"), run.task.info.vocabulary
    shape = tuple(batch["pixels" if ids is None else "tokens"].shape)
    return (
        f"import torch\nfrom transformers import {auto}\n\n"
        f'model = {auto}.from_pretrained("FOLDER", trust_remote_code=True)\n'
        f"inputs = torch.randint({ids or PIXELS}, {shape})  # {'ids' if ids else 'intensities of pixels'}\n"
        "logits = model(inputs).logits\n"
    )


def results(summary: dict[str, Any], metric: Any, split: str, value: float) -> str:
    """Return the results in every form as text; of a run that was not evaluated, the best result in training."""
    if "forms" in summary:
        rows = [row | {"form": name.split("_")[0]} for name, row in summary["forms"].items()]
        return f"On {split}, in every form:\n\n```\n{as_table(rows, metric)}\n```\n"
    if not math.isfinite(value):
        return "Not evaluated.\n"
    return f"{split} {metric.title} {metric.text(value)}, best in training.\n"


def json_of_run(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file of a run; empty if there is none."""
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ValueError:
        raise ConfigError(f"{path}: not JSON") from None
