"""CudaEncoder with its kernel on the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

from emulator.runner import Memory, run

from thor_dflash.calib.quantize import cuda_encoder, nvfp4
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.launch import Int, Pointer, Real


class EmulatedEncoder:
    """See CudaEncoder."""

    def encode(self, rows: Array, scaling: cuda_encoder.Scaling) -> nvfp4.EncodedRows:
        """See CudaEncoder."""
        launch, made = cuda_encoder.encode_launch(rows, scaling), cuda_encoder.outputs(rows)
        given = cuda_encoder.inputs(rows, scaling)
        places = {name: x.ctypes.data for name, x in (given | made).items()}
        values: list[Any] = []
        for one in launch.arguments:
            match one:
                case Pointer(port):
                    values.append(ctypes.c_void_p(places.get(port, 0)))
                case Int(value):
                    values.append(ctypes.c_int32(value))
                case Real(value):
                    values.append(ctypes.c_float(value))
        memory = [Memory(x.ctypes.data, x.nbytes, writable=False) for x in given.values()]
        memory += [Memory(x.ctypes.data, x.nbytes) for x in made.values()]
        run(
            cuda_encoder.SOURCE, launch.defines, launch.kernel, launch.grid, launch.threads, 0,
            values, memory,
        )  # fmt: skip
        return cuda_encoder.encoded(rows, made)
