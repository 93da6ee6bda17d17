"""Names of small layers, apart from what makes them: who collects tests needs no torch."""

KINDS = (
    "plain biases causal window offsets padded one_token wide_values duplicates flat sharp no_query"
).split()
HARD = ("biases", "padded", "duplicates", "sharp", "wide_values", "offsets")
"""Those of them that `make test` takes for tests that cost much: what is causal, windowed, flat or
without biases is a case of these, or easier."""
