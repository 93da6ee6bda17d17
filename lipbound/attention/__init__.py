"""One layer at one batch of inputs, as tensors; knows no Jacobian and no model."""
