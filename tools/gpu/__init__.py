"""Generation and inspection of Inductor's code for an NVIDIA GPU, on a machine without a GPU (`tools.bench.gpu`)."""
