"""TensorRT engines from a package's graphs: what becomes an engine, and where the bytes lie.

    graph (ONNX, what ONNX Runtime runs) -> program (launch list, weights packed)
        -> deployment graph (ONNX again: one custom node a step) -> parser -> network -> engine

Weights that plugins read are inputs of the network, not constants of it. Then an engine is a few
megabytes, all engines of a package read one copy, and TensorRT can neither reorder nor copy what it
does not own. Bytes of Qwen3.6-27B with its drafter, by how engines could share weights (from the
tensors' sizes; nothing here has run on a Thor):

    weights in ...                                                    device     disk
    constants, an engine a graph (2 prefills, verify, propose)        58.6 GB    58.6 GB
    constants, profiles of one engine                                 impossible: the graphs differ
    inputs, an engine a graph                                         19.9 GB    19.9 GB
    inputs, and a dense prefill in TensorRT's own FP4 (constants)     32.8 GB    32.8 GB

So: inputs, and an engine a graph. Only the prefill with TensorRT's own linears holds constants, and
there the sizes of a prefill step are profiles of one engine, which share them.

What is left out, and why: weight streaming (a Thor's memory is shared with the CPU, nothing is
gained), stripped plans and refit (plans are small already), version compatibility (it leaves out
plugins, and engines are built where they run).
"""
