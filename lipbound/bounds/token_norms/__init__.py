"""Papers whose bounds are stated in the norms of single tokens, one file each."""
