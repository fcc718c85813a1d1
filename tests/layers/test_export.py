"""Export with `torch.export` and ONNX: layers, models and steps with dynamic batch size and length."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import lion
from lion.layers.mixers import MIXERS as ALL_MIXERS
from lion.layers.mixers import AttentionConfig, make_mixer, set_form
from lion.layers.mixers.linear import LinearState
from lion.models.vit import ViT, ViTConfig

from ..ops.helpers import assert_close

MIXERS = ("lion_lit", "lion_s", "retnet", "rwkv6")
USUAL = ("lion_s", "gla", "softmax")  # a decay each head, each key dimension, and none
BATCH, BATCHES = {0: Dim("batch")}, (1, 2, 5)
BOTH = {0: Dim.AUTO, 1: Dim.AUTO}
LENGTHS = (1, 7, 65, 127, 128, 300)


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Step(nn.Module):
    """A step of a layer, as a module with tensor arguments."""

    def __init__(self, layer: lion.LionAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, S, z, position):
        y, state = self.layer.step(x, LinearState(S, z, position))
        return y, *state[:3]


def vit(mixer: str, **attention) -> ViT:
    config = ViTConfig(mixer=mixer, dim=16, depth=1, num_heads=2, patch_size=2, attention=AttentionConfig(**attention))
    return ViT(config, image_size=(18, 18), channels=1, num_classes=3).eval()  # 82 tokens


@pytest.mark.parametrize("form", ("full", "chunk", "rnn"))
@pytest.mark.parametrize("mixer", (*MIXERS, "deltanet"))
@pytest.mark.slow
def test_layer_of_all_batches(mixer, form):
    length = 12 if form == "rnn" else 100  # the rnn form is unrolled
    layer = lion.LionAttention(16, 2, mixer=mixer, form=form)
    exported = export(layer, (torch.randn(3, length, 16),), dynamic_shapes=(BATCH,)).module()
    for batch in BATCHES:
        x = torch.randn(batch, length, 16)
        assert_close(exported(x), layer(x), 1e-6, f"batch {batch}")


@pytest.mark.slow
def test_layer_of_all_lengths_in_full():
    layer = lion.LionAttention(16, 2, form="full")
    exported = export(layer, (torch.randn(3, 100, 16),), dynamic_shapes=(BOTH,)).module()
    for length in LENGTHS:
        x = torch.randn(2, length, 16)
        assert_close(exported(x), layer(x), 2e-6, f"{length} tokens")


@pytest.mark.parametrize("mixer", (*MIXERS, "deltanet"))
def test_step(mixer):
    layer = lion.LionAttention(16, 2, mixer=mixer, direction="forward")
    example = (torch.randn(3, 1, 16), *layer.initial_state(3)[:3])
    exported = export(Step(layer), example, dynamic_shapes=(BATCH,) * 4).module()
    for batch in BATCHES:
        x, state, outputs = torch.randn(batch, 4, 16), layer.initial_state(batch)[:3], []
        for token in x.split(1, 1):
            y, *state = exported(token, *state)
            outputs.append(y)
        assert_close(torch.cat(outputs, 1), layer(x), 1e-6, f"batch {batch}")


@pytest.mark.parametrize(
    "mixer, attention", [("lion_s", dict(form="chunk")), ("lion_d", dict(scans=("row_snake", "column_snake")))]
)
@pytest.mark.slow
def test_vit(mixer, attention):
    model = vit(mixer, **attention)
    exported = export(model, (torch.randn(3, 1, 18, 18),), dynamic_shapes=(BATCH,)).module()
    for batch in BATCHES:
        images = torch.randn(batch, 1, 18, 18)
        assert_close(exported(images), model(images), 1e-6, f"batch {batch}")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.every) for n in ALL_MIXERS])
def test_graphs_take_all_lengths_unless_unrolled(name):
    mixer = make_mixer(name, 16, 2, ALL_MIXERS[name].layer.Config()).eval()
    if mixer.unrolled:
        return
    set_form(mixer, "chunk" if "chunk" in mixer.forms else "full")
    exported = export(mixer, (torch.randn(3, 100, 16),), dynamic_shapes=(BOTH,)).module()
    for length in LENGTHS:
        x = torch.randn(2, length, 16)
        assert_close(exported(x), mixer(x), 5e-6, f"{length} tokens")


def run_onnx(module: nn.Module, example: torch.Tensor, dynamic: dict, inputs: list[torch.Tensor]) -> None:
    """Check the ONNX graph of a module with one tensor argument against the module."""
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    program = torch.onnx.export(module, (example,), dynamo=True, dynamic_shapes=(dynamic,), verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    for x in inputs:
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_close(torch.from_numpy(y), module(x), 5e-6, str(tuple(x.shape)))


@pytest.mark.slow
def test_onnx_of_all_lengths():
    layer = lion.LionAttention(16, 2, form="chunk").eval()
    inputs = [torch.randn(2, length, 16) for length in LENGTHS] + [torch.randn(5, 100, 16)]
    run_onnx(layer, torch.randn(3, 100, 16), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, inputs)


@pytest.mark.slow
@pytest.mark.every
def test_onnx_of_a_vector_decay():
    layer = lion.LionAttention(16, 2, mixer="rwkv6", form="chunk").eval()
    run_onnx(layer, torch.randn(3, 100, 16), {0: Dim.DYNAMIC}, [torch.randn(batch, 100, 16) for batch in BATCHES])


@pytest.mark.filterwarnings("ignore")  # traces are deprecated
@pytest.mark.parametrize("form", ("full", "chunk", "rnn"))
def test_no_trace(form):
    """Check that tracing is rejected, because a trace would silently keep the length of its example."""
    with pytest.raises(RuntimeError, match=r"^torch\.jit\.trace: .*use torch\.export"):
        torch.jit.trace(lion.LionAttention(16, 2, form=form), torch.randn(2, 12, 16))


@pytest.mark.filterwarnings("ignore")  # traces are deprecated
def test_no_trace_of_steps_and_scans():
    layer = lion.LionAttention(16, 2, direction="forward")
    for module, example in (
        (Step(layer), (torch.randn(2, 1, 16), *layer.initial_state(2)[:3])),
        (vit("lion_d", scans=("row_snake", "column_snake")), torch.randn(2, 1, 18, 18)),
    ):
        with pytest.raises(RuntimeError, match=r"^torch\.jit\.trace: "):
            torch.jit.trace(module, example)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ("lightnet", "deltanet", "vim"))  # with loops that are one operator elsewhere
def test_graphs_hold_operators_of_torch_alone(mixer):
    layer = make_mixer(mixer, 16, 2, AttentionConfig()).eval()
    exported, x = (
        export(layer, (torch.randn(3, 20, 16),), dynamic_shapes=(BATCH,), strict=False),
        torch.randn(2, 20, 16),
    )
    targets = [str(node.target) for part in exported.graph_module.modules() for node in part.graph.nodes]
    assert targets and not [name for name in targets if name.startswith("lion")]
    assert_close(exported.module()(x), layer(x), 2e-6)
