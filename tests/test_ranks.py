"""Several trainer ranks are one trainer: the same gradients, the same log, and they stop and resume together."""

import multiprocessing
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_job
import torch
from safetensors.torch import load_file
from test_train import log_of

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


def test_two_ranks_give_one_processes_gradients(folder):
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
