"""Child processes: measurements and commands in separate processes, and descriptions of how they ended."""

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

PR_SET_PDEATHSIG = 1  # option of Linux's prctl
Message = dict[str, Any]
Send = Callable[[Message], None]


def in_a_process(measure: Callable[[Any, Send], None], job: Any, receive: Send) -> str | None:
    """Run `measure(job, send)` in a separate process, and call `receive` here with each message that it sends.

    A separate process keeps compiled code and peak memory of one job from affecting the next.

    Returns:
        A description of the failure, or None.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # PyTorch's profiler warns on machines without a GPU
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(measure, job, theirs))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: the parent handles Ctrl-C
    try:
        process.start()
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a signal that came meanwhile is raised here
        with contextlib.suppress(EOFError):
            while True:
                while not ours.poll(1):  # returns to Python, which raises Ctrl-C that another thread has received
                    pass
                message = ours.recv()
                if message["kind"] == "failed":
                    return message["text"]
                receive(message)
        process.join()
        if not process.exitcode:
            return None
        hint = ""
        if process.exitcode == -signal.SIGKILL:
            hint = ", out of memory?"
        return f"its process ended with {ending(process.exitcode)}{hint}"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process.is_alive():
            process.terminate()
            process.join(5)
            process.kill()
        ours.close()


def _child(measure: Callable[[Any, Send], None], job: Any, pipe: Any) -> None:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns about nvcc without a GPU
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
    """Describe how a process ended by its exit code; a negative code is a signal."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def start_command(*argv: str, out: Any = subprocess.PIPE, env: Mapping[str, str] | None = None) -> subprocess.Popen:
    """Start `python -m tools ...` in a new session; its output goes to a pipe, or to the file `out`.

    On Linux, the process receives SIGTERM (save and stop) when this process dies.
    """
    command = [sys.executable, "-m", "tools", *argv]
    options: dict[str, Any] = {"stdout": out, "stderr": subprocess.STDOUT, "text": True, "env": env}
    if sys.platform == "linux":
        options["preexec_fn"] = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    return subprocess.Popen(command, start_new_session=True, **options)


def kill_tree(process: subprocess.Popen) -> None:
    """Send SIGKILL to a process and all of its descendants."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def descendants(pid: int) -> list[int]:
    """Return the ids of all children of a process, and of their children (Linux)."""
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(d for c in children for d in descendants(c))]
