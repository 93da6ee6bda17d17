"""Families of heads on which rounding does its worst: each a function of a generator and a dtype,
alike for alike seeds.

Layers are small (1 to 8 tokens of 1 to 5 entries, queries and values of 1 to 4), of `SAMPLES`
inputs and one or two heads. Every size that matters is drawn uniformly in its logarithm, for each
sample or head by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.layers import causal, window
from torch import Tensor

from lipbound.attention.layer import Attention
from lipbound.attention.variants.gate import Gate
from lipbound.attention.variants.other_stream import OtherStream
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.attention.variants.rotary import Rotation

SAMPLES = 6
Family = Callable[[torch.Generator, torch.dtype], Attention]
FAMILIES: dict[str, Family] = {}
SPREAD = {torch.float32: 1e-5, torch.float64: 1e-12}
"""How little of their common part tokens may differ by and still differ."""
RANGE = {torch.float32: 18.0, torch.float64: 50.0}
"""Powers of ten by which tensors may be scaled without leaving the numbers that are measured."""


@dataclass
class Draft:
    """A layer in the making, float64: x (samples, n, D), w_q, w_k (heads, D, d), w_v (heads, D,
    d_v), and whatever else `Attention` takes."""

    g: torch.Generator
    dtype: torch.dtype
    x: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    more: dict[str, Any] = field(default_factory=dict)

    n = property(lambda self: self.x.shape[1])
    width = property(lambda self: self.x.shape[2])
    heads = property(lambda self: len(self.w_q))
    d = property(lambda self: self.w_q.shape[2])
    d_v = property(lambda self: self.w_v.shape[2])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.g, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=self.g, dtype=torch.float64)

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""
        return int(torch.randint(low, high + 1, (), generator=self.g))

    def chance(self, share: float = 0.5) -> bool:
        return bool(torch.rand((), generator=self.g) < share)

    def power(self, low: float, high: float) -> float:
        """A power of ten."""
        return float(10.0 ** self.uniform(low, high, 1, 1, 1))

    def per_sample(self, low: float, high: float) -> Tensor:
        """Powers of ten, (samples, 1, 1)."""
        return 10.0 ** self.uniform(low, high, SAMPLES, 1, 1)

    def per_head(self, low: float, high: float) -> Tensor:
        """Powers of ten, (heads, 1, 1)."""
        return 10.0 ** self.uniform(low, high, self.heads, 1, 1)

    def shared(self, low: float, high: float) -> Tensor:
        """What all tokens of a sample share, of a size that is a power of ten: (samples, 1, D)."""
        return self.per_sample(low, high) * self.normal(SAMPLES, 1, self.width)

    def build(self) -> Attention:
        """The layer in its dtype."""
        self.more.setdefault("w_o", self.normal(self.heads, self.d_v, 3))
        return Attention(self.x, self.w_q, self.w_k, self.w_v, **self.more).to(self.dtype)


def family(make: Callable[[Draft], None]) -> Callable[[Draft], None]:
    """Decorator: a change of an ordinary random layer becomes a family under its name."""

    def build(g: torch.Generator, dtype: torch.dtype) -> Attention:
        draft = plain(g, dtype)
        make(draft)
        return draft.build()

    FAMILIES[make.__name__] = build
    return make


def plain(g: torch.Generator, dtype: torch.dtype) -> Draft:
    """Normal entries, now and then with biases."""
    draft = Draft(g, dtype, *(torch.empty(0) for _ in range(4)))
    sizes = ((2, 6), (1, 5), (1, 4), (1, 4), (1, 2))
    n, width, d, d_v, heads = (draft.integer(*ends) for ends in sizes)
    n = 8 if draft.chance(0.1) else n
    draft.x = draft.normal(SAMPLES, n, width)
    draft.w_q, draft.w_k, draft.w_v = (draft.normal(heads, width, k) for k in (d, d, d_v))
    if draft.chance(0.3):
        widths = {"b_q": d, "b_k": d, "b_v": d_v}
        draft.more = {name: draft.normal(heads, k) for name, k in widths.items()}
    if draft.chance(0.3):
        draft.more["scale"] = 1.0
    return draft


# -- common parts ----------------------------------------------------------------------------------


@family
def common_offset(draft: Draft) -> None:
    """All tokens share a part 1e3 to 1e8 times their spread."""
    draft.x += draft.shared(3, 8)
    if draft.chance():
        draft.w_q /= draft.per_head(0, 8)


@family
def offset_groups(draft: Draft) -> None:
    """Groups that do not see each other; one of them lies 1e3 to 1e8 spreads away."""
    first = torch.arange(draft.n) < draft.integer(1, draft.n - 1)
    draft.x += first[:, None] * draft.shared(3, 8)
    none = torch.zeros(draft.n, draft.n, dtype=torch.float64)
    draft.more["mask"] = none.masked_fill(first[:, None] != first, -torch.inf)
    if draft.chance():
        draft.more["scale"] = 1.0


@family
def far_groups(draft: Draft) -> None:
    """Two clusters of tokens far from each other, no mask: attention itself keeps them apart."""
    first = torch.arange(draft.n) < draft.integer(1, draft.n - 1)
    draft.x += torch.where(first[:, None], 1.0, -1.0) * draft.shared(1, 6)
    if draft.chance():
        draft.w_k = draft.w_q.clone()


@family
def outliers(draft: Draft) -> None:
    """One token 10 to 1e6 times as long as the others."""
    draft.x[:, draft.integer(0, draft.n - 1)] *= draft.per_sample(1, 6)[:, 0]


@family
def near_tokens(draft: Draft) -> None:
    """Tokens that differ in the last digits of their common part, with logits from 1 to 1e12."""
    spread = SPREAD[draft.dtype] * draft.per_sample(0, 2)
    draft.x = draft.normal(SAMPLES, 1, draft.width) * (1 + spread * draft.normal(*draft.x.shape))
    draft.w_q *= draft.per_head(0, 12)


@family
def cancelling_projections(draft: Draft) -> None:
    """The long part of every token, another for each, is what no projection sees, but
    for rounding."""
    width = draft.width
    if width == 1:
        return
    direction = draft.normal(width)
    along = direction / direction.norm()
    draft.w_q, draft.w_k, draft.w_v = (
        w - along[:, None] * (along @ w)[:, None] for w in (draft.w_q, draft.w_k, draft.w_v)
    )
    draft.x += draft.per_sample(2, 8) * draft.normal(SAMPLES, draft.n, 1) * direction


@family
def shifted_keys_and_values(draft: Draft) -> None:
    """Biases of keys and values 1e2 to 1e12 times what they are added to."""
    d, d_v = draft.d, draft.d_v
    draft.more["b_k"] = draft.normal(draft.heads, d) * draft.per_head(2, 12)[:, 0]
    draft.more["b_v"] = draft.normal(draft.heads, d_v) * draft.per_head(2, 12)[:, 0]


@family
def shifted_queries(draft: Draft) -> None:
    """Biases of queries 10 to 1e6 times what they are added to: all tokens attend alike."""
    draft.more["b_q"] = draft.normal(draft.heads, draft.d) * draft.per_head(1, 6)[:, 0]


# -- attention of extreme shape --------------------------------------------------------------------


@family
def one_key(draft: Draft) -> None:
    """All rows attend to the first token by a margin of 10 to 1e3; the others are alike, or alike
    but for 1e-6."""
    shape = draft.x.shape
    draft.x = draft.normal(SAMPLES, 1, draft.width).expand(shape).clone()
    draft.x += draft.per_sample(-9, 0) * draft.normal(*shape) * draft.integer(0, 1)
    draft.x[:, 0] = draft.normal(SAMPLES, draft.width)
    draft.w_q *= draft.per_head(-9, 0) * draft.integer(0, 1)
    draft.w_k *= draft.per_head(0, 3)
    draft.more["b_q"] = draft.normal(draft.heads, draft.d) * draft.per_head(0, 1)[:, 0]
    draft.more["scale"] = 1.0


@family
def one_key_of_many(draft: Draft) -> None:
    """The like with up to 24 tokens, all but the first equal: what rounding does to each row adds
    up."""
    n = draft.integer(12, 24)
    draft.x = draft.normal(SAMPLES, 1, 3).repeat(1, n, 1)
    draft.x[:, 0] = draft.normal(SAMPLES, 3)
    heads = draft.heads
    draft.w_k, draft.w_v = draft.normal(heads, 3, 1), draft.normal(heads, 3, 1)
    draft.w_q = torch.zeros_like(draft.w_k)
    draft.w_k *= draft.per_head(0.5, 2.5)
    draft.more = {"b_q": draft.normal(heads, 1) * draft.per_head(0, 1)[:, 0], "scale": 1.0}


@family
def saturated(draft: Draft) -> None:
    """Logits of 10 to 1e4."""
    draft.w_q *= draft.per_head(1, 4)


@family
def far_saturated(draft: Draft) -> None:
    """Logits of 1e4 to 1e13."""
    draft.w_q *= draft.per_head(4, 13)


@family
def saturated_ties(draft: Draft) -> None:
    """Large logits of which the largest two are equal, or differ in their last digits."""
    spread = SPREAD[draft.dtype] * draft.integer(0, 1)
    draft.x[:, -1] = draft.x[:, 0] * (1 + spread * draft.normal(SAMPLES, draft.width))
    draft.w_q *= draft.per_head(1, 9)


@family
def one_hot(draft: Draft) -> None:
    """Each token attends to one, a permutation: orthogonal tokens with margins of 10 to 1e4."""
    n = draft.n
    draft.x = torch.eye(n, dtype=torch.float64).repeat(SAMPLES, 1, 1)
    draft.x += draft.per_sample(-12, -1) * draft.normal(SAMPLES, n, n)
    permuted = torch.eye(n, dtype=torch.float64)[torch.randperm(n, generator=draft.g)]
    draft.w_q = draft.per_head(1, 4) * torch.eye(n, dtype=torch.float64)
    draft.w_k = permuted.repeat(draft.heads, 1, 1)
    draft.w_v = draft.normal(draft.heads, n, draft.d_v)
    draft.more = {}


@family
def uniform(draft: Draft) -> None:
    """Hardly any logits, 1e-3 down to none."""
    draft.w_q *= draft.per_head(-16, -3) * draft.integer(0, 1)


# -- spectra ---------------------------------------------------------------------------------------


@family
def symmetric(draft: Draft) -> None:
    """Tokens come in pairs x and -x, queries are keys: singular values in clusters."""
    half = draft.x[:, : (draft.n + 1) // 2]
    draft.x = torch.cat([half, -half], 1)
    draft.w_k = draft.w_q.clone()
    if draft.chance():
        draft.x += draft.per_sample(-16, -6) * draft.normal(*draft.x.shape)


@family
def degenerate(draft: Draft) -> None:
    """Orthogonal tokens and weights: many equal singular values, or nearly equal ones."""
    n = min(draft.n, 5)
    eye = torch.eye(n, dtype=torch.float64)
    draft.x = draft.per_sample(-1, 1) * eye
    draft.x += draft.per_sample(-16, -6) * draft.normal(SAMPLES, n, n) * draft.integer(0, 1)
    draft.w_q, draft.w_k, draft.w_v = (draft.per_head(-1, 1) * eye for _ in range(3))
    draft.more = {}


@family
def repeated_heads(draft: Draft) -> None:
    """Two heads alike, but for 1e-9."""
    near = 1 + 1e-9 * draft.integer(0, 1)
    draft.w_q, draft.w_k, draft.w_v = (
        torch.cat([w[:1], w[:1] * near]) for w in (draft.w_q, draft.w_k, draft.w_v)
    )
    biases = {name: b for name, b in draft.more.items() if isinstance(b, Tensor)}
    draft.more = {name: torch.cat([b[:1], b[:1]]) for name, b in biases.items()}


@family
def duplicated_tokens(draft: Draft) -> None:
    """Tokens drawn from few, so that several are the same; now and then all of them."""
    kinds = draft.integer(1, 2)
    draft.x = draft.x[:, torch.randint(kinds, (draft.n,), generator=draft.g)]
    draft.w_q *= draft.per_head(-1, 3)


@family
def graded(draft: Draft) -> None:
    """Entries of every size, from 1e-8 to 1e8 (float32: 1e-4 to 1e4) in one tensor."""
    power = 8.0 if draft.dtype == torch.float64 else 4.0
    draft.x *= 10 ** draft.uniform(-power, 0, *draft.x.shape)
    draft.w_q *= 10 ** draft.uniform(-power, power / 4, *draft.w_q.shape)
    draft.w_v *= 10 ** draft.uniform(-power, power, *draft.w_v.shape)


# -- masks -----------------------------------------------------------------------------------------


@family
def masks(draft: Draft) -> None:
    """Causal, window, random, or finite additive entries up to 1e4; queries of any size."""
    n, kind = draft.n, draft.integer(0, 3)
    offsets = draft.per_head(-1, 4) * draft.normal(draft.heads, n, n)
    mask = (causal(n), window(n), None, offsets)[kind]
    if mask is None:
        seen = (draft.uniform(0, 1, draft.heads, n, n) < 0.5) | torch.eye(n, dtype=torch.bool)
        mask = torch.where(seen, 0.0, -torch.inf).double()
    draft.more["mask"] = mask
    draft.w_q *= draft.per_head(-1, 3)


@family
def padded(draft: Draft) -> None:
    """Padding of each sample's own length, where what stands at padded places is not small; some
    causal."""
    lengths = torch.randint(1, draft.n + 1, (SAMPLES,), generator=draft.g)
    valid = torch.arange(draft.n) < lengths[:, None]
    draft.x = torch.where(valid[..., None], draft.x * draft.per_sample(-2, 2), 1e4 * draft.x)
    draft.more |= {"valid": valid} | ({"mask": causal(draft.n)} if draft.chance() else {})


@family
def one_token(draft: Draft) -> None:
    """Attention without choice: the norm is that of the values' projection."""
    draft.x = draft.x[:, :1] * draft.per_sample(-6, 6)


@family
def mask_offsets(draft: Draft) -> None:
    """Finite masks of 1e5 to 1e25, the same for all keys that a query sees: as if there were none,
    but for the digits of scores they swallow."""
    rows = draft.per_head(5, 25) * draft.normal(draft.heads, draft.n, 1)
    draft.more["mask"] = rows.expand(-1, -1, draft.n) + (causal(draft.n) if draft.chance() else 0.0)


# -- variants --------------------------------------------------------------------------------------


def normalise(draft: Draft, eps: float) -> None:
    """Queries and keys normalised, each head by itself or all together."""
    together = draft.chance()
    for side, w, bias in (
        ("norm_q", draft.w_q, draft.more.get("b_q")),
        ("norm_k", draft.w_k, draft.more.get("b_k")),
    ):
        whole = w.transpose(0, 1).flatten(1), None if bias is None else bias.flatten()
        shift = draft.normal(draft.heads, draft.d) if draft.chance(0.3) else None
        gain = draft.normal(draft.heads, draft.d) * draft.power(-1, 2)
        draft.more[side] = QKNorm(gain, shift, eps, whole if together else None)


def turn(draft: Draft) -> None:
    """Angles of up to 1e4, and a factor now and then."""
    angles = draft.power(-2, 4) * draft.normal(draft.n, max(1, draft.d // 2))
    factor = 1.3 if draft.chance(0.3) else 1.0
    draft.more["rotation"] = Rotation(factor * angles.cos(), factor * angles.sin())


def widen(draft: Draft) -> None:
    """Queries of at least two entries, which can be turned."""
    if draft.d == 1:
        draft.w_q = draft.w_q.repeat(1, 1, 2)
        draft.w_k = draft.normal(draft.heads, draft.w_k.shape[1], 2)
        draft.more = {key: t for key, t in draft.more.items() if key not in ("b_q", "b_k")}


@family
def sinks(draft: Draft) -> None:
    """Sink logits of -30 to 300: rows of P may sum to very little."""
    draft.more["sinks"] = draft.uniform(-30, 30, draft.heads) * (10.0 if draft.chance(0.3) else 1.0)
    draft.w_q *= draft.per_head(-1, 3)


@family
def sinks_take_all(draft: Draft) -> None:
    """Sink logits far above all scores: the norm is 1e-10 to 1e-130, in float32 to 1e-30."""
    most = 300.0 if draft.dtype == torch.float64 else 70.0
    draft.more["sinks"] = draft.uniform(20, most, draft.heads)


@family
def capped(draft: Draft) -> None:
    """Caps of 0.01 to 100, scores from far below to far above."""
    draft.more["cap"] = draft.power(-2, 2)
    draft.w_q *= draft.per_head(-2, 4)


@family
def normalised(draft: Draft) -> None:
    """Normalised queries and keys without eps, of tokens of any length."""
    draft.x *= 10 ** draft.uniform(-6, 6, SAMPLES, draft.n, 1)
    normalise(draft, 0.0)


@family
def normalised_near_zero(draft: Draft) -> None:
    """Normalised with an eps that is as large as what is normalised, or far smaller; tokens with
    common parts."""
    normalise(draft, draft.power(-12, 0))
    draft.x = draft.x * draft.per_sample(-6, 0)
    draft.x += draft.normal(SAMPLES, 1, draft.width) * draft.integer(0, 1)


@family
def turned(draft: Draft) -> None:
    """Rotary embeddings at tokens with and without common parts, logits of up to 1e3."""
    widen(draft)
    turn(draft)
    draft.x += draft.per_sample(0, 4) * draft.normal(SAMPLES, 1, draft.width) * draft.integer(0, 1)
    draft.w_q /= draft.per_head(0, 6)


def latent(draft: Draft, eps: float) -> None:
    """Keys (in part) and values that are projections of a normalised vector."""
    width, d, d_v = draft.width, draft.d, draft.d_v
    rank = draft.integer(1, 4)
    over = draft.normal(width, rank), draft.normal(rank) if draft.chance() else None
    part = torch.arange(d) < max(1, d - draft.integer(0, 2))
    gain = torch.where(part, draft.normal(draft.heads, d), 1.0)
    draft.more["norm_k"] = QKNorm(gain, None, eps, over, part)
    shift = draft.normal(draft.heads, d_v) if draft.chance(0.3) else None
    draft.more["norm_v"] = QKNorm(draft.normal(draft.heads, d_v), shift, eps, over)
    draft.more["w_o"] = draft.normal(draft.heads, d_v, d_v + 1)


def gate(draft: Draft, most: float) -> None:
    """Gates whose logits are up to ``most`` large."""
    heads, width, d_v = draft.w_v.shape
    size = draft.per_head(-3, 0) * most
    b = size[:, 0] * draft.normal(heads, d_v) if draft.chance() else None
    draft.more["gate"] = Gate(size * draft.normal(heads, width, d_v), b)
    draft.more["w_o"] = draft.normal(heads, d_v, d_v + 1)


@family
def latent_vectors(draft: Draft) -> None:
    """Latent attention, tokens of any length, eps from nothing to much."""
    draft.x *= 10 ** draft.uniform(-6, 6, SAMPLES, draft.n, 1)
    latent(draft, draft.power(-12, 0) * draft.integer(0, 1))
    draft.w_q *= draft.per_head(-1, 3)


@family
def normalised_values(draft: Draft) -> None:
    """Values normalised by themselves, of any length, with common parts."""
    d_v = draft.d_v
    draft.x *= 10 ** draft.uniform(-6, 6, SAMPLES, draft.n, 1)
    gain = draft.normal(draft.heads, d_v) * draft.power(-1, 2)
    shift = 10 * draft.normal(draft.heads, d_v) if draft.chance() else None
    draft.more["norm_v"] = QKNorm(gain, shift, draft.power(-12, 0))
    draft.more["w_o"] = draft.normal(draft.heads, d_v, d_v + 1)


@family
def gates(draft: Draft) -> None:
    """Gates from one half to 0 and 1, values with a long common part, which a gate sees."""
    gate(draft, 300.0)
    draft.more["b_v"] = draft.power(0, 6) * draft.normal(draft.heads, draft.d_v)
    draft.w_q *= draft.per_head(-1, 3)
    if draft.chance():
        padded(draft)


@family
def modern(draft: Draft) -> None:
    """Latent vectors, rotation, gate, sinks: some of them at once; masked or padded."""
    widen(draft)
    if draft.chance():
        latent(draft, draft.power(-12, -3))
    if draft.chance():
        turn(draft)
    gate(draft, 10.0)
    if draft.chance():
        draft.more["sinks"] = 10 * draft.normal(draft.heads)
    if draft.chance():
        padded(draft)
    draft.w_q *= draft.per_head(-1, 2)


def other_tokens(draft: Draft) -> tuple[int, Tensor | None]:
    """Number of tokens of another stream, and which of them are not padding."""
    count = draft.integer(1, 7)
    real = torch.arange(count) < 1 + torch.arange(SAMPLES)[:, None] % count
    return count, real if draft.chance() else None


@family
def memory(draft: Draft) -> None:
    """Keys and values of cross-attention: queries of any length do not move."""
    count, valid = other_tokens(draft)
    shape = draft.heads, SAMPLES, count, draft.d
    q = 10 ** draft.uniform(-2, 3, *shape[:3], 1) * draft.normal(*shape)
    draft.more = {name: t for name, t in draft.more.items() if name != "mask"}
    draft.more["other_stream"] = OtherStream(q=q, valid=valid)
    draft.x += draft.shared(0, 4)


@family
def asking(draft: Draft) -> None:
    """Queries of cross-attention, to keys and values with and without long common parts."""
    count, valid = other_tokens(draft)
    d, d_v = draft.d, draft.d_v
    far = draft.power(0, 5) * draft.integer(0, 1)
    k, v = (
        draft.normal(draft.heads, SAMPLES, count, width) + far * draft.normal(1, 1, 1, width)
        for width in (d, d_v)
    )
    draft.more = {name: t for name, t in draft.more.items() if name != "mask"}
    draft.more["other_stream"] = OtherStream(k=k, v=v, valid=valid)
    draft.more["w_o"] = draft.normal(draft.heads, d_v, d_v + 1)
    draft.w_q *= draft.per_head(-1, 3)


@family
def several_variants(draft: Draft) -> None:
    """Whatever there is between projections and softmax, at once; masked or padded."""
    widen(draft)
    if draft.chance():
        normalise(draft, draft.power(-12, -3) * draft.integer(0, 1))
    if draft.chance():
        turn(draft)
    if draft.chance():
        draft.more["cap"] = draft.power(-1, 2)
    if draft.chance():
        draft.more["sinks"] = 10 * draft.normal(draft.heads)
    if draft.chance():
        padded(draft)
    draft.w_q *= draft.per_head(-1, 2)


@family
def variants_far_away(draft: Draft) -> None:
    """Caps, sinks or rotations, to which the common part of tokens does matter, and a long common
    part."""
    kind = draft.integer(0, 2)
    if kind == 0:
        draft.more["cap"] = draft.power(0, 3)
    if kind == 1:
        draft.more["sinks"] = 100 * draft.normal(draft.heads)
    if kind == 2:
        widen(draft)
        turn(draft)
    size = draft.per_sample(1, 6)
    draft.x += size * draft.normal(SAMPLES, 1, draft.width)
    draft.w_q /= draft.per_head(0, 10)


# -- sizes -----------------------------------------------------------------------------------------


def scaled(draft: Draft, exponent: Tensor) -> None:
    """x times s, w_q and w_k over s, s = 10^exponent: the same Jacobian."""
    draft.x *= 10**exponent
    draft.w_q, draft.w_k = draft.w_q * 10**-exponent, draft.w_k * 10**-exponent


@family
def scales(draft: Draft) -> None:
    """Inputs large and weights small, or the other way round, as far as the dtype goes."""
    most = RANGE[draft.dtype]
    scaled(draft, draft.uniform(-most, most))
    if draft.chance(0.3):
        draft.x += 1e4 * draft.x[:, :1]


@family
def scaled_values(draft: Draft) -> None:
    """Values, and with them the norm, scaled as far as the dtype goes; their biases too, or not."""
    most = RANGE[draft.dtype]
    size = draft.per_head(-most, most)
    draft.w_v *= size
    if draft.chance() and "b_v" in draft.more:
        draft.more["b_v"] *= size[:, 0]


@family
def scaled_queries(draft: Draft) -> None:
    """Queries large and keys small, or the other way round; the scale takes its part."""
    most = RANGE[draft.dtype] / 2
    exponent = draft.uniform(-most, most)
    draft.w_q, draft.w_k = draft.w_q * 10**exponent, draft.w_k * 10**-exponent
    if draft.chance():
        other = float(draft.uniform(-most, most))
        draft.w_k, draft.more["scale"] = draft.w_k * 10**other, 10**-other


@family
def odd_scales(draft: Draft) -> None:
    """Scales of the scores that are negative, zero, or 1e-30 to 1e6."""
    draft.more["scale"] = draft.integer(-1, 1) * draft.power(-30, 6)


@family
def subnormal(draft: Draft) -> None:
    """Values, or inputs, near and below the smallest normal float32, or the smallest numbers that
    are measured."""
    least = float(torch.finfo(draft.dtype).tiny) if draft.dtype == torch.float32 else 1e-50
    if draft.chance():
        draft.w_v *= least * draft.per_head(-6, 6)
    else:
        draft.x *= least * draft.per_sample(-6, 6)


@family
def zeros(draft: Draft) -> None:
    """Some of inputs, queries, keys and values zero, whole or in part."""
    for name in ("x", "w_q", "w_k", "w_v"):
        kind = draft.integer(0, 4)
        tensor = getattr(draft, name)
        if kind == 0:
            tensor.zero_()
        if kind == 1:
            tensor *= draft.uniform(0, 1, *tensor.shape) < 0.5


# -- heads that went wrong -------------------------------------------------------------------------


def pairs_far_away(seed: int = 15, offset: float = 1e4) -> Attention:
    """float32: two pairs of tokens, each blind to the other, one of them far away."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 4, 2, generator=g)
    x[:, :2] += offset * torch.randn(2, generator=g)
    w_q, w_k, w_v = (torch.randn(1, 2, 1, generator=g) for _ in range(3))
    pair = torch.arange(4) // 2
    mask = torch.zeros(4, 4).masked_fill(pair[:, None] != pair, -torch.inf)
    return Attention(x, w_q, w_k, w_v, scale=1.0, mask=mask)


def sink_token(n: int = 32, dtype: torch.dtype = torch.float32, pull: float = 10.0) -> Attention:
    """All n tokens attend to the first, whose key is not that of the others."""
    x = torch.tensor([-0.3, 0.0, 0.0], dtype=dtype).repeat(1, n, 1)
    x[:, 0] = torch.tensor([1.0, 0.0, 1.0], dtype=dtype)
    w_k, w_v = (torch.tensor(w, dtype=dtype).view(1, 3, 1) for w in ([0.0, 100, 1], [1.0, 0, 0]))
    return Attention(x, 0 * w_k, w_k, w_v, b_q=torch.tensor([[pull]], dtype=dtype), scale=1.0)
