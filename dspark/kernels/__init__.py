"""The block operations that make drafting fast: each a Triton kernel (`*_triton.py`) and a PyTorch reference.

The kernel runs on CUDA tensors, the reference on all others. The environment variable DSPARK_KERNELS forces one of
them: `reference`, or `triton` (without a GPU that needs Triton's interpreter, TRITON_INTERPRET=1, set before Triton
is imported). On CUDA one thing alone falls back to a reference unasked: Markov decode without a head, or with a gated
or rnn one, which has no kernel.
"""

import functools
import os

import torch

from dspark.kernels import (
    acceptance_loss_reference,
    block_attention_reference,
    markov_decode_reference,
    verify_reference,
)

__all__ = ["acceptance_loss", "block_attention", "markov_decode", "processors", "runs_triton", "verify"]


@torch.compiler.assume_constant_result  # read when a compiled function is traced
def runs_triton(device: str) -> bool:
    """Whether tensors on a device of this type go through the kernels."""
    choice = os.environ.get("DSPARK_KERNELS", "auto")
    if choice not in ("auto", "triton", "reference"):
        raise ValueError(f"DSPARK_KERNELS = {choice!r}: one of auto, triton, reference")
    if choice == "triton" and device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"DSPARK_KERNELS = triton on a {device} tensor: use a GPU, or set TRITON_INTERPRET=1 (slow)")
    return choice == "triton" or choice == "auto" and device == "cuda"


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a made-up few under the interpreter, so that small tests share work as a GPU does."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@functools.wraps(acceptance_loss_reference.acceptance_loss)
def acceptance_loss(hidden, *args, **options):
    chosen = acceptance_loss_reference
    if runs_triton(hidden.device.type):
        from dspark.kernels import acceptance_loss_triton as chosen
    return chosen.acceptance_loss(hidden, *args, **options)


@functools.wraps(block_attention_reference.block_attention)
def block_attention(q, *args, **options):
    if not len(q):
        raise ValueError("block_attention was given no anchor: leave out a row that has none")
    chosen = block_attention_reference
    if runs_triton(q.device.type):
        from dspark.kernels import block_attention_triton as chosen
    return chosen.block_attention(q, *args, **options)


@functools.wraps(markov_decode_reference.markov_decode)
def markov_decode(base, *args, **options):
    chosen = markov_decode_reference
    if runs_triton(base.device.type):
        from dspark.kernels import markov_decode_triton as chosen
    return chosen.markov_decode(base, *args, **options)


@functools.wraps(verify_reference.verify)
def verify(logits, *args, **options):
    chosen = verify_reference
    if runs_triton(logits.device.type):
        from dspark.kernels import verify_triton as chosen
    return chosen.verify(logits, *args, **options)
