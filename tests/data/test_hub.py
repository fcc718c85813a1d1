"""Tests of the set-up of the Hub without a network."""

import os
import socket
import urllib.request

import datasets
import huggingface_hub.constants
import pytest

from data.hub import configure_hub, hub_unreachable
from data.vision.hf import HubConfig, load_splits
from tests.helpers import refusal


def away(*args):
    raise socket.gaierror("no such name")


@pytest.fixture
def configured(monkeypatch):
    """Return a function that sets up the Hub for a network, as in a new process that has loaded the library."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def configure(look_up, proxies):
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(urllib.request, "getproxies", lambda: proxies)
        hub_unreachable.cache_clear()
        configure_hub()

    yield configure
    hub_unreachable.cache_clear()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize(
    "look_up, proxies, offline",
    [(away, {}, True), (lambda *args: [], {}, False), (away, {"https": "http://proxy"}, False)],
    ids=["no network", "network", "a proxy"],
)
def test_where_its_name_leads_nowhere_nothing_is_tried(configured, look_up, proxies, offline):
    configured(look_up, proxies)
    assert os.environ.get("HF_HUB_OFFLINE") == ("1" if offline else None)
    assert datasets.config.HF_HUB_OFFLINE == huggingface_hub.constants.HF_HUB_OFFLINE == offline


def test_a_library_that_is_loaded_already_retries_nothing(configured):
    configured(away, {})
    said = refusal(load_splits, HubConfig(path="someone/some_set"))
    assert "cannot be loaded from the Hub" in said
    assert "OfflineModeIsEnabled" in said
