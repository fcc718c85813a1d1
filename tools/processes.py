"""Child processes: a measurement in one of its own, a command in one, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux's prctl
Message = dict[str, Any]
Send = Callable[[Message], None]


def in_a_process(measure: Callable[[Any, Send], None], job: Any, receive: Send) -> str | None:
    """`measure(job, send)` in a process, so that compiled code and peak memory of one job do not touch those of the
    next; what it sends is received here. Returns how it failed, if it did."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # PyTorch's profiler reports that there is no GPU
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(measure, job, theirs))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: Ctrl-C is the parent's to handle
    try:
        process.start()
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # one that came meanwhile is raised here
        with contextlib.suppress(EOFError):
            while True:
                message = ours.recv()
                if message["kind"] == "failed":
                    return message["text"]
                receive(message)
        process.join()
        if not process.exitcode:
            return None
        hint = ", out of memory?" if process.exitcode == -signal.SIGKILL else ""
        return f"its process ended with {ending(process.exitcode)}{hint}"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process.is_alive():
            process.terminate()
            process.join(5)
            process.kill()
        ours.close()


def _child(measure: Callable[[Any, Send], None], job: Any, pipe: Any) -> None:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of nvcc without a GPU
    try:
        measure(job, pipe.send)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)
    except Exception as error:
        pipe.send({"kind": "failed", "text": first_line(error)})


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def ending(code: int) -> str:
    """How a process ended, by its exit code: that of a signal is below 0."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def start_command(*argv: str, out: Any = subprocess.PIPE, env: Mapping[str, str] | None = None) -> subprocess.Popen:
    """`python -m tools ...` in a session of its own; what it prints is piped here, or goes to the file `out`.

    When we die, it is told to save and stop (SIGTERM), as far as there is such a kernel.
    """
    command = [sys.executable, "-m", "tools", *argv]
    how = {"stdout": out, "stderr": subprocess.STDOUT, "text": True, "env": env}
    if sys.platform == "linux":
        how["preexec_fn"] = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    return subprocess.Popen(command, start_new_session=True, **how)


def kill_tree(process: subprocess.Popen) -> None:
    """SIGKILL for a process and all that it has started."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def descendants(pid: int) -> list[int]:
    """Children of a process, and theirs (Linux)."""
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(d for c in children for d in descendants(c))]
