"""Trainer processes under torchrun that act as one: the same weights, each its share of a step's micro-batches.

FSDP2 (`fully_shard`) keeps a share of the weights, the summed gradients and the optimisers' state on every rank. The
drafter is one unit of it: gathered by a step's first forward pass, given back by the last backward pass, which also
sums the gradients, so that ranks may have different numbers of micro-batches, or none. While a step is on, a rank
holds weights and gradients whole: `dspark plan` says what that takes. The loss is normalised by the weights of all
ranks already, so that nothing is averaged.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from dspark import UserError
from dspark.serve import die_with_parent

PATIENCE = timedelta(hours=2)  # ranks wait for each other while rank 0 measures, or a verifier starts again
HIDDEN = ("", "-1", "NoDevFiles")  # how a user, or Slurm, says that there is no GPU


def start() -> tuple[int, int, str]:
    """(rank, number of ranks, device) of this process; joins the others where torchrun has started it. UserError, a
    RuntimeError, where CUDA_VISIBLE_DEVICES promises a GPU that torch does not see."""
    if dist.is_torchelastic_launched():
        # The rank is in a session of its own, which nobody stops when torchrun is killed. torchrun starts it from its
        # main thread, so that the signal comes at torchrun's end and not before.
        die_with_parent(signal.SIGKILL)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible not in HIDDEN and not torch.cuda.is_available():
        raise UserError(
            f"CUDA_VISIBLE_DEVICES = {visible!r}, but torch sees no GPU: name one that is there, or unset it to train "
            "on the CPU"
        )
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


def shard(drafter: nn.Module) -> None:
    """Leave every rank its share of the trained parameters; the frozen ones stay whole, being the target's. Before the
    optimisers are made: its parameters are others afterwards."""
    if count() == 1:
        return
    frozen = {parameter for parameter in drafter.parameters() if not parameter.requires_grad}
    fully_shard(drafter, reshard_after_forward=False, ignored_params=frozen)
    drafter.set_gradient_divide_factor(1.0)
    drafter.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    drafter.set_reduce_scatter_unused_params(True)
    register_fsdp_forward_method(drafter, "block_hidden")


def shared(drafter: nn.Module, batch: list) -> Iterator:
    """The micro-batches of this rank's step, the last of which sums the gradients over all ranks in its backward pass.
    A rank that has none adds zeros."""
    for index, micro in enumerate(batch):
        if count() > 1:
            last = index == len(batch) - 1
            drafter.set_requires_gradient_sync(last)
            drafter.set_is_last_backward(last)
            drafter.set_reshard_after_backward(last)
        yield micro
    if not batch and count() > 1:
        at = torch.zeros(1, dtype=torch.long, device=drafter.fc.weight.device)
        features = torch.zeros(1, drafter.fc.in_features, device=at.device)
        (0.0 * drafter.block_hidden(features, at, at, at, at, 1)).sum().backward()


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor from all ranks, all of which must ask for it; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict:
    """Its state_dict, whole on every rank."""
    saved = optimizer.state_dict()
    saved["state"] = {k: {name: whole(v) for name, v in state.items()} for k, state in saved["state"].items()}
    return saved


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Of a whole state_dict, this rank's share."""
    optimizer.load_state_dict(saved)
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                mesh, placements = parameter.device_mesh, parameter.placements
                state[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)


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
