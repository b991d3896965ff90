"""gdn in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes
from thor_dflash.plugins.numpy_math import rounded, sigmoid, silu, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    n = int(x["accepted"][0])
    taps = x["tail"].shape[0]
    window = np.concatenate([x["tail"], x["record_qkv"]])
    tail, state = window[n : n + taps], _folded(x, a, n)
    inputs = np.concatenate([tail, x["qkv"]])
    q, k, v = _convolved(x, a, wide(inputs))
    decay, beta = _gates(x)
    rows = len(q)
    if a.word("mode") == "prefill":
        rows = int(x["valid"][0])
        tail = inputs[rows : rows + taps]
    o = np.zeros((len(q), a.integer("value_heads"), a.integer("value_dim")))
    d, running = np.zeros_like(o), state
    states: list[Array] = []
    for t in range(rows):
        running, d[t], o[t] = _step(running, q[t], k[t], v[t], decay[t], beta[t])
        states.append(running)
    out = {"o": rounded(o.reshape(len(q), -1), DType.of(x["qkv"])), "next_tail": tail}
    if a.word("mode") == "prefill":
        return out | {"next_state": running.astype(np.float32)}
    out |= {"next_state": state.astype(np.float32), "next_record_qkv": x["qkv"]}
    if a.word("saves") == "states":
        return out | {"next_states": np.stack(states).astype(np.float32)}
    ratio = a.integer("value_heads") // a.integer("key_heads")
    return out | {
        "next_record_k": k[:, ::ratio].astype(np.float32),
        "next_record_d": d.astype(np.float32),
        "next_record_decay": decay.astype(np.float32),
    }


def _folded(x: Arrays, a: Attributes, n: int) -> Array:
    if a.word("saves") == "states":
        return wide(x["state"] if n == 0 else x["states"][n - 1])
    state = wide(x["state"])
    ratio = a.integer("value_heads") // a.integer("key_heads")
    for i in range(n):
        k = np.repeat(wide(x["record_k"][i]), ratio, axis=0)
        d, decay = wide(x["record_d"][i]), wide(x["record_decay"][i])
        state = state * decay[:, None, None] + k[:, :, None] * d[:, None, :]
    return state


def _convolved(x: Arrays, a: Attributes, inputs: Array) -> tuple[Array, Array, Array]:
    weight = wide(x["conv_weight"])[:, 0]
    rows = len(x["qkv"])
    terms = [inputs[j : j + rows] * weight[:, j] for j in range(weight.shape[1])]
    y = silu(np.sum(terms, axis=0))
    hk, hv, dk, dv = (a.integer(n) for n in ("key_heads", "value_heads", "key_dim", "value_dim"))
    q, k, v = np.split(y, [hk * dk, 2 * hk * dk], axis=1)
    q, k = (_unit(u.reshape(rows, hk, dk)) for u in (q, k))
    repeat = hv // hk
    return (
        np.repeat(q * dk**-0.5, repeat, axis=1),
        np.repeat(k, repeat, axis=1),
        v.reshape(rows, hv, dv),
    )


def _unit(u: Array) -> Array:
    norm: Array = np.sqrt(np.sum(u * u, axis=-1, keepdims=True) + 1e-6)
    return u / norm


def _gates(x: Arrays) -> tuple[Array, Array]:
    rate = np.exp(wide(x["a_log"])) * np.logaddexp(0, wide(x["a"]) + wide(x["dt_bias"]))
    return np.exp(-rate), sigmoid(wide(x["b"]))


def _step(
    state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> tuple[Array, Array, Array]:
    state = state * decay[:, None, None]
    d = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
    state = state + k[:, :, None] * d[:, None, :]
    return state, d, np.einsum("hkv,hk->hv", state, q)
