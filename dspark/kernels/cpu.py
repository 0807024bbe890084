"""The few-row operations of decoding in bfloat16 (cpu.cpp), for x86 CPUs with AVX512-BF16, or AVX2 at least.

They are compiled once, on first use, with the C++ compiler that $CXX names or `g++`; torch.ops.dspark holds them then.
Without such a CPU or a compiler, or with DSPARK_KERNELS=reference, torch's own operations serve instead.
"""

import functools
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from dspark.paths import cache_dir

log = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("cpu.cpp")
BUILDS = {  # the first whose extensions, spelt as in /proc/cpuinfo, the CPU has
    "AVX512-BF16": ("AVX512", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma", "f16c"}),
    "AVX2": ("AVX2", {"avx2", "fma", "f16c"}),
}
OPTIONS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp")


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


def flags() -> set[str]:
    """What /proc/cpuinfo says the CPU can, among its other words; nothing where there is no such file."""
    cpuinfo = Path("/proc/cpuinfo")
    return set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()


def build() -> str | None:
    """Which of BUILDS this CPU takes."""
    return next((name for name, (_, extensions) in BUILDS.items() if extensions <= flags()), None)


@functools.cache
def available() -> bool:
    """Whether the kernels are there; compiles them (about ten seconds) where they can be."""
    if build() is None:
        return False
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(shlex.split(compiler)[0]) is None:
        log.warning("no C++ compiler (%s): decoding takes about twice as long; install g++", compiler)
        return False
    try:
        library = _compiled(compiler)
        if not hasattr(torch.ops.dspark, "linear"):  # a second copy, from another cache, would end the process
            torch.ops.load_library(library)
    except (subprocess.CalledProcessError, OSError, ImportError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        log.warning("torch's operations serve, for %s does not compile or load: %s", SOURCE.name, reason)
        return False
    return True


def _compiled(compiler: str) -> Path:
    """The library for this source, compiler, torch, made if it is not in the cache."""
    capability, extensions = BUILDS[build()]
    options = [*OPTIONS, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    options += sorted("-m" + name.replace("_", "") for name in extensions)
    identity = "\n".join([SOURCE.read_text(), compiler, torch.__version__, *options])
    library = cache_dir() / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        from torch.utils import cpp_extension  # brings setuptools along

        includes = [f"-I{path}" for path in cpp_extension.include_paths()]
        links = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            command = [*shlex.split(compiler), *options, *includes, str(SOURCE), "-o", str(made), *links]
            subprocess.run(command, check=True, capture_output=True, text=True)
            made.replace(library)  # whole, or not at all
    return library
