"""What must be set before torch or Triton is imported, and what all tests share."""

import os

import pytest

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
