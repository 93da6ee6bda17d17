"""Our bounds at lengths where no matrix over all pairs of tokens fits."""
