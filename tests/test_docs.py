"""Markdown files: their code runs, and links, commands and tables are correct."""

import json
import re

import pytest

import lion.runs
from data import DATASETS
from tests.helpers import ROOT, here, tiny_recipe
from tools.bench.lengths import LINES, PASSES, panels
from tools.bench.report import Report
from tools.commands import COMMANDS, parse_command
from tools.listing import recipe_names
from tools.mixers import mixer_rows

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


def test_the_python_of_the_readmes_runs(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    assert here("train", tiny_recipe(tmp_path, "quickstart"), "--no-eval") == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lion.runs, "compile_blocks", lambda *args, **settings: None)
    pytest.importorskip("timm")
    held = {}
    for path in (ROOT / "README.md", ROOT / "lion/timm/README.md"):
        for code in blocks(path, "python"):
            exec(code, held)
    assert held["logits"].shape == (1, 10) and held["model"].num_classes == 10


def test_no_report_names_a_folder_of_a_machine():
    """Check that reports have no absolute paths, because data are identified by name, size and hash."""
    for path in [*DOCS, *(p for p in (ROOT / "reports").iterdir() if p.suffix in (".md", ".json"))]:
        found = re.findall(r"(?<![\w.])/(?:root|home|work|tmp|Users|mnt)/[\w./-]*", path.read_text())
        assert not found, name(path)


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        if not file.startswith("http"):
            there = path.parent / file if file else path
            assert there.exists(), target
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [h.lower().replace(" ", "-") for h in headings], target


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_commands_are_commands(path):
    for line in re.findall(r"\./run\.sh([ \w./=-]*)", path.read_text()):
        words = line.split()
        if not words or words[0] in ("NAME", "RECIPE", "...", "--help"):
            continue
        command, rest = parse_command(words)
        assert command in COMMANDS or words[0] in recipe_names(), line
        for word in rest:
            if word.startswith("recipes/"):
                assert word == "recipes/pictures.yaml" or (ROOT / word).exists(), line


def test_tables_are_whole():
    mixers, sets = ((ROOT / p).read_text() for p in ("lion/layers/README.md", "data/README.md"))
    for mixer, *rest in mixer_rows():
        assert f"| `{mixer}` | {' | '.join(rest)} |" in mixers, f"the row of {mixer} is missing or out of date"
    for dataset in DATASETS:
        assert f"`{dataset}`" in sets
    commands = (ROOT / "tools/README.md").read_text()
    for command in COMMANDS.keys() - {"train"}:
        assert f"`{command}" in commands, command


def test_the_picture_shows_what_was_measured():
    rows = Report(ROOT / "reports").load().settings()[0]
    for which in PASSES:
        time, memory = panels(rows, which).values()
        assert [line for line, lengths, _ in time if lengths] == [
            line for line in LINES if (line[1], which) != ("rnn", "both")
        ]
        for (line, lengths, ratios), (_, _, kib) in zip(time, memory):
            for length, ratio, each in zip(lengths, ratios, kib):
                (row,) = (r for r in rows if (r["mixer"], r["form"], r["length"], r["pass"]) == (*line, length, which))
                assert row["ratio"] == ratio and row["peak_bytes"] == pytest.approx(1024 * each * row["batch"] * length)


def test_recipes_cost_what_was_measured_last():
    """Check the ratios to softmax in recipes/README.md against the last rows of their machine in the report."""
    lines = (ROOT / "recipes/README.md").read_text().partition("## What it costs\n")[2].splitlines()
    head, _, *rows = (line.strip("| ").split(" | ") for line in lines if line.startswith("|"))
    names = {"no mixer at all": "without a mixer", "lion_d, two scans": "lion_d multiscan"}
    names["lion_s, two scans"] = "lion_s multiscan"
    measured = sorted(json.loads((ROOT / "reports/train.json").read_text())["rows"], key=lambda row: row["date"])
    shape = {"device": "AMD EPYC, AVX512", "precision": "fp32", "matmul": "highest", "model": "vit"}
    shape["shape"] = "dim 384, depth 12, 6 heads, patches of 16 x 16"
    for row in rows:
        size = int(row[0].split()[0])
        last = {held["mixer"]: held["ratio"] for held in measured if {**held, **shape, "size": size} == held}
        wanted = [last.get(names.get(column, column)) for column in head]
        assert row[1:] == ["-" if ratio is None else f"{ratio:.2f}" for ratio in wanted], row[0]


def test_paths_in_comments_of_recipes_exist():
    """A path begins in the clone, in `recipes`, or in the recipe's folder; other paths are of other repositories."""
    for recipe in sorted((ROOT / "recipes").rglob("*.yaml")):
        comments = "\n".join(re.findall(r"#(.*)", recipe.read_text()))
        for path in re.findall(r"(?<![\w./])(?:[\w*.-]+/)+[\w*.-]+\.(?:py|md|yaml|json)\b", comments):
            places = (ROOT, ROOT / "recipes", recipe.parent)
            ours = any((place / path.partition("/")[0]).is_dir() for place in places)
            assert not ours or any(any(place.glob(path)) for place in places), f"{name(recipe)}: {path}"
