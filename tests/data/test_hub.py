"""Tests of the set-up of the Hub without a network."""

import os
import socket
import urllib.request

import pytest

from data.hub import approach_hub, out_of_reach


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
    out_of_reach.cache_clear()
    approach_hub()
    out_of_reach.cache_clear()
    assert os.environ.get("HF_HUB_OFFLINE") == offline
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
