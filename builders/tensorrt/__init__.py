"""Builds TensorRT engines from a package's graphs.

    graph (ONNX, what ONNX Runtime runs) -> program (launch list, weights packed)
        -> deployment graph (ONNX again: one custom node per step) -> parser -> network -> engine

Weights that plugins read are inputs of the network, not constants of it. Then an engine is small,
all engines of a package share one copy of the weights, and TensorRT can neither reorder nor copy
them. Bytes of Qwen3.6-27B with its drafter, prefill steps of 512 and 128 rows, by how weights are
held (counted from shapes; a test checks the figures):

    constants, an engine per graph                                  54.1 GB
    constants, profiles of one engine                               impossible: the graphs differ
    inputs, an engine per graph                                     18.0 GB
    inputs, and a prefill with TensorRT's own products              31.8 GB

So weights are inputs, and each graph is an engine. Only the prefill with TensorRT's own products
holds constants; the sizes of its step are profiles of one engine, which share them.

Not used, and why: weight streaming (no gain on a Thor, whose memory is shared with the CPU),
stripped plans and refit (plans are small already), version compatibility (engines are built where
they run), declared aliases (TensorRT copies an aliased tensor; instead, the runtime binds a state
and its next value to one address, and nothing else reads the state).
"""
