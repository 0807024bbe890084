"""Trainer processes under torchrun that act as one: the same weights, each its share of a step's micro-batches.

Gradients are summed after a step's last backward pass. A DistributedDataParallel wrapper would reduce in every
backward pass, wants the same number of them on every rank, and averages; here a rank may have none, and the loss is
normalised by the weights of all ranks already. Every rank holds the whole drafter: `dspark plan` says what that takes.
"""

import os
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=2)  # ranks wait for each other while rank 0 measures, or a verifier starts again


def start() -> tuple[int, int, str]:
    """(rank, number of ranks, device) of this process; joins the others where torchrun has started it."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized():
        if device != "cpu":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=PATIENCE)
    return rank(), count(), device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def total(values: list[float], device) -> list[float]:
    """The sums of these numbers over all ranks, in float64."""
    if count() == 1:
        return values
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return sums.tolist()


def sum_gradients(parameters: list[Tensor]) -> None:
    """Replace every parameter's gradient by its sum over all ranks; a rank without micro-batches counts as zero."""
    if count() == 1:
        return
    pending = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        pending.append(dist.all_reduce(parameter.grad, async_op=True))
    for work in pending:
        work.wait()


@contextmanager
def first_alone():
    """Rank 0 goes through the `with` block before the others enter it."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0 and count() > 1:
        dist.barrier()


def finish() -> None:
    """Leave together, so that no rank's end looks like a crash to the others."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
