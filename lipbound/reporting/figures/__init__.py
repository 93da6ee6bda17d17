"""Parts of heatmap figures: which panels share a colour scale, where panels stand on the paper,
what the caption says."""
