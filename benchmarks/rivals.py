"""What people use instead, written afresh: spectral norms of one head at a time from products by
autograd, or from its dense Jacobian.

Each rival is a function of (attention, head, tolerance) -> (value, products spent with J and its
transpose). `loosest` finds the tolerance with which a rival is just accurate enough, so that times
are compared at equal accuracy.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.linalg.operators import AutogradJacobian

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.reference import dense_jacobian, head_function

Rival = Callable[[Attention, int, float], tuple[float, int]]
TOLERANCES = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


def power_iteration(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """Power iteration on J^T J through autograd (Castin et al. 2024, appendix E.1), stopped when a
    step changes the value by less than tol."""
    return _power(att, head, tol, 1)


def patient_power_iteration(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """The same, stopped when 20 steps together change the value by less than tol: in float32 one
    step's change soon rounds to nothing."""
    return _power(att, head, tol, 20)


def _power(
    att: Attention, head: int, tol: float, patience: int, max_steps: int = 2000
) -> tuple[float, int]:
    op = AutogradJacobian(head_function(att, 0, head), att.x[0])
    x = torch.randn(1, *op.in_shape, generator=torch.Generator().manual_seed(head), dtype=att.dtype)
    found, products = [0.0] * patience, 0
    for _ in range(max_steps):
        y = op.jvp(x / x.norm())
        found.append(float(y.norm()))
        products += 1
        if abs(found[-1] - found[-1 - patience]) <= tol * found[-1]:
            break
        x, products = op.vjp(y), products + 1
    return found[-1], products


def arpack(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """scipy's svds with ARPACK."""
    return _svds(att, head, tol, "arpack")


def propack(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """scipy's svds with PROPACK."""
    return _svds(att, head, tol, "propack")


def lobpcg(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """scipy's svds with LOBPCG."""
    return _svds(att, head, tol, "lobpcg")


def _svds(att: Attention, head: int, tol: float, solver: str) -> tuple[float, int]:
    op = AutogradJacobian(head_function(att, 0, head), att.x[0]).to_scipy()
    count = 0

    def counted(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        def apply(x: np.ndarray) -> np.ndarray:
            nonlocal count
            count += 1
            return f(x)

        return apply

    linear = LinearOperator(
        op.shape, matvec=counted(op.matvec), rmatvec=counted(op.rmatvec), dtype=op.dtype
    )
    with warnings.catch_warnings():
        # LOBPCG and single precision: it warns, and is judged by its result
        warnings.simplefilter("ignore")
        values = svds(
            linear,
            k=1,
            tol=tol,
            solver=solver,
            return_singular_vectors=False,
            rng=np.random.default_rng(head),
            maxiter=2000,
        )
    return float(values[0]), count


def torch_svd_lowrank(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """torch.svd_lowrank of the dense autograd Jacobian; its subspace iterations take the place of a
    tolerance: 1, 2, ... as it shrinks."""
    torch.manual_seed(head)
    rounds = 2 * round(-np.log10(tol)) - 3
    return float(torch.svd_lowrank(dense_jacobian(att, 0, head), q=6, niter=rounds)[1][0]), 0


def torch_lobpcg(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """torch.lobpcg of J J^T, J the dense autograd Jacobian."""
    torch.manual_seed(head)
    j = dense_jacobian(att, 0, head)
    return float(torch.lobpcg(j @ j.mT, k=1, tol=tol, niter=500)[0][0].sqrt()), 0


def dense_svd(att: Attention, head: int, tol: float) -> tuple[float, int]:
    """All singular values of the dense autograd Jacobian."""
    return float(torch.linalg.svdvals(dense_jacobian(att, 0, head))[0]), 0


def values(rival: Rival, att: Attention, heads: range, tol: float) -> tuple[Tensor, float]:
    """A rival on some heads: values, float64, and its mean number of products."""
    results = [rival(att, h, tol) for h in heads]
    return torch.tensor([value for value, _ in results], dtype=torch.float64), sum(
        count for _, count in results
    ) / len(results)


def loosest(
    rival: Rival, layers: list[Attention], heads: range, reference: list[Tensor], accuracy: float
) -> tuple[float, float, float]:
    """The largest of `TOLERANCES` at which a rival is accurate on every head, with its largest
    error and mean number of products there.

    The smallest one where none is: its error then says so.
    """
    for tol in TOLERANCES:
        error, products = 0.0, 0.0
        for att, exact in zip(layers, reference, strict=True):
            found, count = values(rival, att, heads, tol)
            error, products = (
                max(error, float((found / exact[heads.start : heads.stop] - 1).abs().max())),
                products + count / len(layers),
            )
            if error > accuracy and tol != TOLERANCES[-1]:
                break
        if error <= accuracy:
            break
    return tol, error, products
