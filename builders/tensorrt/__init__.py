"""TensorRT engines from a package's graphs: what becomes an engine, and where the bytes lie.

    graph (ONNX, what ONNX Runtime runs) -> program (launch list, weights packed)
        -> deployment graph (ONNX again: one custom node a step) -> parser -> network -> engine

Weights that plugins read are inputs of the network, not constants of it. Then an engine is small,
all engines of a package read one copy, and TensorRT can neither reorder nor copy what it does not
own. Bytes of Qwen3.6-27B with its drafter, prefill steps of 512 and 128 rows, by who holds weights
(counted from shapes; a test counts them again):

    constants, an engine a graph                                    54.1 GB
    constants, profiles of one engine                               impossible: the graphs differ
    inputs, an engine a graph                                       18.0 GB
    inputs, and a prefill whose products are TensorRT's own         31.8 GB

So: inputs, and an engine a graph. Only the prefill with TensorRT's own products holds constants;
there the sizes of a prefill step are profiles of one engine, which share them.

What is left out, and why: weight streaming (a Thor's memory is shared with the CPU, so nothing is
gained), stripped plans and refit (plans are small already), version compatibility (engines are
built where they run), declared aliases (TensorRT keeps a copy of what is declared; whoever runs an
engine binds a state and its next value to one address instead, and nothing else reads the state).
"""
