"""Launch of several processes on this machine, and on others, through PyTorch's launcher (`torchrun`)."""

from __future__ import annotations

import logging
import os
import signal
import socket
from typing import NamedTuple

from torch.distributed import DistError
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from lion.config import ConfigError
from lion.trainer.faults import RunError
from tools.cli import say
from tools.processes import ending

SECONDS_TO_SAVE = 50  # time between a signal and the kill of a process that ignores the signal
QUIET = 2  # exit code of a process that has printed its error itself


class Machines(NamedTuple):
    """The machines of a run.

    Attributes:
        processes: Number of processes on each machine.
        nodes: Number of machines.
        head: `HOST:PORT` of the machine where the others meet, if there are several.
        restarts: Number of restarts after a process has died.
    """

    processes: int
    nodes: int = 1
    head: str | None = None
    restarts: int = 0

    def options(self) -> list[str]:
        """Return the options of `torchrun`.

        Raises:
            ConfigError: Several machines without a head, one machine with a head, or a head without a port or of an
                unknown name.
        """
        if self.nodes == 1 and self.head is not None:
            raise ConfigError("--head: one machine needs none, give their number with --nodes")
        if self.nodes == 1:
            where = ["--standalone"]
        elif self.head is None:
            raise ConfigError("--nodes: several machines need --head HOST:PORT, the same on each of them")
        else:
            check_head(self.head)
            where = [f"--nnodes={self.nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={self.head}"]
        return [*where, f"--nproc-per-node={self.processes}", f"--max-restarts={self.restarts}"]


def check_head(head: str) -> None:
    """Check the address of the machine where the others meet.

    Raises:
        ConfigError: It is not HOST:PORT, or this machine does not know the host.
    """
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"--head: expected HOST:PORT such as {head.split(':')[0] or 'HOST'}:29500, got {head!r}")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise ConfigError(f"--head: host {host!r} is not known here ({error.strerror})") from None


def launch(
    machines: Machines,
    arguments: list[str],
    module: str = "tools.train",
    again: str = "resumes from the last checkpoint",
) -> int:
    """Run the command of a module in the processes of this machine and return the exit code.

    If one process fails, the others are stopped. `again` says what the same command then does.

    Raises:
        RunError: A process died, or the other machines cannot be reached.
    """
    call = [*machines.options(), "--module", "--", module, *arguments]  # torchrun checks no word after --
    for name in ("", ".agent.server.api", ".multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SECONDS_TO_SAVE))
    if machines.nodes > 1:  # a machine that comes back would wait for an address that a shared store holds no longer
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        say(f"meeting {machines.nodes} machines at {machines.head}")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // machines.processes)))
    try:
        torchrun.main(call)
    except SignalException as error:
        if error.sigval == signal.SIGQUIT:  # sent by a process, see `run_command`
            return QUIET
        if error.sigval in (signal.SIGINT, signal.SIGTERM):
            return 130
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:
        raise RunError(f"--head {machines.head}: {str(error).splitlines()[0]} The same command {again}") from None
    except ChildFailedError as error:
        killed = {rank: f for rank, f in error.failures.items() if f.exitcode < 0 and -f.exitcode != signal.SIGTERM}
        rank, failure = next(iter(killed.items())) if killed else error.get_first_failure()
        if failure.exitcode == QUIET:
            return QUIET
        if failure.exitcode in (1, 130):
            return failure.exitcode
        raise RunError(
            f"process {rank} of {machines.processes * machines.nodes} died ({ending(failure.exitcode)}), the others "
            f"were stopped; the same command {again}"
        ) from None
    return 0
