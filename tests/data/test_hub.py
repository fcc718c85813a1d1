"""Tests of the set-up of the Hub without a network."""

import os
import socket
import urllib.request

import pytest

from data.hub import configure_hub, hub_unreachable


def away(*args):
    raise socket.gaierror("no such name")


@pytest.mark.parametrize(
    ("look_up", "proxies", "offline"),
    [(away, {}, "1"), (lambda *args: [], {}, None), (away, {"https": "http://proxy"}, None)],
    ids=["no network", "network", "a proxy"],
)
def test_where_its_name_leads_nowhere_nothing_is_tried(monkeypatch, look_up, proxies, offline):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(urllib.request, "getproxies", lambda: proxies)
    hub_unreachable.cache_clear()
    configure_hub()
    hub_unreachable.cache_clear()
    assert os.environ.get("HF_HUB_OFFLINE") == offline
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
