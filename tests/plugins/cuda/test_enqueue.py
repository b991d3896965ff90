"""What enqueuing a launch and loading a kernel ask of the driver."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins.fake_driver import fake

from thor_dflash.plugins.cuda.driver import Driver, DriverCalls
from thor_dflash.plugins.cuda.enqueue import enqueue
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import H100, Launch
from thor_dflash.runtime.engines.cuda.engine import enqueue_launches
from thor_dflash.runtime.engines.cuda.graph_capture import capture

OVERLAP, CLUSTER = 6, 4
"""CUlaunchAttributeID of programmatic stream serialization and of the cluster's size."""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cluster", [1, 4])
def test_clusters_and_overlap_are_attributes_of_one_launch(
    overlap: bool, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = fake(monkeypatch)
    gate = DriverCalls()
    launch = Launch("kernel", (8, 2, 1), 64, (), cluster=cluster)
    gate("cuStreamBeginCapture", 0, 0)
    enqueue(gate, 0, "kernel", launch, [("int", 3)], overlap=overlap)
    gate("cuStreamEndCapture", 0)
    assert cuda.graphs == [1]
    (attributes,) = cuda.launched
    assert attributes.keys() == ({OVERLAP} if overlap else set()) | (
        {CLUSTER} if cluster > 1 else set()
    )
    if overlap:
        assert attributes[OVERLAP].programmaticStreamSerializationAllowed == 1
    if cluster > 1:
        size = attributes[CLUSTER].clusterDim
        assert (size.x, size.y, size.z) == (4, 1, 1)


@pytest.mark.parametrize("graph", [True, False])
def test_no_launch_overlaps_what_ran_before_its_step(
    graph: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda = fake(monkeypatch)
    driver = Driver()
    launch = Launch("kernel", (1, 1, 1), 32, (), overlap=True)
    one: Any = SimpleNamespace(launch=launch, source=tmp_path / "kernel.cu"), []
    kernels = Kernels(driver, H100, tmp_path)
    calls = [
        partial(enqueue_launches, driver, kernels, launches, first=i == 0)
        for i, launches in enumerate([[one, one], [one]])
    ]
    capture("it", driver, calls, graph=graph).start()
    assert [OVERLAP in attributes for attributes in cuda.launched] == [False, True, True]
    assert cuda.calls.count("cuGraphDestroy") == graph, "the executable graph is a copy"
