"""Fixtures of several tests of tools."""

import pytest

from lion.runs import open_folder
from tools.bench import engine


@pytest.fixture
def weights_asked(monkeypatch):
    """Return a list that gets the options with which commands open a run."""
    asked = []

    def opened(folder, recipe, **how):
        asked.append(how)
        return open_folder(folder, recipe)

    monkeypatch.setattr("tools.compose.open_folder", opened)
    return asked


@pytest.fixture
def in_this_process(monkeypatch):
    """Let benchmarks measure in this process."""
    monkeypatch.setattr(engine, "in_a_process", lambda measure, job, receive: measure(job, receive))
