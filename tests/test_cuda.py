"""Correctness on a GPU: layers of all mixers against the CPU in float64, eager and compiled, and real training.

Without a GPU the tests are skipped. `LION_TEST_DEVICE=cpu` runs them on the CPU, which tests the tests.
"""

import contextlib
import copy
import json
import os
from dataclasses import replace

import pytest
import torch

import lion
from lion.layers.mixers import MIXERS, make_mixer
from tests.helpers import command, ended, state_of, tiny_recipe
from tools.bench.train import training_step
from tools.compose import describe_data, make_task, resolve

DEVICE = torch.device(os.environ.get("LION_TEST_DEVICE", "cuda"))
pytestmark = pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="no GPU")
on_a_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="a property of CUDA")

DIM, HEADS = 64, 2
ROUNDED = {
    "float32": 1e-4,
    "bfloat16": 5e-2,
}  # errors of outputs, relative to the largest; of gradients 5 times as much
COMPILED = [  # a layer for each kind of operator
    *(
        (name, form, "both")
        for name in ("lion_s", "lion_d", "gla", "gated_deltanet", "lightnet")
        for form in ("full", "chunk")
    ),
    ("lion_lit", "full", "both"),
    ("kda", "chunk", "both"),
    ("vim", "chunk", "both"),
    ("hydra", "full", "both"),
    ("fox", "full", "both"),
    ("softmax", "full", "both"),
    ("gla", "chunk", "forward"),
    ("lion_s_vector", "full", "backward"),
]


@pytest.fixture(autouse=True)
def precise():
    """Turn TF32 off: convolutions use it by default."""
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@contextlib.contextmanager
def never_waiting():
    """Make it an error to wait for the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def layers(name: str, form: str, direction: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a layer on the CPU in float64, in the full form if it has several, and its copy on the device."""
    torch.manual_seed(0)
    layer = make_mixer(name, DIM, HEADS, MIXERS[name].layer.Config(direction=direction, chunk_size=32))
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    tested, known = copy.deepcopy(layer).to(DEVICE), layer.double()
    if form in layer.forms:
        lion.set_form(tested, form)
        lion.set_form(known, layer.forms[0])
    return tested, known


def differences(run, tested, known, length: int, dtype: str = "float32", **masks) -> dict[str, float]:
    """Return errors of the output and of all gradients, relative to the largest value of each; padding holds NaN."""
    x, weights = torch.randn(2, 2, length, DIM, dtype=torch.float64).unbind()
    valid = masks.get("valid", torch.ones(2, length, dtype=torch.bool))[..., None]
    results = []
    for layer, device, fn, wide in ((known, torch.device("cpu"), known, True), (tested, DEVICE, run, False)):
        given = torch.where(valid, x, torch.nan).to(device, torch.float64 if wide else torch.float32).requires_grad_()
        layout = lion.Layout.of(given, **{key: mask.to(device) for key, mask in masks.items()})
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16" and not wide):
            y = fn(given, layout)
        y = torch.where(valid.to(device), y.to(given.dtype), 0)
        (y * weights.to(y)).sum().backward()
        held = {"output": y, "x": torch.where(valid.to(device), given.grad, 0)}
        held |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        results.append({name: value.detach().double().cpu() for name, value in held.items()})
        layer.zero_grad()
    want, got = results
    assert want.keys() == got.keys()
    return {name: ((got[name] - z).abs().max() / z.abs().max().clamp_min(1e-12)).item() for name, z in want.items()}


def check(found: dict[str, float], dtype: str = "float32") -> None:
    limits = {name: ROUNDED[dtype] * (1 if name == "output" else 5) for name in found}
    assert all(found[name] <= limits[name] for name in found), found


@pytest.mark.parametrize("direction", ["both", "forward", "backward"])
@pytest.mark.parametrize("name", [name for name in MIXERS if name != "none"])
def test_every_form_of_every_mixer(name, direction):
    for form in MIXERS[name].layer.forms or ("full",):
        tested, known = layers(name, form, direction)
        check(differences(tested, tested, known, 75))


@pytest.mark.parametrize("name", ["softmax", "lion_lit", "lion_s", "gla", "lightnet", "gated_deltanet", "hydra", "vim"])
def test_padding_and_packed_documents(name):
    valid = torch.arange(75) < torch.tensor([[75], [50]])
    segments = torch.arange(75).ge(30).long() + torch.arange(75).ge(60)
    for masks in ({"valid": valid}, {"segments": segments.expand(2, -1).contiguous()}):
        for form in MIXERS[name].layer.forms or ("full",):
            tested, known = layers(name, form, "both")
            check(differences(tested, tested, known, 75, **masks))


@on_a_gpu
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("name", "direction"), [("lion_lit", "both"), ("lion_d", "forward"), ("lion_s", "both")])
def test_triton_kernels(name, direction, dtype):
    """Check one chunk and several, padding and packed rows, eager and compiled; and the same bits in two runs."""
    torch._dynamo.reset()
    tested, known = layers(name, "full", direction)
    tested.operator_settings = replace(tested.operator_settings, kernels="triton")
    compiled = torch.compile(tested, fullgraph=True)
    for length in (75, 197, 300, 1024):
        valid = torch.arange(length) < torch.tensor([[length], [length - 20]])
        segments = (torch.arange(length) // 31).expand(2, -1).contiguous()
        for masks in ({}, {"valid": valid}, {"segments": segments}):
            for run in (tested, compiled):
                check(differences(run, tested, known, length, dtype, **masks), dtype)
        x = torch.randn(2, length, DIM, device=DEVICE)
        assert torch.equal(tested(x), tested(x))


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("name", "form", "direction"), COMPILED)
def test_compiled_layers(name, form, direction, dtype):
    torch._dynamo.reset()
    tested, known = layers(name, form, direction)
    valid = torch.arange(300) < torch.tensor([[300], [211]])
    compiled = torch.compile(tested, fullgraph=True)
    check(differences(compiled, tested, known, 300, dtype, valid=valid), dtype)
    x = torch.randn(2, 300, DIM, device=DEVICE)
    with torch.no_grad():  # evaluation has graphs of its own
        torch.testing.assert_close(compiled(x), tested(x), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.parametrize("recipe", ["deit_tiny_lion_s", "gpt2_small_lion_s", "mlm_base_lion_s", "dit_s_patch8"])
def test_a_compiled_training_step_never_waits_for_the_gpu(recipe):
    """Check that the loss of a training step is finite, and that a warm step does not synchronise."""
    found = resolve(recipe, ["model.dim=64", "model.depth=2", "model.num_heads=2"])
    task = make_task(found, describe_data(found, look=False)[0])
    torch.manual_seed(0)
    model, size = task.build_model(found.model), 2
    step = training_step(model, task, found, task.example(size, DEVICE), "bf16", DEVICE, compiled=True)
    for _ in range(3):
        step()
    with never_waiting():
        step()
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["lion_lit", "lion_s", "gla", "gated_deltanet", "lightnet"])
def test_steps_continue_a_prompt(name):
    tested, known = layers(name, "chunk", "forward")
    x = torch.randn(2, 50, DIM, dtype=torch.float64)
    with torch.no_grad():
        y, state = tested.prefill(x[:, :40].float().to(DEVICE))
        rest = [y]
        for i in range(40, 50):
            y, state = tested.step(x[:, i : i + 1].float().to(DEVICE), state)
            rest.append(y)
        torch.testing.assert_close(torch.cat(rest, 1).double().cpu(), known(x), rtol=1e-4, atol=1e-4)


@on_a_gpu
@pytest.mark.parametrize("name", ["lion_lit", "lion_s", "gla", "lightnet", "gated_deltanet", "hydra", "vim"])
def test_a_step_never_waits_for_the_gpu(name):
    tested, _ = layers(name, "chunk", "both")
    x, valid = torch.randn(2, 75, DIM, device=DEVICE), torch.ones(2, 75, dtype=torch.bool, device=DEVICE)
    tested(x, lion.Layout.of(x, valid=valid)).sum().backward()  # handles of libraries
    with never_waiting():
        tested(x, lion.Layout.of(x, valid=valid)).sum().backward()


@pytest.mark.slow
@pytest.mark.compiled
@on_a_gpu
def test_the_clock_times_an_operator(tmp_path):
    ended(command("bench", "gpu", "--clock", "lion_s", "--form", "full", "--length", "197", "--out", tmp_path))
    (row,) = json.loads((tmp_path / "clock.json").read_text())["rows"]
    assert row["name"] == "lion_s" and 0 < row["graph"]["seconds"] <= row["launched"]["seconds"]


@pytest.mark.slow
@pytest.mark.process
def test_quickstart_learns_and_agrees_in_every_form(tmp_path):
    pytest.importorskip("sklearn")
    done = ended(command("train", "quickstart", f"run.root={tmp_path}", timeout=900))
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("full ", "chunk ", "rnn "))]
    assert len(rows) == 4
    for *_, accuracy, _, _, _, deviation in (row if row[0] == "full" else row[1:] for row in rows):
        assert float(accuracy) > 95 and float(deviation) < 1e-2


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(
    DEVICE.type == "cuda" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14),
    reason="cumsum has no deterministic kernel on CUDA",
)
def test_deterministic_runs_are_equal_bit_for_bit(tmp_path):
    pytest.importorskip("sklearn")
    settings = (f"trainer.device={DEVICE.type}", "trainer.deterministic=true", "trainer.steps=8")
    for name in ("first", "again"):
        path = tiny_recipe(tmp_path, name, trainer={"compile": True})
        ended(command("train", path, *settings, "--no-eval", timeout=600))
    first, again = (state_of(tmp_path / "runs" / name)["model"] for name in ("first", "again"))
    assert all(torch.equal(first[key].cpu(), again[key].cpu()) for key in first)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(DEVICE.type == "cuda" and torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("setting", ["trainer.parallel=ddp", "trainer.parallel=fsdp", "trainer.parallel=sequence"])
def test_two_processes_train(setting, tmp_path):
    pytest.importorskip("sklearn")
    path = tiny_recipe(tmp_path, trainer={"compile": True, "device": DEVICE.type})
    ended(command("train", path, setting, "--processes", "2", "--no-eval", timeout=600))
    assert state_of(tmp_path / "runs" / "tiny")["step"] == 6
