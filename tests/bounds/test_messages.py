"""What is not a number, a name or a layer is refused in one sentence that says what was given and
what is allowed."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.layers import changed, random_attention

import lipbound as lb
from lipbound import bounds
from lipbound.errors import LipboundError
from lipbound.linalg.operator_norm import operator_norm
from lipbound.linalg.operators import AutogradJacobian

ATT = random_attention("plain")
Call = tuple[Callable[[], Any], str]


def calls(name: str, run: Callable[..., Any], given: list[tuple[Any, str]]) -> dict[str, Call]:
    return {f"{name} {value!r}": (partial(run, value), said) for value, said in given}


CALLS: dict[str, Call] = {
    **calls(
        "over_ball",
        lambda r: bounds.over_ball(ATT, r, at="yudin"),
        [
            ([], "radius is empty"),
            ("x", "radius is 'x'"),
            (-1, "radius is -1"),
            (math.nan, "radius is nan"),
            (None, "radius is None"),
            ([1, "x"], "radius is 'x'"),
        ],
    ),
    **calls(
        "castin",
        lambda r: bounds.get("castin").over_ball(ATT, r),
        [(r, "radius is .*it must be") for r in ([], "x", -1, math.nan, None)],
    ),
    **calls(
        "spectral_norm",
        lambda given: lb.spectral_norm(ATT, **given),
        [
            ({"tol": math.nan}, "tol is nan"),
            ({"tol": "x"}, "tol is 'x'"),
            ({"delta": "x"}, "delta is 'x'"),
            ({"delta": 1.5}, "between 0 and 1"),
            ({"delta": 0}, "between 0 and 1"),
            ({"seed": "x"}, "seed is 'x'"),
            ({"seed": 1.5}, "seed is 1.5"),
            ({"seed": [1] * 5}, "5 seeds"),
            ({"max_steps": 0}, "must be a whole number, at least 1"),
            ({"map": 3}, "unknown map 3"),
            ({"method": None}, "unknown method None"),
        ],
    ),
    **calls(
        "attack",
        lambda given: lb.attack(ATT, **{"radius": 1.0, **given}),
        [
            ({"radius": "x"}, "radius is 'x'"),
            ({"radius": []}, r"radius is \[\]"),
            ({"steps": 0}, "steps is 0"),
            ({"steps": "x"}, "steps is 'x'"),
            ({"seed": "x"}, "seed is 'x'"),
            ({"ball": "x"}, "unknown ball 'x'"),
        ],
    ),
    **calls(
        "radius_curve",
        lambda r: lb.radius_curve(ATT, r),
        [([], "radius is empty"), ("x", "radius is 'x'")],
    ),
    **calls("get", bounds.get, [(3, "unknown bound 3"), ([], r"unknown bound \[\]")]),
    **calls(
        "evaluate",
        lambda names: bounds.evaluate(ATT, names),
        [(None, "bounds is None"), ([3], "unknown bound 3")],
    ),
    **calls(
        "whole_layer",
        lambda rule: bounds.whole_layer(ATT, "yudin", rule=rule),
        [(3, "unknown rule 3")],
    ),
    **calls(
        "layer",
        lambda att: bounds.evaluate(att, "yudin"),
        [(3, "was given is 3; give one Attention")],
    ),
    **calls("norm of", lb.spectral_norm, [(None, "spectral_norm was given is None")]),
    **calls(
        "x",
        lambda x: lb.Attention(x, ATT.w_q, ATT.w_k, ATT.w_v),
        [([[1.0]], "x is \\[\\[1.0\\]\\]; it must be a torch tensor")],
    ),
    **calls(
        "parts",
        lambda given: changed(ATT, **given),
        [
            ({"scale": "x"}, "scale is 'x'"),
            ({"cap": "x"}, "cap is 'x'"),
            ({"mask": "x"}, "mask is .x.; it must be a torch tensor"),
        ],
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_refused_in_one_sentence(call: str) -> None:
    run, said = CALLS[call]
    with pytest.raises(LipboundError, match=said) as error:
        run()
    assert "\n" not in str(error.value)


def test_float64_is_not_advised_where_it_is_used() -> None:
    op = AutogradJacobian(torch.sin, torch.zeros(3, dtype=torch.float64))
    with pytest.raises(LipboundError) as error:
        operator_norm(op, tol=1e-18, delta=1e-10)
    assert "float64 or" not in str(error.value)
    assert "larger tol" in str(error.value)


WITHOUT: list[Callable[[lb.Attention], torch.Tensor]] = [
    lambda att: bounds.over_ball(att, 0.1),
    lambda att: bounds.get("yudin").over_ball(att, 0.1),
    lambda att: bounds.get("dasoulas")(
        changed(att, sinks=torch.zeros(att.heads, dtype=torch.float64))
    ),
    lambda att: bounds.get("lipbound_every")(att),
]


@pytest.mark.parametrize("call", WITHOUT)
def test_bounds_without_derivatives_say_so(call: Callable[[lb.Attention], torch.Tensor]) -> None:
    att = changed(ATT, w_q=ATT.w_q.clone().requires_grad_())
    with pytest.raises(LipboundError, match=r"ha(s|ve) no derivatives"):
        call(att)
    with torch.no_grad():
        assert bool(torch.isfinite(call(att)).all())
