"""How kernel tests run: on a GPU natively, elsewhere under Triton's interpreter, with every launch counted."""

import os
import random
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

if sys.platform != "linux":  # there a missing Triton is a failure, not a reason to skip
    pytest.skip("Triton is published for Linux only", allow_module_level=True)
# Deterministic mode (below) asks for this on a GPU, and would warn at every product without it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter keeps bfloat16 as raw integers and is not to be trusted with it.
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
RELATIVE = {torch.float32: 2e-5, torch.bfloat16: 2**-6}  # of a tensor's norm: a few roundings of the dtype


def fresh_generator() -> torch.Generator:
    """Other inputs in every run; a failing test shows the seed."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


class _Counted:
    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        self.launches[self.kernel.__name__] += 1
        self.launches[self.kernel.__name__, grid] += 1
        return self.kernel[grid]


@contextmanager
def kernels(module, *names):
    """DSPARK_KERNELS=triton, NaN in all fresh memory, and a Counter of the launches of the module's kernels `names`, by
    name and by (name, grid).

    Leaving it without one launch of each fails: a test must not pass because something else did the work.
    """
    launches = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSPARK_KERNELS", "triton")
        for name in names:
            patch.setattr(module, name, _Counted(getattr(module, name), launches))
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
        try:
            yield launches
        finally:
            torch.use_deterministic_algorithms(False)
    assert all(launches[name] for name in names), launches


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype=torch.float32) -> None:
    """The difference is within RELATIVE of the exact tensor's norm; no element is off by more than 30 times that."""
    got, exact = got.detach().double().cpu(), exact.detach().double().cpu()
    assert got.shape == exact.shape and torch.isfinite(got).all()
    allowed, error = RELATIVE[dtype], got - exact
    assert float(error.norm()) <= allowed * float(exact.norm()) + 1e-7 * error.numel() ** 0.5
    assert float(error.abs().max()) <= 30 * allowed * float(exact.abs().max()) + 1e-6
