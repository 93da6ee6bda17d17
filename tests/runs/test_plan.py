"""What a run decides before it computes."""

import pytest

import lipbound as lb
from lipbound.bounds.ours import block_norms
from lipbound.errors import LipboundError


def test_bounds_are_left_out_of_inputs_that_are_too_long_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"samples": 1, "max_length": 12, "layers": [0], "progress": False}
    monkeypatch.setattr(block_norms, "STORED", 8.0 * (block_norms.MATRICES + 4) * 11**2)
    ds = lb.compare("builtin:gpt2", **options)
    assert set(ds.attrs["not_applicable"]) == {"lipbound", "lipbound_block"}
    assert ds.attrs["not_applicable"]["lipbound"].startswith(
        "is computed up to 11 tokens of such heads, and there are 12; take exact_upper"
    )
    assert "yudin_sqrt_n" in ds
    with pytest.raises(LipboundError, match="bound 'lipbound' is computed up to 11 tokens"):
        lb.compare("builtin:gpt2", bounds="lipbound", **options)
