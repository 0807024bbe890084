"""Hidden states between processes of one machine without a socket: the verifier gathers them into memory that a trainer
rank can map, and the message over ZeroMQ (dspark.wire) only says where they lie.

The memory is a memfd: it has no name in a file system, and ends with the processes that hold it. A rank opens it as
/proc/PID/fd/FD, which the kernel allows to processes of the same user; it copies the states out and sets the byte that
releases their place. A place whose release does not come (its reader died) is taken back after `RELEASE` seconds.
That is safe whatever the reader does meanwhile, because the digest is checked on the copy.
"""

import fcntl
import mmap
import os
import struct
import threading
import weakref
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspark.wire import WireError

NAME = "dspark-states"
PLACE = struct.Struct("<4Q")  # pid, fd, offset of the states, their bytes: the fifth frame of a message
HEAD = 64  # bytes before the states, of which the first is set to release them
RELEASE = 30.0  # seconds
MEND = "then start the verifier with --config '{\"shared_memory\": false}'"


class Slab:
    """The verifier's side: `size` bytes, of which only those are ever in memory that were used."""

    def __init__(self, size: int):
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or its readers could be killed by SIGBUS
        self.memory = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)
        self.taken: dict[int, int] = {}  # offset of the states -> end
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """An uninitialised tensor in the slab, in the first gap that it fits, so that used pages are used again."""
        size = prod(shape) * dtype.itemsize
        with self._lock:
            end = 0
            for offset in sorted(self.taken):
                if offset - HEAD - end >= HEAD + size:
                    break
                end = self.taken[offset]
            if len(self.memory) - end < HEAD + size:
                return None
            offset = end + HEAD
            self.taken[offset] = -(-(offset + size) // HEAD) * HEAD
        self.memory[end] = 0
        return self.memory[offset : offset + size].view(dtype).view(shape)

    def place(self, tensor: Tensor) -> bytes | None:
        """Where a tensor of `empty` lies, for a reader; None for another's."""
        offset = tensor.data_ptr() - self.memory.data_ptr()
        return PLACE.pack(os.getpid(), self.fd, offset, tensor.nbytes) if offset in self.taken else None

    def released(self, place: bytes) -> bool:
        """Whether the reader has copied what lies there."""
        return bool(self.memory[PLACE.unpack(place)[2] - HEAD])

    def free(self, place: bytes) -> None:
        with self._lock:
            del self.taken[PLACE.unpack(place)[2]]


class Reader:
    """A trainer rank's side. Copies lie in buffers that are used again once nothing looks at them any more."""

    def __init__(self):
        self.slabs: dict[tuple[int, int, int], mmap.mmap] = {}  # by pid, fd, inode: a restarted verifier has another
        self.spare: list[np.ndarray] = []

    def fetch(self, frames: list, limit: int) -> list:
        """The four frames of a message, its states copied out of shared memory if they were left there. WireError
        where they cannot be, or are more than `limit` bytes; FileNotFoundError where the sender is gone."""
        if len(frames) != 5:
            return frames
        if len(frames[4]) != PLACE.size:
            raise WireError(f"place of {len(frames[4])} bytes, want {PLACE.size}")
        pid, fd, offset, size = PLACE.unpack(frames[4])
        if not 0 < size <= limit:
            raise WireError(f"{size} bytes of states in shared memory, want 1 to {limit}")
        slab = self._slab(pid, fd)
        if not HEAD <= offset <= len(slab) - size:
            raise WireError(f"states at {offset} to {offset + size} of {len(slab)} bytes of shared memory")
        copy = self._buffer(size)
        np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(slab, np.uint8, size, offset))
        slab[offset - HEAD] = 1
        return [*frames[:2], copy, frames[3]]

    def _slab(self, pid: int, fd: int) -> mmap.mmap:
        path = Path(f"/proc/{pid}/fd/{fd}")
        try:
            if (named := os.readlink(path)) != f"/memfd:{NAME} (deleted)":  # before it is opened: it may be anything
                raise WireError(f"states are said to lie in {named!r:.60}, want a memory named {NAME}")
            key = (pid, fd, path.stat().st_ino)
            if key not in self.slabs:
                self.slabs = {old: slab for old, slab in self.slabs.items() if Path(f"/proc/{old[0]}").exists()}
                self.slabs[key] = _mapped(path)
            return self.slabs[key]
        except FileNotFoundError as error:
            gone = f"the verifier's process {pid} is gone, or runs in another container or machine; {MEND}"
            raise FileNotFoundError(gone) from error
        except OSError as error:
            raise WireError(f"the verifier's shared memory cannot be opened ({error}); {MEND}") from error

    def _buffer(self, size: int) -> memoryview:
        for number, array in enumerate(self.spare):
            if len(array) >= size:
                del self.spare[number]
                break
        else:
            self.spare.clear()  # too small, all of them
            array = np.empty(size, np.uint8)
        copy = memoryview(array)[:size]
        weakref.finalize(copy, self.spare.append, array)
        return copy


def _mapped(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != os.geteuid() or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WireError("the shared memory of the states is another user's, or could be cut while it is read")
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
