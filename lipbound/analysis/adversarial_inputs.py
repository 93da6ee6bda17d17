r"""Inputs at which a head is steep: those of propositions, and what an adversary finds in a ball.

The propositions, and the limit of the Jacobian far from the origin, are those of Castin, Ablin and
Peyré 2024, section 3 and appendix C. They are about heads without biases: :math:`P_{ij} \propto
e^{x_i^T A x_j}` with :math:`A = \mathrm{scale}\,W_Q W_K^T`, D x D of rank at most d. A real
eigenvalue :math:`\gamma` of A with a unit eigenvector u makes the score of :math:`\alpha u` and
:math:`\beta u` equal :math:`\alpha\beta\gamma`, so that a few tokens on the line of u draw all
attention. Eigenvalues come from the d x d matrix :math:`\mathrm{scale}\,W_K^T W_Q`: Lemma 57
(docs/theory/inputs.md).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xarray as xr
from torch import Tensor

from lipbound.attention.cache import memoised
from lipbound.attention.layer import Attention
from lipbound.bounds import factors
from lipbound.bounds.ball import COVERS, over_ball
from lipbound.bounds.registry import get, resolve
from lipbound.bounds.statement import check_ball, check_radii
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, check_layer, flag, whole
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.solution import check_seed

BOUNDS = ("castin_bias", "yudin", "specformer")
"""Published bounds with a radius that `radius_curve` shows by default."""
START, TURN = 8, 3
"""Power iterations where an ascent starts, and at every step."""


class Steepness(NamedTuple):
    r"""Rate of growth of each head and its direction, from Proposition 3.4.

    Attributes:
        gamma: :math:`\max(-\gamma_{min}, \gamma_{max}/8)`, (heads,), float64.
        eigenvalue: the one of A, largest or smallest real, that attains it, (heads,).
        direction: its unit eigenvector, (heads, D), float64.
    """

    gamma: Tensor
    eigenvalue: Tensor
    direction: Tensor


@memoised
def steepness(att: Attention) -> Steepness:
    r"""Compute :math:`\gamma` of Proposition 3.4 for every head, with its eigenvector.

    Where A is singular (d < D) zero counts as an eigenvalue, so that :math:`\gamma \ge 0`.

    Returns:
        The rates, with eigenvalues and unit eigenvectors.

    Raises:
        LipboundError: a head whose A has no real eigenvalue at all (d = D only), for which the
            proposition says nothing.
    """
    att.only("the curvature of scores")
    pairs = zip(att.w_q.double(), att.w_k.double(), strict=True)
    found = [_steepness(w_q, w_k, att.scale) for w_q, w_k in pairs]
    *rates, directions = zip(*found, strict=True)
    gamma, eigenvalue = torch.tensor(rates, dtype=torch.float64, device=att.device)
    return Steepness(gamma, eigenvalue, torch.stack(directions))


def _steepness(w_q: Tensor, w_k: Tensor, scale: float) -> tuple[float, float, Tensor]:
    width, d = w_q.shape
    values, vectors = torch.linalg.eig(scale * (w_k.mT @ w_q))
    # LAPACK returns real eigenvalues of real matrices with imaginary part zero
    real = torch.nonzero(values.imag == 0)[:, 0]
    candidates = [(float(values.real[i]), w_q @ vectors[:, i].real) for i in real]
    if d < width:  # a vector that no key sees
        candidates.append((0.0, torch.linalg.svd(w_k.mT, full_matrices=True).Vh[-1]))
    rates = [(growth_rate(value), value, u / u.norm()) for value, u in candidates if u.any()]
    if not rates:
        raise LipboundError("Proposition 3.4 says nothing of a W_Q W_K^T with no real eigenvalue")
    return max(rates, key=lambda one: one[0])


def growth_rate(eigenvalue: float) -> float:
    r"""Rate :math:`\gamma` of an eigenvalue of A, positive or negative, in Proposition 3.4."""
    return max(-eigenvalue, eigenvalue / 8)


def adversarial_inputs(att: Attention, tokens: int, radius: float) -> Tensor:
    r"""Build inputs at which a head's local constant grows like :math:`\sqrt N`.

    :math:`R(-u, u, \dots, u)` for a negative eigenvalue, :math:`R(u, u/2, \dots, u/2)` for a
    positive one (Lemma C.7): all tokens attend to the first.

    Args:
        att: the heads.
        tokens: N.
        radius: R, of the ball that the tokens lie in.

    Returns:
        An input of each head, (heads, N, D), in the dtype of ``att``.

    Raises:
        LipboundError: no tokens, or a radius that is not positive.
    """
    att.only("Proposition 3.4")
    if tokens < 1 or not radius > 0:
        what = f"{tokens} tokens within radius {radius} are no input"
        raise LipboundError(f"{what}; give at least one token and a positive radius")
    steep = steepness(att)
    negative = (steep.eigenvalue < 0)[:, None, None]
    shape = torch.ones(1, tokens, 1, dtype=torch.float64, device=att.device)
    shape[:, 0] = -1
    x = torch.where(negative, shape, (3 + shape.neg()) / 4)  # -1 and 1, or 1 and 1/2
    return (radius * x * steep.direction[:, None, :]).to(att.dtype)


def lower_bound(att: Attention, tokens: int, radius: float) -> Tensor:
    r"""Compute a lower bound on every head's local constant at its `adversarial_inputs`.

    .. math::
        \frac{\sqrt{N-1}}{1 + (N-1) e^{-2R^2\gamma}}\;\|W_V^T (I - w w^T)\|,\qquad w = A^T u / |A^T
        u|

    Proposition 3.4 for any values, without mask or with a causal one: Lemma 58
    (docs/theory/inputs.md). With :math:`W_V = I` and D > 1 the last factor is 1 and this is their
    statement.

    Args:
        att: the heads, taken without their biases.
        tokens, radius: as for `adversarial_inputs`.

    Returns:
        The bound, (heads,), float64.
    """
    att.only("Proposition 3.4")
    steep = steepness(att)
    p = 1 / (1 + (tokens - 1) * (-2 * radius**2 * steep.gamma).exp())
    w_q, w_k, w_v = att.w_q.double(), att.w_k.double(), att.w_v.double()
    w = att.scale * w_k @ (w_q.mT @ steep.direction[..., None])  # (heads, D, 1)
    w = w / w.norm(dim=1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
    reach = torch.linalg.matrix_norm((w_v - w @ (w.mT @ w_v)).cpu(), 2).to(p)
    return math.sqrt(tokens - 1) * p * reach


def crossover_length(att: Attention) -> Tensor:
    r"""Compute log10 of the length from which the bound of Theorem 3.5 is below that of 3.3.

    Theorem 3.5 is the mean-field one; the length N* is that at the tokens' radius R.

    With :math:`t = \|A\|R^2`, :math:`N^* = \big((1+3t)^2 e^{4t}/3 - t^2\big) / (1 + 4t^2)`: Lemma
    61 (docs/theory/inputs.md). A logarithm, since N* exceeds the range of float64 on pretrained
    heads.

    Returns:
        The logarithms, (samples, heads), float64.
    """
    att.only("Proposition 3.4")
    t = factors.norm_a(att) * factors.radius(att) ** 2
    first = 4 * t + 2 * torch.log1p(3 * t) - math.log(3)  # log of the first term of the numerator
    rest = torch.log1p(-(t**2) * (-first).exp())
    return (first + rest - torch.log1p(4 * t**2)) / math.log(10)


class Attack(NamedTuple):
    """Norms found by `attack`, (samples, heads), and their inputs, (samples, heads, N, D)."""

    norm: Tensor
    x: Tensor


class Climb(NamedTuple):
    """State of the ascents: norms, moves, and singular directions.

    |J^T u| (starts, 1, 1), the moves from X, u, and v = J^T u / |J^T u|, (starts, N, .).
    """

    value: Tensor
    move: Tensor
    left: Tensor
    right: Tensor


@in_own_modes
def attack(
    att: Attention,
    radius: float,
    *,
    ball: str = "token",
    steps: int = 20,
    starts: int = 7,
    seed: int = 0,
) -> Attack:
    r"""Find a lower bound on :math:`\sup \|J(X')\|` over a ball by ascent, head by head.

    The ascent is on :math:`u^T J(X') v`: in turn a few power iterations improve u and v, and X'
    moves along the gradient, projected to the ball. Steps that lower the value are taken back;
    their length, at first twice the radius, grows while they succeed and shrinks where they fail.
    The first seven starts are X itself, the points of the sphere along the top right singular
    vector at X and against it, those with every token drawn towards another one, towards the mean
    of all, and towards the one furthest away, and that with queries turned to the key whose
    probability then matters most (in a Frobenius ball of one token alone; plain heads only); more
    starts are random points of the sphere. It is a heuristic: the supremum may be larger.

    Args:
        att: the layer at the centre.
        radius: of the ball. ball: "token" or "frobenius", as in `lipbound.bounds.over_ball`.
        steps, starts: of the ascent, for each head. seed: of the starts, which are drawn for each
            head by itself: its result does not depend on which other heads and samples the layer
            has.

    Returns:
        `Attack`; the norm is the float64 value at the input found, ``x``, which lies in the ball as
        the layer's dtype holds it; never below that at X itself.

    Raises:
        LipboundError: a negative radius, an unknown ball, no steps or no starts.
    """
    check_layer(att, "attack")
    check_ball(radius, ball)
    radius = float(radius)
    steps, starts = whole("steps", steps, least=1), whole("starts", starts, least=1)
    (start,) = check_seed(whole("seed", seed))
    att = att.detached()
    every = []
    for s in range(att.samples):
        one = att.unpadded(s)
        heads = (one.select(heads=slice(h, h + 1)) for h in range(att.heads))
        found = (_attack_head(head, radius, ball, steps, starts, start) for head in heads)
        values, points = (torch.stack(part) for part in zip(*found, strict=True))
        full = att.x[s].expand(att.heads, -1, -1).clone()
        full[:, slice(None) if att.valid is None else att.valid[s]] = points
        every.append((values, full))
    return Attack(*(torch.stack(part) for part in zip(*every, strict=True)))


@torch.enable_grad()
def _attack_head(
    att: Attention, radius: float, ball: str, steps: int, starts: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Attack one head of one unpadded sample.

    Returns the largest norm found, (), float64, and its input (N, D).
    """
    # a stream of numbers for each head: what is found for one depends on no other
    generator = torch.Generator().manual_seed(seed)
    top = spectral_norm(att, tol=1e-3, vectors=True)
    assert top.left is not None
    assert top.right is not None
    move = _starts(att, top.right[:, 0], radius, ball, starts, generator)
    noise = torch.randn(top.left[:, 0].shape, generator=generator, dtype=torch.float64).to(att.x)
    at = _climbed(att, move, top.left[:, 0] + 0.1 * noise / noise.norm().clamp_min(1e-30), START)
    length = torch.full_like(move[:, :1, :1], 2.0)
    for _ in range(steps if radius > 0 else 0):
        x = (att.x + at.move).requires_grad_()
        form = (at.left * HeadJacobian(att.at(x)).along(at.right)).sum()
        (gradient,) = torch.autograd.grad(form, x)
        step = length * radius * _unit(torch.nan_to_num(gradient), ball)
        new = _climbed(att, _project(at.move + step, radius, ball), at.left, TURN)
        better = new.value >= at.value
        at = Climb(*(torch.where(better, a, b) for a, b in zip(new, at, strict=True)))
        length = torch.where(better, 1.3 * length, 0.4 * length).clamp(max=8.0)
    candidates = torch.cat([att.x, _inside(att.x, at.move[int(at.value.argmax())], radius, ball)])
    exact = spectral_norm(att.double().at(candidates.double()), tol=1e-6).lower[:, 0]
    winner = int(exact.argmax())
    return exact[winner], candidates[winner]


def _starts(
    att: Attention, right: Tensor, radius: float, ball: str, starts: int, generator: torch.Generator
) -> Tensor:
    """The moves from x (1, N, D) that the ascent starts from, (starts, N, D)."""
    x = att.x
    n = x.shape[1]
    swapped = x[:, torch.randperm(n, generator=generator).to(x.device)]
    furthest = x[:, torch.cdist(x[0], x[0]).argmax(1)]
    towards = (swapped, x.mean(1, keepdim=True), furthest)
    moves = [torch.zeros_like(x), right, -right, *(other - x for other in towards)]
    moves += [] if att.variants else [_towards_keys(att.double(), radius, ball).to(x)]
    shape = (max(0, starts - len(moves)), *x.shape[1:])
    at_random = torch.randn(shape, generator=generator, dtype=torch.float64).to(x)
    return _project(_unit(torch.cat([*moves, at_random])[:starts], ball) * radius, radius, ball)


def _towards_keys(att: Attention, radius: float, ball: str) -> Tensor:
    """Moves (1, N, D) that turn each query to the key at which its token's block is largest.

    That is the key for which P_j (1 - P_j) |v_j - o| |k_j - mean of k| is then largest: the size of
    the token's own block of J where that key and one other matter. In a Frobenius ball the token
    for which this is largest moves alone. Float64.
    """
    p, v = att.p[0], att.centred_v[0]
    keys = att.scale * att.centred_k[0] @ att.w_q.mT
    mean = p @ keys
    far = torch.cdist(mean, keys)
    there = torch.sigmoid(torch.logit(p.clamp(1e-30, 1 - 1e-7)) + radius * far)
    size = torch.where(p > 0, there * (1 - there) * far * torch.cdist(p @ v, v), 0.0)[0]
    best, index = torch.nan_to_num(size).max(-1)
    move = keys[:, index] - mean
    alone = torch.arange(len(best), device=best.device) == best.argmax()
    return move if ball == "token" else torch.where(alone[:, None], move, 0.0)


@torch.no_grad()
def _climbed(att: Attention, move: Tensor, left: Tensor, turns: int) -> Climb:
    """Power iterations at the inputs x + move."""
    op = HeadJacobian(att.at(att.x + move))
    left = left.expand(len(move), -1, -1)
    for _ in range(turns):
        left = _unit(op.gram(left), "frobenius")
    right = op.vjp(left)
    value = torch.nan_to_num(_sizes(right, "frobenius"), 0.0, 0.0)
    return Climb(value, move, left, op.lift(_unit(right, "frobenius")))


def _sizes(move: Tensor, ball: str) -> Tensor:
    """Length of the move of each token, or of all X: broadcastable to (starts, N, D)."""
    return torch.linalg.vector_norm(move, dim=-1 if ball == "token" else (-2, -1), keepdim=True)


def _unit(move: Tensor, ball: str) -> Tensor:
    return move / _sizes(move, ball).clamp_min(torch.finfo(move.dtype).tiny)


def _project(move: Tensor, radius: float, ball: str) -> Tensor:
    """The nearest point of the ball, a rounding inside it."""
    size = _sizes(move, ball).clamp_min(torch.finfo(move.dtype).tiny)
    return move * (radius * (1 - 1e-6) / size).clamp(max=1.0)


def _inside(x: Tensor, move: Tensor, radius: float, ball: str) -> Tensor:
    """Point x + move (1, N, D) in its dtype, moved back where rounding put it outside the ball.

    To x itself at worst.
    """
    for part in (1.0, 0.99, 0.9, 0.5):
        point = (x.double() + part * move.double()).to(x.dtype)
        if bool((_sizes(point.double() - x.double(), ball) <= radius).all()):
            return point
    return x


@in_own_modes
def radius_curve(
    att: Attention,
    radii: Sequence[float],
    *,
    ball: str = "token",
    at: str = "certified",
    bounds: Sequence[str] | None = None,
    adversary: bool = True,
    steps: int = 20,
    starts: int = 7,
    seed: int = 0,
) -> xr.Dataset:
    """Compute bounds over balls of growing radius, and norms an adversary finds in them.

    The true supremum lies between.

    Args:
        att, ball, at: as in `lipbound.bounds.over_ball`.
        radii: in the units of ``x``.
        bounds: registry names of bounds with a radius; `BOUNDS` by default, none where the layer is
            one that they do not cover.
        adversary: run `attack` (with ``steps``, ``starts``, ``seed``) at every radius.

    Returns:
        Dataset with dims (sample, head, radius): ``over_ball`` (ours; not where queries or keys are
        normalised, which it does not cover), ``adversary``, and every bound under its name. What
        was found at a smaller radius counts at larger ones too.

    Raises:
        LipboundError: as `lipbound.bounds.over_ball` and `attack` do; nothing to show.
    """
    check_layer(att, "radius_curve")
    _, radii = check_radii(radii, ball)
    if bounds is None:
        bounds = () if att.variants else BOUNDS
    names, adversary = resolve(bounds, "frobenius"), flag("adversary", adversary)
    values: dict[str, Tensor] = {}
    if att.variants <= COVERS or not (adversary or names):
        values["over_ball"] = over_ball(att, list(radii), ball=ball, at=at)
    for name in names:
        values[name] = torch.stack([get(name).over_ball(att, r, ball=ball) for r in radii], -1)
    if adversary:
        options: dict[str, Any] = {"ball": ball, "steps": steps, "starts": starts, "seed": seed}
        found = torch.stack([attack(att, r, **options).norm for r in radii], -1)
        order = torch.tensor(radii).argsort()
        found[..., order] = found[..., order].cummax(-1).values
        values["adversary"] = found
    lengths = att.x.norm(dim=-1)
    size = float(lengths[lengths > 0].mean())
    axes = ("sample", "head", "radius")
    tables = {name: (axes, t.cpu().numpy()) for name, t in values.items()}
    attrs = {"ball": ball, "at": at, "bounds": names, "token_norm": size}
    return xr.Dataset(tables, {"radius": list(radii)}, attrs)
