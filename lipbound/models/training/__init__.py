"""Models in training: following their attention, with gradients."""
