"""Samples measured side by side: the same numbers, errors and interruptions as one after the other.
Memory that is used again."""

import threading

import numpy as np
import pytest
import torch

import lipbound as lb
from lipbound.devices import SERIAL, Room, side_by_side, threads_for
from lipbound.errors import LipboundError


@pytest.fixture
def threads():
    """Sets the number of torch's threads, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_results_are_in_order_and_threads_are_shared_out(threads):
    threads(4)
    meeting = threading.Barrier(2, timeout=60)  # passed only by two at once

    def task(name):
        meeting.wait()
        return name, torch.get_num_threads(), torch.is_grad_enabled()

    with torch.no_grad():
        found = side_by_side([lambda: task("a"), lambda: task("b")])
    assert found == [("a", 2, False), ("b", 2, False)]
    assert torch.get_num_threads() == 4
    alone = side_by_side([lambda: (torch.get_num_threads(), threading.current_thread())])
    assert alone == [(4, threading.current_thread())]


def test_an_error_is_raised_once_all_have_ended(threads):
    threads(2)
    ended, meeting = [], threading.Barrier(2, timeout=60)

    def fails():
        meeting.wait()
        raise LipboundError("no")

    def works():
        meeting.wait()
        ended.append(sum(range(10**6)))

    with pytest.raises(LipboundError, match="no"):
        side_by_side([fails, works])
    assert ended == [499999500000]
    assert torch.get_num_threads() == 2


def test_little_work_is_left_to_one_thread(threads):
    threads(2)
    with threads_for(2 * SERIAL):
        assert torch.get_num_threads() == 2
    with threads_for(SERIAL):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("checkpoint", "samples", "exact", "layers"),
    [("builtin:gpt2", 3, 2, "0"), ("builtin:llama", 3, 2, "0"), ("builtin:gpt2", 1, 1, "0-3")],
)
def test_numbers_do_not_depend_on_how_many_threads_there_are(
    checkpoint, samples, exact, layers, threads
):
    """Those of several samples side by side, nor those of several layers of one."""
    runs, options = [], {"samples": samples, "exact_samples": exact, "layers": layers}
    for count in (1, 2, 5):
        threads(count)
        options |= {"bounds": ["lipbound", "yudin_sqrt_n", "castin"], "max_length": 24}
        runs.append(lb.compare(checkpoint, progress=False, **options))
    heads = runs[0].sizes["layer"] * runs[0].sizes["head"]
    assert int(np.isfinite(runs[0].exact).sum()) == exact * heads
    # sums over tokens and inputs, which the processor's library adds up in another order
    rounding = 24 * 128 * np.finfo(float).eps
    for other in runs[1:]:
        for name in runs[0].drop_vars("checksum").data_vars:
            np.testing.assert_allclose(other[name], runs[0][name], rtol=rounding)


def test_a_room_is_used_again_where_it_is_large_enough() -> None:
    room, like = Room(), torch.zeros(1)
    first = room.take(like, 4, 6)
    assert first.shape == (4, 6)
    assert room.take(like, 2, 3).data_ptr() == first.data_ptr()
    assert room.take(like.double(), 2, 3).dtype == torch.float64
    larger = room.take(like, 5, 6)
    assert (larger.shape, larger.dtype) == ((5, 6), torch.float32)
