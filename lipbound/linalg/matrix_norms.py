"""Matrix norms that bounds are built from: each an *upper* value, in float64.

An estimate from below would void the bound. Rounding is inside, by proofs that are checked where
they are used: what LAPACK computes is a guess until a product or a Cholesky decomposition, whose
rounding is known, confirms it. NaN stays NaN, and what is not finite has the norm NaN or infinity.
"""

import numpy as np
import torch
from torch import Tensor

from lipbound.devices import Routine, finished

UNIT = 2.0**-53
SMALLEST = 1e-140
"""Norms below it have no squares in the range of float64."""
GRAM_RANGE = 1e200
"""Sums of squares between this and its inverse have lost nothing to the range of float64."""
LARGEST_DENSE_EIG = 1024
"""Largest matrix handed to a dense eigensolver where an iterative upper bound has not settled."""
KNOWN = 1e-6
"""Relative error to which `product_norms` are known."""
LOOK = 3
"""Steps of power iteration between two looks at what it has shown, which cost as much."""
SQUARED, FAR_SQUARED = 16, 1024
"""Largest matrix of which 64 steps of power iteration are taken at once, by powers of its Gram
matrix: for small ones less work than looking between them, on a CPU and on other devices."""
ROUNDS = 4
"""Rounds of six squarings that an eigenvalue takes on other devices."""
VECTOR_STEPS = 20_000
"""Steps of power iteration for a vector whose derivative is wanted, beyond that size."""


def gamma(k: int) -> float:
    """Return Higham's bound on the relative error of k accumulated roundings, of float64."""
    return k * UNIT / (1 - k * UNIT)


def exact_power(e: Tensor) -> Tensor:
    """Return 2^e of integers between -1022 and 1023, float64.

    Made of its bits: what exp2 rounds would no longer be exact.
    """
    return ((e.long() + 1023) << 52).view(torch.float64)


def times_power(t: Tensor, e: Tensor) -> Tensor:
    """Return t 2^e of integers e, exact in the range of float64; differentiable in t.

    In two steps, of which none leaves the range unless the result does.
    """
    half = e.long() >> 1
    return t * exact_power(half.clamp(-1022, 1023)) * exact_power((e - half).clamp(-1022, 1023))


def times_power_up(t: Tensor, e: Tensor) -> Tensor:
    """Return an upper value of t 2^e of numbers t >= 0.

    Near the end of the range, where the product rounds, something is added.
    """
    value = times_power(t, e)
    return torch.where((t > 0) & (value < 1e-300), value + 1e-307, value)


def power_of_two(size: Tensor) -> Tensor:
    """Return powers of two within a factor of two of sizes > 0, and 1 elsewhere, float64."""
    size = torch.nan_to_num(size.detach().double(), nan=0.0, posinf=0.0)
    return exact_power(torch.frexp(size).exponent.clamp(-1022, 1023))


def ordinary(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return matrices (..., m, n) in units of a power of two near their largest entry, float64.

    Returns:
        The matrices, zero for those that are not finite; their largest absolute entries; the
        units; and which were not finite, (...) each.
    """
    g = g.detach().double()
    low, high = g.amin((-1, -2)), g.amax((-1, -2))  # NaN if one is
    largest = torch.maximum(-low, high)
    bad = ~torch.isfinite(largest)
    if g.device.type != "cpu" or bool(bad.any()):  # others would wait for what is rare
        g, largest = torch.where(bad[..., None, None], 0.0, g), torch.where(bad, 0.0, largest)
    size = power_of_two(largest)
    return g / size[..., None, None], largest / size, size, bad


def matrix_norm(w: Tensor, known: Tensor | None = None) -> Tensor:
    """Return spectral norms of the last two axes, (..., m, n) -> (...), rounded upwards, float64.

    The largest eigenvalue of the Gram matrix of the shorter side, proved by `symmetric_norm`, and
    the rounding of that matrix: Lemma 75 (docs/theory/upper_values.md). The derivative is that of
    ``|w v|`` at a top singular vector v.

    Args:
        w: the matrices.
        known: their `gram_of`, where it is at hand.
    """
    gram = gram_of(w.detach().double()) if known is None else known
    near, (m, n), size, bad = w.device.type == "cpu", w.shape[-2:], None, None
    traces = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    if near and not bool(((traces > 1 / GRAM_RANGE) & (traces < GRAM_RANGE)).all()):
        fixed, _, size, bad = ordinary(w)
        gram = gram_of(fixed)
    squares = gram.diagonal(dim1=-2, dim2=-1)
    rounding = 2 * gamma(2 * (m + n) + 4) * squares.sum(-1)
    if not near:  # which would wait to know the range: squares that underflow
        rounding = rounding + m * n * 2.0**-1020
    top = _enlarged(gram, squares.amax(-1), top_eigenvalue(gram))
    norm = (top + rounding).sqrt() * (1 + 4 * UNIT)
    if size is not None and bad is not None:
        norm = (norm * size).masked_fill(bad, torch.nan)
    if not w.requires_grad:
        return norm
    v = top_eigenpair(gram)[1]
    image = (w if w.shape[-2] >= w.shape[-1] else w.mT).double() @ v
    return with_derivative(norm, (_unit_columns(image.detach()) * image).sum((-1, -2)))


def product_norms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return spectral norms of products a b^T, and their stable ranks, (...) each, float64.

    The stable rank is the squared Frobenius norm over the squared spectral norm. Both come from the
    Gram matrices G and H of a and b: the squared spectral norm is the largest eigenvalue of
    :math:`R^T H R`, :math:`R R^T = G` by Cholesky's decomposition, the squared Frobenius norm the
    sum of the entries of :math:`G \circ H`. They are values, in no direction rounded, to a
    relative error of `KNOWN`; NaN where rounding, an allowance in the norms of a and b, may be
    more, since these cancel; zero or infinite beyond the range of float64. A product with a matrix
    of zeros is zero, and its stable rank NaN.

    Args:
        a: (..., m, n).
        b: (..., k, n); the axes before are broadcast.
    """
    (g, unit), (h, other_unit) = _gram_of_columns(a.detach()), _gram_of_columns(b.detach())
    size, other = (t.diagonal(dim1=-2, dim2=-1).sum(-1) for t in (g, h))
    (m, n), k = a.shape[-2:], b.shape[-2]
    frobenius = (g * h).sum((-1, -2))
    # more than G may lack to be positive definite, and to have a decomposition
    shift = torch.where(size > 0, (m + 8 * n + 8) * UNIT * size, 1.0)
    g.diagonal(dim1=-2, dim2=-1).add_(shift[..., None])
    r, failed = torch.linalg.cholesky_ex(g)
    square = top_eigenvalue((r.mT @ h @ r).nan_to_num(0.0, 0.0, 0.0)).clamp_min(0) * (size > 0)
    norm = square.sqrt() * unit * other_unit
    # rounding of both Gram matrices, the shift, the decomposition, products and eigenvalues
    error = (2 * m + k + 28 * n + 48) * UNIT * size * other
    known = (2 * error <= KNOWN * square) & (failed == 0)
    return torch.where(known, norm, torch.nan), torch.where(known, frobenius / square, torch.nan)


@np.errstate(all="ignore")
def _gram_of_columns(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return Gram matrices of the columns of matrices (..., m, n) in some units, and these, (...).

    Units are near the largest entries of matrices of float64. Squares of other types, and products
    of two, are in the range of float64.
    """
    wide = w.dtype == torch.float64
    unit = power_of_two(w.abs().amax((-1, -2)) if wide else w.new_zeros(w.shape[:-2]))
    w = w / unit[..., None, None] if wide else w
    if w.device.type != "cpu" or torch.get_num_threads() > 1:  # numpy's would be in their way
        return w.double().mT @ w.double(), unit
    # one by one, which stays in caches, and by numpy, which finds half of a symmetric product
    each = (one.double().numpy() for one in w.reshape(-1, *w.shape[-2:]))
    gram = torch.from_numpy(np.stack([one.T @ one for one in each]))
    return gram.view(*unit.shape, *gram.shape[1:]), unit


def gram_of(w: Tensor) -> Tensor:
    """Return Gram matrices of the shorter sides of matrices (..., m, n)."""
    return w.mT @ w if w.shape[-2] >= w.shape[-1] else w @ w.mT


def _unit_columns(u: Tensor) -> Tensor:
    return u / torch.linalg.vector_norm(u, dim=-2, keepdim=True).clamp_min(1e-300)


def with_derivative(value: Tensor, form: Tensor) -> Tensor:
    """Return ``value`` with the derivative of ``form``."""
    return value + (form - form.detach())


def upper_factor(w: Tensor, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Return a small F and r >= 0 with :math:`w^T w \preceq F^T F \preceq w^T w + r I`, float64.

    Hence :math:`|F y| \ge |w y|` for every y, and :math:`\|M F^T\| \ge \|M w^T\|` for every M:
    Lemma 76 (docs/theory/upper_values.md).

    Args:
        w: matrices (..., m, n).
        known: their `gram_of`, where it is at hand.

    Returns:
        F (..., min(m, n), n): w itself where it is small, or where derivatives are wanted; and r
        (...), about 1e-12 of :math:`\|w\|_F^2`.
    """
    w = w.double()
    m, n = w.shape[-2:]
    if w.requires_grad or m <= n:
        return w, torch.zeros_like(w[..., 0, 0]).detach()
    return factor_of_gram(gram_of(w) if known is None else known, m)


def factor_of_gram(gram: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Return `upper_factor` of matrices of m rows, from their Gram matrices (..., n, n), n < m."""
    n = gram.shape[-1]
    eye = torch.eye(n, dtype=torch.float64, device=gram.device)
    squares = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] * (1 + gamma(m * n + 4))
    more = 8 * gamma(m + n + 8) * squares
    lower, failed = torch.linalg.cholesky_ex(gram + more * eye)
    f = lower.mT
    off = f.mT @ f - gram - more * eye
    rounding = gamma(m + n + 4) * (squares + f.square().sum((-1, -2), keepdim=True) + n * more)
    proved = off.square().sum((-1, -2), keepdim=True).sqrt() + 2 * rounding <= more
    proved = proved & (failed == 0)[..., None, None]
    f = torch.where(proved, f, squares.sqrt() * (1 + 4 * UNIT) * eye)
    return f, torch.where(proved, 3 * more, 2 * squares)[..., 0, 0]


def reproducible_float32() -> bool:
    """Return whether float32 products are float32 throughout.

    Torch can be told to use bfloat16 or TF32 instead, under autocast, for one.
    """
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return False
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch before 2.9
        return torch.get_float32_matmul_precision() == "highest"
    backends = (torch.backends.cuda, torch.backends.mkldnn)
    return all(backend.matmul.fp32_precision in ("none", "ieee") for backend in backends)


def block_norm(b: Tensor, *, squarings: int = 2) -> Tensor:
    r"""Return spectral norms of small matrices (..., m, n), rounded upwards, (...), float64.

    Differentiable. No iteration to convergence: the Gram matrix of the shorter side is squared
    ``squarings`` times, Wolkowicz and Styan's bound on its largest eigenvalue: Lemma 47
    (docs/theory/numerics.md) is taken of the power and rooted back. An upper value for every number
    of squarings; each of them halves the logarithm of the excess.

    Small blocks are multiplied in float32, derivatives formed in float64. The rounding error (about
    1e-4 for k = 32, Lemma 48 (docs/theory/numerics.md)) is added to the result; where it would
    exceed 2e-3, products are in float64.
    """
    b = b if b.shape[-2] <= b.shape[-1] else b.mT
    k, m = b.shape[-2:]
    slack = k * (2 * m + 2 * k + 20)
    exact = slack * torch.finfo(torch.float32).eps / 2 <= 2e-3
    small = exact and squarings <= 2 and k * m <= 10_000
    work = torch.float32 if small and reproducible_float32() else torch.float64
    value = _squared_norm(b.detach(), squarings, work) * (1 + slack * torch.finfo(work).eps / 2)
    if not b.requires_grad:
        return value
    return with_derivative(value, _squared_norm(b, squarings, torch.float64))


def _squared_norm(b: Tensor, squarings: int, work: torch.dtype) -> Tensor:
    """Return `block_norm` without rounding, of matrices with no more rows than columns."""
    k, m = b.shape[-2:]
    least, whole = 1e-290 if b.dtype == torch.float64 else torch.finfo(b.dtype).tiny, b.detach()
    size = torch.maximum(whole.amax((-1, -2), keepdim=True), -whole.amin((-1, -2), keepdim=True))
    divisor = size.clamp_min(least)  # entries divided by it are at most 1: powers stay in range
    out = None if b.requires_grad else torch.empty_like(b, dtype=work)
    b = torch.div(b, divisor, out=out).to(work)
    g = b @ b.mT
    for _ in range(squarings):
        g = g @ g
    # summed over one axis in float32, over the other in float64
    t, f = g.diagonal(dim1=-2, dim2=-1).double().sum(-1), (g * g).sum(-1).double().sum(-1)
    unit = torch.finfo(work).eps / 2
    spread = (f - t * t / k).clamp_min(0) + 32 * k * unit * f  # the difference cancels
    wolkowicz_styan = t / k + ((1 - 1 / k) * spread).clamp_min(1e-300).sqrt()
    frobenius = (f * (1 + 2 * (k + 4) * unit)).clamp_min(1e-300).sqrt()
    top = torch.minimum(wolkowicz_styan, frobenius) ** (0.5 / 2**squarings)
    size = size[..., 0, 0].double()
    # near the end of the range, Frobenius
    return torch.where(size <= least, (k * m) ** 0.5 * size, top * size)


def _row_sum_norm(g: Tensor) -> Tensor:
    """Return the largest row sums of symmetric matrices known by their lower triangles, (...)."""
    return torch.linalg.matrix_norm(g.tril() + g.tril(-1).mT, torch.inf)


def top_eigenvalue(g: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return largest eigenvalues of positive semi-definite float64 matrices (..., n, n), (...).

    On the CPU an eigensolver's, or where it gives up bounds; on other devices, where it takes a
    hundred times as long as products, upper values by so many rounds of `powers`.
    """
    if g.device.type != "cpu":
        return powers(g, rounds)[0]
    try:
        return torch.linalg.eigvalsh(g)[..., -1]
    except RuntimeError:  # LinAlgError
        return _row_sum_norm(g)


def top_eigenpair(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return `top_eigenvalue` (...), and unit vectors near top eigenvectors, (..., n, 1)."""
    if g.device.type == "cpu":
        values, vectors = decomposed(g)
        return values[..., -1], vectors[..., -1:]
    value, power = powers(g)
    column = power.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    x = _unit_columns(power.gather(-1, column.expand(*power.shape[:-1], 1)))
    return value, _unit_columns(torch.where((x == 0).all(-2, keepdim=True), 1.0, x))


def powers(g: Tensor, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """Return upper values of largest absolute eigenvalues by squaring, and the powers.

    The Frobenius norm of the power p = 64^rounds, rooted back, is above the eigenvalue by a
    relative log n / (2 p) at most; rounding takes less from it than 2 (n + 12) units of the trace
    of a positive semi-definite matrix: Lemma 53 (docs/theory/numerics.md).

    Args:
        g: symmetric float64 matrices, (..., n, n), of which the lower triangle counts.
        rounds: of six squarings each, at most four.

    Returns:
        The values, (...), and multiples of the powers, (..., n, n): where the largest eigenvalue
        stands alone, its vector in every column.
    """
    g = g.tril() + g.tril(-1).mT
    value = g.abs().amax((-1, -2), keepdim=True).clamp_min(1e-300)
    power, share = g / value, 1.0
    for _ in range(rounds):
        size = torch.linalg.matrix_norm(power, keepdim=True).clamp_min(1e-300)
        value, power = value * size**share, torch.linalg.matrix_power(power / size, 64)
        share /= 64
    value = value * torch.linalg.matrix_norm(power, keepdim=True) ** share
    return value[..., 0, 0], power


def decomposed(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues of symmetric matrices, ascending, and vectors in columns.

    Found on the CPU, in one read from other devices, where many of them take far longer. Where the
    solver gives up on one of them, bounds that are above all, and unit vectors.
    """
    try:
        values, vectors = torch.linalg.eigh(g.cpu())
        return values.to(g.device), vectors.to(g.device)
    except RuntimeError:  # LinAlgError
        eye = torch.eye(g.shape[-1], dtype=g.dtype, device=g.device)
        return _row_sum_norm(g)[..., None].expand(g.shape[:-1]), eye.expand_as(g)


def symmetric_norm(g: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return largest eigenvalues of positive semi-definite matrices, rounded upwards, float64.

    (..., n, n) -> (...), zero at least; the lower triangle counts. What `top_eigenvalue` finds is
    enlarged until a Cholesky decomposition proves it, whose rounding is added: Lemma 74
    (docs/theory/upper_values.md); on other devices by the rounding of ``rounds`` of `powers`. The
    derivative is that of ``x^T g x`` at a top eigenvector x.
    """
    fixed, largest, size, bad = ordinary(g)
    value, x = top_eigenpair(fixed) if g.requires_grad else (top_eigenvalue(fixed, rounds), None)
    result = (_enlarged(fixed, largest, value) * size).masked_fill(bad, torch.nan)
    return result if x is None else with_derivative(result, (x.mT @ g.double() @ x)[..., 0, 0])


def largest_eigenvalue(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Enclose largest eigenvalues of symmetric float64 matrices (..., n, n).

    From below by the quotient of a vector, less its rounding, from above as by `symmetric_norm`:
    Lemma 74 (docs/theory/upper_values.md).

    Returns:
        Both ends, zero at least, (...), and unit vectors near the eigenvectors, (..., n).
    """
    fixed, largest, size, bad = ordinary(g)
    value, vectors = top_eigenpair(fixed)
    n, x = g.shape[-1], vectors[..., 0]
    x = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    quotient = (x * (fixed @ x[..., None])[..., 0]).sum(-1)
    lower = (quotient - (4 * n + 16) * UNIT * torch.linalg.matrix_norm(fixed)).clamp_min(0)
    upper = (_enlarged(fixed, largest, value) * size).masked_fill(bad, torch.inf)
    return lower * size, upper, x


def _enlarged(g: Tensor, largest: Tensor, value: Tensor) -> Tensor:
    """Return upper values of largest eigenvalues: `top_eigenvalue` and its rounding.

    Args:
        g: the matrices. largest: their largest entries. value: their `top_eigenvalue`.
    """
    n, top = g.shape[-1], value.clamp_min(0)
    if g.device.type != "cpu":
        return top * (1 + 3 * n * (n + 12) * UNIT)
    done, proved = _proved(g, (top + 8 * n * UNIT * largest) * (1 + 4 * UNIT))
    if not bool(done.all()):  # which is rare
        again, more = _proved(g, (top + 64 * n * (n + 2) * UNIT * largest) * (1 + 4 * UNIT))
        rows = _row_sum_norm(g) * (1 + gamma(n + 2))
        proved = torch.where(done, proved, torch.where(again, more, rows))
    return torch.where(largest > 0, proved, 0.0)


def _proved(g: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return where Cholesky decompositions of at I - g exist, and then bounds on eigenvalues of g.

    Rounding of the decompositions is inside: Lemma 74 (docs/theory/upper_values.md).
    """
    n, diagonal = g.shape[-1], g.diagonal(dim1=-2, dim2=-1).abs().sum(-1)
    eye = torch.eye(n, dtype=torch.float64, device=g.device)
    done = torch.linalg.cholesky_ex(at[..., None, None] * eye - g).info == 0
    rounding = 2 * gamma(n + 2) * (n * at + diagonal) * (1 + gamma(n + 4))
    return done, (at + rounding) * (1 + 4 * UNIT)


def at_most(g: Tensor, bound: Tensor) -> Tensor:
    """Return whether symmetric matrices (..., n, n) are proved to have no eigenvalue above a bound.

    By one Cholesky decomposition each, in float64: Lemma 74 (docs/theory/upper_values.md).

    Args:
        g: the matrices, of which the lower triangle counts.
        bound: (...), float64.

    Returns:
        (...) bool; False says nothing.
    """
    g, largest, size, bad = ordinary(g)
    n, bound = g.shape[-1], bound / size
    diagonal = g.diagonal(dim1=-2, dim2=-1).abs().sum(-1)
    at = (bound - 4 * gamma(n + 2) * (n * bound.abs() + diagonal)) * (1 - 8 * UNIT)
    finite = torch.isfinite(at)
    done, proved = _proved(g, torch.where(finite, at, 0.0))
    shown = done & finite & (at > 8 * n * UNIT) & (proved <= bound)
    return (shown | (largest == 0) & (bound >= 0)) & ~bad


def nonnegative_norm(p: Tensor, *, rtol: float = 1e-6, max_steps: int = 40) -> Tensor:
    r"""Return spectral norms of nonnegative matrices (..., n, n), rounded upwards, (...), float64.

    Collatz-Wielandt on :math:`B = P^T P`: for every y > 0,
    :math:`\rho(B) \le \max_i (B y)_i / y_i`: Lemma 49 (docs/theory/numerics.md). y follows power
    iteration, and the best upper value is kept; where it has not come within ``rtol`` of the
    Rayleigh quotient, and n is at most 1024, an eigensolver proposes a value that `symmetric_norm`
    proves.

    The derivative is that of the norm at a top singular pair, :math:`u^T\,dP\,y` with
    :math:`u \propto P y`: Lemma 81 (docs/theory/upper_values.md); where it is wanted, y is an
    eigenvector of B to rounding.
    """
    return finished(nonnegative_routine(p, rtol=rtol, max_steps=max_steps))


def nonnegative_routine(p: Tensor, *, rtol: float = 1e-6, max_steps: int = 40) -> Routine[Tensor]:
    """Return `nonnegative_norm`."""
    flat = p.reshape(-1, *p.shape[-2:])
    fixed = flat.detach().double()
    size = fixed.amax((-1, -2)).clamp_min(1e-300)  # squares of the entries must stay in range
    unit = fixed / size[:, None, None]
    upper = (yield from _collatz_wielandt(unit, rtol, max_steps)).sqrt()
    upper = upper * (size * (1 + (8 * p.shape[-1] + 8) * UNIT))
    if p.requires_grad:
        u, y = singular_pair(unit)
        upper = with_derivative(upper, (u * (flat.double() @ y)).sum((-1, -2)))
    return upper.view(p.shape[:-2])


@torch.no_grad()
def singular_pair(p: Tensor) -> tuple[Tensor, Tensor]:
    """Return top singular vectors u and y >= 0, (..., n, 1) each, of nonnegative matrices."""
    dense = p.shape[-1] <= LARGEST_DENSE_EIG or p.device.type != "cpu"
    if dense:
        y = top_eigenpair(p.mT @ p)[1].abs()
    else:
        y = torch.ones_like(p[..., :1]) / p.shape[-1] ** 0.5
    for step in range(2 if dense else VECTOR_STEPS):
        z = _unit_columns(p.mT @ (p @ y))
        settled = step % 16 == 15 and bool(((z - y).norm(dim=-2) < 1e-11).all())
        y = z
        if settled:
            break
    return _unit_columns(p @ y), y


def _collatz_wielandt(flat: Tensor, rtol: float, max_steps: int) -> Routine[Tensor]:
    """Return squares of norms, (batch,), by the theorem of Collatz and Wielandt.

    Upper values but for their rounding: 16 n units.
    """
    n = flat.shape[-1]
    upper = torch.full_like(flat[:, 0, 0], torch.inf)
    active, part = torch.arange(len(flat), device=flat.device), flat
    y = torch.ones_like(flat[:, :1])  # rows: products with columns take several times as long
    if n <= (SQUARED if flat.device.type == "cpu" else FAR_SQUARED):
        power = torch.linalg.matrix_power(flat.mT @ flat, 4)  # entries are at most n^8
        power = power / power.amax((-1, -2), keepdim=True).clamp_min(1e-300)
        for _ in range(16):  # y is at most n^16
            y = y @ power
        y = y.clamp_min(1e-14)
    for step in range(max_steps):
        z = (y @ part.mT) @ part
        if step % LOOK == 0:
            least = torch.minimum(upper[active], (z / y).amax((-1, -2)))
            upper[active] = least
            rayleigh = (y * z).sum((-1, -2)) / (y * y).sum((-1, -2))
            (open_,) = yield [least > rayleigh * (1 + 2 * rtol)]
            left = open_.nonzero()[:, 0].to(flat.device)
            if not len(left):
                return upper
            if len(left) < len(active):  # what has settled stays as it is, whatever others do
                active, part, z = active[left], part[left], z[left]
            z = z / z.amax((-1, -2), keepdim=True).clamp_min(1e-300)
        y = z.clamp_min(1e-14)  # any y > 0 will do: keep it off zero; a few steps stay in range
    if n <= LARGEST_DENSE_EIG:
        proved = symmetric_norm(part.mT @ part) * (1 + gamma(2 * n))
        upper[active] = torch.minimum(upper[active], proved)
    return upper
