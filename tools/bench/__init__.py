"""Benchmarks behind `./run.sh bench ..`: time and memory of operators, training steps, inference and generation."""

from pathlib import Path

OUT = Path("runs/bench")  # folder of measurements; those of the repository were made with `--out reports`
