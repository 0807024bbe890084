"""Compiles what the kernels' launchers would launch on an H200 (sm_90), without a GPU, and prints what became of it.

A program of its own, since Triton decides between compiler and interpreter when it is imported. One JSON object a
kernel: its name and dtype, registers a thread, bytes of shared memory a program, bytes of stack (spills) a thread.
"""

import itertools
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"DSPARK_KERNELS": "triton", "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import KernelInterface

from dspark import kernels
from dspark.config import PRESETS
from dspark.heads import MarkovHead
from dspark.kernels import acceptance_loss_triton

HOPPER = GPUTarget("cuda", 90, 32)
COMPILED = {}


def record_instead_of_launching() -> None:
    """From here on kernel[grid](...) only compiles, for HOPPER, with the arguments that it would be launched with."""
    stand_in = SimpleNamespace(
        get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )
    triton.runtime.driver.set_active(stand_in)

    def get(kernel, grid):
        def launch(*args, **options):
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            COMPILED[compiled.hash] = compiled

        return launch

    KernelInterface.__getitem__ = get
    kernels.runs_triton = lambda device: True


def resources(compiled) -> dict:
    """Registers and stack as cuobjdump reads them from the binary, shared memory from Triton's own plan."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said).group(1)) for name in ("REG", "STACK"))
    return {"kernel": compiled.name, "registers": registers, "shared": compiled.metadata.shared, "stack": stack}


def block_attention(dtype: torch.dtype, A: int, n: int, heads: int, kv: int, d: int, window=None, grad=True) -> None:
    shapes = ((A, n, heads, d), *[(1000, kv, d)] * 2, *[(A, n, kv, d)] * 2)
    inputs = [torch.zeros(shape, dtype=dtype, requires_grad=grad) for shape in shapes]
    anchors = torch.arange(A) * 900 // A
    out = kernels.block_attention(*inputs, anchors, anchors * 0, window is not None, window)
    if grad:
        out.sum().backward()


@torch.no_grad()
def markov_decode(dtype: torch.dtype, B: int, temperature: float, pruned: bool = True) -> None:
    config = PRESETS["kimi-k2.6"].replace(vocab_size=40000, mask_token_id=0)
    head = MarkovHead(config).to(dtype)
    base, d2t = torch.zeros(B, 2, 32000, dtype=dtype), torch.zeros(32000, dtype=torch.long) if pruned else None
    anchors = torch.zeros(B, dtype=torch.long)
    with suppress(IndexError):  # nothing was launched, so no token came out
        kernels.markov_decode(base, base, anchors, head, d2t, temperature, anchors)


def acceptance_loss(dtype: torch.dtype, N: int, l1_weight: float) -> None:
    acceptance_loss_triton._product = lambda *args, **options: None  # the CPU's product has no float32 output
    hidden, head, index = torch.zeros(N, 16, dtype=dtype), torch.zeros(32000, 16, dtype=dtype), torch.arange(N)
    kernels.acceptance_loss(hidden, None, head, None, hidden, head, index, index, torch.ones(N), 1.0, 0.5, l1_weight)


def verify(dtype: torch.dtype, B: int, n: int, temperature: float, ragged: bool, q: str = "pruned") -> None:
    """q: of a pruned draft vocabulary, of the same one as the target's, or none (`certain`)."""
    V, width = 163840, {"pruned": 32000, "same": 163840}.get(q)
    logits, drafts = torch.zeros(B, n + 1, V, dtype=dtype), torch.zeros(B, n, dtype=torch.long)
    to_draft = torch.zeros(V, dtype=torch.long) if q == "pruned" else None
    drawn_from = torch.zeros(B, n, width) if width else None
    rows = torch.arange(B * (n + 1)).view(B, n + 1) if ragged else None
    sampled = (torch.zeros(B, n + 1), drawn_from, to_draft) if temperature else ()
    kernels.verify(logits.flatten(0, 1) if ragged else logits, drafts, rows, temperature, *sampled)


JOBS = {  # mostly Kimi's shapes in bfloat16, SmolLM2's in float32; a window comes with causal slots
    torch.bfloat16: [
        (block_attention, (16, 8, 56, 8, 128)),
        (block_attention, (16, 16, 56, 8, 128, 2048)),
        (block_attention, (16, 8, 9, 3, 64)),
        (block_attention, (1, 8, 56, 8, 128, None, False)),
        (markov_decode, (1, 0.0)),
        (markov_decode, (64, 1.0)),
        (markov_decode, (1, 0.0, False)),
        (markov_decode, (64, 1.0, False)),
        (acceptance_loss, (4, 0.9)),
        (acceptance_loss, (4, 0.0)),
        (verify, (2, 7, 0.0, False)),
        (verify, (2, 7, 1.0, True)),
        (verify, (2, 7, 1.0, False, "certain")),
        (verify, (2, 7, 1.0, False, "same")),
        (verify, (2, 0, 0.0, False)),  # the target alone
        (verify, (2, 0, 1.0, True, "certain")),
    ],
    torch.float32: [
        (block_attention, (16, 8, 9, 3, 64, 2048)),
        (markov_decode, (1, 1.0)),
        (markov_decode, (64, 0.0)),
        (acceptance_loss, (4, 0.9)),
        (verify, (2, 7, 1.0, True)),
    ],
}


def compiled(dtype: torch.dtype, job, arguments: tuple) -> list[dict]:
    COMPILED.clear()
    job(dtype, *arguments)
    if not COMPILED:
        raise RuntimeError(f"{job.__name__}{arguments} in {dtype} launched no kernel")
    said = {"job": job.__name__, "dtype": str(dtype).removeprefix("torch."), "arguments": str(arguments)}
    return [said | resources(kernel) for kernel in COMPILED.values()]


def main() -> None:
    record_instead_of_launching()
    jobs = [(dtype, job, arguments) for dtype, several in JOBS.items() for job, arguments in several]
    with multiprocessing.get_context("fork").Pool(2) as pool:  # a job keeps one core busy
        for row in itertools.chain(*pool.starmap(compiled, jobs, chunksize=1)):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
