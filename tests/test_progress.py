"""Progress bars: the rate excludes unsteady work, and a log file gets few lines."""

import logging
import re
import sys
import time

from tqdm import tqdm

from lion import progress as progress_module
from lion.progress import announced, progress, rate
from lion.trainer.log import RunLog


def test_compilation_and_pauses_are_no_part_of_the_rate(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    bar = progress(total=10, desc="run")
    bar._time = time.time  # tqdm has already bound its clock

    def step(seconds):
        now[0] += seconds
        bar.update()

    step(600)  # compiles
    bar.restart_clock()
    step(2)
    with bar.paused():
        now[0] += 300
    step(2)
    shown = bar.format_dict
    assert (shown["n"] - shown["initial"]) / shown["elapsed"] == 0.5
    bar.close()
    assert tqdm.format_meter(**shown).count("<00:14") == 1  # seven steps of two seconds are left
    assert capsys.readouterr().err == "", "work of a few seconds leaves no line in a file"
    with progress(total=3, disable=True).paused():  # in processes of other ranks
        pass


def test_a_run_of_a_time_shows_its_steps_and_the_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    log = RunLog(tmp_path, start=0, total=7200, unit="s")
    log.progress(600, step="40", loss="1.0")
    with log.pause("evaluating"):
        pass
    shown = str(log.bar)
    log.close()
    assert "600/7200 s [" in shown and " left, step=40, loss=1.0]" in shown
    assert f"{tmp_path.name}, evaluating" in capsys.readouterr().err


def test_rates_below_one_are_not_nought():
    assert [rate(*x) for x in ((3175, 1), (12.4, 1), (1, 2), (1, 300), (5, 0))] == ["3175", "12", "0.5", "0.0033", "0"]


def test_a_bar_that_was_shown_ends_its_line(monkeypatch, capsys):
    """Check that `close` ends the line of a bar in a file, even if its clock was restarted just before."""
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    bar = progress(total=3)
    bar._time = time.time  # tqdm has already bound its clock
    bar.start_t = bar.last_print_t = now[0]
    for _ in range(2):
        now[0] += 30
        bar.update()
    bar.restart_clock()
    bar.update()
    bar.close()
    assert capsys.readouterr().err.endswith("\n")


def test_long_work_is_named(caplog, monkeypatch):
    """Check that work which takes longer than `UNSAID` logs one line, and shorter work and other processes none."""
    caplog.set_level(logging.INFO, "lion")
    monkeypatch.setattr(progress_module, "UNSAID", 0.05)
    with announced("quick work"):
        pass
    with announced("long work"):
        time.sleep(0.3)
    monkeypatch.setenv("RANK", "1")
    with announced("work of another process"):
        time.sleep(0.1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(r"long work, since \d\d:\d\d:\d\d", line)
