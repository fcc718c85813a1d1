"""Export with `torch.export` and ONNX: layers, models and steps with dynamic batch size and length."""

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import lion
from lion.layers.mixers import MIXERS, AttentionConfig, make_mixer, set_form
from lion.layers.mixers.linear import LinearState
from lion.models.vit import ViT, ViTConfig

from ..ops.helpers import assert_close

BATCH = {0: Dim("batch")}
BATCHES = (1, 2, 5)
BOTH = {0: Dim.AUTO, 1: Dim.AUTO}
LENGTHS = (1, 7, 65, 127, 128, 300)
STREAMED = ("lion_lit", "lion_s", "retnet", "rwkv6", "deltanet")
SNAKES = ("row_snake", "column_snake")


@pytest.fixture(autouse=True)
def inference():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Several(nn.Module):
    """Layers that are exported as one graph."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


class Steps(nn.Module):
    """Steps of several layers, as a module with tensor arguments."""

    def __init__(self, layers) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, states):
        outputs = []
        after = []
        for layer, given in zip(self.layers, states):
            y, state = layer.step(x, LinearState(*given))
            outputs.append(y)
            after.append(state[:3])
        return outputs, after


def scanned_vit() -> ViT:
    attention = AttentionConfig(scans=SNAKES)
    config = ViTConfig(mixer="lion_s", dim=16, depth=1, num_heads=2, patch_size=2, attention=attention)
    return ViT(config, image_size=(18, 18), channels=1, num_classes=3).eval()  # 82 tokens


def check(exported, module: Several, inputs: list[torch.Tensor], tolerance: float) -> None:
    for x in inputs:
        for layer, got in zip(module.layers, exported(x), strict=True):
            assert_close(got, layer(x), tolerance, f"{type(layer).__name__} {tuple(x.shape)}")


@pytest.mark.parametrize(
    "form, mixers",
    [
        ("full", ("lion_lit", "retnet", "rwkv6")),
        ("chunk", ("lion_lit", "retnet", "deltanet")),
        ("rnn", ("lion_s", "deltanet")),
    ],
)
@pytest.mark.slow
def test_layers_of_all_batches(form, mixers):
    length = 6 if form == "rnn" else 100  # the rnn form is unrolled
    module = Several(lion.LionAttention(16, 2, mixer=mixer, form=form) for mixer in mixers)
    exported = export(module, (torch.randn(3, length, 16),), dynamic_shapes=(BATCH,)).module()
    check(exported, module, [torch.randn(batch, length, 16) for batch in BATCHES], 1e-6)


def check_all_lengths(layers, tolerance: float) -> None:
    module = Several(layers)
    exported = export(module, (torch.randn(3, 100, 16),), dynamic_shapes=(BOTH,)).module()
    check(exported, module, [torch.randn(2, length, 16) for length in LENGTHS], tolerance)


@pytest.mark.slow
def test_layers_of_all_lengths():
    """Check a decay each head, in both forms, and a softmax without a decay."""
    layers = [lion.LionAttention(16, 2, form=form) for form in ("full", "chunk")]
    check_all_lengths([*layers, make_mixer("softmax", 16, 2)], 2e-6)


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("name", MIXERS)
def test_graphs_take_all_lengths_unless_unrolled(name):
    mixer = make_mixer(name, 16, 2, MIXERS[name].layer.Config()).eval()
    if not mixer.unrolled:
        set_form(mixer, "chunk" if "chunk" in mixer.forms else "full")
        check_all_lengths([mixer], 5e-6)


@pytest.mark.slow
def test_steps():
    layers = [lion.LionAttention(16, 2, mixer=mixer, direction="forward") for mixer in STREAMED]
    states = [tuple(layer.initial_state(3)[:3]) for layer in layers]
    shapes = (BATCH, [(BATCH, BATCH, BATCH)] * len(layers))
    exported = export(Steps(layers), (torch.randn(3, 1, 16), states), dynamic_shapes=shapes).module()
    for batch in BATCHES:
        x = torch.randn(batch, 4, 16)
        states = [tuple(layer.initial_state(batch)[:3]) for layer in layers]
        tokens = []
        for token in x.split(1, 1):
            outputs, states = exported(token, states)
            tokens.append(outputs)
        for mixer, layer, got in zip(STREAMED, layers, zip(*tokens)):
            assert_close(torch.cat(got, 1), layer(x), 1e-6, f"{mixer}, batch {batch}")


@pytest.mark.slow
def test_a_vit_with_several_scans():
    model = scanned_vit()
    exported = export(model, (torch.randn(3, 1, 18, 18),), dynamic_shapes=(BATCH,)).module()
    for batch in BATCHES:
        images = torch.randn(batch, 1, 18, 18)
        assert_close(exported(images), model(images), 1e-6, f"batch {batch}")


def check_onnx(layer: nn.Module, dynamic: dict, inputs: list[torch.Tensor]) -> None:
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    runtime = pytest.importorskip("onnxruntime")
    example = torch.randn(3, 100, 16)
    program = torch.onnx.export(
        layer.eval(), (example,), dynamo=True, dynamic_shapes=(dynamic,), verbose=False, optimize=False
    )
    session = runtime.InferenceSession(program.model_proto.SerializeToString())
    for x in inputs:
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_close(torch.from_numpy(y), layer(x), 5e-6, str(tuple(x.shape)))


def of_all_lengths() -> list[torch.Tensor]:
    return [torch.randn(2, length, 16) for length in LENGTHS] + [torch.randn(5, 100, 16)]


@pytest.mark.slow
def test_onnx_of_all_lengths():
    check_onnx(lion.LionAttention(16, 2, form="full"), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, of_all_lengths())


@pytest.mark.slow
@pytest.mark.every
def test_onnx_of_chunks():
    check_onnx(lion.LionAttention(16, 2, form="chunk"), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, of_all_lengths())
    vector = lion.LionAttention(16, 2, mixer="rwkv6", form="chunk")
    check_onnx(vector, {0: Dim.DYNAMIC}, [torch.randn(batch, 100, 16) for batch in BATCHES])


@pytest.mark.filterwarnings("ignore")  # traces are deprecated
def test_traces_are_refused():
    """Check that tracing is rejected, because a trace would silently keep the length of its example."""
    x = torch.randn(2, 12, 16)
    step = lion.LionAttention(16, 2, direction="forward")
    cases = [(lion.LionAttention(16, 2, form=form), (x,)) for form in ("full", "chunk", "rnn")]
    cases.append((Steps([step]), (x[:, :1], [tuple(step.initial_state(2)[:3])])))
    cases.append((scanned_vit(), (torch.randn(2, 1, 18, 18),)))
    for module, example in cases:
        with pytest.raises(RuntimeError, match=r"^torch\.jit\.trace: .*use torch\.export"):
            torch.jit.trace(module, example)


@pytest.mark.slow
def test_graphs_hold_operators_of_torch_alone():
    """Check mixers with loops that are one operator elsewhere, and a decay of each key dimension in chunks."""
    module = Several(make_mixer(name, 16, 2, AttentionConfig()).eval() for name in ("lightnet", "deltanet", "vim"))
    module.layers.append(lion.LionAttention(16, 2, "gla", form="chunk", chunk_size=16))
    exported = export(module, (torch.randn(3, 20, 16),), dynamic_shapes=(BATCH,), strict=False)
    targets = [str(node.target) for part in exported.graph_module.modules() for node in part.graph.nodes]
    assert targets and not [name for name in targets if name.startswith("lion")]
    check(exported.module(), module, [torch.randn(2, 20, 16)], 2e-6)
