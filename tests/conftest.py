"""What must be set before torch or Triton is imported, and what all tests share."""

import os

import pytest
import zmq

from dspark.setup import has_gpu

GPU = has_gpu()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items):
    for item in items:
        if not GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def target():
    """The embedded real model in float32, tapped where its preset says."""
    import torch

    from dspark.config import PRESETS
    from dspark.target import Target

    return Target.load(dtype=torch.float32, layer_ids=PRESETS["smollm2-135m"].target_layer_ids)


@pytest.fixture
def socket():
    """A trainer rank's end of the wire, not yet bound."""
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.set(zmq.RCVHWM, 1)
    yield socket
    socket.close(0)
