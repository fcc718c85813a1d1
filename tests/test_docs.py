"""Markdown files: their code runs, and links, commands and tables are correct."""

import importlib.util
import json
import re
import sys

import pytest
import torch

import lion
import lion.runs
from data import DATASETS
from lion.layers.mixers import LINEAR, MIXERS
from lion.models import MODELS
from tests.helpers import ROOT, here, refuse, tiny_recipe
from tools.bench.lengths import LINES, PASSES, panels
from tools.bench.ops_report import OpsReport
from tools.bench.train import published
from tools.commands import COMMANDS, parse_command
from tools.listing import recipe_files
from tools.mixers import CHOICES, mixer_rows

FOLDERS = ("lion", "data", "tools", "recipes")
DOCS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md")),
]


def name(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_python_of_the_readmes_runs(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    assert here("train", tiny_recipe(tmp_path, "quickstart"), "--no-eval") == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lion.trainer.loop.compile_blocks", lambda *args, **settings: False)
    monkeypatch.setattr("lion.evaluation.run.compile_blocks", lambda *args, **settings: False)
    compiled = []
    monkeypatch.setattr(lion.runs, "compile_blocks", lambda model, **settings: compiled.append(settings))
    pytest.importorskip("timm")
    held = {}
    for path in (ROOT / "README.md", ROOT / "lion/timm/README.md"):
        for code in blocks(path, "python"):
            exec(code, held)
    assert held["logits"].shape == (1, 10) and held["model"].num_classes == 10
    assert {"dynamic": None} in compiled  # as `lion.load` does by default


@pytest.mark.slow
def test_a_recipe_imports_the_mixer_of_the_readme(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    (code,) = (text for text in blocks(ROOT / "lion/layers/README.md", "python") if "half_life" in text)
    (tmp_path / "my_mixers.py").write_text(code)
    (tmp_path / "broken_mixers.py").write_text("raise KeyError('gate')")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = tiny_recipe(tmp_path, imports=["my_mixers"], model={"mixer": "half_life"})
    try:
        assert here("train", recipe, "--no-eval") == 0
        run = tmp_path / "runs" / "tiny"
        assert here("eval", run, "--form", "rnn") == 0
        assert lion.load(run, compile=False).config.mixer == "half_life"
        if importlib.util.find_spec("transformers"):
            assert here("export", run, tmp_path / "hub") == 0
            assert "\nimport my_mixers  # registers" in (tmp_path / "hub" / "README.md").read_text()
    finally:
        for table, key in ((MIXERS, "half_life"), (LINEAR, "half_life"), (sys.modules, "my_mixers")):
            table.pop(key, None)
    capsys.readouterr()
    assert "tiny.yaml: imports: my_mixers_: ModuleNotFoundError" in refuse(
        capsys, "train", tiny_recipe(tmp_path, imports=["my_mixers_"])
    )
    assert "override: imports: broken_mixers: KeyError: 'gate'" in refuse(
        capsys, "train", recipe, "imports=[broken_mixers]"
    )


def test_no_report_names_a_folder_of_a_machine():
    """Check that reports have no absolute paths, because data are identified by name, size and hash."""
    reports = [path for path in (ROOT / "reports").iterdir() if path.suffix in (".md", ".json")]
    for path in [*DOCS, *reports]:
        found = re.findall(r"(?<![\w.])/(?:root|home|work|tmp|Users|mnt)/[\w./-]*", path.read_text())
        assert not found, name(path)


def test_links_lead_somewhere():
    for path in DOCS:
        for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            file, _, anchor = target.partition("#")
            if file.startswith("http"):
                continue
            there = path.parent / file if file else path
            assert there.exists(), (name(path), target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in anchors, (name(path), target)


def test_commands_are_commands():
    for path in DOCS:
        for line in re.findall(r"\./run\.sh([ \w./=-]*)", path.read_text()):
            words = line.split()
            if not words or words[0] in ("NAME", "RECIPE", "...", "--help"):
                continue
            command, rest = parse_command(words)
            assert command in COMMANDS or words[0] in recipe_files(), (name(path), line)
            for word in rest:
                if word.startswith("recipes/") and word != "recipes/pictures.yaml":
                    assert (ROOT / word).exists(), (name(path), line)


def test_tables_are_whole():
    mixers = (ROOT / "lion/layers/README.md").read_text()
    for mixer, *rest in mixer_rows():
        assert f"| `{mixer}` | {' | '.join(rest)} |" in mixers, f"the row of {mixer} is missing or out of date"
    for choice in CHOICES:
        assert f"| {' | '.join(choice)} |" in mixers.replace("`", ""), f"{choice[0]}: another row in the README"
    sets = (ROOT / "data/README.md").read_text()
    for dataset in DATASETS:
        assert f"`{dataset}`" in sets
    commands = (ROOT / "tools/README.md").read_text()
    for command in COMMANDS.keys() - {"train"}:
        assert f"`{command}" in commands, command


def test_the_image_shows_what_was_measured():
    rows = {}
    for row in OpsReport(ROOT / "reports").load().widest():
        rows[row["mixer"], row["form"], row["length"], row["pass"]] = row
    for which in PASSES:
        times, memory = panels(list(rows.values()), which).values()
        drawn = [(line.mixer, line.form) for line in times]
        assert drawn == [line for line in LINES if (line[1], which) != ("rnn", "both")]
        for line, kib in zip(times, memory):
            for length, ratio, each in zip(line.lengths, line.values, kib.values):
                row = rows[line.mixer, line.form, length, which]
                assert row["ratio"] == ratio
                assert row["peak_bytes"] == pytest.approx(1024 * each * row["batch"] * length)


COSTS = (ROOT / "recipes/README.md").read_text().partition("## What it costs\n")[2]
NAMES = {"without a mixer": "no mixer at all", "vim with positions": "vim"}
NAMES |= {f"lion_{kind} multiscan": f"lion_{kind}, two scans" for kind in "ds"}


def cost_table(place):
    """Return the header and the rows of a table in the section on costs of recipes/README.md."""
    lines = re.findall(r"(?:^\|.*\n)+", COSTS, re.MULTILINE)[place].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return head[1:], {row[0]: row[1:] for row in rows}


def measured_steps():
    """Return the rows of reports/train.json that are in float32 on the machine of recipes/README.md, last ones last."""
    rows = json.loads((ROOT / "reports/train.json").read_text())["rows"]
    setting = {"device": "AMD EPYC, AVX512", "precision": "fp32", "matmul": "highest"}
    return [row for row in sorted(rows, key=lambda row: row["date"]) if {**row, **setting} == row]


SMALL_RUNS = {  # sections of reports/paper.md, their rows, and the values of those in small_runs.md
    "Positions: rotary softmax beside the mixers, tiny Shakespeare by character": {
        "softmax": ["6.72"],
        "softmax rotary": ["5.96", "9.80 ± 1.74"],
        "lion_s": ["5.90", "5.69 ± 0.07"],
    },
    "Positions: rotary softmax beside the mixers, CIFAR-10": {
        "softmax": ["56.54"],
        "softmax rotary": ["55.73"],
        "softmax rotary 2-D": ["57.09"],
        "lion_lit": ["57.12"],
        "lion_s with positions": ["59.77"],
    },
    "LION, Table 2: ImageNet-1k, small": {
        "lion_d": ["53.61"],
        "lion_d multiscan": ["55.58"],
        "lion_s multiscan": ["55.29"],
        "hydra": ["58.78"],
        "vim": ["58.38"],
    },
    "LION, Table 14: softmax, positions and non-linearity": {
        "softmax [2] positions": ["56.54"],
        "softmax [4]": ["50.62"],
        "softmax [1] positions, non-linearity": ["51.32"],
        "lion_lit [7] non-linearity": ["51.18"],
        "lion_lit [6] positions": ["46.28"],
    },
    "LION, Table 13: shapes of decays": {"lion_s_vector": ["55.49"]},
    "Directions with position embeddings, CIFAR-10": {
        "lion_s": ["59.77"],
        "lion_s forward": ["59.52"],
        "lion_s backward": ["60.36"],
        "lion_s alternating": ["60.46"],
    },
    "LION, Table 16: directions": {
        "lion_s": ["54.52"],
        "lion_s forward": ["57.38"],
        "lion_s backward": ["58.03"],
        "lion_s alternating": ["58.49"],
    },
    "LightNet, Table 1: without TPE, without LRPE": {
        "lightnet": ["60.45"],
        "lightnet without TPE": ["60.32"],
        "lightnet without LRPE": ["54.21"],
    },
    "The readout: cls or the mean of all tokens, CIFAR-10": {
        "softmax, mean": ["56.40"],
        "lion_s with positions, cls": ["57.27"],
    },
    "LION, Tables 4, 5 and 7: ListOps": {
        "softmax": ["41.46"],
        "softmax rotary": ["45.17"],
        "lion_lit": ["38.98"],
        "lion_d_hippo": ["48.15"],
        "lion_s_hippo": ["48.08"],
        "lion_d_hippo random start": ["44.84"],
        "lion_s_hippo random start": ["45.43"],
    },
    "LION, Tables 4, 5 and 7: Image": {
        "softmax": ["27.63"],
        "softmax rotary": ["27.64"],
        "lion_lit": ["25.55"],
        "lion_d_hippo": ["32.08"],
        "lion_s_hippo": ["31.89"],
        "lion_d_hippo random start": ["24.33"],
        "lion_s_hippo random start": ["22.77"],
    },
    "LION, Tables 4, 5 and 7: Pathfinder, and how W_v starts": {"softmax": ["65.63"], "lion_s_hippo": ["60.59"]},
    "Recall: row sums, and where decays start": {"lion_s": ["68.45"], "lion_s, temperature 16": ["99.99"]},
    "The block around the mixer: convolution and gate, CIFAR-10": {
        "lion_s": ["54.52"],
        "lion_s, convolution and gate": ["57.43"],
        "lion_s with positions, convolution and gate": ["62.07"],
    },
    "LION, Tables 10 and 11: masked language modelling, base": {
        "softmax (BERT)": ["19.04"],
        "hydra": ["56.49"],
        "softmax rotary": ["55.76", "26.86 ± 3.85"],
        "lion_lit": ["18.88"],
        "lion_d": ["47.16"],
        "lion_s": ["49.19", "48.76 ± 1.93"],
    },
    "The block around the mixer: convolution and gate, masked language modelling": {
        "lion_s, convolution and gate": ["53.15"],
    },
}


# comparisons that small_runs.md states, by section of reports/paper.md: "a > b", or "a ? b" if undecided
SMALL_ORDERS = {
    "Positions: rotary softmax beside the mixers, tiny Shakespeare by character": [
        "softmax rotary > softmax",
        "lion_s > softmax",
        "lion_s ? softmax rotary",
    ],
    "Positions: rotary softmax beside the mixers, CIFAR-10": [
        "lion_s with positions > softmax",
        "lion_s with positions > softmax rotary",
        "lion_s with positions > softmax rotary 2-D",
        "lightnet > softmax rotary",
    ],
    "The readout: cls or the mean of all tokens, CIFAR-10": [
        "lion_s with positions > softmax, mean",
        "lion_s with positions, cls ? softmax",
    ],
    "LION, Table 2: ImageNet-1k, small": [
        "lion_lit > lion_s",
        "lion_s with positions > lion_lit",
        "hydra > softmax",
        "vim > softmax",
        "lion_d multiscan > lion_d",
        "lion_s multiscan ? lion_s",
    ],
    "Vim beside LION, CIFAR-10": ["vim, 3 blocks ? softmax"],
    "LION, Table 14: softmax, positions and non-linearity": [
        "softmax [2] positions > lion_s",
        "softmax [2] positions > softmax [4]",
        "softmax [2] positions > softmax [1] positions, non-linearity",
        "lion_lit [5] positions, non-linearity > lion_lit [7] non-linearity",
        "lion_lit [5] positions, non-linearity > lion_lit [6] positions",
        "lion_lit [7] non-linearity > lion_lit [6] positions",
        "lion_lit [5] positions, non-linearity > softmax [1] positions, non-linearity",
    ],
    "LION, Table 16: directions": [
        "lion_s forward > lion_s",
        "lion_s backward > lion_s",
        "lion_s alternating > lion_s",
    ],
    "Directions with position embeddings, CIFAR-10": [
        "lion_s ? lion_s forward",
        "lion_s ? lion_s backward",
        "lion_s ? lion_s alternating",
    ],
    "LightNet, Table 1: without TPE, without LRPE": [
        "lightnet > softmax",
        "lightnet > lightnet without LRPE",
        "lightnet ? lightnet without TPE",
    ],
    "LION, Table 13: shapes of decays": ["lion_s_vector > lion_d", "lion_s ? lion_s_vector", "lion_s ? lion_d"],
    "LION, Tables 4, 5 and 7: ListOps": [
        "lion_d_hippo > softmax",
        "lion_s_hippo > softmax",
        "lion_d_hippo > lion_lit",
        "lion_s_hippo > lion_lit",
        "lion_d_hippo > lion_d_hippo random start",
        "lion_s_hippo ? lion_s_hippo random start",
        "lion_s_hippo ? softmax rotary",
        "lion_d_hippo random start > softmax",
        "lion_s_hippo random start > softmax",
    ],
    "LION, Tables 4, 5 and 7: Image": [
        "lion_d_hippo > lion_lit",
        "lion_s_hippo > lion_lit",
        "lion_d_hippo > lion_d_hippo random start",
        "lion_s_hippo > lion_s_hippo random start",
        "lion_d_hippo ? softmax",
        "lion_s_hippo ? softmax",
        "lion_d_hippo random start ? softmax",
        "lion_s_hippo random start ? softmax",
    ],
    "LION, Tables 4, 5 and 7: Pathfinder, and how W_v starts": ["lion_s_hippo ? softmax"],
    "LION, Tables 10 and 11: masked language modelling, base": [
        "lion_s > lion_lit",
        "lion_d > lion_lit",
        "lion_s > softmax",
        "lion_d > softmax",
        "lion_s ? softmax rotary",
        "hydra ? lion_s",
    ],
    "The block around the mixer: convolution and gate, masked language modelling": [
        "lion_s, convolution and gate ? lion_s",
    ],
    "The block around the mixer: convolution and gate, CIFAR-10": [
        "lion_s, convolution and gate > lion_s",
        "lion_s with positions, convolution and gate > lion_s with positions",
    ],
    "Recall: row sums, and where decays start": ["lion_s, temperature 16 ? lion_s"],
}


def test_small_runs_in_words_are_rows_and_verdicts_of_the_report():
    section = (ROOT / "reports/small_runs.md").read_text()
    shown = {value for rows in SMALL_RUNS.values() for values in rows.values() for value in values}
    assert set(re.findall(r"\d+\.\d\d(?: ± \d+\.\d\d)?", section)) == shown
    report = (ROOT / "reports" / "paper.md").read_text()
    total, contradicted, confirmed, undecided = re.search(
        r"^Of (\d+): (\d+) contradicted, (\d+) confirmed, (\d+) undecided", report, re.M
    ).groups()
    said = f"of {total} claims, {confirmed} are confirmed, {contradicted} contradicted and {undecided} undecided"
    assert said in " ".join((ROOT / "README.md").read_text().split())
    for title in SMALL_RUNS | SMALL_ORDERS:
        _, found, rest = report.partition(f"\n## {title} (mini)\n")
        assert found, title
        lines = rest.partition("\n## ")[0].splitlines()
        for row, values in SMALL_RUNS.get(title, {}).items():
            line = next(line for line in lines if line.startswith(f"| {row} | "))
            for value in values:
                assert re.search(rf"\| {re.escape(value)} [±\[(|]", line), (title, row, value)
        for order in SMALL_ORDERS.get(title, []):
            assert order in orders_of(lines), (title, order)


def orders_of(lines: list[str]) -> set[str]:
    """Return what the verdicts of a section decide: "a > b", or "a ? b" and "b ? a" if they do not."""
    found = set()
    for names, *cells in (line.strip("| ").split(" | ") for line in lines if " > " in line.partition(" | ")[0]):
        a, b = names.split(" > ")
        if {"confirmed", "yes"} & {*cells}:
            found.add(names)
        elif {"contradicted", "no, the other way round"} & {*cells}:
            found.add(f"{b} > {a}")
        elif "undecided" in cells:
            found |= {f"{a} ? {b}", f"{b} ? {a}"}
    return found


def test_recipes_cost_what_was_measured_last():
    head, rows = cost_table(0)
    shape = {"model": "vit", "shape": "dim 384, depth 12, 6 heads, patches of 16 x 16"}
    for name_, cells in rows.items():
        own = [row for row in measured_steps() if {**row, **shape, "size": int(name_.split()[0])} == row]
        last = {NAMES.get(row["mixer"], row["mixer"]): f"{row['ratio']:.2f}" for row in own}
        assert cells == [last.get(column, "-") for column in head], name_


def test_steps_of_all_sizes_cost_what_was_measured_last():
    """Check the ratios to DeiT and BERT, and those of the paper; Hydra and Vim are compared with these recipes."""
    head, rows = cost_table(1)
    shapes = {"dim 192, depth 12, 3 heads": "DeiT tiny", "dim 384, depth 12, 6 heads": "small"}
    shapes |= {"dim 768, depth 12, 12 heads": "base", "dim 1024, depth 24, 16 heads": "BERT large"}
    recipes = dict(zip(("deit_tiny_softmax", "deit_small_softmax", "deit_base_softmax", "mlm_large_softmax"), head))
    last = {}
    for row in measured_steps():
        other = row.get("against")
        column = recipes.get(other["recipe"]) if other else shapes.get(", ".join(row["shape"].split(", ")[:3]))
        if (row["model"], row["size"]) in (("vit", 224), ("bert", 128)) and (
            theirs := published(row, other and other["recipe"])
        ):
            last[NAMES.get(row["mixer"], row["mixer"]), column] = f"{(other or row)['ratio']:.2f} ({theirs})"
    for mixer, cells in rows.items():
        assert cells == [last.get((mixer, column), "-") for column in head], mixer


def test_paths_in_comments_of_recipes_exist():
    """A path begins in the clone, in `recipes`, or in the recipe's folder; other paths are of other repositories."""
    for recipe in sorted((ROOT / "recipes").rglob("*.yaml")):
        comments = "\n".join(re.findall(r"#(.*)", recipe.read_text()))
        for path in re.findall(r"(?<![\w./])(?:[\w*.-]+/)+[\w*.-]+\.(?:py|md|yaml|json)\b", comments):
            places = (ROOT, ROOT / "recipes", recipe.parent)
            ours = any((place / path.partition("/")[0]).is_dir() for place in places)
            assert not ours or any(any(place.glob(path)) for place in places), f"{name(recipe)}: {path}"


def test_the_readme_has_the_times_of_the_gpu():
    text = " ".join((ROOT / "README.md").read_text().split())
    h200 = "NVIDIA H200"
    steps = json.loads((ROOT / "reports/train.json").read_text())["rows"]
    (row,) = [r for r in steps if (r["device"], r["mixer"], r["size"]) == (h200, "lion_s", 224)]
    assert f"(197 tokens) with Lion-S takes {row['ratio']:.2f} times as long as with softmax" in text
    recipes = " ".join((ROOT / "recipes/README.md").read_text().split())
    ratios = {r["mixer"]: f"{r['ratio']:.2f}" for r in steps if r["device"] == h200 and r["size"] == 224}
    assert (
        f"with Lion-lit takes {ratios['lion_lit']} of softmax's time, with Lion-D {ratios['lion_d']} and with Lion-S "
        f"{ratios['lion_s']}; without a mixer {ratios['without a mixer']}" in recipes
    )


@pytest.mark.slow
def test_a_model_and_a_data_set_of_ones_own(tmp_path, monkeypatch):
    """Train with the modules and the recipe that two READMEs show."""
    pytest.importorskip("sklearn")
    for file in ("recipes/README.md", "data/README.md"):
        for code in re.findall(r"```(?:python|yaml)\n(.*?)```", (ROOT / file).read_text(), re.S):
            if name := re.match(r"# ((?:my_\w+|rows)\.\w+)", code):
                (tmp_path / name[1]).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    short = [f"run.root={tmp_path}", "trainer.compile=false", "trainer.epochs=1", "trainer.device=cpu"]
    try:
        assert here("train", tmp_path / "rows.yaml", *short) == 0
        assert lion.load(tmp_path / "rows", compile=False)(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)).shape == (2, 10)
        assert here("train", "quickstart", "imports=[my_data]", "data={name: blocks}", "model.depth=1", *short) == 0
    finally:
        for table, name in (
            (MODELS, "rows"),
            (DATASETS, "blocks"),
            (sys.modules, "my_model"),
            (sys.modules, "my_data"),
        ):
            table.pop(name, None)
