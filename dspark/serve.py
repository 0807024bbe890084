"""Live verifier and trainers from one profile: their command lines, and processes that start and stop together.

`python3 -m dspark serve --profile P` starts vLLM with the hidden-state connector, waits until it is healthy, trains
under torchrun, and stops everything at the end, on Ctrl-C and on a crash. `--only verifier` and `--only trainer` start
one half, for two machines; `--drafter D` serves the target with a trained drafter instead; `--dry-run` prints the
commands.
"""

import argparse
import csv
import ctypes
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dspark.config import PRESETS
from dspark.paths import ROOT
from dspark.target import resolve_dtype

STARTUP = 3600.0  # seconds that a verifier may take to become healthy, at first and when it is started again
TRAINER_GRACE = 40.0  # torchrun gives its ranks 30 s to end, then kills them
# Servers are asked directly: a proxy that the environment names would see the prompts, and cannot reach the loopback.
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


@dataclass(frozen=True)
class Profile:
    """Who runs where. Of the GPUs that CUDA_VISIBLE_DEVICES names (else all) the verifier takes the first
    `tensor_parallel`, trainers the rest, or the first on a machine of their own; with `colocated` every GPU of the
    verifier has a trainer too. No GPUs: all on the CPU."""

    preset: str  # drafter and target, a name of dspark.config.PRESETS
    trainers: int = 1  # ranks
    gpus: int = 0  # of one machine
    tensor_parallel: int = 1
    colocated: bool = False
    gpu_memory: float = 0.9  # share of each of its GPUs that vLLM may take
    max_model_len: int = 2048
    max_num_seqs: int = 64
    dtype: str = "bfloat16"
    budget: int = 4 << 30  # bytes that the verifier may hold for slow trainers
    shared_memory: bool = True  # for trainers that listen on the loopback
    row_tokens: int = 4096  # a packed row
    anchors: int = 512  # blocks a row
    micro_batches: int = 8  # rows a step, over all ranks


KIMI = Profile(
    "kimi-k2.6", trainers=8, gpus=8, tensor_parallel=8, colocated=True, gpu_memory=0.68, max_model_len=20000,
    max_num_seqs=16, row_tokens=20000,
)  # fmt: skip
PROFILES = {
    "cpu": Profile(
        "smollm2-135m",
        trainers=2,
        row_tokens=1024,
        anchors=96,
        micro_batches=4,
        budget=256 << 20,
        dtype=str(resolve_dtype("auto", training=True)).removeprefix("torch."),
    ),  # fmt: skip
    "h200x8": Profile("qwen3-8b", trainers=6, gpus=8, tensor_parallel=2, max_model_len=4096, micro_batches=48),
    "kimi-k2.6": KIMI,
    "kimi-k2.7-code": replace(KIMI, preset="kimi-k2.7-code"),
}
ON_CPU = {  # what vLLM needs without a GPU; it also wants --enforce-eager and a small --gpu-memory-utilization
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}
# For both ends of the stream. A message of more than 32 MB gets fresh memory each time, and without huge pages the
# kernel hands it out 4 KB at a time, which costs more than copying it (glibc 2.35 and later; others ignore this).
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # to draft there: the one runner with DSpark


class Command(NamedTuple):
    argv: list[str]
    environment: dict[str, str]  # beside the caller's own
    grace: float = 10.0  # seconds to end in when it is stopped

    def __str__(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.argv])


def speculative_config(layer_ids: tuple[int, ...]) -> dict:
    """vLLM's extraction of these layers (`aux_hidden_state_layer_ids`), which drafts nothing."""
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}
    return {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}


def transfer_config(endpoints: list[str], budget: int, shared_memory: bool) -> dict:
    return {
        "kv_connector": "HiddenStateConnector",
        "kv_connector_module_path": "dspark.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"endpoints": endpoints, "budget": budget, "shared_memory": shared_memory},
    }


def verifier_command(
    profile: Profile, endpoints: list[str], host: str = "127.0.0.1", port: int = 8000, model: str | None = None,
    trust_remote_code: bool = False, extra: tuple[str, ...] = (), transfer: dict | None = None,
    drafting: dict | None = None,
) -> Command:  # fmt: skip
    """vLLM's OpenAI-compatible server for the profile's target; `model` is a folder in place of its hub name,
    `transfer` another --kv-transfer-config than our connector's. With `drafting`, a --speculative-config, it drafts and
    streams nothing."""
    shape = PRESETS[profile.preset]
    layer_ids = (*shape.aux_hidden_state_layer_ids, shape.target_num_hidden_layers)
    interpreted = bool(drafting) and not profile.gpus
    argv = [
        sys.executable, "-m", "dspark.vllm_engine" if interpreted else "vllm.entrypoints.openai.api_server",
        "--model", model or shape.target,
        "--served-model-name", shape.target,
        "--host", host, "--port", str(port),
        "--dtype", profile.dtype,
        "--tensor-parallel-size", str(profile.tensor_parallel),
        "--max-model-len", str(profile.max_model_len),
        "--max-num-seqs", str(profile.max_num_seqs),
        "--speculative-config", json.dumps(drafting or speculative_config(layer_ids)),
    ]  # fmt: skip
    if not drafting:
        here = all(endpoint.startswith("tcp://127.") for endpoint in endpoints) and sys.platform == "linux"
        ours = transfer_config(endpoints, profile.budget, profile.shared_memory and here)
        argv += ["--kv-transfer-config", json.dumps(transfer or ours)]
    if trust_remote_code:
        argv.append("--trust-remote-code")
    environment = {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1"} | HUGE_PAGES
    if profile.gpus:
        passes = {"pass_config": {"fuse_allreduce_rms": False}}
        argv += ["--gpu-memory-utilization", str(profile.gpu_memory), "--compilation-config", json.dumps(passes)]
        environment["CUDA_VISIBLE_DEVICES"] = _visible(0, profile.tensor_parallel)
    else:
        argv += ["--gpu-memory-utilization", "0.3", "--enforce-eager"]
        environment |= ON_CPU | (INTERPRETED if interpreted else {})
    return Command([*argv, *extra], environment)


def drafting_config(drafter: str, n: int) -> dict:
    """vLLM's configuration for a folder that it can serve, or for the hub name of a DSpark drafter."""
    if not Path(drafter).is_dir():
        return {"method": "dspark", "model": drafter, "num_speculative_tokens": n}
    from dspark.vllm_engine import speculative_config

    return speculative_config(drafter, n)


def trainer_command(
    profile: Profile, verifier: str, listen: str, port: int, train_args: list[str], alone: bool = False
) -> Command:
    """torchrun with the profile's ranks; rank r listens on port + r of `listen`. alone: no verifier is started beside
    them, whose GPUs they would leave to it."""
    argv = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(profile.trainers),
        "-m", "dspark", "train", "--preset", profile.preset, "--target", PRESETS[profile.preset].target,
        "--verifier", verifier, "--listen", f"tcp://{listen}:{port}",
        "--block-sizes", str(PRESETS[profile.preset].max_draft_tokens),
        "--dtype", profile.dtype, "--row-tokens", str(profile.row_tokens), "--anchors", str(profile.anchors),
        "--micro-batches", str(profile.micro_batches), *train_args,
    ]  # fmt: skip
    environment = {"PYTHONPATH": str(ROOT)} | HUGE_PAGES
    if profile.gpus:
        first = 0 if profile.colocated or alone else profile.tensor_parallel
        environment["CUDA_VISIBLE_DEVICES"] = _visible(first, profile.trainers)
        argv.insert(argv.index("--verifier"), "--heldout-prompts=0")  # held-out tau needs the target whole
    else:
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return Command(argv, environment, TRAINER_GRACE)


def _visible(first: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES for `count` of the caller's GPUs from the `first` on; ValueError if it names too few."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(number) for number in range(first + count)]
    if len(names) < first + count:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES = {given!r} names {len(names)} GPUs, the profile wants {first + count}: name more, "
            "or change trainers or tensor_parallel by --config"
        )
    return ",".join(names[first : first + count])


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """In a child: this signal when the thread that started it ends, however it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # 1: PR_SET_PDEATHSIG


class Fleet:
    """Processes that are stopped together when the `with` block is left, with all that they started."""

    def __init__(self, folder: Path, quiet: bool = False):
        self.folder, self.quiet = folder, quiet  # the folder is for their logs, quiet keeps them off the terminal
        self.processes: dict[str, subprocess.Popen] = {}
        self.graces: dict[str, float] = {}
        self.last_lines: dict[str, deque] = {}
        self.told_to_end = 0  # the signal

    def __enter__(self) -> "Fleet":
        numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) is not signal.SIG_IGN]
        self._handlers = {number: signal.signal(number, self._end) for number in numbers}
        return self

    def _end(self, number: int, *_) -> None:
        """Raise, so that __exit__ runs. Raised while Python forks, or in a destructor, it would be lost: the loops that
        wait look for the signal too."""
        self.told_to_end = number
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)

    def _look_for_the_end(self) -> None:
        if self.told_to_end:
            self._end(self.told_to_end)

    def __exit__(self, *_) -> None:
        for name in list(self.processes):
            self.stop(name)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(self, name: str, command: Command) -> subprocess.Popen:
        """Start a process in a session of its own, in place of a former one of that name; its output goes to
        <folder>/<name>.log and the terminal."""
        if name in self.processes:
            self.stop(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            command.argv, env=os.environ | command.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, errors="replace", start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        self.processes[name], self.last_lines[name] = process, deque(maxlen=20)
        self.graces[name] = command.grace
        threading.Thread(target=self._copy_log, args=(name, process), daemon=True).start()
        return process

    def _copy_log(self, name: str, process: subprocess.Popen) -> None:
        with process.stdout, (self.folder / f"{name}.log").open("a") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self.last_lines[name].append(line)
                if not self.quiet:
                    print(f"[{name}] {line}", end="", flush=True)

    def wait_healthy(self, name: str, url: str, seconds: float = STARTUP, waiting: str | None = None) -> None:
        """Until GET url/health answers, or the process `waiting` for it has ended; RuntimeError if the server's process
        ends before or takes longer."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._look_for_the_end()
            if waiting and self.processes[waiting].poll() is not None:
                return
            engine_died = any("EngineDeadError" in line for line in list(self.last_lines[name]))  # vLLM may live on
            if self.processes[name].poll() is not None or engine_died:
                break
            try:
                open_url(f"{url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        last = "".join(self.last_lines[name])
        raise RuntimeError(f"{name} did not become healthy; its log is {name}.log, its last words:\n{last}")

    def stop(self, name: str, grace: float | None = None) -> None:
        """SIGTERM to the process and all that it started, SIGKILL to what is left after `grace` seconds (default: its
        command's)."""
        process = self.processes.pop(name)
        signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + (self.graces[name] if grace is None else grace)
        while signal_group(process, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        signal_group(process, signal.SIGKILL)
        process.wait()

    def wait(self, name: str, keep: str | None, command: Command | None, url: str, restarts: int = 3) -> int:
        """Exit code of `name`; meanwhile start `keep` (the verifier) again whenever it dies, `restarts` times."""
        while (code := self.processes[name].poll()) is None:
            self._look_for_the_end()
            if keep and self.processes[keep].poll() is not None:
                if restarts == 0:
                    raise RuntimeError(f"{keep} died again and again; its log is {keep}.log")
                restarts -= 1
                print(f"dspark: {keep} died and is started again; training waits for it", flush=True)
                self.start(keep, command)
                self.wait_healthy(keep, url, waiting=name)
            time.sleep(0.3)
        return code


def follow(process: subprocess.Popen, log: Path) -> Iterator[dict[str, str]]:
    """The rows of a training's log.csv as they are written, until the process has ended."""
    seen, ended = 0, False
    while not ended:
        time.sleep(0.1)
        ended = process.poll() is not None
        rows = list(csv.DictReader(log.read_text().splitlines())) if log.exists() else []
        yield from rows[seen:]
        seen = len(rows)


def free_ports(count: int) -> range:
    """So many ports of the loopback in a row that nobody listens on; below those that systems give to connections."""
    while True:
        first = random.randrange(20000, 32000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return range(first, first + count)
        except OSError:
            pass


def signal_group(process: subprocess.Popen, number: int) -> bool:
    """Send a signal to a process and all that it started; whether any of them is left."""
    process.poll()  # a dead leader must not pass for a living one
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="dspark serve", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu", choices=PROFILES)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of Profile fields to change")
    parser.add_argument(
        "--only", choices=("verifier", "trainer"), help="start one half, for two machines: each takes its first GPUs"
    )
    parser.add_argument("--drafter", help="serve the target with this drafter, a folder or hub name; no training")
    parser.add_argument("-n", type=int, default=7, help="tokens it drafts a step: %(default)s")
    parser.add_argument("--verifier-host", default="127.0.0.1", help="where the verifier's API listens")
    parser.add_argument("--http-port", type=int, default=8000, help="of the verifier's API")
    parser.add_argument("--trainer-host", default="127.0.0.1", help="where trainers listen for hidden states")
    parser.add_argument("--port", type=int, default=29600, help="rank r listens on this + r")
    parser.add_argument("--model", help="folder of the target's weights (default: the profile's hub name)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let vLLM run the target's own code")
    parser.add_argument(
        "--transport", choices=("zmq", "mooncake"), default="zmq", help="mooncake: see dspark/mooncake.py"
    )
    parser.add_argument("--mooncake-master", default="127.0.0.1:50051", metavar="HOST:PORT", help="%(default)s")
    parser.add_argument("--mooncake-protocol", choices=("tcp", "rdma"), default="tcp")
    parser.add_argument("--vllm-args", default="", help="further arguments for vLLM, as one text")
    parser.add_argument("--out", type=Path, default=Path("runs/stream"), help="run folder: drafter and logs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument("train_args", nargs="*", help="after --: arguments for `dspark train`")
    args = parser.parse_args(argv)
    profile = replace(PROFILES[args.profile], **args.config)
    url = f"http://{args.verifier_host}:{args.http_port}"
    endpoints = [f"tcp://{args.trainer_host}:{args.port + rank}" for rank in range(profile.trainers)]
    model = args.model
    if model is None and PRESETS[profile.preset].target == "smollm2-135m":
        from dspark.target import embedded_target

        model = str(embedded_target())
    transfer, further = None, []
    if args.transport == "mooncake":
        from dspark import mooncake

        transfer = mooncake.transfer_config(args.mooncake_master, args.mooncake_protocol)
        further = ["--transport=mooncake", "--mooncake-master", args.mooncake_master]
        further += ["--mooncake-protocol", args.mooncake_protocol]
    only, commands = "verifier" if args.drafter else args.only, {}
    if only != "trainer":
        commands["verifier"] = verifier_command(
            profile, endpoints, args.verifier_host, args.http_port, model, args.trust_remote_code,
            tuple(shlex.split(args.vllm_args)), transfer,
            drafting_config(args.drafter, args.n) if args.drafter else None,
        )  # fmt: skip
    if only != "verifier":
        train_args = [*further, "--out", str(args.out), *args.train_args]
        commands["trainer"] = trainer_command(
            profile, url, args.trainer_host, args.port, train_args, alone=only == "trainer"
        )
    if args.dry_run:
        print(*commands.values(), sep="\n")
        return 0
    return run(commands, url, args.out / "logs")


def run(commands: dict[str, Command], url: str, logs: Path) -> int:
    """Start what `commands` name, the verifier first, and return the exit code of the last."""
    with Fleet(logs) as fleet:
        if "verifier" in commands:
            fleet.start("verifier", commands["verifier"])
            fleet.wait_healthy("verifier", url)
        if "trainer" not in commands:
            return fleet.wait("verifier", None, None, url)
        fleet.start("trainer", commands["trainer"])
        code = fleet.wait("trainer", "verifier" if "verifier" in commands else None, commands.get("verifier"), url)
    if code:
        print("dspark: a trainer rank failed, all were stopped; the same command resumes from the last checkpoint")
    return code
