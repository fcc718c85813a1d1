"""Helpers of tests of models."""


def adapted(model, source):
    """Return the position embeddings of `source` as `model` takes them."""
    weights = model.adapt(source.state_dict(), source)
    (name,) = {"position", "positions.weight"} & weights.keys()
    return weights[name]
