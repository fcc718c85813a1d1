import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from lion.files import write_atomic
from lion.layers.mixers import LINEAR, SOFTMAX, AttentionConfig
from lion.models.dit import DiT, DiTConfig
from lion.models.vit import ViT, ViTConfig
from lion.trainer import runtime
from lion.trainer.checkpoint_files import load_state
from lion.trainer.compilation import (
    avoid_wrong_gradients,
    compile_blocks,
    load_compiled,
    mend_split_scans,
    missing_compiler,
    prepare_compiler,
    save_compiled,
)
from lion.trainer.runtime import check_device, random_state, restore_random_state, seed_everything, start_runtime
from tests.helpers import refused


def test_random_states_survive_a_checkpoint(tmp_path):
    seed_everything(3)
    torch.save({"random": random_state()}, tmp_path / "x.pt")
    expected = torch.rand(2).tolist(), random.random(), np.random.rand()
    seed_everything(4)
    restore_random_state(load_state(tmp_path / "x.pt")["random"])
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == expected


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.bin"
    write_atomic(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, fail)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_checkpoints_cannot_run_code(tmp_path):
    torch.save({"x": pytest.raises}, tmp_path / "x.pt")
    refused("not a readable checkpoint", load_state, tmp_path / "x.pt")
    refused("no such checkpoint", load_state, tmp_path / "y.pt")


def test_a_cpu_that_emulates_bf16_is_named(monkeypatch):
    flags, cpu = {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}, torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags, raising=False)
    assert "this CPU emulates bf16" in runtime.slow_precision("bf16", cpu)
    assert runtime.slow_precision("fp32", cpu) is None
    assert runtime.slow_precision("bf16", torch.device("cuda")) is None
    for known in ({"avx512_bf16": True}, {"amx_bf16": True}, {"architecture": "aarch64"}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: flags | known)
        assert runtime.slow_precision("bf16", cpu) is None
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert runtime.slow_precision("bf16", cpu) is None  # of another torch


def test_every_process_uses_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(runtime.dist, "is_initialized", lambda: True)
    used = []

    def zeros(size, device):
        used.append(device)
        if device.index == 1:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return torch.empty(size)

    monkeypatch.setattr(runtime.torch, "zeros", zeros)
    for name, value in {"RANK": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():  # on the second machine of two
        monkeypatch.setenv(name, str(value))
    assert check_device("auto", 4) == torch.device("cuda:0")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("LOCAL_RANK", "1")
    refused(r"'cuda:1' does not work: CUDA error: out of memory$", check_device, "cuda", 2)
    assert used == [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(runtime.dist, "is_initialized", lambda: False)  # it launches others
    assert check_device("cuda", 2).type == "cuda" and len(used) == 2
    for device, world in (("cuda:1", 2), ("cuda", 3)):
        refused(f"'{device}' cannot give {world} processes one GPU each, 2 are", check_device, device, world)
    assert check_device("cpu", 3) == torch.device("cpu")
    refused(r"'cuda:2' is not available here, use one of cuda, cpu", check_device, "cuda:2")
    monkeypatch.undo()
    for device in ("cuda:99", "cpu:3", "nonsense"):
        refused(rf"trainer\.device: '{device}' is not available here, use one of", start_runtime, device)


def model(mixer, **settings):
    """Return a model whose blocks differ in the rate of stochastic depth."""
    config = ViTConfig(mixer, 12, 2, 3, patch_size=2, drop_path=0.1, **settings)
    return ViT(config, image_size=(8, 8), channels=1, num_classes=4)


def test_without_a_compiler_it_runs_eager_with_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in missing_compiler()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "ls")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
        assert f"{tmp_path} is on a file system without execution (noexec)" in missing_compiler()
    m = model("lion_s")
    assert compile_blocks(m) is False
    assert len(caplog.messages) == 1 and "running eager" in caplog.messages[0]
    m(torch.randn(2, 1, 8, 8))


def test_a_fusion_of_gpu_kernels_that_may_miscompile_adaln_is_off():
    """Check the workaround for pytorch#193061, fixed in 2.15, by block and version; no GPU is needed."""
    from torch._inductor import config

    shape = {"mixer": SOFTMAX, "dim": 12, "depth": 1, "num_heads": 3, "patch_size": 2}
    modulated = DiT(DiTConfig(**shape, block="adaln_zero"), image_size=(8, 8), channels=1, classes=("0", "1"))
    for made, version, left in (
        (modulated, "2.14.1+cu130", False),
        (modulated, "2.15.0", True),
        (model("lion_s"), "2.11.0", True),
    ):
        with config.patch({"triton.mix_order_reduction": True}):
            avoid_wrong_gradients(made, version)
            assert config.triton.mix_order_reduction is left


def test_kernels_of_split_scans_load_values_that_are_equal_for_all_tokens(monkeypatch):
    """Check the workaround for Inductor before 2.13 on an index of one sum (x), a token (r) and both; no GPU."""
    import sympy
    from torch._inductor.codegen.triton import TritonSymbols
    from torch._inductor.virtualized import V

    seen, x, token = [], sympy.Symbol("x1"), sympy.Symbol("r0_3")
    monkeypatch.setattr(TritonSymbols, "get_block_shape", classmethod(lambda cls, expr: seen.append(expr)))
    before = TritonSymbols.get_block_shape
    mend_split_scans("2.13.0")
    assert TritonSymbols.get_block_shape == before
    for _ in range(2):  # is applied once
        mend_split_scans("2.12.1+cu130")
    mended = TritonSymbols.get_block_shape
    for split, wanted in ((True, [0, token, 8 * token]), (False, [4 * x, token, 4 * x + 8 * token])):
        seen.clear()
        with V.set_kernel_handler(SimpleNamespace(no_x_dim=split)):
            for index in (4 * x, token, 4 * x + 8 * token):
                mended(index)
        assert seen == wanted


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
def test_autotuning_times_kernels_of_products_and_prints_nothing(tmp_path, monkeypatch, capfd):
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    m = nn.Linear(16, 16).eval()
    m.units = lambda: [m]
    x = torch.randn(8, 16)
    # restored by torch: monkeypatch of pytest 9.2 would delete these settings
    with torch.no_grad(), config.patch(max_autotune_gemm=False, autotune_num_choices_displayed=10):
        expected = m(x)
        assert compile_blocks(m, autotune=True)
        assert config.max_autotune_gemm and config.autotune_num_choices_displayed == 0
        assert torch.allclose(m(x), expected, atol=1e-5)
    assert "AUTOTUNE" not in "".join(capfd.readouterr())
    torch._dynamo.reset()


FORM_OF = {SOFTMAX: "full", "lion_s": "chunk", "kda": "chunk"}  # tests/gpu/test_mixers.py compiles each operator
OTHERS = [pytest.param(mixer, "full", marks=pytest.mark.every) for mixer in LINEAR if mixer not in FORM_OF]


@pytest.mark.compiled
@pytest.mark.parametrize(("mixer", "form"), [*FORM_OF.items(), *OTHERS])
def test_blocks_compile_whole_and_share_their_graph(mixer, form):
    """Check graphs with the eager backend: no graph break, one graph for all blocks and steps, one for evaluation."""
    torch._dynamo.reset()
    counter = CompileCounter()
    m = model(mixer, attention=AttentionConfig(form=form, chunk_size=8))
    assert compile_blocks(m, backend=counter)
    for _ in range(2):
        m(torch.randn(2, 1, 8, 8)).sum().backward()
    assert counter.frame_count == 1
    if mixer in (SOFTMAX, "lion_s"):
        assert not any("_orig_mod" in name for name in m.state_dict())
        m.eval()
        with torch.no_grad():
            for _ in range(2):
                m(torch.randn(2, 1, 8, 8))
        assert counter.frame_count == 2


@pytest.mark.compiled
def test_with_a_memory_budget_less_is_saved_and_gradients_are_equal():
    results = []
    for budget in (1.0, 0.3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        m = model("lion_s", attention=AttentionConfig(form="full")).eval()  # no stochastic depth
        own, saved = {p.data_ptr() for p in m.parameters()}, []

        def keep(x, own=own, saved=saved):
            saved.append(0 if x.data_ptr() in own else x.nbytes)
            return x

        with torch._functorch.config.patch(activation_memory_budget=1.0):  # restores it
            assert compile_blocks(m, backend="aot_eager_decomp_partition", memory_budget=budget)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = m(torch.randn(2, 1, 8, 8)).square().sum()
            loss.backward()
        results.append((sum(saved), [p.grad for p in m.parameters()]))
    (before, expected), (after, gradients) = results
    assert after < 0.5 * before
    for got, want in zip(gradients, expected):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.every
@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
def test_compiled_code_is_carried_in_a_file(tmp_path, monkeypatch):
    file, found = tmp_path / "code", []
    for cache in ("here", "elsewhere"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / cache))
        torch._dynamo.reset()
        counters.clear()
        load_compiled(str(file))
        assert torch.compile(lambda x: x.sin() * 2)(torch.zeros(3)).eq(0).all()
        found.append(counters["aot_autograd"]["autograd_cache_hit"])
        save_compiled(str(file))
    assert found == [0, 1]


def test_a_file_of_compiled_code_that_cannot_be_used_is_named_in_a_line(tmp_path, monkeypatch, caplog):
    file, elsewhere = tmp_path / "code", tmp_path / "no" / "folder"
    file.write_bytes(b"damaged")
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: (b"code", None))
    load_compiled(None)
    load_compiled(str(elsewhere))
    load_compiled(str(file))
    save_compiled(str(elsewhere))
    assert caplog.messages == [
        f"{file}: not used (no file of compiled code)",
        f"{elsewhere}: not saved (No such file or directory)",
    ]
    save_compiled(str(file))
    assert file.read_bytes() == b"code"


@pytest.mark.compiled
@pytest.mark.skipif(missing_compiler() is not None, reason="no C++ compiler")
def test_the_compiler_is_prepared_in_a_thread(caplog, monkeypatch):
    caplog.set_level("DEBUG", "lion")
    thread = prepare_compiler()
    thread.join()
    assert "not prepared" not in caplog.text
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.x86_isa_checker", lambda: 1 / 0)
    prepare_compiler().join()  # internals of Inductor may change: training goes on
    assert "compiler not prepared: division by zero" in caplog.text
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert prepare_compiler() is None
