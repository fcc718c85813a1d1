"""Measurements in processes of their own: compiled code and peak memory of one do not touch those of the next."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from lion.config import ConfigError
from lion.trainer.runtime import missing_compiler

Message = dict[str, Any]
Send = Callable[[Message], None]


def in_a_process(measure: Callable[[Any, Send], None], job: Any, receive: Send) -> str | None:
    """`measure(job, send)` in a process; what it sends is received here. Returns how it failed, if it did."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # PyTorch's profiler reports that there is no GPU
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(measure, job, theirs))
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
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"code {process.exitcode}"
        return f"its process ended with {how}{', out of memory?' if process.exitcode == -signal.SIGKILL else ''}"
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if process.is_alive():
            process.terminate()
            process.join(5)
            process.kill()
        ours.close()


def child(measure: Callable[[Any, Send], None], job: Any, pipe: Any) -> None:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns of nvcc without a GPU
    try:
        measure(job, pipe.send)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)
    except Exception as error:
        pipe.send({"kind": "failed", "text": first_line(error)})


def check_compiler(eager: bool) -> None:
    """Raises ConfigError: There is no compiler, and compiled code is to be timed."""
    missing = missing_compiler()
    if missing and not eager:
        raise ConfigError(f"bench: {missing}, or add --eager")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
