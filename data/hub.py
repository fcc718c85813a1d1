"""The Hub of Hugging Face, where there is a network, and where there is none."""

from __future__ import annotations

import functools
import logging
import os
import socket
import urllib.request
from urllib.parse import urlsplit


@functools.cache
def approach_hub() -> None:
    """To be called before its libraries are imported: they warn of nothing that is not said better here, and where its
    name leads nowhere they look in their cache alone. Else they would try again for half a minute."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # warns of every retry
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what cannot be read is our error
    if urllib.request.getproxies():  # a proxy knows other names
        return
    try:
        socket.getaddrinfo(urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
