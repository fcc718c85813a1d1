"""Place of exported files, which appear in one step when they are complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lion.config import ConfigError
from lion.files import sync


@contextmanager
def written(out: Path) -> Iterator[Path]:
    """Yield the path at which a file or folder is written; after the block it becomes `out`, unless an error occurred.

    Raises:
        ConfigError: `out` cannot be written.
    """
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        scratch.mkdir(parents=True)
        yield scratch / out.name
        sync(scratch / out.name)
        os.rename(scratch / out.name, out)
        sync(out.parent)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
