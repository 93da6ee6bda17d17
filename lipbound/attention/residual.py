"""What stands around an attention layer in its model: residual connection and layer
normalisation."""

from collections.abc import Callable
from dataclasses import dataclass

from lipbound.attention.layer_norm import Normaliser


@dataclass
class ResidualContext:
    """What stands around an attention layer in its model.

    Attributes:
        fed_by: the normaliser whose output is the layer's input, or None.
        residual: "pre" for h + layer(norm(h)), norm being ``fed_by``; "post" for x + layer(x); None
            for neither.
        followed_by: the normaliser of x + layer(x) under "post", or None.
    """

    fed_by: Normaliser | None = None
    residual: str | None = None
    followed_by: Normaliser | None = None

    def map(self, change: Callable[[Normaliser], Normaliser]) -> "ResidualContext":
        """The same with changed normalisers."""
        fed_by, followed_by = (
            None if norm is None else change(norm) for norm in (self.fed_by, self.followed_by)
        )
        return ResidualContext(fed_by, self.residual, followed_by)
