"""The Hub of Hugging Face, where there is a network, and where there is none."""

from __future__ import annotations

import functools
import logging
import os
import socket
import urllib.request
from urllib.parse import urlsplit


def approach_hub() -> None:
    """To be called before its libraries are imported: they warn of nothing that is not said better here, and where its
    name leads nowhere they look in their cache alone. Else they would try again for half a minute."""
    for variable, name, level in (
        ("HF_HUB_VERBOSITY", "huggingface_hub", "error"),  # warns of every retry
        ("DATASETS_VERBOSITY", "datasets", "critical"),  # what cannot be read is our error
    ):
        os.environ.setdefault(variable, level)
        logging.getLogger(name).setLevel(level.upper())  # where it has been imported before
    if out_of_reach():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


@functools.cache
def out_of_reach() -> bool:
    """Whether nobody knows the Hub's name, without a proxy, which knows other names."""
    if urllib.request.getproxies():
        return False
    try:
        socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname, 443)
    except OSError:
        return True
    return False
