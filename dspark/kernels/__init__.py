"""The block operations that make drafting fast: each a Triton kernel (`*_triton.py`) and a PyTorch reference.

The kernel runs on CUDA tensors, the reference on all others. The environment variable DSPARK_KERNELS forces one of
them: `reference`, or `triton` (without a GPU that needs Triton's interpreter, TRITON_INTERPRET=1, set before Triton
is imported). On CUDA nothing falls back to a reference unasked.
"""

import functools
import importlib
import os

from dspark.kernels import acceptance_loss_reference, block_attention_reference

__all__ = ["acceptance_loss", "block_attention"]


def implementation(name: str, device: str):
    """The function `name`, as kernel or as reference, for tensors on a device of this type."""
    choice = os.environ.get("DSPARK_KERNELS", "auto")
    if choice not in ("auto", "triton", "reference"):
        raise ValueError(f"DSPARK_KERNELS = {choice!r}: one of auto, triton, reference")
    triton = choice == "triton" or choice == "auto" and device == "cuda"
    if triton and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"DSPARK_KERNELS = triton on a {device} tensor: set TRITON_INTERPRET=1 or use a GPU")
    return getattr(importlib.import_module(f"{__name__}.{name}_{'triton' if triton else 'reference'}"), name)


def _choosing(reference):
    @functools.wraps(reference)
    def chosen(*args, **options):
        first = args[0] if args else next(iter(options.values()))
        return implementation(reference.__name__, first.device.type)(*args, **options)

    return chosen


acceptance_loss = _choosing(acceptance_loss_reference.acceptance_loss)
block_attention = _choosing(block_attention_reference.block_attention)
