"""Collection of the GPU code tests only with Triton and a supported version of torch."""

import importlib.util

import torch

from lion.trainer.compilation import release
from tools.gpu.targets import TORCH

known = release(torch.__version__) in TORCH
collect_ignore_glob = [] if known and importlib.util.find_spec("triton") else ["test_*.py"]
