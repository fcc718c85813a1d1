"""Layers of a sequence model: mixers, blocks, norms, positions."""
