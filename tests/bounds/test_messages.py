"""What is not a number, a name or a layer is refused in one sentence that says what was given and what is allowed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.layers import changed, random_attention

import lipbound as lb
from lipbound import bounds
from lipbound.errors import LipboundError

ATT = random_attention("plain")
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    **{f"over_ball {radius!r}": (lambda radius=radius: bounds.over_ball(ATT, radius, at="yudin"), said) for radius, said in (
        ([], "radius is empty"), ("x", "radius is 'x'"), (-1, "radius is -1"), (math.nan, "radius is nan"), (None, "radius is None"), ([1, "x"], "radius is 'x'"),
    )},
    **{f"castin {radius!r}": (lambda radius=radius: bounds.get("castin").over_ball(ATT, radius), "radius is .*it must be") for radius in ([], "x", -1, math.nan, None)},
    **{f"spectral_norm {key}={value!r}": (lambda key=key, value=value: lb.spectral_norm(ATT, **{key: value}), said) for key, value, said in (
        ("tol", math.nan, "tol is nan"), ("tol", "x", "tol is 'x'"), ("delta", "x", "delta is 'x'"), ("delta", 1.5, "between 0 and 1"), ("delta", 0, "between 0 and 1"),
        ("seed", "x", "seed is 'x'"), ("seed", 1.5, "seed is 1.5"), ("seed", [1] * 5, "5 seeds"), ("max_steps", 0, "at least one step"), ("map", 3, "unknown map 3"),
        ("method", None, "unknown method None"),
    )},
    **{f"attack {given}": (lambda given=given: lb.attack(ATT, **{"radius": 1.0, **given}), said) for given, said in (
        ({"radius": "x"}, "radius is 'x'"), ({"radius": []}, r"radius is \[\]"), ({"steps": 0}, "steps is 0"), ({"steps": "x"}, "steps is 'x'"), ({"seed": "x"}, "seed is 'x'"),
        ({"norm": "x"}, "unknown norm 'x'"),
    )},
    "radius_curve": (lambda: lb.radius_curve(ATT, []), "radius is empty"),
    "radius_curve x": (lambda: lb.radius_curve(ATT, "x"), "radius is 'x'"),
    "name": (lambda: bounds.get(3), "unknown bound 3"),
    "names": (lambda: bounds.evaluate(ATT, None), "bounds is None"),
    "rule": (lambda: bounds.whole_layer(ATT, "yudin", rule=3), "unknown rule 3"),
    "layer": (lambda: bounds.evaluate(torch.ones(3), "yudin"), "was given a Tensor"),
    "no layer": (lambda: lb.spectral_norm(None), "att is a NoneType"),
    "lists": (lambda: lb.Attention([[1.0]], ATT.w_q, ATT.w_k, ATT.w_v), "x is a list; it must be a torch tensor"),
    "scale": (lambda: changed(ATT, scale="x"), "scale is 'x'"),
    "mask": (lambda: changed(ATT, mask="x"), "mask is a str"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_refused_in_one_sentence(call: str) -> None:
    run, said = CALLS[call]
    with pytest.raises(LipboundError, match=said) as error:
        run()
    assert "\n" not in str(error.value)


def test_float64_is_not_advised_where_it_is_used() -> None:
    with pytest.raises(LipboundError) as error:
        lb.spectral_norm(ATT, tol=1e-18, delta=1e-10)
    assert "float64 or" not in str(error.value)
    assert "larger tol" in str(error.value)


@pytest.mark.parametrize(
    "call",
    [lambda att: bounds.get("lipbound_gram")(att), lambda att: bounds.over_ball(att, 0.1), lambda att: bounds.get("yudin").over_ball(att, 0.1)],
)
def test_bounds_without_derivatives_say_so(call: Callable[[lb.Attention], torch.Tensor]) -> None:
    att = changed(ATT, w_q=ATT.w_q.clone().requires_grad_())
    with pytest.raises(LipboundError, match="has no derivatives|have no derivatives"):
        call(att)
    with torch.no_grad():
        assert bool(torch.isfinite(call(att)).all())
