"""From data to model inputs: one reader a modality, and what readers share."""
