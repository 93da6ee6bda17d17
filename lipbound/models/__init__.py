"""Checkpoints and inputs: the only folder that imports transformers when it runs."""
