"""Norms an adversary finds over a ball of inputs, bounds there, and both against the radius."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import xarray as xr
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.bounds.ball.centre_entries import COVERS
from lipbound.bounds.ball.over_ball import over_ball
from lipbound.bounds.registry import get, resolve
from lipbound.bounds.statement import check_ball, check_radii
from lipbound.devices import in_own_modes
from lipbound.errors import LipboundError, check_layer, flag, shown, whole
from lipbound.jacobians.head import HeadJacobian
from lipbound.jacobians.spectral_norm import spectral_norm
from lipbound.linalg.solution import check_seed

BOUNDS = ("castin_bias", "yudin", "specformer")
"""Published bounds with a radius that `radius_curve` shows by default."""


class Attack(NamedTuple):
    """Norms found by `attack`, and the inputs that attain them.

    Norms are (samples, heads), inputs (samples, heads, N, D).
    """

    norm: Tensor
    x: Tensor


class Climb(NamedTuple):
    """State of the ascents: norms, moves, and singular directions.

    |J^T u| (starts,), the moves from X, u, and v = J^T u / |J^T u|, (starts, N, .).
    """

    value: Tensor
    move: Tensor
    left: Tensor
    right: Tensor


START, TURN = 8, 3
"""Power iterations where an ascent starts, and at every step."""


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
    r"""Find a lower bound on :math:`\sup \|J(X')\|` over a ball, head by head.

    By ascent from several inputs.

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
    if not all(
        isinstance(count, int) and not isinstance(count, bool) and count >= 1
        for count in (steps, starts)
    ):
        raise LipboundError(
            f"steps is {shown(steps)} and starts {shown(starts)}; both must be integers, and at "
            "least one of each is needed"
        )
    (start,) = check_seed(whole("seed", seed))
    att = att.detached()
    norms, inputs = [], []
    for s in range(att.samples):
        one = att.unpadded(s)
        with (
            torch.enable_grad()
        ):  # a stream of numbers for each head: what is found for one depends on no other
            found = [
                _attack_head(
                    one.select(heads=slice(h, h + 1)),
                    radius,
                    ball,
                    steps,
                    starts,
                    torch.Generator().manual_seed(start),
                )
                for h in range(att.heads)
            ]
        norms.append(torch.stack([value for value, _ in found]))
        full = att.x[s].expand(att.heads, -1, -1).clone()
        keep = slice(None) if att.valid is None else att.valid[s]
        full[:, keep] = torch.stack([x for _, x in found])
        inputs.append(full)
    return Attack(torch.stack(norms), torch.stack(inputs))


def _attack_head(
    att: Attention, radius: float, ball: str, steps: int, starts: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Attack one head of one unpadded sample.

    Returns the largest norm found, (), float64, and its input (N, D).
    """
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
        new = _climbed(
            att,
            _project(
                at.move + length * radius * _unit(torch.nan_to_num(gradient), ball), radius, ball
            ),
            at.left,
            TURN,
        )
        better = (new.value >= at.value)[:, None, None]
        at = Climb(
            torch.where(better[:, 0, 0], new.value, at.value),
            *(torch.where(better, a, b) for a, b in zip(new[1:], at[1:], strict=True)),
        )
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
    moves = [
        torch.zeros_like(x),
        right,
        -right,
        swapped - x,
        x.mean(1, keepdim=True) - x,
        furthest - x,
    ]
    moves += [] if att.variants else [_towards_keys(att.double(), radius, ball).to(x)]
    at_random = torch.randn(
        max(0, starts - len(moves)), *x.shape[1:], generator=generator, dtype=torch.float64
    ).to(x)
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
    if ball == "token":
        return move
    alone = torch.zeros_like(move)
    row = int(best.argmax())
    alone[:, row] = move[:, row]
    return alone


def _climbed(att: Attention, move: Tensor, left: Tensor, turns: int) -> Climb:
    """Power iterations at the inputs x + move."""
    with torch.no_grad():
        op = HeadJacobian(att.at(att.x + move))
        left = left.expand(len(move), -1, -1)
        for _ in range(turns):
            left = _unit(op.gram(left), "frobenius")
        right = op.vjp(left)
        value = torch.linalg.vector_norm(right, dim=(-2, -1))
        return Climb(
            torch.nan_to_num(value, 0.0, 0.0), move, left, op.lift(_unit(right, "frobenius"))
        )


def _sizes(move: Tensor, ball: str) -> Tensor:
    """Length of the move of each token, or of all X: broadcastable to (starts, N, D)."""
    return torch.linalg.vector_norm(move, dim=-1 if ball == "token" else (-2, -1), keepdim=True)


def _unit(move: Tensor, ball: str) -> Tensor:
    return move / _sizes(move, ball).clamp_min(torch.finfo(move.dtype).tiny)


def _project(move: Tensor, radius: float, ball: str) -> Tensor:
    """The nearest point of the ball, a rounding inside it."""
    return move * (
        radius * (1 - 1e-6) / _sizes(move, ball).clamp_min(torch.finfo(move.dtype).tiny)
    ).clamp(max=1.0)


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
    chosen = BOUNDS if bounds is None and not att.variants else () if bounds is None else bounds
    bounds = (
        resolve(chosen, "frobenius")
        if chosen or isinstance(chosen, str) or not isinstance(chosen, Sequence)
        else []
    )
    adversary = flag("adversary", adversary)
    values = {}
    if att.variants <= COVERS or not (adversary or bounds):
        values["over_ball"] = over_ball(att, list(radii), ball=ball, at=at).cpu().numpy()
    for name in bounds:
        values[name] = (
            torch.stack([get(name).over_ball(att, r, ball=ball) for r in radii], -1).cpu().numpy()
        )
    if adversary:
        found = torch.stack(
            [attack(att, r, ball=ball, steps=steps, starts=starts, seed=seed).norm for r in radii],
            -1,
        )
        order = torch.tensor(radii).argsort()
        found[..., order] = found[..., order].cummax(-1).values
        values["adversary"] = found.cpu().numpy()
    ds = xr.Dataset(
        {name: (("sample", "head", "radius"), value) for name, value in values.items()},
        coords={"radius": list(radii)},
    )
    ds.attrs = {
        "ball": ball,
        "at": at,
        "bounds": list(bounds),
        "token_norm": float(att.x.norm(dim=-1)[att.x.norm(dim=-1) > 0].mean()),
    }
    return ds
