"""Command lines that vLLM's own parser takes, and processes that never outlive their purpose."""

import functools
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from verifier import free_ports

from dspark import notebooks, serve, vllm_engine
from dspark.__main__ import parser
from dspark.config import PRESETS
from dspark.evaluate import SweepConfig
from dspark.paths import ROOT
from dspark.serve import PROFILES, Command, Fleet, trainer_command, verifier_command
from dspark.stream import Verifier
from dspark.vllm_engine import server_command

ENDPOINTS = ["tcp://127.0.0.1:29600", "tcp://127.0.0.1:29601"]
DRAFTING = {"method": "dspark", "model": "novita/kimi-k2.7-code-dspark", "num_speculative_tokens": 5}
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
for argv in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    names = ("model", "served_model_name", "tensor_parallel_size", "max_model_len", "max_num_seqs", "host", "port",
             "trust_remote_code", "speculative_config", "enforce_eager", "gpu_memory_utilization")
    row = {name: getattr(args, name) for name in names}
    row["dtype"] = str(args.dtype)
    row["fuse_allreduce_rms"] = args.compilation_config.pass_config.fuse_allreduce_rms
    kv = args.kv_transfer_config
    row["connector"] = kv and [kv.kv_connector, kv.kv_connector_module_path, kv.kv_role, kv.kv_connector_extra_config]
    print("PARSED", json.dumps(row))
"""


@pytest.fixture(autouse=True)
def every_gpu(monkeypatch):
    """As where nobody has said which GPUs to use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def release() -> Command:
    return verifier_command(PROFILES["kimi-k2.7-code"], [], trust_remote_code=True, drafting=DRAFTING)


def parsed(commands: list[Command]) -> list[dict]:
    """What vLLM's own parser makes of their arguments, in a process of its own."""
    argvs = [command.argv[3:] for command in commands]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input=json.dumps(argvs), env=environment, capture_output=True, text=True
    )
    rows = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("PARSED ")]
    assert len(rows) == len(argvs), done.stderr[-3000:]
    return rows


def test_vllms_own_parser_takes_the_sweeps_of_the_gpu_profiles(tmp_path):
    """The notebook's profiles of papermill, target alone and with a drafter, as `--engine vllm` starts them."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}))
    profiles, commands = ("kimi-k2.6", "kimi-k2.7-code", "qwen3-8b"), []
    for name in profiles:
        args = parser().parse_args(["run", "--profile", name, "--only", "04"])
        notebooks.check(args)
        values = notebooks.values_for(args)
        config = SweepConfig(
            name, values["target"], max_new_tokens=values["max_new_tokens"], engine=values["engine"],
            dtype=values["dtype"], vllm_args=values["vllm_args"],
        )  # fmt: skip
        commands += [server_command(config, source, 7, 512, 8000) for source in (None, str(tmp_path))]
    rows = parsed(commands)
    for plain, drafting in zip(rows[::2], rows[1::2], strict=True):
        assert plain["speculative_config"] is None and plain["model"] == drafting["model"]
        assert drafting["speculative_config"]["method"] == "dspark"
        assert drafting["speculative_config"]["num_speculative_tokens"] == 7
    for row in rows[:4]:
        assert (row["tensor_parallel_size"], row["max_model_len"], row["trust_remote_code"]) == (8, 20000, True)
        assert row["fuse_allreduce_rms"] is False
    assert not rows[4]["trust_remote_code"]


def test_vllms_own_parser_takes_every_profiles_command():
    commands = [verifier_command(profile, ENDPOINTS, trust_remote_code=True) for profile in PROFILES.values()]
    *rows, released = parsed([*commands, release()])
    assert len(rows) == len(PROFILES) == 4
    for profile, row in zip(PROFILES.values(), rows, strict=True):
        shape = PRESETS[profile.preset]
        assert row["model"] == shape.target and row["served_model_name"] == [shape.target]
        assert row["tensor_parallel_size"] == profile.tensor_parallel and row["dtype"] == profile.dtype
        assert row["max_model_len"] == profile.max_model_len and row["host"] == "127.0.0.1"
        layers = row["speculative_config"]["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        assert layers == [*(i + 1 for i in shape.target_layer_ids), shape.target_num_hidden_layers]
        assert row["speculative_config"]["method"] == "extract_hidden_states"
        options = {"endpoints": ENDPOINTS, "budget": profile.budget, "shared_memory": True}
        assert row["connector"] == ["HiddenStateConnector", "dspark.connector", "kv_producer", options]
        assert row["enforce_eager"] is (profile.gpus == 0)
        assert (row["fuse_allreduce_rms"] is False) == (profile.gpus > 0)
    assert released["speculative_config"] == DRAFTING and released["connector"] is None
    for kimi in (rows[list(PROFILES).index("kimi-k2.6")], released):
        assert (kimi["tensor_parallel_size"], kimi["max_model_len"], kimi["trust_remote_code"]) == (8, 20000, True)
        assert kimi["fuse_allreduce_rms"] is False


@pytest.mark.parametrize("name", ["kimi-k2.6", "kimi-k2.7-code"])
def test_kimi_is_served_as_released(name):
    """--tensor-parallel-size 8 --max-model-len 20000 --trust-remote-code, the last only when asked for."""
    text = str(verifier_command(PROFILES[name], ENDPOINTS))
    assert "--tensor-parallel-size 8 --max-model-len 20000 " in text and '"fuse_allreduce_rms": false' in text
    assert "trust-remote-code" not in text
    assert str(verifier_command(PROFILES[name], ENDPOINTS, trust_remote_code=True)).count("--trust-remote-code") == 1
    assert f"--model moonshotai/Kimi-{name[5:].upper().replace('CODE', 'Code')} " in text


def test_the_release_is_served_with_its_drafter_by_name(capsys):
    argv = [
        "--profile",
        "kimi-k2.7-code",
        "--drafter",
        DRAFTING["model"],
        "-n",
        "5",
        "--trust-remote-code",
        "--dry-run",
    ]
    assert serve.main(argv) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line == str(release()) and "kv-transfer" not in line


def test_a_drafter_in_a_folder_is_served_by_its_own_method(capsys):
    folder = str(ROOT / "data" / "drafters" / "smollm2-135m-dspark")
    assert serve.main(["--profile", "cpu", "--drafter", folder, "-n", "3", "--dry-run"]) == 0
    line = capsys.readouterr().out
    assert "-m dspark.vllm_engine" in line and '"method": "dspark"' in line and "TRITON_INTERPRET=1" in line


def test_gpus_are_split_or_shared():
    def visible(command):
        return command.environment.get("CUDA_VISIBLE_DEVICES")

    split, shared = PROFILES["h200x8"], PROFILES["kimi-k2.6"]
    assert visible(verifier_command(split, ENDPOINTS)) == "0,1"
    assert visible(trainer_command(split, "http://x", "127.0.0.1", 29600, [])) == "2,3,4,5,6,7"
    assert visible(verifier_command(shared, ENDPOINTS)) == "0,1,2,3,4,5,6,7"
    assert visible(trainer_command(shared, "http://x", "127.0.0.1", 29600, [])) == "0,1,2,3,4,5,6,7"
    assert visible(verifier_command(PROFILES["cpu"], ENDPOINTS)) is None


def test_gpus_are_those_that_the_caller_may_use(monkeypatch, capsys):
    """In the caller's order; trainers alone on a machine begin with its first; too few are an error, where wanted."""
    hosts = ["--profile", "h200x8", "--dry-run"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9,8,7,6,5,4,3,2")
    assert serve.main(hosts) == 0
    verifier, trainer = capsys.readouterr().out.splitlines()
    assert "CUDA_VISIBLE_DEVICES=9,8 " in verifier and "CUDA_VISIBLE_DEVICES=7,6,5,4,3,2 " in trainer
    assert serve.main([*hosts, "--only", "trainer"]) == 0
    assert "CUDA_VISIBLE_DEVICES=9,8,7,6,5,4 " in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,2")
    assert serve.main([*hosts, "--only", "verifier"]) == 0
    assert "CUDA_VISIBLE_DEVICES=3,2 " in capsys.readouterr().out
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES = '3,2' names 2 GPUs, the profile wants 8: name more"):
        serve.main(hosts)


def test_the_trainers_command_is_one_that_train_takes(monkeypatch):
    from dspark import train

    seen = []
    monkeypatch.setattr(train, "train", lambda *args: seen.append(args))
    for profile in PROFILES.values():
        argv = trainer_command(profile, "http://127.0.0.1:8000", "127.0.0.1", 29600, ["--out", "x", "--data", "y"]).argv
        assert argv[argv.index("--nproc-per-node") + 1] == str(profile.trainers)
        train.main(argv[argv.index("train") + 1 :])
        name, shape, config, _, _, streamed, *_ = seen[-1]
        assert name == shape.target == PRESETS[profile.preset].target
        assert (config.row_tokens, config.anchors, config.dtype) == (profile.row_tokens, profile.anchors, profile.dtype)
        assert config.block_sizes == (shape.max_draft_tokens,)
        assert streamed["verifier"] == "http://127.0.0.1:8000"


@pytest.mark.parametrize("only, count", [([], 2), (["--only", "verifier"], 1), (["--only", "trainer"], 1)])
def test_dry_run_prints_what_would_run(capsys, only, count):
    hosts = ["--verifier-host", "10.0.0.1", "--trainer-host", "10.0.0.2"]
    assert serve.main(["--profile", "kimi-k2.6", "--dry-run", *only, *hosts, "--", "--data", "mine.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == count
    if "trainer" not in only:
        assert "--host 10.0.0.1" in printed and '"tcp://10.0.0.2:29607"' in printed
    if "verifier" not in only:
        assert "--verifier http://10.0.0.1:8000 --listen tcp://10.0.0.2:29600" in printed
        assert "--data mine.jsonl" in printed


# ---- processes


def python(code: str, **environment) -> Command:
    return Command([sys.executable, "-u", "-c", code], environment)


SERVER = """
import http.server, os, sys
print("began", os.environ["NAME"])
open(os.environ["NAME"] + f".{os.getpid()}", "w").close()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Healthy).serve_forever()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def test_all_that_was_started_stops_even_what_refuses(tmp_path):
    """A process that ignores SIGTERM, and the child of one, which its parent leaves behind."""
    stubborn = python("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)")
    parent = python("import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid); p.wait()")
    with Fleet(tmp_path) as fleet:
        pids = [fleet.start("stubborn", stubborn).pid, fleet.start("parent", parent).pid]
        while not (fleet.last_lines["stubborn"] and fleet.last_lines["parent"]):
            time.sleep(0.02)
        pids.append(int(fleet.last_lines["parent"][0]))
        assert all(map(alive, pids))
        fleet.stop("stubborn", grace=0.2)
        assert not alive(pids[0])
    assert gone(pids)
    assert (tmp_path / "stubborn.log").read_text() == "up\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_command(tmp_path, number):
    """Ctrl-C, a polite kill, and one that leaves no time for anything."""
    (port,) = free_ports(1)
    code = f"""
import sys
from pathlib import Path
from dspark.serve import *
server = Command([sys.executable, "-u", "-c", {SERVER!r}], {{"NAME": "server", "PORT": "{port}"}})
trainer = Command(["sleep", "60"], {{}})
run({{"verifier": server, "trainer": trainer}}, "http://127.0.0.1:{port}", Path("logs"))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    deadline = time.monotonic() + 60
    while len(pids := [int(pid) for pid in children.read_text().split()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    command.send_signal(number)
    command.wait(20)
    assert command.returncode != 0 and gone([command.pid, *pids])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number, raised", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_whose_exception_python_drops_still_ends_all(tmp_path, number, raised):
    """As while it forks, where a kill was lost once."""

    class Drops:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        with pytest.raises(raised), Fleet(tmp_path, quiet=True) as fleet:
            pid = fleet.start("sleeper", Command(["sleep", "60"], {})).pid
            Drops()
            fleet.wait("sleeper", None, None, "")
    finally:
        signal.signal(signal.SIGINT, before)
    assert gone([pid])


def test_a_training_is_followed_to_its_last_row(tmp_path):
    log = tmp_path / "log.csv"
    code = f"""
import time
from pathlib import Path
with Path({str(log)!r}).open("w") as log:
    print("step,loss", file=log, flush=True)
    for step in range(3):
        print(f"{{step}},{{step / 2}}", file=log, flush=True)
        time.sleep(0.3)
"""
    with Fleet(tmp_path, quiet=True) as fleet:
        rows, seen_alive = [], []
        for row in serve.follow(fleet.start("trainer", python(code)), log):
            rows.append(row)
            seen_alive.append(fleet.processes["trainer"].poll() is None)
    assert rows == [{"step": str(step), "loss": str(step / 2)} for step in range(3)]
    assert seen_alive[0]


def test_a_new_process_takes_the_place_of_one_of_its_name(tmp_path):
    with Fleet(tmp_path, quiet=True) as fleet:
        former = fleet.start("verifier", Command(["sleep", "60"], {}))
        assert fleet.start("verifier", Command(["sleep", "60"], {})).pid != former.pid
        assert former.returncode == -signal.SIGTERM


def test_a_process_that_dies_before_it_is_healthy_is_told_with_its_last_words(tmp_path):
    with Fleet(tmp_path) as fleet:
        fleet.start("verifier", python("print('out of memory'); raise SystemExit(3)"))
        with pytest.raises(RuntimeError, match="verifier did not become healthy; .*verifier.log.*\nout of memory"):
            fleet.wait_healthy("verifier", "http://127.0.0.1:1", 20)


def test_a_verifier_that_dies_is_started_again_while_the_trainer_waits(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    trainer = """
import os, pathlib, signal, time
for count in (1, 2):
    while len(found := sorted(pathlib.Path().glob("server.*"), key=lambda p: p.stat().st_mtime)) < count:
        time.sleep(0.02)
    time.sleep(0.5)
    if count == 1:
        os.kill(int(found[0].suffix[1:]), signal.SIGKILL)
print("trained")
"""
    server = python(SERVER, NAME="server", PORT=str(port))
    url = f"http://127.0.0.1:{port}"
    assert serve.run({"verifier": server, "trainer": python(trainer)}, url, tmp_path / "logs") == 0
    said = capfd.readouterr().out
    assert said.count("[verifier] began server") == 2 and "[trainer] trained" in said
    assert "verifier died and is started again; training waits for it" in said
    assert gone([int(path.suffix[1:]) for path in tmp_path.glob("server.*")])


def test_a_failed_trainer_ends_all_with_a_word(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    server = python(SERVER, NAME="server", PORT=str(port))
    commands = {"verifier": server, "trainer": python("raise SystemExit(7)")}
    assert serve.run(commands, f"http://127.0.0.1:{port}", tmp_path / "logs") == 7
    assert "the same command resumes from the last checkpoint" in capfd.readouterr().out
    assert gone([int(path.suffix[1:]) for path in tmp_path.glob("server.*")])


def test_wrong_profiles_are_refused():
    with pytest.raises(TypeError, match="tensor_paralel"):
        replace(PROFILES["cpu"], tensor_paralel=2)


def test_a_proxy_of_the_environment_is_not_asked(tmp_path, monkeypatch):
    """Health, prompts and counters go straight to the server; the proxy is a port at which nobody listens."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()
            metrics = {"time_to_first_token_ms": 1.0, "mean_itl_ms": 1.0}
            self.wfile.write(json.dumps({"choices": [{"token_ids": [7]}], "metrics": metrics}).encode())

        def log_message(self, *_):
            pass

    (closed,) = free_ports(1)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # urlopen keeps the proxies of its first call
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server, Fleet(tmp_path, quiet=True) as fleet:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        fleet.start("verifier", Command(["sleep", "60"], {}))
        fleet.wait_healthy("verifier", url, 3)
        assert Verifier(url, "tiny").post("/v1/completions", prompt=[1])["choices"] == [{"token_ids": [7]}]
        assert vllm_engine.counters(url)["drafts"] == 0
        assert vllm_engine.ask(url, SweepConfig("test", engine="vllm"), [1], [2])[0].tokens == [7]
        server.shutdown()


def test_a_trainer_that_dies_while_the_verifier_starts_again_is_noticed(tmp_path, monkeypatch):
    """The new verifier never becomes healthy: without the look at the trainer, that would be waited for."""
    monkeypatch.setattr(Fleet, "wait_healthy", functools.partialmethod(Fleet.wait_healthy, seconds=5.0))
    again, (closed,) = tmp_path / "again", free_ports(1)
    trainer = f"import os, time\nwhile not os.path.exists({str(again)!r}): time.sleep(0.01)\nraise SystemExit(7)"
    with Fleet(tmp_path, quiet=True) as fleet:
        fleet.start("verifier", Command(["true"], {})).wait()
        fleet.start("trainer", python(trainer))
        verifier = python(f"import time; open({str(again)!r}, 'w').close(); time.sleep(60)")
        assert fleet.wait("trainer", "verifier", verifier, f"http://127.0.0.1:{closed}") == 7


@pytest.mark.parametrize("grace, seconds, code", [(0.0, 60.0, -signal.SIGKILL), (30.0, 0.1, 5)])
def test_a_command_says_how_long_its_end_may_take(tmp_path, grace, seconds, code):
    """torchrun wants up to 30 s for its ranks; killed before, it would leave them."""
    ends = f"def end(*_):\n    time.sleep({seconds})\n    sys.exit(5)\n"
    command = python(f"import signal, sys, time\n{ends}signal.signal(15, end)\nprint('up')\ntime.sleep(60)")
    with Fleet(tmp_path, quiet=True) as fleet:
        process = fleet.start("slow", command._replace(grace=grace))
        while not fleet.last_lines["slow"]:
            time.sleep(0.01)
        fleet.stop("slow")
        assert process.returncode == code
    assert trainer_command(PROFILES["cpu"], "http://x", "127.0.0.1", 29600, []).grace > 30
