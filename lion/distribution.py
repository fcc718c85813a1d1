"""Name and version of the distribution that pip installs, and its folders; package and command are called `lion`."""

from pathlib import Path

NAME = "lion-attention"  # another project is called `lion` on the index
VERSION = "0.1.0"  # semantic, for the names in `__all__` of the public modules


def clone_folder() -> Path:
    """Return the folder of `data`, `tools` and `recipes`: that of the wheel, or of the clone."""
    here = Path(__file__).resolve().parent
    wheel = here / "clone"
    if wheel.is_dir():
        return wheel
    return here.parent
