import math

import pytest
import torch
from support.checks import close, refused
from support.layers import changed, places, random_attention
from support.reference import head_function

import lipbound as lb
from lipbound.attention.variants.qk_norm import QKNorm
from lipbound.errors import AttentionError


def test_out_is_the_function_the_oracle_differentiates(att: lb.Attention) -> None:
    for s, h in places(att):
        keep = slice(None) if att.valid is None else att.valid[s]
        close(head_function(att, s, h)(att.x[s][keep]), att.out[s, h][keep], 1e-11, 1e-11)


def test_rows_of_p_sum_to_one_and_padding_takes_no_part() -> None:
    att = random_attention("padded")
    real = att.valid.double()[:, None]
    torch.testing.assert_close(att.p.sum(-1), real.expand(2, 3, 6))
    assert not att.p[1, :, :, 4:].any()
    assert not att.out[1, :, 4:].any()
    x = att.x.clone()
    x[1, 4:] = math.nan  # not even the values of padded tokens matter
    assert torch.equal(changed(att, x=x).out, att.out)


def test_fold_output_keeps_the_map() -> None:
    att = random_attention("biases")
    folded, basis = att.fold_output()
    close(folded.out @ basis.mT, att.out @ att.w_o)


def test_select_is_a_part_of_the_layer(att: lb.Attention) -> None:
    close(att.select(slice(1, 2), slice(0, 2)).out, att.out[1:2, :2])


def test_large_negative_finite_masks_forbid_like_minus_infinity() -> None:
    att = random_attention("causal")
    finite = torch.where(att.mask == -math.inf, torch.finfo(torch.float32).min, att.mask)
    close(changed(att, mask=finite).p, att.p)


GOOD = {"x": (2, 5, 8), "w_q": (3, 8, 4), "w_k": (3, 8, 4), "w_v": (3, 8, 6)}
FAR = {
    name: torch.linspace(-1e100, 1e100, math.prod(shape), dtype=torch.float64).view(shape)
    for name, shape in GOOD.items()
}
ONES, ZERO = torch.ones(3, 4), torch.zeros(GOOD["x"])


def build(**changes: object) -> lb.Attention:
    tensors = {name: torch.ones(shape) for name, shape in GOOD.items()} | changes
    return lb.Attention(**tensors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(5, 8)}, "x has shape (5, 8); it must be (samples, N, D)"),
        ({"x": torch.ones(2, 0, 8)}, "no empty axis"),
        ({"w_k": torch.ones(3, 8, 5)}, "w_k has shape"),
        ({"w_v": torch.ones(2, 8, 6)}, "w_v has shape"),
        ({"b_q": torch.ones(3, 6)}, "b_q has shape"),
        ({"w_o": torch.ones(3, 4, 8)}, "w_o has shape"),
        ({"mask": torch.ones(4, 5)}, "mask has shape"),
        ({"valid": torch.ones(2, 5)}, "valid has dtype"),
        ({"valid": torch.zeros(2, 5, dtype=torch.bool)}, "every token of a sample as padding"),
        ({"x": torch.ones(2, 5, 8, dtype=torch.float64)}, "give all tensors one dtype"),
        ({"x": torch.ones(2, 5, 8, dtype=torch.float16)}, "float16"),
        ({"x": torch.full((2, 5, 8), math.nan)}, "x has NaN"),
        ({"w_q": torch.full((3, 8, 4), math.inf)}, "w_q has NaN or infinite"),
        ({"mask": torch.full((5, 5), math.nan)}, "mask has NaN"),
        ({"mask": torch.full((5, 5), -math.inf)}, "forbids some query every key"),
        ({"scale": math.nan}, "scale is nan"),
        ({"cap": 0.0}, "cap is 0.0; it must be a positive number"),
        ({"cap": math.nan}, "cap is nan; it must be a finite number"),
        ({"sinks": torch.zeros(2)}, "sinks has shape (2,)"),
        ({"sinks": torch.full((3,), math.nan)}, "sinks has NaN"),
        ({"norm_q": QKNorm(ONES * math.inf)}, "norm_q.gain has NaN or infinite entries"),
        ({"norm_q": QKNorm(ONES[:2])}, "norm_q.gain has shape (2, 4)"),
        ({"norm_k": QKNorm(ONES, over=(ONES.mT, None))}, "norm_k.over.0 has shape (4, 3)"),
        ({"x": ZERO, "norm_k": QKNorm(ONES)}, "normalised without eps"),
        (FAR, "scores overflow"),
        ({"mask": torch.ones(1, 1).bool()}, "dtype torch.bool"),
        ({}, "w_o"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_bad_input_gets_a_sentence(changes: dict, message: str) -> None:
    """When it is built, or where it shows; without a notice on what numbers of a wrong dtype would
    mean."""

    def use() -> None:
        att = build(**changes)
        assert att.p.isfinite().all()
        att.fold_output()

    refused(use, message, error=AttentionError)


def test_normalisation_needs_sizes_and_an_eps_where_vectors_vanish() -> None:
    for bad in ({"gain": ONES[0]}, {"bias": ONES[:, :2]}, {"eps": -1.0}):
        words = " of a normalisation"
        refused(lambda bad=bad: QKNorm(**{"gain": ONES} | bad), words, error=AttentionError)
    still = build(x=ZERO, norm_k=QKNorm(ONES, eps=1e-6))
    assert bool(torch.isfinite(lb.spectral_norm(still).lower).all())


def test_the_mask_may_have_a_dtype_of_its_own() -> None:
    """It is added to float64 scores; the float64 copy of a layer has that of the layer itself."""
    att = random_attention("offsets", dtype=torch.float32)
    assert att.double().mask is att.mask
    wide = att.double().with_parts(mask=att.mask.double())
    assert torch.equal(att.double().p, wide.p)
    norms = (lb.spectral_norm(one, delta=1e-6).upper for one in (att.double(), wide))
    assert torch.equal(*norms)
    close(changed(att.double()).p, wide.p)


def test_values_without_derivatives_do_not_serve_where_these_are_wanted() -> None:
    att = random_attention("biases")
    att = att.at(att.x.requires_grad_())
    with torch.no_grad():
        before = (att.p, lb.bounds.get("lipbound_block")(att), lb.bounds.get("yudin")(att))
    after = (att.p, lb.bounds.get("lipbound_block")(att), lb.bounds.get("yudin")(att))
    # our bounds have float32 products where no derivatives are wanted
    for old, new, rtol in zip(before, after, (1e-12, 1e-5, 1e-12), strict=True):
        assert (old.requires_grad, new.requires_grad) == (False, True)
        close(old, new.detach(), rtol)
        (gradient,) = torch.autograd.grad(new.sum(), att.x, retain_graph=True)
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("part", ["mask", "norm_q"])
def test_so_do_values_of_other_parts_with_derivatives(part: str) -> None:
    own = random_attention("plain")
    norm = QKNorm(torch.ones(own.heads, own.d, dtype=torch.float64, requires_grad=True), eps=1e-6)
    mask = torch.zeros(own.tokens, own.tokens, dtype=torch.float64, requires_grad=True)
    att = changed(own, **{part: {"mask": mask, "norm_q": norm}[part]})
    with torch.no_grad():
        assert not att.p.requires_grad
    assert att.p.requires_grad


def test_a_bias_of_keys_costs_no_digits_where_only_queries_are_normalised() -> None:
    own = random_attention("plain")
    norm = QKNorm(torch.ones(own.heads, own.d, dtype=torch.float64), eps=1e-6)
    bias = torch.full((own.heads, own.d), 1e8, dtype=torch.float64)
    without, with_bias = (changed(own, b_k=b, norm_q=norm) for b in (None, bias))
    assert torch.equal(without.p, with_bias.p)
