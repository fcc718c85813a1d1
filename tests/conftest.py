"""Configuration of all tests: no network access, selection of cases, and one line of progress.

Tests marked `every` take minutes and run only with `--every`. `--quick` gives fast feedback: it runs one case of every
test that is not slow, does not compile and starts no processes. That case is the last one, because parameters are
listed from plain to special.
"""

import gc
import os

import pytest

from lion.progress import progress

os.environ["HF_HUB_OFFLINE"] = "1"  # access to the Hub fails at once, here and in started processes
OUTSIDE = ("slow", "compiled", "process")  # markers of pyproject.toml
MOST_CASES = 1500  # of a quick run
COSTS = {  # mean time of a test of a folder, relative to the others, for the estimate of the remaining time
    "tests/gpu": 50,
    "tests/trainer": 7,
    "tests/tools": 5,
    "tests/transformers": 3,
    "tests/inference": 3,
    "tests/ops": 3,
}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="one case of every test that is fast")
    parser.addoption("--every", action="store_true", help="all cases of all tests")


def pytest_configure(config):
    worker = hasattr(config, "workerinput")  # a process of pytest-xdist
    if config.option.verbose < 0 and not worker and not config.option.collectonly:
        config.pluginmanager.register(ProgressLine())


def pytest_collection_modifyitems(config, items):
    fast = {name_of(item): item for item in items if is_fast(item)}  # the last case of each test
    config.fast_tests = len(fast)  # the cases of a quick run of these files
    if config.getoption("--every") or any("::" in name and "[" in name for name in config.args):
        return
    if config.getoption("--quick"):
        chosen = set(fast.values())
    else:
        chosen = {item for item in items if not item.get_closest_marker("every")}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def is_fast(item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("every", *OUTSIDE))


def name_of(item) -> tuple[str, str]:
    """Return the file and the name of the test of a case."""
    return item.location[0], getattr(item, "originalname", item.name)


def pytest_collection_finish():
    freeze()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        freeze()


def freeze():
    """Exempt all living objects, mostly of modules, from `gc.collect`, which would take a second to visit them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # else nanobind counts what is left at the end as leaked


class ProgressLine:
    """One line with the share of the tests that have run and the remaining time, in place of a letter for each test."""

    def __init__(self):
        self.bar = None

    def pytest_collection_finish(self, session):
        self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.begin(ids)

    def begin(self, ids):
        if self.bar is None and ids:
            total = sum(cost(test) for test in ids)
            shown = "{desc}: {percentage:3.0f}% |{bar}| {elapsed}, about {remaining} left"
            self.bar = progress(total=total, desc=f"{len(ids):,} tests", bar_format=shown)

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        category, _, word = yield
        return category, "", word if category in ("failed", "error") else ""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.bar.write(f"FAILED {report.nodeid}")
        if report.when == "teardown":
            self.bar.update(cost(report.nodeid))

    def pytest_sessionfinish(self):
        if self.bar is not None:
            self.bar.close()


def cost(test: str) -> int:
    """Return the mean time of a test of the same folder."""
    folder = os.path.dirname(test.partition("::")[0])
    return COSTS.get(folder, 1)
