"""Several trainer ranks are one trainer: the same gradients, the same log, and they stop and resume together."""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks_job
import torch
from safetensors.torch import load_file
from test_train import log_of

from dspark import UserError, ranks
from dspark.paths import ROOT


def two_ranks(folder: Path, job: str) -> None:
    """tests/ranks_job.py in two forked processes, which saves the seconds that torchrun takes to import torch anew."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def child(rank: int) -> None:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(port)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        ranks_job.main(str(folder), job)

    processes = [multiprocessing.get_context("fork").Process(target=child, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]


def torchrun(folder: Path, job: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "ranks_job.py"), str(folder), job]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def same_step(one: Path, two: Path, begun: dict[str, torch.Tensor]) -> None:
    """Assert that two checkpoints of a first step, from the weights `begun`, hold the same optimiser states and update.

    States agree to float32's rounding. Muon orthogonalises in bfloat16 and, over ranks, sums norms and products in it:
    directions in which a gradient has little more than rounding errors come out differently. In a simulation of these
    shapes that was 0.03 of the update where there were none and 0.3 where most were such; ranks that each
    orthogonalised their own share were off by 0.5 to 0.8, but for one case. AdamW's first step is the gradient's sign,
    which may turn where that is all rounding error.
    """
    states = [torch.load(step / "optimizers.pt", weights_only=True) for step in (one, two)]
    for mine, theirs in zip(*states, strict=True):
        assert mine["state"] and mine["state"].keys() == theirs["state"].keys()
        for index, state in mine["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(theirs["state"][index][name], value, rtol=1e-4, atol=2e-7)
    mine, theirs = (load_file(step / "trained.safetensors") for step in (one, two))
    assert mine.keys() == theirs.keys() == begun.keys()
    matrices = {name for name, weight in begun.items() if name.startswith(("fc.", "layers.")) and weight.ndim == 2}
    for names, tolerance in ((matrices, 0.4), (begun.keys() - matrices, 0.2)):
        update, difference = (
            torch.cat([(theirs[name] - weights[name]).flatten() for name in sorted(names)]).norm()
            for weights in (begun, mine)
        )
        assert update > 0 and difference < tolerance * update, (float(difference), float(update))


def test_two_ranks_give_one_processes_gradients_and_make_its_step(folder):
    """Pitfall 24: the loss is normalised over the micro-batches of all ranks, however unevenly they lie."""
    two_ranks(folder, "gradients")
    for micro_batches in (1, 3, 4):
        one = ranks_job.first_gradients(folder / f"run-1-{micro_batches}", micro_batches)
        two = torch.load(folder / f"gradients-2-{micro_batches}.pt", weights_only=True)
        assert set(one) == set(two) and any(gradient.abs().max() > 1e-3 for gradient in one.values())
        for name, gradient in one.items():
            torch.testing.assert_close(two[name], gradient, rtol=1e-5, atol=1e-6, msg=f"{name}, {micro_batches}")
        mine, theirs = (log_of(folder / f"run-{k}-{micro_batches}")[0] for k in (1, 2))
        assert {k: float(v) for k, v in theirs.items()} == pytest.approx(
            {k: float(v) for k, v in mine.items()}, abs=2e-4
        )
        begun = ranks_job.build(folder / f"begun-{micro_batches}", micro_batches, steps=1).drafter
        begun = {name: weight.detach() for name, weight in begun.named_parameters() if weight.requires_grad}
        same_step(*(folder / f"run-{k}-{micro_batches}" / "step-000001" for k in (1, 2)), begun)


def test_a_killed_rank_stops_all_and_they_resume_as_if_nothing_had_been(folder):
    killed = torchrun(folder, "killed")  # the second rank, by itself, at step 8 of 12
    assert killed.returncode != 0 and "-9" in killed.stderr, killed.stderr[-3000:]
    assert sorted(path.name for path in (folder / "run-killed").glob("step-*")) == ["step-000005"]
    (folder / "run-killed").rename(folder / "run-resumed")
    two_ranks(folder, "resumed")
    two_ranks(folder, "straight")
    assert (
        log_of(folder / "run-resumed") == log_of(folder / "run-straight") and len(log_of(folder / "run-resumed")) == 12
    )
    mine, theirs = (
        load_file(folder / f"run-{k}" / "step-000012" / "trained.safetensors") for k in ("resumed", "straight")
    )
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs) and set(mine) == set(theirs)


def test_a_rank_keeps_its_share_of_weights_and_optimizer_state(folder):
    """FSDP2: between steps nothing is there twice."""
    two_ranks(folder, "shares")
    alone = ranks_job.build(folder / "run-alone", 3, steps=12)
    alone.run()
    shares = [torch.load(folder / f"bytes-shares-{rank}.pt", weights_only=True) for rank in range(2)]
    for whole, *parts in zip(ranks_job.bytes_at_rest(alone), *shares, strict=True):
        assert sum(parts) == whole and max(parts) < 0.6 * whole


def test_a_gpu_that_is_promised_and_not_there_is_an_error(monkeypatch):
    """Never a training on the CPU without a word; who hides all GPUs wants just that."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES = '4,5', but torch sees no GPU"):
        ranks.start()
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert ranks.start() == (0, 1, "cpu")


def test_a_rank_ends_with_its_torchrun(tmp_path):
    """Torchrun, killed, cannot end its ranks, which it put into sessions of their own."""
    script, alive = tmp_path / "rank.py", tmp_path / "alive"
    script.write_text(
        "import os, pathlib, time\nfrom dspark import ranks\nranks.start()\n"
        f"pathlib.Path({str(alive)!r}).write_text(str(os.getpid()))\ntime.sleep(90)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    agent = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    try:
        until(lambda: alive.exists() and alive.read_text(), 80)
        pid = int(alive.read_text())
        assert runs(pid)
    finally:
        agent.kill()
        agent.wait()
    until(lambda: not runs(pid), 20)


def runs(pid: int) -> bool:
    """Whether the process is there, and not only as a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(reached, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.1)
