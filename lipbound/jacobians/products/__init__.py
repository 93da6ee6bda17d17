"""Products with N x N matrices of attention, whole or in blocks of rows."""
