"""Tests of what all processes of a run must agree on, and of errors that some of them find."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch

from lion.config import ConfigError
from lion.samples.base import Splits
from lion.trainer.runtime import together
from tests.helpers import ROOT, refused, tiny_recipe
from tests.processes import in_processes
from tools import agreement
from tools.agreement import check_agreement, check_data_agreement, fingerprint
from tools.compose import resolve
from tools.train import prepare


def refuse(text):
    raise ConfigError(text)


def outcome(work):
    """Return the error of this process, its exit code, or the result."""
    try:
        return together(work)
    except ConfigError as error:
        return str(error)
    except SystemExit as error:
        return error.code


def outcomes(group, path, short):
    """Return the outcomes of checks in this process, of which some differ between the processes."""
    second = torch.distributed.get_rank() == 1
    recipe = resolve(path)
    book = resolve("gpt2_tiny_lion_s", short)
    same = partial(check_agreement, recipe)
    found = [
        outcome(same),
        outcome(lambda: refuse("no data") if second else 3),
        outcome(lambda: refuse("typo")),
        outcome(partial(check_agreement, dataclasses.replace(recipe, seed=int(second)))),
        outcome(lambda: prepare(book, 2, fresh=True, first=not second) and None),
    ]
    splits = Splits(range(4), range(2), None, None, more={"other": range(3)})
    for other in (splits, splits._replace(train=range(4 + second)), splits._replace(fingerprint=f"0{int(second)}")):
        found.append(outcome(partial(check_data_agreement, other)))
    for target in (f"{agreement.__name__}.VERSION", "torch.__version__"):
        with mock.patch(target, "9.1" if second else "9.0"):
            found.append(outcome(same))
    return found


@pytest.mark.process
def test_the_first_process_alone_says_what_is_wrong_anywhere(tmp_path):
    (tmp_path / "book.txt").write_text("\n".join(f"line {i} of a book" for i in range(300)))
    short = [f"data.path={tmp_path / 'book.txt'}", f"data.root={tmp_path / 'tokens'}", f"run.root={tmp_path / 'runs'}"]
    path = tiny_recipe(tmp_path)
    short += ["data.name=text", "data.tokenizer=bytes", "data.length=2", "trainer.parallel=sequence"]
    first, second = in_processes(2, outcomes, path, short)
    code = fingerprint(resolve(path))["lion"].partition(" ")[2]
    assert first == [
        None,
        f"process 1 on {socket.gethostname()}: no data",
        "typo",
        "processes 0 and 1 differ in seed: 0 and 1; give all machines the same",
        "processes: rows of 1 tokens are too short for 2 processes",
        None,
        "processes 0 and 1 differ in the number of train samples: 4 and 5; give all machines the same",
        "processes 0 and 1 differ in the fingerprint of the data: 00 and 01; give all machines the same",
        f"processes 0 and 1 differ in lion: 9.0 {code} and 9.1 {code}; give all machines the same",
        "processes 0 and 1 differ in torch: 9.0 and 9.1; give all machines the same",
    ]
    assert second == [2 if text else None for text in first]


def test_one_process_returns_or_raises():
    assert together(lambda: 3) == 3
    refused("typo", together, lambda: refuse("typo"))


REFUSED = """
from lion.config import ConfigError
from tools.cli import run_command

def main(argv):
    raise ConfigError("typo")

run_command(main, [])
"""


@pytest.mark.process
def test_bad_input_is_not_restarted():
    """Check that a launcher that could restart a process is stopped by it."""
    launcher = 'trap "echo stopped" QUIT; "$0" -c "$1"; echo "code $?"'
    heard = partial(signal.signal, signal.SIGQUIT, signal.SIG_DFL)  # a job in the background ignores it
    for restarts, expected in (("3", "stopped\ncode 2\n"), ("0", "code 2\n")):
        launched = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_MAX_RESTARTS": restarts}
        call = ["bash", "-c", launcher, sys.executable, REFUSED]
        run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
        done = run(call, env=os.environ | launched, preexec_fn=heard)
        assert (done.stdout, done.stderr) == (expected, "error: typo\n")
