"""Launching one kernel."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from thor_dflash.plugins.cuda.driver import Driver, pack
from thor_dflash.plugins.launch import Launch

Arguments = Sequence[tuple[str, int | float]]
"""As `driver.pack` takes them."""


def enqueue(
    driver: Driver, kernel: Any, launch: Launch, arguments: Arguments, *, overlap: bool
) -> None:
    """Launch one kernel on the driver's stream."""
    cu = driver.cu
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.shared
    config.hStream = driver.stream
    attributes: list[Any] = []
    kinds = cu.CUlaunchAttributeID
    if overlap:
        one = cu.CUlaunchAttribute()
        one.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        one.value.programmaticStreamSerializationAllowed = 1
        attributes.append(one)
    if launch.cluster > 1:
        one = cu.CUlaunchAttribute()
        one.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        one.value.clusterDim.x = launch.cluster
        one.value.clusterDim.y = one.value.clusterDim.z = 1
        attributes.append(one)
    config.attrs, config.numAttrs = attributes, len(attributes)
    pointers, held = pack(arguments)
    driver("cuLaunchKernelEx", config, kernel, ctypes.addressof(pointers), 0)
    del held  # the driver has copied the arguments
