"""Inductor's code of a model for an NVIDIA GPU, made and inspected on a machine without one (`tools.bench.gpu`)."""
