"""Set-up of the Hugging Face Hub libraries for machines with and without a network."""

from __future__ import annotations

import functools
import logging
import os
import socket
import urllib.request
from urllib.parse import urlsplit


def configure_hub() -> None:
    """Configure the Hub libraries; call this before they are imported.

    Their warnings are silenced, because the errors here say more. If the host name of the Hub cannot be resolved, the
    libraries use only their cache; otherwise they would retry for half a minute.
    """
    for variable, name, level in (
        ("HF_HUB_VERBOSITY", "huggingface_hub", "error"),  # warns of every retry
        ("DATASETS_VERBOSITY", "datasets", "critical"),  # unreadable files become a ConfigError here
    ):
        os.environ.setdefault(variable, level)
        logging.getLogger(name).setLevel(level.upper())  # in case the library is already imported
    if hub_unreachable():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


@functools.cache
def hub_unreachable() -> bool:
    """Return whether the host name of the Hub cannot be resolved; False with a proxy, which resolves names itself."""
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname, 443)
    except OSError:
        return True
    return False
