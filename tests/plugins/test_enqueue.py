"""What a launch asks of the driver."""

from __future__ import annotations

import pytest
from fake_cuda import fake

from thor_dflash.plugins.cuda.driver import Gate
from thor_dflash.plugins.cuda.enqueue import enqueue
from thor_dflash.plugins.launch import Launch

OVERLAP, CLUSTER = 6, 4
"""CUlaunchAttributeID of programmatic stream serialization and of the cluster's size."""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cluster", [1, 4])
def test_clusters_and_overlap_are_attributes_of_one_launch(
    overlap: bool, cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = fake(monkeypatch)
    gate = Gate()
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
