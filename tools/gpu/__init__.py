"""What Inductor makes of a model for an NVIDIA GPU, on a machine without one: see `tools.bench.gpu`."""
