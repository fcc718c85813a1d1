import torch
from torch import nn

from lion.trainer.optim import Average
from tests.layers.helpers import close


def net():
    torch.manual_seed(0)
    out = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    out.register_buffer("table", torch.ones(2), persistent=False)
    return out


def test_floating_buffers_are_averaged_and_counts_copied():
    model = net()
    average = Average(model, 0.9)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(3):
        model(torch.randn(8, 3) + 5)  # training mode, so running statistics change
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn_like(parameter)
        model.table += 1
        average.update()
        for name, value in model.state_dict().items():
            exact = value.is_floating_point()
            expected[name] = 0.9 * expected[name] + 0.1 * value if exact else value.clone()
    got = average.model.state_dict()
    assert "1.running_var" in got and got["1.num_batches_tracked"] == 3
    close(dict(got), expected)
    assert average.model.table.eq(1).all()  # not averaged: it is not learned, so in no checkpoint
    assert not any(p.requires_grad for p in average.model.parameters())
    assert (got["1.running_mean"] - model[1].running_mean).abs().max() > 0.1
