"""Launch of several processes on this machine, through PyTorch's launcher (`torchrun`)."""

from __future__ import annotations

import logging
import os
import signal

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lion.trainer.faults import RunError
from tools.processes import ending

SECONDS_TO_SAVE = 50  # time between a signal and the kill of a process that ignores the signal
QUIET = 2  # exit code of a process that has printed its error itself


def launch(processes: int, arguments: list[str], module: str = "tools.train") -> int:
    """Run the command of a module in `processes` processes and return the exit code.

    If one process fails, the others are stopped.

    Raises:
        RunError: A process died.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    call = ["--standalone", f"--nproc-per-node={processes}", "--module", module, *arguments]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    try:
        torchrun.main(call)
    except SignalException as error:
        return 130 if error.sigval in (signal.SIGINT, signal.SIGTERM) else 128 + error.sigval
    except ChildFailedError as error:
        killed = {rank: f for rank, f in error.failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
        rank, failure = next(iter(killed.items())) if killed else error.get_first_failure()
        if failure.exitcode == QUIET:
            return QUIET
        if failure.exitcode in (1, 130):
            return failure.exitcode
        raise RunError(
            f"process {rank} of {processes} died ({ending(failure.exitcode)}), the others were stopped; "
            f"the same command resumes from the last checkpoint"
        ) from None
    return 0
