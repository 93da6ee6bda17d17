"""Colour scales, arrangement on the paper, titles and captions of heatmap figures."""
