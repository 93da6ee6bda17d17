r"""The Jacobian of the softmax, :math:`M(p) = \mathrm{diag}(p) - p p^T`: its spectrum, its norms in
every l_p, and theta(p)."""

from lipbound.attention.softmax.other_norms import (
    LARGEST_LP_NORM,
    largest_entry_norm,
    splitting_norm,
)
from lipbound.attention.softmax.spectrum import (
    Enclosure,
    g,
    interlacing,
    jacobian_norm,
    largest_jacobian_norm,
    normalised,
    singular_value,
    top_eigenvector,
)

__all__ = [
    "LARGEST_LP_NORM",
    "Enclosure",
    "g",
    "interlacing",
    "jacobian_norm",
    "largest_entry_norm",
    "largest_jacobian_norm",
    "normalised",
    "singular_value",
    "splitting_norm",
    "top_eigenvector",
]
