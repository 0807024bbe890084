"""The few-row operations of decoding (cpu.cpp), for CPUs that multiply bfloat16: AVX512-BF16.

They are compiled once, on first use, with the C++ compiler that $CXX names or `g++`; torch.ops.dspark holds them then.
Without such a CPU or a compiler, or with DSPARK_KERNELS=reference, torch's own operations serve instead.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

import torch

from dspark.paths import cache_dir

SOURCE = Path(__file__).with_name("cpu.cpp")
EXTENSIONS = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma"}  # as /proc/cpuinfo spells them
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")


def serves(weight: torch.Tensor) -> bool:
    """Whether products with this weight [O, K] go through the kernels."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.shape[-1] % 2 == 0
    return fits and os.environ.get("DSPARK_KERNELS", "auto") == "auto" and available()


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[..., V] -> [...]: the first of the highest."""
    return torch.ops.dspark.argmax(logits) if serves(logits) else logits.argmax(-1)


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """softmax(logits [..., V] / temperature), float32 at least."""
    if serves(logits):
        return torch.ops.dspark.probabilities(logits, temperature)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).softmax(-1)


@functools.cache
def available() -> bool:
    """Whether the kernels are there; compiles them (about ten seconds) where they can be."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or not EXTENSIONS <= set(cpuinfo.read_text().split()):
        return False
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        warnings.warn(f"no C++ compiler ({compiler}): bfloat16 decodes about half as fast; install g++", stacklevel=2)
        return False
    try:
        library = _compiled(compiler)
        if not hasattr(torch.ops.dspark, "linear"):  # a second copy, from another cache, would end the process
            torch.ops.load_library(library)
    except (subprocess.CalledProcessError, OSError, ImportError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        warnings.warn(f"torch's operations serve, for {SOURCE.name} does not compile or load: {reason}", stacklevel=2)
        return False
    return True


def _compiled(compiler: str) -> Path:
    """The library for this source, compiler, torch, made if it is not in the cache."""
    flags = [*FLAGS, *sorted("-m" + name.replace("_", "") for name in EXTENSIONS)]
    identity = "\n".join([SOURCE.read_text(), compiler, torch.__version__, *flags])
    library = cache_dir() / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        from torch.utils import cpp_extension  # brings setuptools along

        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        links = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            command = [compiler, *flags, *includes, str(SOURCE), "-o", str(made), *links]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)  # whole, or not at all
    return library
