"""Tests of the set-up of the Hub without a network."""

import os
import socket
import subprocess
import sys
import urllib.request

import pytest

from data.hub import configure_hub, hub_unreachable
from tests.helpers import ROOT

LOADED_FIRST = """
import socket, datasets, data.hub
def away(*args): raise socket.gaierror("no such name")
socket.getaddrinfo, data.hub.urllib.request.getproxies = away, dict
from data.vision.hf import HubConfig, load_splits
load_splits(HubConfig(path="someone/some_set"))
"""


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


@pytest.mark.slow
def test_a_library_that_is_loaded_already_retries_nothing():
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    made = subprocess.run(
        [sys.executable, "-c", LOADED_FIRST], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "cannot be loaded from the Hub" in made.stderr and "OfflineModeIsEnabled" in made.stderr, made.stderr
