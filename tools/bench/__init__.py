"""Benchmarks behind `./run.sh bench ..`: time and memory of operators, training steps, inference and generation."""
