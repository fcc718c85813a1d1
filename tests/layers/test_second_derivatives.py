"""Second derivatives, as in products with a Hessian: right, or refused with an error; never silently wrong."""

import pytest
import torch

from lion.layers.mixers import MIXERS

from .helpers import doubles, small

REFUSED = (
    r"no second derivatives|derivative for aten::_scaled_dot_product|Trying to backward through lion.selective_scan"
)
LIGHTNET = ("lightnet", "forward")
DELTA = {"deltanet", "gated_deltanet", "kda", "comba", "gdn2", "rwkv7", "deltaproduct"}


def refused(mixer, form, direction):
    return mixer in ("softmax", "vim") or (mixer in DELTA and form == "chunk") or (mixer, direction) == LIGHTNET


@pytest.mark.parametrize("form, direction", [("full", "both"), ("chunk", "forward")])
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "none"])
def test_second_derivatives(mixer, form, direction):
    """Compare the product of the Hessian and a direction with differences of gradients.

    `torch.autograd.grad` with inputs is what misses the mark of `once_differentiable`.
    """
    layer = small(mixer, form, direction)
    x, along, weights = doubles(3, 1, 9, 8)

    def gradient(x, **how):
        x = x if how else x.detach().requires_grad_()
        return torch.autograd.grad((layer(x) * weights).sum(), x, **how)[0]

    def product():
        given = x.clone().requires_grad_()
        return torch.autograd.grad((gradient(given, create_graph=True) * along).sum(), given)[0]

    if refused(mixer, form, direction):
        with pytest.raises(RuntimeError, match=REFUSED):
            product()
        return
    step = 1e-5
    known = (gradient(x + step * along) - gradient(x - step * along)) / (2 * step)
    assert (product() - known).norm() < 1e-6 * known.norm()
