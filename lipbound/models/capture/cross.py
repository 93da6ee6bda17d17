"""Cross-attention in closed form: one of its streams moves, and what the other makes stays."""

from dataclasses import replace

from torch import Tensor

from lipbound.models.capture.automatic import Padding, named_streams, owner_of
from lipbound.models.capture.seeing.call import Call
from lipbound.schema import MEMORY, QUERIES

SIDES = {QUERIES: "q", MEMORY: "kv"}
"""The sides that are made of each stream of cross-attention: queries, or keys and values."""


def of_stream(call: Call, stream: str) -> Call:
    """Return a call of cross-attention as seen from one of its streams.

    Raises:
        CaptureError: its queries, or its keys and values, are made of more than one stream.
    """
    owner, streams = owner_of(call)
    named = named_streams(streams)
    own = owner.run.module is call.module and {stream} <= set(named) <= set(SIDES)
    if not own or not streams.apart or len(named[stream]) > 1:
        raise call.unsupported(
            "makes its queries, or its keys and values, of several streams of tokens, or of some "
            "that are not its own inputs"
        )
    if call.changed:
        raise call.unsupported(call.changed)
    if owner.run.calls > 1:
        raise call.unsupported(f"calls attention {owner.run.calls} times whenever it runs")
    return replace(call, run=owner.run, stream=named[stream][0], sides=SIDES[stream])


def padding_of(call: Call, padding: Padding) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens of the stream that moves, and of the other, are not padding."""
    samples = call.q.shape[0]
    queries = padding.of_queries(call, samples, call.q.shape[-2])
    keys = padding.of_keys(call, samples, call.k.shape[-2])
    return (queries, keys) if call.sides == "q" else (keys, queries)
