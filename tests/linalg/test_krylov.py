"""Lanczos runs, what they leave, and what it shows."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays

import lipbound as lb
from lipbound.linalg.certificates import SHARES, STARTS, Certificate, log_inverse_epsilon
from lipbound.linalg.krylov import Runs, top_eigenpairs
from lipbound.linalg.solution import start_vectors

SIZES = strategies.tuples(strategies.integers(1, 3), strategies.integers(1, 12))


def tridiagonal(alpha, beta):
    return np.diag(alpha) + np.diag(beta[:-1], 1) + np.diag(beta[:-1], -1)


@given(strategies.data(), SIZES, strategies.integers(-150, 150))
def test_top_eigenpairs_of_tridiagonal_matrices(data, shape, exponent):
    # where entries nearly vanish numpy's solver, the oracle, is off by 1e-5
    entries = strategies.floats(-1, 1).map(lambda x: x if abs(x) > 1e-30 else 0.0)
    drawn = arrays.arrays(np.float64, (2, *shape), elements=entries)
    alpha, beta = data.draw(drawn) * 10.0**exponent
    dense = np.stack([tridiagonal(*one) for one in zip(alpha, beta, strict=True)])
    unit = max(np.abs(dense).max(), 1e-300)
    top, one = top_eigenpairs(alpha, beta)
    np.testing.assert_allclose(top / unit, np.linalg.eigvalsh(dense / unit)[:, -1], atol=1e-14)
    image = np.einsum("bij,bj->bi", dense / unit, one)
    np.testing.assert_allclose(image, one * (top / unit)[:, None], atol=1e-14)
    np.testing.assert_allclose((one**2).sum(1), 1, atol=1e-14)


SPECTRA = {
    "one large": torch.cat([torch.ones(1), torch.linspace(0.2, 0.5, 39)]),
    "clustered at the top": 1 - torch.logspace(-9, -1, 40),
    "two values": torch.cat([torch.full((20,), 2.0), torch.ones(20)]),
    "one value": torch.ones(40),
    "nothing": torch.zeros(40),
    "steep": torch.logspace(0, -12, 40),
}


def with_values(values, batch, dtype):
    """Heads of one token whose Jacobians are diagonal matrices."""
    zero, n = torch.zeros(1, len(values), len(values), dtype=dtype), len(values)
    w_v = torch.diag(values).to(dtype)[None]
    return lb.HeadJacobian(lb.Attention(torch.ones(batch, 1, n, dtype=dtype), zero, zero, w_v))


@pytest.fixture(params=["one by one", "as a graph"])
def _started(request, monkeypatch):
    """How steps are started."""
    if request.param == "as a graph":
        monkeypatch.setattr(lb.HeadJacobian, "graphable", lambda _: True)


@pytest.mark.usefixtures("_started")
@pytest.mark.parametrize("steps", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_what_a_recurrence_says_it_has_missed(name, steps):
    """G V - V T has columns no longer than that, and T the Ritz values of V."""
    op = with_values(SPECTRA[name], 1, torch.float64)
    images, gram = [], op.gram

    def recorded(y):
        images.append(y.flatten().clone())
        return gram(y)

    op.gram = recorded
    start = start_vectors(op, op.out_shape, 0)
    found = Runs(op, start, limit=steps).until(lambda _, part: part.steps >= steps).recurrence
    g, k = torch.diag(SPECTRA[name].double() ** 2), int(found.steps[0])
    v, alpha, beta = torch.stack(images[:k], 1), found.alpha[0, :k], found.beta[0, :k]
    t = tridiagonal(alpha, beta)
    missed = (g @ v - v @ torch.from_numpy(t)).norm(dim=0).numpy()
    missed[-1] = max(missed[-1] - beta[-1], 0)
    rounding = 4 * (len(g) + k + 8) * 2.0**-53 * float(g.max())
    assert (missed <= 1.01 * found.lost[0, :k] + rounding).all()
    assert found.top[0] == pytest.approx(np.linalg.eigvalsh(t)[-1], rel=1e-13, abs=1e-300)
    assert found.top[0] <= float(g.max()) * (1 + 1e-13)


@pytest.mark.each_value
@pytest.mark.parametrize("products", [None, 1e-15])
@pytest.mark.parametrize("delta", [0.5, 1e-3, 1e-8])
@pytest.mark.parametrize("name", list(SPECTRA))
def test_bounds_of_a_certificate_against_the_spectrum(name, delta, products):
    """As the lemma has it: a number beyond which an eigenvalue lies is shown only where the start
    has less than epsilon along the eigenvector. And what is shown is the smallest such number."""
    op, everyone = with_values(SPECTRA[name], 200, torch.float64), np.arange(200)
    start, top = start_vectors(op, op.out_shape, 1), float(SPECTRA[name].max()) ** 2
    sizes = None if products is None else np.full(200, products)
    certificate = Certificate(40, delta, sizes)
    for steps in (1, 3, 8, 40):
        runs = Runs(op, start, limit=steps).until(lambda _, part, k=steps: part.steps >= k)
        found = runs.recurrence
        starts, goal = np.ones(200, dtype=int), found.top * 1.002
        bound = certificate.bound(found, starts, goal)
        component = start[:, int(SPECTRA[name].argmax())].abs().numpy()
        if name in ("two values", "one value"):  # any vector of the eigenspace is an eigenvector
            component = np.where(SPECTRA[name] == SPECTRA[name].max(), start, 0)
            component = np.linalg.norm(component, axis=1)
        wrong = bound < top * (1 - 1e-9)
        assert not (wrong & (component > certificate.epsilon[0])).any()
        assert wrong.sum() <= 200 * delta + 3 * (200 * delta) ** 0.5
        if products is None and name not in ("nothing", "one value", "two values") and steps < 40:
            assert certificate.shows(everyone, found, bound * (1 + 1e-9), starts)[0].all()
            less = found.top + 0.9 * (bound - found.top)
            shown = certificate.shows(everyone, found, less, starts)[0]
            assert not (shown & (bound > found.top * (1 + 1e-9))).any()


def test_failure_rate_of_certificates_agrees_with_theory():
    """1,000 upper bounds at 10 % each, stopped early: about a tenth at most may fail, and some
    should, or the bound is idle."""
    values = torch.cat([torch.ones(1), torch.linspace(0.2, 0.5, 59)])
    op = with_values(values, 1000, torch.float64)
    runs = Runs(op, start_vectors(op, op.out_shape, 3), limit=4)
    runs = runs.until(lambda _, part: part.steps > 9)
    certificate = Certificate(60, 0.1, np.full(1000, 1e-15))
    bound = certificate.bound(runs.recurrence, np.ones(1000, dtype=int), np.zeros(1000))
    failures = int((bound < 1).sum())
    assert 0 < failures <= 100 + 3 * 9.5


def test_several_starts_share_a_probability():
    """Each may fail with its root, and the epsilons are those of Lemma 41."""
    certificate = Certificate(100, 1e-12, np.zeros(1))
    assert (np.diff(certificate.epsilon) > 0).all()
    assert sum(SHARES) <= 1
    for epsilon, count, share in zip(certificate.epsilon, STARTS, SHARES, strict=True):
        each = (share * 1e-12) ** (1 / count)
        theirs = np.exp(-log_inverse_epsilon(100, each))
        assert epsilon == pytest.approx(theirs, rel=1e-3, abs=1e-14)
        x = torch.randn(100_000, 100, generator=torch.Generator().manual_seed(count))
        below = float(((x[:, 0] / x.norm(dim=1)).abs() < epsilon).double().mean())
        assert below <= each + 4 * (each / 1e5) ** 0.5
