"""States in shared memory: bit-equal in another process, bounded, given back, and read from nowhere else."""

import gc
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from test_wire import sample, until

from dspark import outbox
from dspark.outbox import Outbox
from dspark.shared import HEAD, NAME, PLACE, Reader, Slab
from dspark.wire import WireError, decode

LIMIT = 1 << 24
pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory needs Linux")


def put(box: Outbox, seed: int, **shape) -> torch.Tensor:
    """Queue a sample whose states were gathered into the outbox's memory; returns a copy of them."""
    message = sample(seed=seed, **shape)
    states = box.empty(tuple(message.states.shape), message.states.dtype)
    states.copy_(message.states)
    box.put(0, message._replace(states=states), None)
    return message.states


def message(socket, seconds=10.0) -> list:
    assert socket.poll(1000 * seconds), "nothing arrived"
    return [part.buffer for part in socket.recv_multipart(copy=False)]


def send_three(endpoint: str, done) -> None:
    box = Outbox([endpoint], 1 << 20, shared_memory=True)
    for seed in range(3):
        put(box, seed, tokens=50)
    until(lambda: box.held == 0)
    done.set()
    time.sleep(60)


@pytest.fixture
def box(socket):
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return Outbox([f"tcp://127.0.0.1:{port}"], 1 << 20, shared_memory=True)


def test_states_of_another_process_arrive_bit_for_bit(socket):
    port, spawn, reader = socket.bind_to_random_port("tcp://127.0.0.1"), multiprocessing.get_context("spawn"), Reader()
    done = spawn.Event()
    process = spawn.Process(target=send_three, args=(f"tcp://127.0.0.1:{port}", done), daemon=True)
    process.start()
    try:
        for seed in range(3):
            frames = message(socket, 60)
            assert len(frames) == 5 and len(frames[2]) == 0  # nothing of the states went through the socket
            got = decode(reader.fetch(frames, LIMIT))
            assert got.sample_id == f"{seed:08x}" and torch.equal(got.states, sample(tokens=50, seed=seed).states)
        assert done.wait(10)
    finally:
        process.kill()
        process.join()
    pid, fd, offset, size = PLACE.unpack(frames[4])
    with pytest.raises(FileNotFoundError, match=f"process {pid} is gone"):
        Reader().fetch(frames, LIMIT)


def test_many_samples_need_no_more_memory_than_the_budget(socket, box):
    """Forty samples of 400 kB through 1 MB, read slowly; what arrives is what was sent, and nothing is held at last."""
    shape, reader, held = {"tokens": 1000, "width": 67}, Reader(), []

    def produce():
        for seed in range(40):
            while not box.has_room(402_000):
                time.sleep(0.001)
            put(box, seed, **shape)
            held.append(box.held)

    producer = threading.Thread(target=produce)
    producer.start()
    for seed in range(40):
        frames = message(socket)
        assert len(frames) == 5
        assert torch.equal(decode(reader.fetch(frames, LIMIT)).states, sample(seed=seed, **shape).states)
    producer.join()
    until(lambda: box.held == 0)
    assert max(held) <= 1 << 20 and not box.slab.taken and len(reader.spare) <= 2


def test_copies_that_are_kept_are_not_written_over(socket, box):
    reader, kept = Reader(), []
    for seed in range(5):
        put(box, seed)
        kept.append(decode(reader.fetch(message(socket), LIMIT)))
    assert all(torch.equal(got.states, sample(seed=seed).states) for seed, got in enumerate(kept))
    assert not reader.spare
    del kept
    gc.collect()
    assert len(reader.spare) == 5


def test_what_fits_no_gap_goes_by_frame(socket, box):
    states = put(box, 1, tokens=1000, width=1000)  # 6 MB
    frames = message(socket)
    assert len(frames) == 4 and torch.equal(decode(frames).states, states)
    until(lambda: box.held == 0)


def test_gaps_are_used_again_from_the_first_on():
    slab = Slab(10 * 1024)
    at = [slab.place(slab.empty((1000,), torch.uint8)) for _ in range(3)]
    slab.free(at[0])
    assert slab.place(slab.empty((900,), torch.uint8))[:24] == at[0][:24]  # the same place
    assert PLACE.unpack(slab.place(slab.empty((1000,), torch.uint8)))[2] > PLACE.unpack(at[2])[2]
    assert slab.empty((8000,), torch.uint8) is None and slab.place(torch.empty(8)) is None


def test_damage_in_shared_memory_is_found(socket, box):
    put(box, 0)
    frames = message(socket)
    box.slab.memory[HEAD + 5] ^= 1
    with pytest.raises(WireError, match="checksum does not fit"):
        decode(Reader().fetch(frames, LIMIT))


def test_memory_that_nobody_releases_is_taken_back(socket, box, monkeypatch):
    monkeypatch.setattr(outbox, "RELEASE", 0.3)
    put(box, 0)
    message(socket)
    assert box.held
    until(lambda: box.held == 0 and not box.slab.taken)


def test_a_trainer_that_dies_gives_its_memory_back_at_once(box, socket):
    put(box, 0)
    message(socket)
    begun = time.monotonic()
    socket.close(0)
    until(lambda: box.held == 0)
    assert time.monotonic() - begun < 5  # not after RELEASE


@pytest.mark.parametrize(
    "place, named",
    [
        (lambda pid, fd, at, size: b"short", "place of 5 bytes"),
        (lambda pid, fd, at, size: PLACE.pack(pid, fd, at, 0), "0 bytes of states"),
        (lambda pid, fd, at, size: PLACE.pack(pid, fd, at, LIMIT + 1), f"{LIMIT + 1} bytes of states"),
        (lambda pid, fd, at, size: PLACE.pack(pid, fd, 2**63, size), f"states at {2**63}"),
        (lambda pid, fd, at, size: PLACE.pack(pid, fd, (1 << 20) - size + 1, size), "of 1048576 bytes"),
        (lambda pid, fd, at, size: PLACE.pack(pid, fd, 0, size), "states at 0 to"),  # where the release byte would be
        (lambda pid, fd, at, size: PLACE.pack(pid, 0, at, size), f"want a memory named {NAME}"),
        (lambda pid, fd, at, size: PLACE.pack(pid, 2**62, at, size), "gone"),
        (lambda pid, fd, at, size: PLACE.pack(2**62, fd, at, size), "gone"),
    ],
)
def test_a_place_that_cannot_be_is_refused_by_name(socket, box, place, named):
    put(box, 0)
    frames = message(socket)
    frames[4] = place(*PLACE.unpack(frames[4]))
    with pytest.raises((WireError, FileNotFoundError), match=named):
        Reader().fetch(frames, LIMIT)


def test_memory_that_could_be_cut_while_it_is_read_is_refused():
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, 4096)
    with pytest.raises(WireError, match="could be cut while it is read"):
        Reader().fetch([b"", b"", b"", b"", PLACE.pack(os.getpid(), fd, HEAD, 100)], LIMIT)
    os.close(fd)


def test_a_restarted_verifier_has_other_memory():
    """Also where the kernel gives it the process and file number of the one before."""
    reader, spawn = Reader(), os.fork  # a fork: same file number
    first, second = Slab(4096), Slab(8192)
    for slab in (first, second):
        place = slab.place(slab.empty((100,), torch.uint8))
        assert len(reader._slab(*PLACE.unpack(place)[:2])) == len(slab.memory)
    os.dup2(second.fd, first.fd)
    assert len(reader._slab(os.getpid(), first.fd)) == 8192
    child = spawn()
    if child == 0:
        signal.pause()
    assert len(reader._slab(child, first.fd)) == 8192
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    reader._slab(os.getpid(), second.fd)
    third = Slab(4096)
    assert len(reader._slab(os.getpid(), third.fd)) == 4096
    assert not any(pid == child for pid, *_ in reader.slabs)
