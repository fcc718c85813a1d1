"""`bench startup`: a process for each start, and one start with a real measurement."""

import json

import pytest

from tests.helpers import here, refuse, tiny_recipe
from tools.bench import startup


def test_every_start_is_a_row_of_the_report(tmp_path, monkeypatch, capsys):
    begun = []
    parts = dict.fromkeys(("import", "build", "first", "second", "dynamo", "aot", "inductor", "compiler"), 1.5)

    def in_a_process(name, state, batch, cache, artifacts):
        assert not cache.exists()
        begun.append((state, cache.name))
        return parts | {"graphs": 1, "files": 2, "cache": "bypass", "threads": 1}

    monkeypatch.setattr(startup, "in_a_process", in_a_process)
    assert here("bench", "startup", "quickstart", "--batch", 4, "--out", tmp_path) == 0
    assert begun == list(zip(startup.STATES, ["cache", "cache", "carried", "cache"], strict=True))
    text = (tmp_path / "startup.md").read_text()
    for state in startup.STATES:
        assert f"| quickstart | {state} | 1.50 |" in text
    rows = json.loads((tmp_path / "startup.json").read_text())["rows"]
    assert [row["batch"] for row in rows] == [4] * 4
    capsys.readouterr()
    refuse(capsys, "bench", "startup", "no_recipe", "--out", tmp_path)


@pytest.mark.slow
@pytest.mark.process
def test_a_start_is_measured_in_a_process_of_its_own(tmp_path):
    path = str(tiny_recipe(tmp_path))
    row = startup.in_a_process(path, "eager", 2, tmp_path / "cache", tmp_path / "artifacts")
    assert row["graphs"] == row["files"] == row["dynamo"] == row["compiler"] == 0
    assert row["first"] > row["second"] / 10 > 0
    assert row["import"] > 0
