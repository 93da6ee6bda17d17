"""From a forward pass of a model to the `Attention` of every layer, in five sentences.

The model runs once with an attention function of ours and hooks on its modules, and every
attention, however it is computed, becomes a record of one call with the runs of modules that it
happened in (`seeing`). A sample runs again through the model's untouched attention, and is compared
with the records (`verification`). What queries, keys and values of a call are made of tells its
streams of tokens, and which of these are padding (`streams`). A copy of the module is run again in
float64, and where it makes queries, keys and values of a stream token by token, its projections are
read off it and put together as an `Attention`, which must rebuild the record (`rerun`, `probing`).
Any other layer is that copy itself as a function of the stream, whose derivatives tell which
outputs are whose (`streams`).
"""
