"""The steps of the loops inside the operators of selective scans, which are compiled as graphs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule

from lion.ops.selective_scan import TOKENS_ELSEWHERE, piece_gradients, scan_piece
from tools.gpu.graphs import Graph, trace

SCAN = "selective_scan"
FORWARD, BACKWARD = torch.ops.lion.selective_scan.default, torch.ops.lion.selective_scan_gradients.default


def step_graph(stage: str, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, start: Tensor | None) -> Graph:
    """Return the graph of a step of the loop, in the stage "forward" or "backward", for the tokens of one step."""
    h = dt.new_zeros(*dt.shape[:2], *A.shape[1:])
    with torch.no_grad(), mock.patch("lion.ops.selective_scan.stacks", lambda _: True):  # as on a GPU
        if stage == "forward":
            (graph,) = trace(scan_piece, x, dt, B, C, start, A, h)
        else:
            (graph,) = trace(piece_gradients, x, dt, B, C, start, torch.ones_like(x), A, h, h.clone(), h.clone())
    graph.stage = stage
    return graph


def scan_graphs(length: int, channels: int, state: int, dtype: torch.dtype) -> list[Graph]:
    """Return the graphs of a step of `length` random tokens in two directions, for the forward and backward stage."""
    x = torch.randn(2, 1, length, channels).to(dtype)
    dt = torch.randn(2, 1, length, channels).abs()
    B = torch.randn(2, 1, length, state)
    C = torch.randn(2, 1, length, state)
    start = torch.rand(2, 1, length) < 0.2
    A = -torch.rand(2, channels, state)
    return [step_graph(stage, x, dt, A, B, C, start) for stage in ("forward", "backward")]


def steps_of(module: GraphModule) -> Iterator[tuple[Graph, int]]:
    """Yield the graph of a step of each loop in a graph, and the number of its steps on a GPU."""
    for node in module.graph.nodes:
        if node.target not in (FORWARD, BACKWARD):
            continue
        stage, args = "forward", node.args[:6]
        if node.target == BACKWARD:
            stage, args = "backward", node.args[2:8]
        x, dt, A, B, C, start = (part and part.meta["val"] for part in args)
        size = min(x.shape[2], TOKENS_ELSEWHERE)

        def piece(tokens: Tensor | None, size: int = size) -> Tensor | None:
            if tokens is None:
                return None
            return tokens.new_empty(tokens[:, :, :size].shape)

        with detect_fake_mode(x):
            graph = step_graph(stage, piece(x), piece(dt), A.new_empty(A.shape), piece(B), piece(C), piece(start))
        yield graph, -(-x.shape[2] // size)
