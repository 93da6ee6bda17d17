"""Everything on a device that is not the CPU: one made of the CPU's numbers, which refuses what a
GPU refuses, in a process of its own."""

import json
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import numpy as np
import pytest
from support import elsewhere, far_device
from support.checks import refused
from support.versions import newer_torch

import lipbound as lb
from lipbound import bounds

pytestmark = newer_torch("2.10", "devices that are written in Python")

LAYERS = (
    ((), None, "float32"),
    (("rotation",), "causal", "float32"),
    (("norm",), None, "float64"),
    (("cap", "sinks"), "causal", "float64"),
)
FAMILIES = ("bert", "gpt2", "vit", "Llama", "Gemma 2", "Phi, q/k-norm", "T5 encoder")
FIGURES = (
    "which-map three-norms token-profile mass-splitting yudin-2 yudin-multihead castin-2 castin-3"
).split()
CLOSE = {"float64": 1e-6, "float32": 5e-4}


def calls(register):
    """Calls of functions in a process of their own, which registers a device first."""
    context = get_context("forkserver")  # of test_interruptions.py, which has torch imported
    with ProcessPoolExecutor(1, mp_context=context, initializer=register) as pool:
        yield lambda f, *args: pool.submit(f, *args).result()


@pytest.fixture(scope="module")
def there():
    """Calls a function in the process that knows the device."""
    yield from calls(far_device.register)


def agree(found, rtol, of_largest=1e-9):
    """Both devices' numbers are the same ones, up to what their methods allow; ``of_largest``: for
    tensors in units of their largest entry."""
    assert found
    assert all(near for near, _, _ in found.values())
    for name, (near, far, allowed) in found.items():
        np.testing.assert_allclose(far, near, rtol=rtol + allowed, atol=of_largest, err_msg=name)


made_of_numbers = pytest.mark.skipif(far_device.REAL, reason="a GPU counts and lacks nothing")
COUNTS = {"estimate": (630, 10), "enclosure": (870, 11), "castin_bias": (240, 1)}
COUNTS |= {"kim": (160, 1), "yudin": (580, 2), "yudin_sqrt_n": (600, 2), "lipbound": (700, 3)}
PUBLISHED = [n for n in bounds.names(None) if "papers" in bounds.get(n).function.__module__]


@made_of_numbers
@pytest.mark.parametrize("what", list(COUNTS))
def test_operations_and_reads_of_a_call(there, what):
    """No more than so many, with room for one look more on another processor: on a GPU each of them
    waits."""
    found = there(elsewhere.counts, what)
    assert (found["operations"], found["reads"]) <= COUNTS[what], found
    assert found["reads"] <= COUNTS[what][1]
    if what in ("estimate", "enclosure", "lipbound"):  # what a run expects to need
        assert 1 / 1.5 < found["most"] / found["planned"] < 1.5, found


@made_of_numbers
def test_samples_of_a_layer_are_one_batch(there):
    """Our bound works on all of them at a time, in the memory that is planned for it."""
    one, many = (there(elsewhere.counts, "lipbound", samples, 24) for samples in (1, 8))
    assert many["reads"] <= one["reads"] + 1, (one, many)
    assert many["operations"] <= one["operations"] + 40, (one, many)
    assert 1 / 1.5 < many["most"] / many["planned"] < 1.5, many


@made_of_numbers
@pytest.mark.parametrize("what", PUBLISHED)
def test_published_bounds_read_twice_at_most(there, what):
    """For eight samples as for one, with another round of rows or of Newton's iteration."""
    one, many = (there(elsewhere.counts, what, samples, 48) for samples in (1, 8))
    assert max(one["reads"], many["reads"]) <= 2, (one, many)
    assert many["operations"] <= one["operations"] + 200, (one, many)


@made_of_numbers
def test_a_capture_reads_little(there):
    """A pass more verifies the first; what was probed and verified then is not looked at again."""
    passes, reads = zip(*there(elsewhere.captures), strict=True)
    assert passes == (2, 1)
    assert reads[0] <= 2 * 18, reads
    assert reads[1] <= 2 * 4, reads


@made_of_numbers
def test_a_step_of_lanczos_reads_nothing_between_looks(there):
    """Twelve more steps, four looks more, and maybe a smaller batch."""
    longer, shorter = (there(elsewhere.counts, what) for what in ("longer", "shorter"))
    assert longer["reads"] - shorter["reads"] <= 5
    assert longer["operations"] - shorter["operations"] <= 12 * 24


@made_of_numbers
def test_decompositions_of_several_heads_are_left_to_the_host(there):
    assert there(elsewhere.decompositions) == set()


@made_of_numbers
def test_the_device_refuses_what_a_gpu_refuses(there):
    found = there(elsewhere.refusals)
    assert len(found) == 7, found


@pytest.mark.each_value
@pytest.mark.parametrize("what", [elsewhere.norms, elsewhere.all_bounds, elsewhere.token_norms])
@pytest.mark.parametrize(("has", "mask", "dtype"), LAYERS)
def test_layers(there, what, has, mask, dtype):
    agree(there(what, has, mask, dtype), CLOSE[dtype])


@pytest.mark.each_value(family=("bert", "vit", "Llama"))
@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_captured(there, family):
    agree(there(elsewhere.captured, family), 0.0, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "every-token", "layers": [0], "samples": 1},
        pytest.param({"weights": "layers"}, marks=pytest.mark.slow),
        pytest.param({"map": "post_norm", "dtype": "float64"}, marks=pytest.mark.slow),
    ],
)
def test_whole_runs(there, bert, options):
    agree(there(elsewhere.run, bert, options), CLOSE["float32"])


@pytest.mark.each_value(family=("bert",))
@pytest.mark.parametrize(
    ("family", "map"), [("bert", "post_norm"), ("gpt2", "pre_norm"), ("Llama", "residual")]
)
def test_networks(there, family, map):
    agree(there(elsewhere.around, family, map), CLOSE["float32"])


@pytest.mark.slow
def test_the_benchmark_of_gpus(there, tmp_path):
    assert there(elsewhere.gpu_benchmark, tmp_path / "gpu.json") == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["device"].startswith(far_device.NAME)
    assert not found["failed"] + found["left_out"]


def test_derivatives(there):
    agree(there(elsewhere.derivatives), CLOSE["float32"], 1e-5)


def test_inputs_and_measures(there):
    agree(there(elsewhere.inputs_and_measures), CLOSE["float64"])


@pytest.fixture(scope="module")
def without_float64():
    """Calls a function in a process whose device knows no float64."""
    yield from calls(far_device.register_without_float64)


@made_of_numbers
@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "vit", "Llama"])
def test_models_are_captured_without_float64(without_float64, family):
    agree(without_float64(elsewhere.captured, family), 0.0, 1e-5)


@made_of_numbers
@pytest.mark.slow
def test_runs_without_float64_are_measured_on_the_cpu(without_float64, bert):
    agree(without_float64(elsewhere.run, bert, {"map": "head_out"}), CLOSE["float32"])
    agree(without_float64(elsewhere.around, "bert", "residual"), CLOSE["float32"])
    options = {"device": far_device.NAME, "bounds": "castin", "max_length": 8, "progress": False}
    compare = partial(without_float64, partial(lb.compare, bert, samples=1, **options))
    (note,) = (one for one in compare().attrs["notes"] if "has no float64" in one)
    assert "the model runs there, and its heads are measured on the CPU" in note
    wide = partial(without_float64, partial(lb.compare, bert, dtype="float64", **options))
    refused(wide, "dtype is 'float64', which the device 'far' does not have")


@made_of_numbers
@pytest.mark.slow
def test_layers_networks_and_penalties_without_float64_are_certified_on_the_cpu(without_float64):
    for what in (elsewhere.norms, elsewhere.all_bounds, elsewhere.token_norms):
        agree(without_float64(what, ("cap", "sinks"), "causal", "float32"), CLOSE["float32"])
    agree(without_float64(elsewhere.around, "gpt2", "pre_norm"), CLOSE["float32"])
    agree(without_float64(elsewhere.derivatives), CLOSE["float32"], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_figures(there, name):
    agree(there(elsewhere.figure_of, name), CLOSE["float32"])
