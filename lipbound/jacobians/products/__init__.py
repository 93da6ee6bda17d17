"""Products with the N x N matrices of attention: whole ones that stay in the cache, and blocks of
rows of those that are mostly masked."""
