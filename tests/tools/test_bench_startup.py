"""`bench startup`: a process for each start, and one start with a real measurement."""

import json

import pytest

from tests.helpers import here, refuse, tiny_recipe
from tools.bench import startup


def test_every_start_is_a_row_of_the_report(tmp_path, monkeypatch, capsys):
    begun = []

    def in_a_process(name, state, batch, cache, artifacts):
        begun.append((state, cache.name, cache.exists()))
        parts = dict.fromkeys(("import", "build", "first", "second", "dynamo", "aot", "inductor", "compiler"), 1.5)
        return {**parts, "graphs": 1, "files": 2, "cache": "bypass", "threads": 1}

    monkeypatch.setattr(startup, "in_a_process", in_a_process)
    assert here("bench", "startup", "quickstart", "--batch", 4, "--out", tmp_path) == 0
    assert [state for state, _, _ in begun] == list(startup.STATES) and not any(there for *_, there in begun)
    assert [cache for _, cache, _ in begun] == ["cache", "cache", "carried", "cache"]
    text = (tmp_path / "startup.md").read_text()
    assert all(f"| quickstart | {state} | 1.50 |" in text for state in startup.STATES)
    assert [row["batch"] for row in json.loads((tmp_path / "startup.json").read_text())["rows"]] == [4] * 4
    capsys.readouterr()
    refuse(capsys, "bench", "startup", "no_recipe", "--out", tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_a_start_is_measured_in_a_process_of_its_own(tmp_path):
    path = str(tiny_recipe(tmp_path))
    row = startup.in_a_process(path, "eager", 2, tmp_path / "cache", tmp_path / "artifacts")
    assert row["graphs"] == row["files"] == 0 and row["first"] > row["second"] / 10 > 0 and row["import"] > 0
    assert row["dynamo"] == row["compiler"] == 0
