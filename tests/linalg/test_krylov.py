"""Building blocks of Lanczos runs: tridiagonal eigenproblems and inner products."""

import json
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays

from lipbound.attention.layer import Attention
from lipbound.jacobians.head import HeadJacobian
from lipbound.linalg.krylov import Dots, eigenpairs, top_eigenpairs, top_vectors

SIZES = strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 12))


@given(strategies.data(), SIZES, strategies.integers(-150, 150))
def test_eigenpairs_of_tridiagonal_matrices(data, shape, exponent):
    entries = strategies.floats(-1, 1)
    alpha, beta = (
        data.draw(arrays.arrays(np.float64, shape, elements=entries)) * 10.0**exponent
        for _ in range(2)
    )
    dense = np.stack(
        [
            np.diag(a) + np.diag(b[:-1], 1) + np.diag(b[:-1], -1)
            for a, b in zip(alpha, beta, strict=True)
        ]
    )
    unit = max(np.abs(dense).max(), 1e-300)
    values, vectors = eigenpairs(alpha, beta[:, :-1])
    np.testing.assert_allclose(values / unit, np.linalg.eigvalsh(dense / unit), atol=1e-14)
    np.testing.assert_allclose(
        (dense / unit) @ vectors, vectors * (values / unit)[:, None], atol=1e-14
    )
    np.testing.assert_allclose(
        vectors.swapaxes(1, 2) @ vectors, np.broadcast_to(np.eye(shape[1]), dense.shape), atol=1e-14
    )
    top, one = top_eigenpairs(alpha, beta)
    np.testing.assert_allclose(top / unit, values[:, -1] / unit, atol=1e-14)
    np.testing.assert_allclose(
        ((dense / unit) @ one[..., None])[..., 0], one * (top / unit)[:, None], atol=1e-14
    )


SCRIPT = """
import json, pathlib, threading, time
import numpy as np
from lipbound.linalg.krylov import eigenpairs, top_eigenpairs

me, diagonal = threading.get_native_id(), np.random.default_rng(0).random((4, 64))

def spent(repeats):
    for _ in range(repeats):
        eigenpairs(diagonal, diagonal[:, 1:])
        top_eigenpairs(diagonal, diagonal)
    time.sleep(0.2)  # until threads that have spun are at rest
    tasks = [task for task in pathlib.Path("/proc/self/task").iterdir() if int(task.name) != me]
    return {task.name: int((task / "stat").read_text().rpartition(")")[2].split()[11]) for task in tasks}

print(json.dumps([spent(1), spent(100)]))
"""  # noqa: E501


@pytest.mark.skipif(
    sys.platform != "linux", reason="processor time of single threads is read from /proc"
)
def test_no_other_thread_works(monkeypatch):
    """The threads of numpy's linear algebra spin for a while after each call, on a core that torch
    may need."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    if not before:
        pytest.skip("numpy and scipy have no threads of their own here")
    assert after == before


@pytest.mark.parametrize("n", [1, 2, 7, 97, 256, 4096])
def test_inner_products_in_two_stages_are_as_close_as_they_say(n: int) -> None:
    g, dots = torch.Generator().manual_seed(n), Dots(n)
    x, z = (torch.randn(2, *shape, generator=g, dtype=torch.float64) for shape in ((n,), (3, n)))
    z[:, 0] = x.flip(1) * torch.tensor([1.0, -1.0]).repeat(n)[:n]  # large terms that cancel
    found = dots(x, z)
    for b in range(2):
        for r in range(3):
            factors = zip(x[b].tolist(), z[b, r].tolist(), strict=True)
            exact = sum((Fraction(s) * Fraction(t) for s, t in factors), Fraction(0))
            error = abs(float(Fraction(float(found[b, r])) - exact))
            assert error <= dots.roundings * float(x[b].norm() * z[b, r].norm())
    torch.testing.assert_close(dots.gram(z), z @ z.mT)
    assert dots.roundings <= (n + 3) * 2.0**-53
    assert n != 4096 or dots.roundings == (64 + 64 + 2) * 2.0**-53


def test_ritz_vectors_go_on_after_an_exhausted_space() -> None:
    """G with two distinct eigenvalues has a Krylov space of two dimensions; four are asked for."""
    zero = torch.zeros(1, 6, 1, dtype=torch.float64)
    w_v = torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64))
    op = HeadJacobian(Attention(torch.ones(1, 1, 6, dtype=torch.float64), zero, zero, w_v[None]))
    vectors, _ = top_vectors(op, count=4, residual=0.0, max_steps=6, seed=0, restart=1e-12)
    torch.testing.assert_close(vectors[0] @ vectors[0].mT, torch.eye(4, dtype=torch.float64))
    images = torch.cat([op.gram(v.view(1, 1, 6)).view(1, 6) for v in vectors[0]])
    torch.testing.assert_close(
        (vectors[0] * images).sum(-1), torch.tensor([4.0, 4.0, 1.0, 1.0], dtype=torch.float64)
    )
