"""The spectral norm of any batch of linear operators, by the method of choice."""

from collections.abc import Sequence

import torch

from lipbound.devices import has_float64, in_own_modes
from lipbound.errors import LipboundError, UnknownNameError, is_number, nearest
from lipbound.linalg.lanczos import lanczos
from lipbound.linalg.operators import FromCPU, JacobianOperator
from lipbound.linalg.reference_solvers import dense_svd, power_iteration
from lipbound.linalg.solution import Norm

METHODS = ("lanczos", "power", "dense")
DEFAULT_STEPS = {"lanczos": 500, "power": 100}


@in_own_modes
def operator_norm(
    op: JacobianOperator,
    *,
    method: str = "lanczos",
    tol: float = 1e-4,
    delta: float | None = None,
    vectors: bool = False,
    seed: int | Sequence[int] = 0,
    max_steps: int | None = None,
) -> Norm:
    """Compute spectral norms of any `JacobianOperator`, one per batch entry.

    Nothing is known of the rounding of its products: ends hold for the operator as it computes, up
    to `lipbound.linalg.certificates.ROUNDING`. `lipbound.spectral_norm` counts all rounding.

    Args:
        op: the operators.
        method: "lanczos", "power" or "dense".
        tol: relative width to reach with "lanczos", absolute change with "power".
        delta: failure probability of the upper ends of "lanczos"; None for estimates without any.
        vectors: whether to return top singular vectors.
        seed: of the start vectors, one for all or one for each of equal parts of the batch.
        max_steps: products with J J^T at most; 500 for "lanczos", 100 for "power" when None.

    Returns:
        The norms, (batch,).

    Raises:
        UnknownNameError: an unknown method.
        LipboundError: a tolerance, number of steps or failure probability that is none.

    >>> import torch
    >>> from lipbound.linalg.operators import AutogradJacobian
    >>> op = AutogradJacobian(torch.sin, torch.zeros(3, dtype=torch.float64))
    >>> round(float(operator_norm(op).lower), 6)
    1.0
    """
    if method not in METHODS:
        raise UnknownNameError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    if not (is_number(tol) and tol >= 0):
        raise LipboundError(f"tol is {tol!r}; it must be a number >= 0")
    op = op if has_float64(op.device) else FromCPU(op)
    if method == "dense":
        return dense_svd(op, vectors=vectors)
    steps = DEFAULT_STEPS[method] if max_steps is None else max_steps
    if not (is_number(steps) and steps >= 1):
        raise LipboundError(f"max_steps is {steps!r}; at least one step is needed")
    if method == "power":
        if delta is not None:
            raise LipboundError(
                "method 'power' gives no upper bound; use 'lanczos' with delta, or delta=None"
            )
        with torch.no_grad():
            return power_iteration(op, tol=tol, max_steps=steps, seed=seed, vectors=vectors)
    with torch.no_grad():
        return lanczos(op, tol=tol, max_steps=steps, seed=seed, delta=delta, vectors=vectors)
