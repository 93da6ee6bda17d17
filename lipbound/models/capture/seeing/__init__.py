"""Ways to see the attention of a model in its forward pass, which make one record of a call."""
