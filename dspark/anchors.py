"""Which blocks a training step learns from: anchors drawn in packed rows, and what supervises the slots after them.

Everything drawn at step s is a function of (seed, s) alone.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.losses import position_weights
from dspark.source import PackedRow, pack


def sample_anchors(row: PackedRow, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` anchors [A], rising, uniform over the rows whose next token is supervised and of one document."""
    following = torch.zeros_like(row.loss_mask)
    following[:-1] = row.loss_mask[1:]
    rows = torch.arange(len(row.tokens), device=row.tokens.device)
    eligible = (following & (rows + 1 < row.ends)).nonzero().squeeze(1)
    chosen = torch.randperm(len(eligible), generator=generator)[:count].to(eligible.device)
    return eligible[chosen].sort().values


def supervision(row: PackedRow, anchors: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """labels [A, n] target ids at anchor + 1 .. anchor + n, and which are supervised [A, n]: a slot is while it and
    every earlier one of its block lie inside the row, the same document and the loss mask."""
    at = anchors[:, None] + torch.arange(1, n + 1, device=anchors.device)
    inside = at < row.ends[anchors][:, None]
    at = at.clamp_max(len(row.tokens) - 1)
    supervised = (inside & row.loss_mask[at]).int().cumprod(1).bool()
    return row.tokens[at], supervised


@dataclass
class MicroBatch:
    row: PackedRow
    anchors: Tensor  # [A]
    labels: Tensor  # [A, n]
    supervised: Tensor  # [A, n]
    weights: Tensor  # [A, n], 0 where unsupervised


def micro_batches(
    source, config, start_step: int, rank: int = 0, ranks: int = 1
) -> Iterator[tuple[int, list[MicroBatch]]]:
    """(epoch, this rank's micro-batches of one step), from start_step on; the source is told what it will be asked.
    config: a train.TrainConfig."""
    lengths = [len(sample) for sample in source.samples]

    def rows():
        epoch = 0
        while True:
            order = torch.randperm(len(lengths), generator=_generator(config.seed, epoch, 1)).tolist()
            for ids in pack(lengths, config.row_tokens, order):
                yield epoch, ids
            epoch += 1

    stream = rows()
    for _ in range(start_step * config.micro_batches):
        next(stream)
    planned = deque()  # steps, as rows of ids
    for step in range(start_step, config.steps):
        while len(planned) < min(1 + source.lookahead, config.steps - step):
            planned.append([next(stream) for _ in range(config.micro_batches)])
            for _, ids in planned[-1][rank::ranks]:
                source.expect(ids)
        rows_of_step, batch = planned.popleft(), []
        for micro in range(rank, config.micro_batches, ranks):
            generator = _generator(config.seed, step * config.micro_batches + micro, 2)
            size = int(torch.randint(len(config.block_sizes), (1,), generator=generator))
            row, n = source.row(rows_of_step[micro][1]), config.block_sizes[size]
            anchors = sample_anchors(row, config.anchors, generator)
            labels, supervised = supervision(row, anchors, n)
            weights = supervised * position_weights(n, config.gamma_decay).to(anchors.device)
            batch.append(MicroBatch(row, anchors, labels, supervised, weights))
        yield rows_of_step[-1][0], batch


def _generator(seed: int, number: int, kind: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 7 + kind) * 1_000_000_007 + number)
