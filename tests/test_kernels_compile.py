"""Every kernel goes through Triton's real compiler and ptxas for an H200, which the interpreter's tests never touch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is published for Linux only")
SHARED_LIMIT = 227 * 1024  # bytes that one program may have on an H200
KERNELS = {"_forward", "_backward_q", "_backward_kv", "_position", "_rows", "_verify"}


def test_all_kernels_compile_for_sm_90_and_bfloat16_ones_spill_nothing(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    for dtype in ("bfloat16", "float32"):
        assert {row["kernel"] for row in made if row["dtype"] == dtype} == KERNELS
    assert all(row["shared"] <= SHARED_LIMIT for row in made)
    assert not [row for row in made if row["stack"] and row["dtype"] == "bfloat16"]
