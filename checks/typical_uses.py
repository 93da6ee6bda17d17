"""What users write, as their own type checkers read it: each line is checked by `mypy --strict`
against the installed package (`tests/test_types.py`, `release/check.py`), and none is run."""

from pathlib import Path

import torch
import transformers
import xarray as xr

import lipbound as lb
from lipbound.bounds import Bound

x = torch.randn(1, 5, 8)
w = torch.randn(2, 8, 4)
att = lb.Attention(x, w, w, w, scale=0.5, w_o=torch.randn(2, 4, 8))
module: torch.nn.Module = torch.nn.MultiheadAttention(8, 2)
pretrained: transformers.PreTrainedModel = transformers.BertModel(transformers.BertConfig())
checkpoint = lb.load_checkpoint(pretrained)
inputs = lb.prepare(checkpoint, ["a text", "another"], samples=2, max_length=16)

# whatever has attention is compared: a name, a path, any module, layers
runs: list[xr.Dataset] = [
    lb.compare("builtin:gpt2", samples=2, bounds=["yudin", "lipbound"], map="head_out"),
    lb.compare(Path("checkpoint"), "texts.txt", exact_samples=1, layers=[0, 1], delta=None),
    lb.compare(pretrained, inputs=inputs, layers="0-3", dtype=torch.float64, device="cpu"),
    lb.compare(torch.nn.Linear(1, 1), {"input": x}, progress=False),
    lb.compare(module, x),
    lb.compare([att]),
    lb.compare((att, att), bounds="all", extras=["condition"]),
    lb.compare([att], extras=["wqk_norm", "qk_clip"], tau=100),
    lb.weight_norms("builtin:gpt2", out="weights.zarr"),
    lb.compare(lb.capture(module, {"query": x})),
]
ds = lb.concat([runs[0].isel(sample=[0]), runs[0].isel(sample=[1])])
largest: float = float(ds["exact"].max())
again = lb.load(lb.save(ds, "run.zarr"), damaged="refuse")
both: xr.Dataset = lb.diff("builtin:gpt2", module, {"input_ids": x}, samples=2)
sweeps: list[dict[str, object]] = [dict(row) for row in lb.sweep("sweep.yaml", "runs")]
good: bool = lb.verify(ds, places=2).ok and lb.verify("run.zarr", model=module).ok

# layers, and what is known of them
for layer in lb.capture(module, {"query": x, "key": x, "value": x}, layers=[0]):
    found: lb.Norm = lb.spectral_norm(layer, map="layer", delta=1e-6, vectors=True)
    upper: torch.Tensor = found.upper
    if isinstance(layer, lb.Attention):
        probabilities: torch.Tensor = layer.p
        values: dict[str, torch.Tensor] = lb.bounds.evaluate(layer, ["yudin", "lipbound"])
    else:
        reason: str = layer.reason
names: list[str] = lb.bounds.names()
bound: Bound = lb.bounds.get("yudin")
statement: str = bound.statement
product: torch.Tensor = lb.HeadJacobian(att).jvp(x)
of_tokens: lb.Norm = lb.token_norm(att, "one-token", tol=1e-2)
profile: lb.TokenProfile = lb.token_profile(att)
steepest: torch.Tensor = lb.singular_values(att, k=3, map="head_out").lower
others: tuple[torch.Tensor, torch.Tensor] = lb.frobenius_norm(att), lb.condition_number(att)
curve: xr.Dataset = lb.radius_curve(att, [0.1, 1.0])
crossed = lb.cross_attention(x, x, w, w, w, stream="memory")
of_network: lb.Norm = lb.network_norm(pretrained, inputs.batch, start="embeddings")
cached: xr.Dataset = lb.cache_bits(pretrained, ["a text"], bits=[4, 8])

# training
with lb.attention_probabilities(module) as watched:
    penalty: torch.Tensor = lb.regularizers.JaSMin(k=2)(watched)
    penalty.backward()  # type: ignore[no-untyped-call]  # of torch
weights: torch.Tensor = lb.regularizers.Specformer(1.0, 1.0, 1.0)(module)
monitor = lb.Monitor(module, {"query": x}, every=10, out="steps.zarr")
for step in range(20):
    monitor.step(step)

# what goes into a paper; each takes a run or the path of a stored one
for run in (ds, "run.zarr", Path("run.zarr")):
    text: str = lb.tables.render(run, "markdown", by="layer", width=100)
    rows: int = len(lb.tables.summary(run))
    latex: str = lb.tables.latex(run) + lb.tables.bibtex(run) + lb.cite(run, "text")
    lb.plots.heatmaps(run, "heatmaps.pdf", bounds=["yudin"])
    lb.plots.heatmap(run, "yudin", over="exact").set_title("ratios")
    lb.report(run, "report.html")
lb.plots.by_layer([ds, again], labels=["a", "b"])
lb.plots.heatmaps(both, "diff.pdf")
lb.plots.heatmaps([ds, again, "run.zarr"], "several.pdf", limits=(-1, 3)).savefig("several.png")
lb.plots.heatmap(both, path="ratio.pdf", title="ratio").set_xlabel("head")
lb.plots.token_profile(profile, path="profile.pdf")

try:
    lb.compare("builtin:nothing")
except lb.LipboundError as error:
    message: str = str(error)
