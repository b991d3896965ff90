"""Damages the contents of a package and adapts its manifest, so that no hash shows the damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx

from thor_dflash.package import manifest


def rehash(package: Path) -> None:
    """Write the manifest anew, with the hashes of the files as they are now."""
    old = manifest.read(package)
    files = {name: manifest.hash_file(package / name) for name in old.files}
    text = manifest.render(dataclasses.replace(old, files=files))
    (package / manifest.NAME).write_text(text)


def graph(package: Path, name: str) -> onnx.ModelProto:
    return onnx.load(str(package / f"{name}.onnx"), load_external_data=False)


def spoil_weight(package: Path, name: str) -> None:
    """Flip the sign of the first 64 elements of a stored float32 or bf16 tensor."""
    tensor = next(t for t in graph(package, "verify").graph.initializer if t.name == name)
    place = {e.key: e.value for e in tensor.external_data}
    path = package / place["location"]
    raw = bytearray(path.read_bytes())
    width = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.BFLOAT16: 2}[tensor.data_type]
    for i in range(64):
        raw[int(place["offset"]) + i * width + width - 1] ^= 0x80
    path.write_bytes(raw)
    rehash(package)


def spoil_body(package: Path, step: str, old: str, new: str, name: str = "verify") -> None:
    """Give the node `step` a function body of its own, whose last `old` operator becomes `new`."""
    model = graph(package, name)
    node = next(n for n in model.graph.node if n.name == step)
    body = onnx.FunctionProto()
    body.CopyFrom(next(f for f in model.functions if f.overload == node.overload))
    body.overload = node.overload = f"{node.overload}_spoiled"
    next(n for n in reversed(body.node) if n.op_type == old).op_type = new
    model.functions.append(body)
    (package / f"{name}.onnx").write_bytes(model.SerializeToString())
    rehash(package)
