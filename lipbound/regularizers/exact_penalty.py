"""A penalty on the exact norms of heads."""

import torch
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.errors import real
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.matrix_norms import with_derivative
from lipbound.regularizers.penalties import LayerPenalty


class ExactNorm(LayerPenalty):
    r"""Mean over samples of :math:`\sum_{l,h} \log \|J^{l,h}\|`, the exact norms of all heads.

    Nothing is tighter. The value is the lower end of `lipbound.spectral_norm`; its derivative is
    :math:`u^T dJ\,v` at the top singular pair found, that of a simple largest singular value
    (Watson 1992), and of a multiple one a subgradient of the norm. The search starts anew in every
    step: other inputs have another J, and the vectors of the step before say nothing of it.

    To be called with the list of `lipbound.models.training.differentiable.attention_layers`; also
    with layers of any other kind that have a closed form (rotary, grouped, capped and so on).

    Args:
        tol: relative error of the norms; singular vectors, and so derivatives, are known to about
            its root.
        seed: of the random vectors that the searches start from.

    Raises:
        LipboundError: ``tol`` is no number between 0 and 1.
    """

    def __init__(self, tol: float = 1e-3, seed: int = 0):
        self.tol = real("tol", tol, "a relative error between 0 and 1", above=0, below=1)
        self.seed = seed

    def norms(self, att: Attention) -> Tensor:
        """Return the exact norms, (samples, heads), float64, with derivatives."""
        top = spectral_norm(att.detached(), tol=self.tol, vectors=True, seed=self.seed)
        assert top.left is not None
        assert top.right is not None
        left, right = (t.to(att.x).flatten(0, 1) for t in (top.left, top.right))
        form = (left * HeadJacobian(att).along(right)).sum((-1, -2)).view(att.samples, att.heads)
        return with_derivative(top.lower.to(form.device, torch.float64), form.double())
