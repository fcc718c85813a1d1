"""Configuration of all tests: no network access, and selection of cases.

The tests of operators, layers and models have large grids of cases (forms x directions x decays x ..). By default each
of these tests runs the cases in which every value of every parameter occurs, at least `GRID`; tests marked `whole` run
all cases, and `--every` runs all cases of all tests, those marked `every` among them. `--quick` gives fast feedback: it
runs one case of every test that is not slow, does not compile and starts no processes. That case is the last one,
because parameters are listed from plain to special. The limits below bound a quick run on any processor.
"""

import gc
import os
import sys
from collections import defaultdict

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # access to the Hub fails at once, here and in started processes
OUTSIDE = ("slow", "compiled", "process")  # markers of pyproject.toml
MOST_CASES, MOST_GRAPHS = 1500, 25
GRID, GRIDS = 12, ("tests/ops/", "tests/layers/", "tests/models/")
graphs = 0  # number of graphs compiled by all processes of a quick run


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="one case of every test that is fast")
    parser.addoption("--every", action="store_true", help="all cases of all tests")


def pytest_collection_modifyitems(config, items):
    quick = config.getoption("--quick")
    fast = [item for item in items if not any(item.get_closest_marker(name) for name in ("every", *OUTSIDE))]
    config.fast_tests = len({name_of(item) for item in fast})  # the cases of a quick run of these files
    if config.getoption("--every") or any("::" in name and "[" in name for name in config.args):
        return
    cases, chosen = defaultdict(list), set()
    for item in fast if quick else items:
        if not item.get_closest_marker("every"):
            cases[name_of(item)].append(item)
    for (file, _), several in cases.items():
        whole = not file.startswith(GRIDS) or several[-1].get_closest_marker("whole")
        chosen.update(several[-1:] if quick else several if whole else covering(several, GRID))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def name_of(item) -> tuple[str, str]:
    """Return the file and the name of the test of a case."""
    return item.location[0], getattr(item, "originalname", item.name)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # modules and cases live to the end: each later `gc.collect` would take a second to visit them


def covering(cases: list, least: int) -> list:
    """Choose cases in which every value of every parameter occurs, at least `least` if there are as many.

    Cases at even distances would not do: in stacked grids a distance can meet the same values of a parameter each time.
    """
    if len(cases) <= least:
        return cases
    values = {case: {(name, label(value)) for name, value in case.callspec.params.items()} for case in cases}
    chosen, left = [cases[-1]], cases[:-1]
    missing = set().union(*values.values()) - values[cases[-1]]
    while missing or len(chosen) < least:
        best = max(left, key=lambda case: len(values[case] & missing))
        missing -= values[best]
        left.remove(best)
        chosen.append(best)
    return chosen


def label(value) -> object:
    """Return a hashable label of a parameter's value."""
    return id(value) if callable(value) else repr(value)


def compiled() -> int:
    """Count the graphs that this process has compiled, without importing torch."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else len(dynamo.get_compilation_metrics())


def pytest_sessionfinish(session):
    gc.unfreeze()  # else nanobind counts what is left at the end as leaked
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
        session.config.workeroutput["graphs"] = compiled()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    global graphs
    graphs += getattr(node, "workeroutput", {}).get("graphs", 0)


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--quick") and not hasattr(config, "workeroutput"):
        most = f"at most {MOST_CASES:,} cases and {MOST_GRAPHS} graphs"
        terminalreporter.write_line(f"quick: {graphs + compiled()} compiled graphs, {most}")
