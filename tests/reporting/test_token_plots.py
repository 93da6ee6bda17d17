"""Figures of single tokens."""

import numpy as np
import pytest
from support.variants import layer

import lipbound as lb


@pytest.fixture(scope="module")
def profile():
    return lb.token_profile(layer(2, frozenset(), n=9, heads=4))


def test_cells_are_the_norms_and_ticks_the_tokens(profile, tmp_path):
    words = ["[CLS]", "the", "a_very_long_token_of_text", "$x$", "cat", "sat", "on", "it", "."]
    figure = lb.plots.token_profile(profile, words, tmp_path / "tokens.png", sample=1)
    top, bottom = figure.axes[:2]
    for axes, lower in ((top, profile.lower), (bottom, profile.output_lower)):
        np.testing.assert_allclose(axes.images[0].get_array(), lower[1].log10(), atol=1e-9)
    found = [label.get_text() for label in bottom.get_xticklabels()]
    assert found[0] == "[CLS]"
    assert found[3] == "$x$"
    assert found[2].startswith("a_very")
    assert len(found[2]) <= 14
    assert (tmp_path / "tokens.png").stat().st_size > 1000


def test_one_head_is_bars_and_few_tokens_are_named_where_many_are(profile):
    figure = lb.plots.token_profile(profile, heads=[2], width=1.2)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(heights, profile.lower[0, 2].numpy(), rtol=1e-7)
    assert 0 < len(figure.axes[1].get_xticklabels()) < 9
    assert "is named" in figure.axes[1].get_xlabel()


@pytest.mark.parametrize("width", ["column", "page"])
@pytest.mark.parametrize("heads", [None, [1]])
def test_nothing_stands_on_anything_else(profile, width, heads):
    words, how = ["a_long_token_of_text"] * 9, {"heads": heads, "title": "a model, layer 4"}
    figure = lb.plots.token_profile(profile, words, width=width, **how)
    figure.draw_without_rendering()
    panels = figure.axes[:2]
    boxes = [
        figure._suptitle.get_window_extent(),
        *(axes.title.get_window_extent() for axes in panels),
        *(axes.bbox for axes in figure.axes),
    ]
    boxes += [label.get_window_extent() for label in panels[1].get_xticklabels()]
    for i, box in enumerate(boxes):
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:i])
    label = "head" if heads is None else "norm, head 1"
    assert [axes.get_ylabel() for axes in panels] == [label] * 2
