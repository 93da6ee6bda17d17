"""Samples measured side by side: the same numbers, errors and interruptions as one after the other.
Memory that is used again."""

import importlib
import math
import threading

import numpy as np
import pytest
import torch
from support.layers import random_attention

import lipbound as lb
from lipbound.devices import SERIAL, available, side_by_side, threads_for
from lipbound.jacobians import streaming


@pytest.fixture
def threads():
    """Sets the number of torch's threads, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_results_are_in_order_threads_shared_out_and_errors_raised_once_all_have_ended(threads):
    threads(4)
    meeting = threading.Barrier(2, timeout=60)  # passed only by two at once
    ended = []

    def task(name):
        meeting.wait()
        if name == "wrong":
            raise lb.LipboundError("no")
        ended.append(sum(range(10**6)))
        return name, torch.get_num_threads(), torch.is_grad_enabled()

    with torch.no_grad():
        found = side_by_side([lambda: task("a"), lambda: task("b")])
    assert found == [("a", 2, False), ("b", 2, False)]
    with pytest.raises(lb.LipboundError, match="no"):
        side_by_side([lambda: task("wrong"), lambda: task("c")])
    assert ended == [499999500000] * 3
    assert torch.get_num_threads() == 4
    alone = side_by_side([lambda: (torch.get_num_threads(), threading.current_thread())])
    assert alone == [(4, threading.current_thread())]


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    held = {"reserved_bytes": 70, "allocated_bytes": 30}
    stats = {name: {"all": {"current": size}} for name, size in held.items()}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert available(torch.device("cuda")) == 100 + 40


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
    for count in (1, 5):
        threads(count)
        options |= {"bounds": ["lipbound", "yudin_sqrt_n", "castin"], "max_length": 24}
        runs.append(lb.compare(checkpoint, progress=False, **options))
    heads = runs[0].sizes["layer"] * runs[0].sizes["head"]
    assert int(np.isfinite(runs[0].exact).sum()) == exact * heads
    # sums over tokens and inputs, which the processor's library adds up in another order
    rounding = 24 * 128 * np.finfo(float).eps
    for name in runs[0].drop_vars("checksum").data_vars:
        np.testing.assert_allclose(runs[1][name], runs[0][name], rtol=rounding)


def test_where_memory_runs_out_rows_are_tried_and_then_told(monkeypatch):
    att = random_attention("biased").to(torch.float32)
    whole = lb.spectral_norm(att, tol=1e-6)

    def full(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0")

    monkeypatch.setattr(streaming, "HeadJacobian", full)
    again = lb.spectral_norm(att.double().to(torch.float32), tol=1e-6)
    torch.testing.assert_close(again.lower, whole.lower, rtol=2e-6, atol=0)
    monkeypatch.setattr(streaming, "StreamedHeadJacobian", full)
    with pytest.raises(lb.errors.MemoryFullError, match=r"2\.00 GiB.*fewer samples.*device='cpu'"):
        lb.spectral_norm(att)


def test_a_run_that_ran_out_of_memory_goes_on_where_it_was(monkeypatch, tmp_path):
    """Memory is taken when half of the layers are done: what is finished is not measured again."""
    options = {"samples": 1, "layers": [0, 1], "memory": "1 GB", "max_length": 8}
    module = importlib.import_module("lipbound.jacobians.spectral_norm")
    calls, in_range, most = [], module.in_range, [math.inf]

    def counted(att, *given):
        calls.append(att)
        if len(calls) > most[0]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return in_range(att, *given)

    monkeypatch.setattr(module, "in_range", counted)
    whole = lb.compare("builtin:gpt2", bounds=["castin"], **options)
    count, out = len(calls), tmp_path / "run.zarr"
    calls.clear()
    most[0] = count // 2
    with pytest.raises(lb.errors.MemoryFullError, match="no memory left"):
        lb.compare("builtin:gpt2", bounds=["castin"], out=out, **options)
    calls.clear()
    most[0] = math.inf
    resumed = lb.compare("builtin:gpt2", bounds=["castin"], out=out, resume=True, **options)
    assert 0 < len(calls) < count
    np.testing.assert_array_equal(resumed["exact_upper"], whole["exact_upper"])
