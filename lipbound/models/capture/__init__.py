"""From a forward pass of a model to the `Attention` of every layer."""
