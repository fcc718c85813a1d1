"""Name and version of the distribution that pip installs; the package and the command are called `lion`."""

NAME = "lion-attention"  # another project is called `lion` on the index
VERSION = "0.1.0"  # semantic, for the names in `__all__` of the public modules
