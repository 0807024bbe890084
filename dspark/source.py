"""Where training reads the target's hidden states: the local source computes them once and keeps them on disk.

dspark/stream.py has the other source of the same interface, fed by a live verifier.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.data import Sample
from dspark.target import Target


class PackedRow(NamedTuple):
    """Documents packed into one row of T tokens. starts [T]: first row of each token's document."""

    tokens: Tensor  # [T]
    loss_mask: Tensor  # [T]
    positions: Tensor  # [T], restarting with each document
    starts: Tensor  # [T]
    ends: Tensor  # [T], one past the last row of the document
    features: Tensor  # [T, m*H]
    hidden: Tensor  # [T, H], after the final norm


class LocalSource:
    """Hidden states of a list of samples, computed by the target at first touch and kept in a memory-mapped file.

    The file (bfloat16, (m + 1) * H a token) is named by a hash of target, taps and tokens, so that another run over
    the same data finds it, and a run over other data cannot. `row(ids)` packs the samples `ids` into a PackedRow.
    """

    lookahead = 0  # steps whose rows want to be expected before they are asked for

    def __init__(self, target: Target, samples: list[Sample], folder: Path):
        self.target, self.samples = target, samples
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"hidden-{data_digest(target, samples)}"
        lengths = [len(sample) for sample in samples]
        self.offsets = np.concatenate([[0], np.cumsum(lengths)])
        self.width = (len(target.layer_ids) + 1) * target.hidden_size
        shape = (int(self.offsets[-1]), self.width)
        path, filled = stem.with_suffix(".bf16"), stem.with_suffix(".filled")
        whole = path.exists() and filled.exists() and path.stat().st_size == 2 * shape[0] * shape[1]
        mode = "r+" if whole else "w+"
        self._states = torch.from_numpy(np.memmap(path, np.int16, mode, shape=shape)).view(torch.bfloat16)
        self._filled = np.memmap(filled, np.uint8, mode, shape=len(samples))

    def _fill(self, i: int) -> None:
        """Run the target over a sample not seen yet. Alone: a CPU loses more by padding several to one length."""
        sample = self.samples[i]
        cache = self.target.new_cache(1, len(sample))
        out = self.target.forward(sample.token_ids[None].to(self.target.device), cache, 0)
        states = torch.cat([out.features[0], out.hidden[0]], -1)
        self._states[self.offsets[i] : self.offsets[i + 1]] = states.to("cpu", torch.bfloat16)
        self._filled[i] = 1  # after the states: a kill in between leaves the sample to be computed again

    def expect(self, ids: list[int]) -> None:
        """Nothing to prepare: row() computes at once."""

    def close(self) -> None:
        """Nothing to stop."""

    def row(self, ids: list[int]) -> PackedRow:
        for i in ids:
            if not self._filled[i]:
                self._fill(i)
        states = [self._states[self.offsets[i] : self.offsets[i + 1]] for i in ids]
        return pack_row([self.samples[i] for i in ids], states, self.target)


def data_digest(target: Target, samples: list[Sample]) -> str:
    """Names the states of these samples: another name of the target, other taps, dtype or data give another name, and
    so do other weights in a target's local folder, told by size and time of its files. Of a target on the hub the
    name is all that counts, whatever its revision."""
    folder, weights = Path(target.name), []
    if folder.is_dir():
        found = ((file.name, file.stat()) for file in sorted(folder.glob("*.safetensors")))
        weights = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
    ids = digest_of(sample.token_ids for sample in samples)
    described = json.dumps([target.name, target.layer_ids, str(target.dtype), weights, ids])
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def digest_of(columns: Iterable[Tensor]) -> str:
    """Names a list of tensors [T], on the CPU, by their lengths and contents."""
    digest = hashlib.sha256()
    for column in columns:
        digest.update(len(column).to_bytes(8, "little"))
        digest.update(column.numpy().tobytes())
    return digest.hexdigest()[:16]


def pack_row(samples: list[Sample], states: list[Tensor], target: Target) -> PackedRow:
    """Samples and their states [T, (m+1)*H], the last H of them after the final norm, as one row on the target's
    device."""
    lengths = torch.tensor([len(sample) for sample in samples])
    ends = lengths.cumsum(0)
    starts = (ends - lengths).repeat_interleave(lengths)
    columns = torch.cat(states)
    row = PackedRow(
        tokens=torch.cat([sample.token_ids for sample in samples]),
        loss_mask=torch.cat([sample.loss_mask for sample in samples]),
        positions=torch.arange(int(ends[-1])) - starts,
        starts=starts,
        ends=ends.repeat_interleave(lengths),
        features=columns[:, : -target.hidden_size],
        hidden=columns[:, -target.hidden_size :],
    )
    return PackedRow(*(tensor.to(target.device) for tensor in row))


def pack(lengths: list[int], row_tokens: int, order: list[int]) -> list[list[int]]:
    """Sample indices in the given order, packed greedily into rows of row_tokens at most (a longer one goes alone)."""
    rows, used = [[]], 0
    for i in order:
        if rows[-1] and used + lengths[i] > row_tokens:
            rows.append([])
            used = 0
        rows[-1].append(i)
        used += lengths[i]
    return rows
