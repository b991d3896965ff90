"""Makes nvfp4.npz: one matrix as nvidia-modelopt quantises it and as both packages read it back.

Run in an environment with torch, nvidia-modelopt 0.47.0 and compressed-tensors 0.20.0:
    python tests/goldens/nvfp4/make.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor


def weight() -> np.ndarray:
    """float32 [8, 64]: every tie, a zero block, blocks ten decades apart, ordinary noise."""
    rng = np.random.default_rng(20)
    w = rng.standard_normal((8, 64))
    w[0] = 0
    # The largest value makes the tensor's scale 1, the 6 of a block makes that block's scale 1.
    w[0, 0] = 6 * 448
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])
    w[0, 16:24], w[0, 24:32] = ties, -ties
    # Neighbours in float64, so the cast to float32 makes them the ties again.
    w[0, 32:40], w[0, 40:48] = np.nextafter(ties, 0), np.nextafter(ties, 9)
    w[1, :16] *= 1e-7
    w[2, 16:32] *= 1e4 / 6
    w[3, 32:48] *= 0.003
    return w.clip(-6 * 448, 6 * 448).astype(np.float32)


def main() -> None:
    """Writes the file beside this script."""
    w = weight()
    packed, block_scale, scale2 = NVFP4QTensor.quantize(torch.from_numpy(w.copy()), 16)
    back = packed.dequantize(
        torch.float32, scale=block_scale, double_scale=scale2, block_sizes={-1: 16}
    )
    codes = packed._quantized_data
    theirs = unpack_fp4_from_uint8(codes, *w.shape, dtype=torch.float32)
    np.savez_compressed(
        Path(__file__).parent / "nvfp4.npz",
        weight=w,
        codes=codes.numpy(),
        block_scale=block_scale.view(torch.uint8).numpy(),
        scale2=scale2.numpy(),
        modelopt=back.numpy(),
        compressed_tensors_values=theirs.numpy(),
    )


if __name__ == "__main__":
    main()
