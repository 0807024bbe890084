"""What tests/test_ranks.py runs in each rank: a tiny training, several ranks, on the CPU."""

import os
import signal
import sys
from pathlib import Path

import torch
from tiny import tiny_config, tiny_target

from dspark import ranks
from dspark.data import Sample
from dspark.initial import new_drafter
from dspark.source import LocalSource
from dspark.train import TrainConfig, Trainer

LENGTHS = (30, 20, 9, 25, 30, 14, 30, 11, 4, 22)


def build(folder: Path, micro_batches: int, steps: int) -> Trainer:
    target = tiny_target(scale=12.0)
    generator = torch.Generator().manual_seed(0)
    samples = [
        Sample(torch.randint(3, 40, (n,), generator=generator), torch.arange(n) >= min(3, n - 2)) for n in LENGTHS
    ]
    config = TrainConfig(
        steps=steps, micro_batches=micro_batches, row_tokens=40, anchors=12, block_sizes=(4, 2), dtype="float32",
        save_every=5, heldout_every=1000, lr=1e-3, muon_lr=1e-3,
    )  # fmt: skip
    drafter = new_drafter(tiny_config(), target, samples, 0)
    with ranks.first_alone():
        source = LocalSource(target, samples, folder.parent / "hidden")
    return Trainer(drafter, target, source, [], config, folder)


def first_gradients(folder: Path, micro_batches: int) -> dict[str, torch.Tensor]:
    """Of the first step, summed over the ranks, before they are clipped."""
    run, gradients = build(folder, micro_batches, steps=1), {}
    update = run._update

    def recording(scale):
        named = run.drafter.named_parameters()
        gradients.update({name: ranks.whole(p.grad).clone() for name, p in named if p.requires_grad})
        return update(scale)

    run._update = recording
    run.run()
    return gradients


def bytes_at_rest(run: Trainer) -> tuple[int, int]:
    """What this rank keeps between steps: of weights, and of the optimisers' state."""
    states = [v for o in run.optimizers for state in o.state.values() for v in state.values() if v.ndim]
    return tuple(sum(getattr(t, "_local_tensor", t).nbytes for t in tensors) for tensors in (run.parameters, states))


def main(folder: str, job: str) -> None:
    rank, count, _ = ranks.start()
    folder = Path(folder)
    if job == "gradients":
        for micro_batches in (1, 3, 4):  # of 1, the second rank has none
            gradients = first_gradients(folder / f"run-{count}-{micro_batches}", micro_batches)
            if rank == 0:
                torch.save(gradients, folder / f"gradients-{count}-{micro_batches}.pt")
    else:
        run = build(folder / f"run-{job}", 3, steps=12)
        if job == "killed" and rank == 1:
            log = run._log
            run._log = lambda *args: (log(*args), os.kill(os.getpid(), signal.SIGKILL) if run.step == 8 else None)
        run.run()
        torch.save(bytes_at_rest(run), folder / f"bytes-{job}-{rank}.pt")
    ranks.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
