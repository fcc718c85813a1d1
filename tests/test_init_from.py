"""Initialisation of a model from another run: compatible data, and adaptation of weights."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from lion import runs
from lion.config import ConfigError
from lion.models import Model
from lion.runs import init_from
from tests.helpers import refused
from tests.trainer import toys


@dataclass(frozen=True)
class Coded(toys.Info):
    """Points whose values are only comparable under the same code."""

    code: str = "a1"

    def check_transfer(self, whose, then):
        if then["code"] != self.code:
            raise ConfigError(f"{whose} is of another code: it was {then['code']!r}, and is {self.code!r} now")


class Net(toys.Net, Model):
    """A model that doubles the weights of another model of its class in `adapt`."""

    def adapt(self, weights, source):
        assert type(source) is type(self)
        return {name: 2 * value for name, value in weights.items()}


class Other(Net):
    pass


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """Return a function that stores a run with a model class and a code, and returns the weights."""

    def store(kind, code):
        class Task(toys.Sides):
            def build_model(self, config):
                return kind()

        weights = kind().state_dict()
        state = {"model": weights, "info": Coded(code=code).to_dict(), "step": 1}
        monkeypatch.setattr(runs, "find_run", lambda run: tmp_path)
        monkeypatch.setattr(runs, "load_recipe", lambda path: SimpleNamespace(model=None))
        found = {"best": (Task(toys.Config(), toys.Info()), state)}
        monkeypatch.setattr(runs, "read_run", lambda folder, recipe, which: found[which])
        return weights

    return store


def test_data_may_rule_a_run_out(stored):
    stored(Net, "b2")
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    refused(r"^init_from: there is of another code: it was 'b2', and is 'a1' now$", init_from, net, "there", Coded())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    init_from(net, "there", Coded(code="b2"))


@pytest.mark.parametrize(("kind", "factor"), [(Net, 2), (Other, 1)])
def test_a_model_adapts_weights_of_its_own_class_alone(stored, kind, factor):
    weights, net = stored(kind, "a1"), Net()
    init_from(net, "there", Coded())
    for name, value in net.state_dict().items():
        assert torch.equal(value, factor * weights[name]), name
