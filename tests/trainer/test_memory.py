"""Tests of the memory of a call, as counted by the system and by PyTorch."""

import pytest
import torch

from lion.trainer.diagnostics import free_bytes, peak_so_far, process_peak, tensor_peak

CPU = torch.device("cpu")
SIDE = 2048  # a square of 16 MiB


def once():
    a = torch.ones(SIDE, SIDE)
    b = a + 1
    del a
    return b + 1  # at most two squares exist at a time


def test_tensors_are_counted_exactly():
    assert 0 <= tensor_peak(once, CPU) - 2 * 4 * SIDE**2 < 64  # 64: room for the number that is added
    assert tensor_peak(lambda: None, CPU) == 0


def test_the_system_sees_about_as_much():
    peak = process_peak(once, CPU)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 0.9 < peak / (2 * 4 * SIDE**2) < 2  # the allocator may keep freed memory
    assert peak_so_far(CPU) > peak and free_bytes(CPU) > 0
