"""The verifier's outbox: samples on their way to the trainer ranks, within a budget of bytes."""

import queue
import threading
import time

import torch
import zmq
from torch import Tensor

from dspark.shared import RELEASE, Slab
from dspark.wire import WireSample, encode


class Outbox:
    """Sends samples to the trainer ranks, one thread a rank, while holding `budget` bytes of states at most.

    A sample larger than the whole budget is taken when nothing else is held. A rank that is away keeps its samples
    waiting; what a broken connection swallowed, the rank asks for again. With `shared_memory`, states that were made
    by `empty` are left where they are for a rank on this machine to copy.
    """

    def __init__(self, endpoints: list[str], budget: int, shared_memory: bool = False):
        self.budget, self.held = budget, 0
        self.slab = Slab(budget) if shared_memory else None
        self._lock = threading.Lock()
        self._queues = [queue.SimpleQueue() for _ in endpoints]
        for endpoint, waiting in zip(endpoints, self._queues, strict=True):
            threading.Thread(target=self._send_all, args=(endpoint, waiting), daemon=True).start()

    def has_room(self, size: int) -> bool:
        return self.held == 0 or self.held + size <= self.budget

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for states, in shared memory where there is a gap for them. Each must be `put`."""
        room = self.slab.empty(shape, dtype) if self.slab else None
        return torch.empty(shape, dtype=dtype) if room is None else room

    def put(self, rank: int, sample: WireSample, copied) -> None:
        """Queue a sample whose states are there once `copied` (an event of the device, or None) has happened."""
        self._hold(sample.states.nbytes)
        self._queues[rank].put((sample, copied))

    def _hold(self, size: int) -> None:
        with self._lock:
            self.held += size

    def _send_all(self, endpoint: str, waiting: queue.SimpleQueue) -> None:
        socket = zmq.Context.instance().socket(zmq.PUSH)
        socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a trainer that is not connected
        socket.set(zmq.SNDHWM, 1)
        socket.set(zmq.LINGER, 0)
        lost = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        while True:
            sample, copied = waiting.get()
            if copied is not None:
                copied.synchronize()
            frames, size = encode(sample), sample.states.nbytes
            place = self.slab.place(sample.states) if self.slab else None
            if place:
                frames = [*frames[:2], b"", frames[3], place]
            while lost.poll(0):
                lost.recv_multipart()  # a connection of before
            sending = socket.send_multipart(frames, copy=False, track=True)
            del sample
            if place:
                self._await_release(place, lost)
            else:
                sending.wait()  # until ZeroMQ needs the buffers no more
            self._hold(-size)

    def _await_release(self, place: bytes, lost) -> None:
        """Take the memory back once its reader is done with it, or gone."""
        until = time.monotonic() + RELEASE
        while not self.slab.released(place) and time.monotonic() < until and not lost.poll(1):
            pass
        self.slab.free(place)
