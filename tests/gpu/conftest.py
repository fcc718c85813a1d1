"""Collection of the GPU code tests only with Triton and a supported version of torch."""

import importlib.util

import torch

from tools.gpu.targets import TORCH

known = tuple(map(int, torch.__version__.split(".")[:2])) in TORCH
collect_ignore_glob = [] if known and importlib.util.find_spec("triton") else ["test_*.py"]
