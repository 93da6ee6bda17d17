r"""Norms of the parts of the blocks of J, which our bounds on plain heads are made of.

They are upper values in real arithmetic: what rounding may have taken from a difference is added to
it, and what it takes from sums and products of numbers >= 0 is the allowance of `Bound`:
Lemmas 77, 78 and 79 (docs/theory/upper_values.md).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lipbound.attention.cache import keep_result, memoised
from lipbound.attention.layer import Attention
from lipbound.attention.rescaling import of_ordinary_size
from lipbound.attention.rounding import TensorErrors, tensor_errors
from lipbound.bounds.factors import norm_v, weight_grams
from lipbound.devices import Room, Routine, finished, require, together
from lipbound.jacobians.rounding import Mixing, distance, tensor_error
from lipbound.linalg.matrix_norms import block_norm, gamma, times_power_up, upper_factor

CHUNK = 2**22
"""Bytes of the largest temporary, the N x d_v x d moments of some heads of one sample."""
SUM_BYTES = 2**24
"""Bytes of the d x d sums over pairs of tokens that are formed at a time."""
ROW_BYTES = 2**20
"""Bytes of the matrices of as many rows as are taken at a time: what a core's own cache holds."""
FAR = 256
"""Factor on it on other devices than the CPU, which many small operations hold up."""
FAR_BYTES = 2.0**34
"""Bytes of all that is worked on at a time there, where that is not more than half of what is
free."""
MATRICES = 17
"""Number of N x N matrices of one head in memory together, besides P of all heads."""
STORED = 4e9
"""Bytes of matrices over all pairs of tokens up to which our bounds are computed; longer heads have
their exact norm enclosed in less time."""
_TINY = 2.0**-160
"""At least what underflow can take from a norm, relative to the largest probability and the sizes
of values and their weights."""
RTOL = 1e-5
"""Relative excess that upper values of norms of N x N matrices may have."""
RowMaps = Callable[[slice], Tensor]
"""Maps of some tokens, (heads, tokens, d, r): vectors are mapped by their transposes."""


def at_once(size: int, device: torch.device) -> int:
    """Return the bytes that are worked on at a time, ``size`` on a CPU."""
    return size if device.type == "cpu" else FAR * size


def head_bytes(att: Attention) -> float:
    """Return about how many bytes a head takes where all its rows are worked on at a time."""
    return max(att.rows, att.keys) * (500.0 * att.keys + 32 * att.d_v * max(att.d, att.d_v))


def heads_at_once(att: Attention, free: float) -> int:
    """Return how many heads are worked on at a time, on other devices those of several samples.

    There, as many as fit half of the free bytes.
    """
    if att.device.type != "cpu":
        return max(1, int(min(FAR_BYTES, free / 2) / head_bytes(att)))
    return max(1, CHUNK // (8 * att.tokens * max(att.d_v * max(att.d, att.d_v), att.tokens)))


def longest(heads: int) -> int:
    """Most tokens at which our bounds are computed on layers of so many heads.

    5,271 for one head, 4,153 for twelve.
    """
    return int((STORED / (8 * (MATRICES + heads))) ** 0.5)


# -- some heads at a time --------------------------------------------------------------------------


def in_chunks(
    att: Attention,
    values: Callable[[Attention, slice], Tensor | Routine[Tensor]],
    reach: Sequence[float] = (1.0,),
    *,
    several: bool = False,
) -> Tensor:
    """Bounds on every head of every sample, (samples, heads, r), as many heads at a time as fit.

    To ``values`` comes what rounding has left in the layer's P, q, k and v, and what underflow may
    hide. What cannot be evaluated is infinite. Proof: Lemma 80 (docs/theory/upper_values.md).

    Args:
        att: the layer.
        values: (heads, r) from one sample of a float64 layer of ordinary size
            (`lipbound.attention.rescaling.of_ordinary_size`) and some of its heads: upper values
            but for the allowance of `Bound`.
        reach: how much larger the norm that each of the r bounds, or all of them, can be than the
            spectral norm of the same matrix.
        several: whether ``values`` takes several samples, (samples x heads, r), as many at a time
            as fit on other devices than the CPU.

    Raises:
        LipboundError: the memory that is needed is not free.
    """
    most = (MATRICES + att.heads) * 8.0 * max(att.rows, att.keys) ** 2
    kind = f" of heads with {', '.join(sorted(att.variants))}" if att.variants else ""
    what = f"our bounds{kind} at {att.tokens} tokens need matrices over all their pairs"
    free = require(most, att.device, what, "measure shorter inputs, or name other bounds")
    step = heads_at_once(att, free)
    chunks = [slice(h, min(att.heads, h + step)) for h in range(0, att.heads, step)]
    rows, factors = [], torch.tensor(reach, dtype=torch.float64, device=att.device)
    many = max(1, step // att.heads) if several and att.device.type != "cpu" else 1
    with torch.set_grad_enabled(att.cache.recording):
        for sample, errors, exponents in samples_of(att, many):

            def of(heads: slice, one: Attention = sample) -> Routine[Tensor]:
                made = values(one, heads)
                made = (yield from made) if isinstance(made, Generator) else made
                return made.unflatten(0, (one.samples, -1))

            first, error = finished(together(of(chunks[0]), _error(sample, errors)))
            found = torch.cat([first, *(finished(of(heads)) for heads in chunks[1:])], 1)
            total = found + error.to(found.device)[..., None] * factors
            rows.append(times_power_up(total.mT, exponents.to(found.device)).mT)
    return torch.cat(rows)


@torch.no_grad()
def _error(one: Attention, errors: TensorErrors) -> Routine[Tensor]:
    """Upper values of what rounding and underflow may hide of norms of J, (samples, heads)."""
    e, mix, _ = yield from Mixing.of(errors, one.p.sum(-2), one.p.amax(-1), one.valid_rows)
    off = tensor_error(one) if "gate" in one.variants else distance(e, mix, one.scale)
    off = off + _TINY * (one.d_v**0.5 * e.v_slope + e.v)
    return off * (1 + 1e-6)


def samples_of(att: Attention, many: int = 1) -> Iterator[tuple[Attention, TensorErrors, Tensor]]:
    """Every sample of a layer, ``many`` at a time; norms of weights are found once.

    Each is a float64 layer of ordinary size, with the errors of its tensors and the exponents of
    the powers of two that its J is to be multiplied with, (heads,).
    """
    whole, exponents = of_ordinary_size(att)
    errors = tensor_errors(whole)
    for part in (slice(s, s + many) for s in range(0, att.samples, many)):
        one = whole.of_samples(part)
        keep_result(weights_of, one, weights_of(whole))
        yield one, errors.of_samples(part), exponents


# -- products --------------------------------------------------------------------------------------


def mean(p: Tensor, x: Tensor) -> Tensor:
    """P x for vectors x (heads, N), without derivative."""
    return (x[..., None, :] @ p.detach().mT)[..., 0, :]


def lengths(x: Tensor) -> Tensor:
    """Lengths of rows, without derivative: what allowances are made of."""
    return x.detach().norm(dim=-1)


def root(x: Tensor) -> Tensor:
    """Square root whose derivative at 0 is 0; NaN of NaN and of numbers < 0."""
    if not x.requires_grad:
        return x.sqrt()
    return torch.where(x == 0, 0.0, torch.where(x == 0, 1.0, x).sqrt())


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Distances of rows, (heads, N, d) and (heads, M, d) -> (heads, N, M), without cancellation."""
    if x.device.type == "cpu" or x.requires_grad or y.requires_grad:
        return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")
    # torch.cdist takes five times as long on a GPU
    parts = x.split(max(1, at_once(ROW_BYTES, x.device) // (8 * y.numel())), -2)
    return torch.cat([lengths(part[:, :, None] - y[:, None]) for part in parts], 1)


def outer(x: Tensor, y: Tensor, room: Room | None = None) -> Tensor:
    """Rows of outer products, (heads, N, a) and (heads, N, b) -> (heads, N, a b).

    They are put into ``room`` where no derivative is wanted.
    """
    left, right = x[..., :, None], y[..., None, :]
    if room is None or torch.is_grad_enabled():
        return (left * right).flatten(-2)
    return torch.mul(left, right, out=room.take(x, *x.shape, y.shape[-1])).flatten(-2)


def seen(t: Tensor, step: int, *, masked: bool = True) -> list[tuple[slice, slice, slice]]:
    """Ranges of ``step`` tokens, the queries that see them as keys, and the keys that they see.

    Args:
        t: entries that are zero where nothing is seen, (N, M), or bool. Of cross-attention the
            tokens are the keys, and see nothing that is known.
        step: how many tokens a range has.
        masked: False where all tokens are seen, as it is taken to be on other devices than the CPU,
            which would wait for the answer.
    """
    count, square = t.shape[1], t.shape[0] == t.shape[1]
    parts = [slice(i, min(i + step, count)) for i in range(0, count, step)]
    if t.device.type != "cpu" or not masked:
        every = slice(0, t.shape[0]), slice(0, count) if square else slice(None)
        return [(part, *every) for part in parts]
    pairs = []
    for m in (t.detach().mT, t.detach())[: 1 + square]:
        n, order = m.shape[1], (m != 0).to(torch.uint8)
        most, first = order.max(-1)
        last = n - order.flip(-1).argmax(-1)
        pairs.append(torch.stack([first.masked_fill(most == 0, n), last * (most > 0)]))
    ends = torch.stack(pairs).cpu()
    found = []
    for part in parts:
        reach = [(int(first[part].amin()), int(last[part].amax())) for first, last in ends]
        rows, *keys = (slice(a, max(a, b)) for a, b in reach)
        found.append((part, rows, keys[0] if keys else slice(None)))
    return found


class WeightNorms(NamedTuple):
    """Factors and norms of the weights of a layer, (heads, ...).

    Attributes:
        factor_q, factor_k: `upper_factor` of W_Q and W_K. excess: how far the latter's square is
            above. norm_v: upper value of ||W_V||.
        size_q, size_k, size_v: Frobenius norms of the two factors and of W_V.
    """

    factor_q: Tensor
    factor_k: Tensor
    excess: Tensor
    norm_v: Tensor
    size_q: Tensor
    size_k: Tensor
    size_v: Tensor


@memoised
def weights_of(att: Attention) -> WeightNorms:
    """`WeightNorms`, once for a layer."""
    both = torch.stack([att.w_q, att.w_k]), torch.stack(weight_grams(att)[:2])
    (f_q, f_k), (_, excess) = upper_factor(*both)
    sizes = (torch.linalg.matrix_norm(w.detach()) for w in (f_q, f_k, att.w_v))
    return WeightNorms(f_q, f_k, excess, norm_v(att), *sizes)


def for_samples(t: Tensor, att: Attention) -> Tensor:
    """Return what belongs to some heads, (heads, ...), for all samples, (samples x heads, ...)."""
    return t if att.samples == 1 else t.repeat(att.samples, *[1] * (t.ndim - 1))


class BlockNorms:
    r"""Norms of the parts of the blocks of J, for some heads of a float64 layer.

    All samples together: "heads" below are those of every sample, one after the other. Upper values
    but for the allowance of `Bound`. Second moments of all rows come from one product each:
    Lemma 52 (docs/theory/numerics.md).

    Attributes:
        p, v, o: probabilities, centred values, outputs.
        size: :math:`|c q_i|`, (heads, N).
        qt: :math:`\tilde q_i`, in coordinates in which it is no shorter. off_qt: the rounding of
            its rows. qt_norm: :math:`|\tilde q_i|`, (heads, N, 1).
        distance: :math:`|v_j - o_i|`, (heads, N, N). norm_v: :math:`\|W_V\|`, (heads, 1, 1).
        b: :math:`\|B_i\|`, (heads, N).
        b_v, a, z, b_q: with ``gram`` alone, of Lemma 7 (docs/theory/jacobian.md),
            :math:`\|B_i W_V\|`, :math:`\|A_i\|` and :math:`|z_i|`,
            (heads, N) each, and :math:`|B_i \tilde q_k|`, (heads, N, N), zero where k does not see
            i.
    """

    def __init__(self, att: Attention, heads: slice = slice(None), *, gram: bool = False):
        tensors = (att.q, att.centred_k, att.centred_v, att.p)
        q, k, v, p = (t[:, heads].flatten(0, 1) for t in tensors)
        w = WeightNorms(*(for_samples(t[heads], att) for t in weights_of(att)))
        scaled = att.scale * q
        self.p, self.v, self.o = p, v, (o := p @ v)
        self.distance = distances(o, v)
        self.norm_v, self.excess = w.norm_v[:, None, None], w.excess
        self.size = size = abs(att.scale) * lengths(q)
        self.qt, self.off_qt = scaled @ w.factor_k.mT, gamma(att.d + 2) * size * w.size_k[:, None]
        self.qt_norm = (self.qt.norm(dim=-1) + self.off_qt)[..., None]
        if not gram:
            self.b = torch.cat([self._b(c, off, w) for *_, c, off in self._covariances(att, k)], 1)
            return
        w_q, w_k, w_v = (t[heads] for t in (att.w_q, att.w_k, att.w_v))
        inputs, round_v = att.x.shape[2], gamma(att.x.shape[2] + att.d + 4)
        both = (w.size_k * w.size_v)[:, None]
        turned, value, inner = (
            for_samples(t, att) for t in (w_k.mT @ w_v, w_q.mT @ w_v, w_q.mT @ w_k)
        )
        self.z = (scaled @ turned).norm(dim=-1) + round_v * size * both
        images = scaled @ inner.mT
        reach, sizes = size * (w.size_q * w.size_k)[:, None], (w.size_q * w.size_v)[:, None]
        b, b_v, self.b_q = [], [], torch.zeros_like(p)
        for rows, queries, c, off in self._covariances(att, k):
            long = torch.linalg.vector_norm(c.detach(), dim=(-2, -1))
            b.append(self._b(c, off, w))
            b_v.append(block_norm(_each(c, value)) + (off + round_v * long) * sizes)
            moved = (images[:, queries] @ c.flatten(1, 2).mT).unflatten(2, c.shape[1:3])
            lost = (off + gamma(inputs + 2 * att.d + 6) * long)[:, None] * reach[:, queries, None]
            self.b_q[:, rows, queries] = (torch.linalg.vector_norm(moved, dim=-1) + lost).mT
        self.b, self.b_v = torch.cat(b, 1), torch.cat(b_v, 1)
        # the second is exact to rounding where it is tiny
        self.a = torch.minimum(spread(p * p, v, o)[..., 0], (p * self.distance).norm(dim=-1))

    def _covariances(
        self, att: Attention, k: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        r"""Rows, their queries, :math:`C_i = c \sum_j P_{ij} (v_j - o_i) k_j^T`, and its rounding.

        Some rows at a time, since the d_v x d matrices of all rows would not fit: (heads, n, d_v,
        d) and (heads, n), the latter in the Frobenius norm.
        """
        p, v, o, k, (d_v, d) = self.p, self.v, self.o, att.scale * k, (att.d_v, att.d)
        room, step = Room(), max(1, at_once(ROW_BYTES, p.device) // (8 * len(p) * d_v * d))
        pairs, average = outer(v, k, room), p @ k
        length = lengths(k)
        lost = mean(p, lengths(v) * length) + lengths(o) * mean(p, length)
        lost = gamma(att.tokens + 6) * lost
        masked = att.mask is not None or att.valid is not None
        for rows, queries, keys in seen((p != 0).any(0), step, masked=masked):
            sums = (p[:, rows, keys] @ pairs[:, keys]).unflatten(-1, (d_v, d))
            c = torch.addcmul(sums, o[:, rows, :, None], average[:, rows, None, :], value=-1)
            yield rows, queries, c, lost[:, rows]

    @staticmethod
    def _b(c: Tensor, off: Tensor, w: WeightNorms) -> Tensor:
        """||B_i|| of some rows, (heads, n)."""
        off = off + gamma(c.shape[-1] + 2) * torch.linalg.vector_norm(c.detach(), dim=(-2, -1))
        return block_norm(_each(c, w.factor_q.mT)) + off * w.size_q[:, None]

    def block(self) -> Tensor:
        """The compression of J itself, (heads, N, N)."""
        return self.p * (self.norm_v + self.distance * self.qt_norm) + torch.diag_embed(self.b)

    # The terms of the compression of J J^T, (heads, N, N) each: with ``gram``.

    def values(self) -> Tensor:
        """S ||W_V||^2."""
        return self.p @ self.p.mT * self.norm_v**2

    def queries(self) -> Tensor:
        """Diagonal matrix of ||B_i||^2."""
        return torch.diag_embed(self.b**2)

    def mixed(self) -> Tensor:
        """X + X^T."""
        p, a = self.p, self.a[..., :, None]
        reach = torch.minimum(p * self.distance @ p.mT, a * p.norm(dim=-1)[..., None, :])
        x = p * self.b_v[..., None, :] + p.mT * self.b_q * self.distance.mT
        x = x + self.z[..., :, None] * reach
        return x + x.mT

    def keys(self) -> Tensor:
        """K."""
        e = self.p * self.distance
        return self.inner() * torch.minimum(self.a[..., :, None] * self.a[..., None, :], e @ e.mT)

    def inner(self) -> Tensor:
        r""":math:`|\tilde q_i \cdot \tilde q_k|`."""
        length, off = lengths(self.qt) + self.off_qt, self.off_qt
        own = gamma(self.qt.shape[-1] + 2) * length + 2 * off
        left = torch.stack([own, length, self.excess[:, None] * self.size], -1)
        right = torch.stack([length, 2 * off, self.size], -1)
        return (self.qt @ self.qt.mT).abs() + left @ right.mT


def sharp_block_norms(att: Attention, heads: slice) -> Tensor:
    r"""Upper values of the norms of the blocks of J, for some heads of a layer, as `BlockNorms`.

    But for the allowance of `Bound`: Lemma 96 (docs/theory/token_bounds.md). Of
    :math:`\|J_{ij}\|`, (heads, N, N).
    """
    parts = BlockNorms(att, heads)
    w, inputs, distance = weights_of(att), att.x.shape[2], parts.distance
    turned = for_samples(att.w_k[heads].mT @ att.w_v[heads], att)
    z = att.scale * att.q[:, heads].flatten(0, 1) @ turned
    sizes = for_samples((w.size_k * w.size_v)[heads], att)
    off = gamma(inputs + att.d + 4) * parts.size * sizes[:, None]
    length = z.norm(dim=-1) + off

    along = z @ parts.v.mT - (parts.o * z).sum(-1, keepdim=True)  # (v_j - o_i) . z_i
    across = lengths(parts.v)[:, None] + lengths(parts.o)[..., None]
    along = along + off[..., None] * distance.detach()
    along = along + gamma(att.d_v + 6) * across * length.detach()[..., None]
    reach = distance * length[..., None]
    along = torch.minimum(torch.maximum(along, -reach), reach)
    squares = (parts.qt_norm * distance) ** 2
    most = (squares + 2 * reach).detach()
    slack, total = gamma(inputs + 2 * att.d + 2 * att.d_v + 64), squares + 2 * along
    under = total**2 + 4 * (reach - along) * (reach + along) + 64 * slack * most**2
    top = ((total + root(under)) / 2 + 16 * slack * most).clamp_min(0)
    return parts.p * root(parts.norm_v**2 + top) + torch.diag_embed(parts.b)


def _each(c: Tensor, m: Tensor) -> Tensor:
    """Matrices (heads, n, a, b) times one of each head, (heads, b, r), as one product."""
    return (c.flatten(1, 2) @ m).unflatten(1, c.shape[1:3])


def spread(
    w: Tensor,
    x: Tensor,
    centre: Tensor | None = None,
    off: Tensor | None = None,
    maps: RowMaps | None = None,
) -> Tensor:
    """||sum_j w_ij y_ij y_ij^T||^(1/2) for y_ij = F_i^T (x_j - c_i): (heads, N, 1).

    Upper values but for relative roundings: Lemmas 107 and 109 (docs/theory/ball_pairs.md). At the
    squares of P, values and outputs they are the norms ||A_i||.

    Args:
        w: weights >= 0, (heads, N, M).
        x: (heads, M, d).
        centre: c, (heads, N, d), or 0.
        off: how far each y_ij may be from what is meant, broadcastable to (heads, N, 1).
        maps: F of some rows; the identity without.
    """
    (n, m), d, total, found = w.shape[-2:], x.shape[-1], w.sum(-1, keepdim=True), []
    length, pairs, ends = lengths(x), outer(x, x), list[tuple[Tensor, Tensor]]()
    size = mean(w, length**2)
    if centre is not None:
        far, side = lengths(centre), w @ x - total / 2 * centre
        size = size + 2 * far * mean(w, length) + far**2 * total.detach()[..., 0]
        ends = [(side, centre), (centre, side)]
    lost = gamma(m + (10 if maps is None else 2 * d + 18)) * size  # the difference cancels
    step = max(1, max(SUM_BYTES, at_once(ROW_BYTES, w.device)) // (8 * len(x) * d * d))
    for r in (slice(i, i + step) for i in range(0, n, step)):
        sums, more = (w[:, r] @ pairs).unflatten(-1, (d, d)), lost[:, r]
        for a, b in ends:
            sums = torch.addcmul(sums, a[:, r, :, None], b[:, r, None, :], value=-1)
        if maps is not None:
            factor = maps(r)
            sums, more = factor.mT @ sums @ factor, more * factor.square().sum((-1, -2))
        found.append(block_norm(sums) + more)
    norms = root(torch.cat(found, 1))[..., None]
    return norms if off is None else norms + off * total.sqrt()
