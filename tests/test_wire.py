"""Frames and outbox: whatever is damaged is refused by name, and a slow receiver bounds the sender's memory."""

import json
import threading
import time

import pytest
import torch
import zmq

from dspark import bench_stream
from dspark.outbox import Outbox
from dspark.wire import MAX_HEADER, WireError, WireSample, _digest, decode, encode, frame_limit


def sample(tokens=5, rows=None, dtype=torch.bfloat16, layers=(2, 4, 6), width=8, seed=0) -> WireSample:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens if rows is None else rows, len(layers), width, generator=generator).to(dtype)
    ids = torch.randint(0, 99, (tokens,), generator=generator, dtype=torch.int32)
    return WireSample(f"{seed:08x}", "verifier", "tiny", layers, ids, states)


def sent(message: WireSample) -> list[bytearray]:
    return [bytearray(frame) for frame in encode(message)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, rows", [(5, 5), (5, 4), (1, 1), (1000, 999)])
def test_what_is_sent_arrives(dtype, tokens, rows):
    message = sample(tokens, rows, dtype)
    got = decode(sent(message))
    assert got[:4] == message[:4] and got.states.dtype == dtype
    assert torch.equal(got.token_ids, message.token_ids) and torch.equal(got.states, message.states)


def test_frames_are_views_of_the_tensors():
    message = sample(dtype=torch.float32)
    frames = encode(message)
    message.states[0, 0, 0] = 7.0
    assert torch.frombuffer(frames[2], dtype=torch.float32)[0] == 7.0


@pytest.mark.parametrize("frame", range(4))
@pytest.mark.parametrize("damage", ["a bit", "cut", "longer"])
def test_every_damage_is_found(frame, damage):
    frames = sent(sample())
    if damage == "a bit":
        frames[frame][len(frames[frame]) // 2] ^= 4
    elif damage == "cut":
        del frames[frame][-1:]
    else:
        frames[frame] += b"\0"
    with pytest.raises(WireError, match="checksum does not fit"):
        decode(frames)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_other_numbers_of_frames_are_refused(count):
    with pytest.raises(WireError, match=f"{count} frames, want 4"):
        decode((sent(sample()) * 2)[:count])


WRONG = {
    "another version": ({"version": 2}, "protocol version 2, want 1"),
    "no version": ({"version": None}, "protocol version None"),
    "a number as id": ({"sample_id": 7}, "sample_id = 7, want str"),
    "a bool as number": ({"tokens": True}, "tokens = True, want int"),
    "no model": ({"model": None}, "model = None, want str"),
    "a text as layers": ({"layer_ids": "246"}, "layer_ids = '246', want list"),
    "a text among layers": ({"layer_ids": [2, "4", 6]}, "want integers"),
    "a negative length": ({"shape": [-5, 3, 8]}, "want integers"),
    "an unknown dtype": ({"dtype": "float64"}, "dtype 'float64', want one of"),
    "two axes": ({"shape": [5, 24]}, r"want \[rows, layers, hidden\]"),
    "fewer layers than ids": ({"shape": [5, 2, 12]}, "with 3 layers, want"),
    "no rows": ({"shape": [0, 3, 8], "tokens": 0}, "want .rows, layers, hidden"),
    "rows missing": ({"shape": [3, 3, 8]}, "3 rows of states for 5 tokens"),
    "a larger width": ({"shape": [5, 3, 2**40]}, "do not fit"),
    "another dtype": ({"dtype": "float32"}, "240 bytes of tokens and states do not fit"),
}


@pytest.mark.parametrize("changes, named", WRONG.values(), ids=WRONG)
def test_a_wrong_header_with_a_right_checksum_is_named(changes, named):
    frames = sent(sample())
    frames[0] = json.dumps(json.loads(bytes(frames[0])) | changes).encode()
    frames[3] = _digest(frames[:3])
    with pytest.raises(WireError, match=named):
        decode(frames)


@pytest.mark.parametrize(
    "header, named",
    [
        (b"\xff", "not JSON"),
        (b"[1]", "version"),
        (b" " * (MAX_HEADER + 1), "header of"),
        (b"[" * MAX_HEADER, "header is nested too deeply"),  # no JSON either, but the parser does not get that far
    ],
)
def test_a_header_that_is_no_object_is_refused(header, named):
    frames = [header, *sent(sample())[1:3]]
    with pytest.raises(WireError, match=named):
        decode([*frames, _digest(frames)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_sample_has_a_frame_above_its_limit(dtype):
    """And the limit is of the sample's order: in the widest dtype, one of twice the tokens is above it."""
    longest = max(map(len, sent(sample(1000, dtype=dtype, width=64))))
    assert longest <= frame_limit(1000, 3, 64) < 2 * 1000 * 3 * 64 * 4


# ---- the outbox


def receive(socket) -> WireSample:
    assert socket.poll(10_000), "nothing arrived"
    return decode([part.buffer for part in socket.recv_multipart(copy=False)])


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


def big(seed: int) -> WireSample:
    return sample(tokens=1000, width=1000, seed=seed)  # 6 MB


def test_a_slow_trainer_bounds_what_the_verifier_holds_and_gets_everything(socket):
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    outbox, held, waited = Outbox([f"tcp://127.0.0.1:{port}"], 20_000_000), [], []

    def produce():
        for seed in range(12):
            while not outbox.has_room(6_000_000):
                waited.append(seed)
                time.sleep(0.005)
            outbox.put(0, big(seed), None)
            held.append(outbox.held)

    producer = threading.Thread(target=produce)
    producer.start()
    until(lambda: waited)
    assert producer.is_alive() and len(held) < 12  # it waits for the trainer
    for seed in range(12):
        got = receive(socket)
        assert got.sample_id == f"{seed:08x}" and torch.equal(got.states, big(seed).states)
    producer.join()
    assert waited and max(held) <= 20_000_000
    until(lambda: outbox.held == 0)


def test_a_trainer_that_comes_later_gets_what_waited(socket):
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    socket.unbind(f"tcp://127.0.0.1:{port}")
    outbox = Outbox([f"tcp://127.0.0.1:{port}"], 10_000_000)
    outbox.put(0, big(1), None)
    assert not outbox.has_room(6_000_000) and outbox.has_room(4_000_000)
    time.sleep(0.3)
    assert outbox.held == 6_000_000
    socket.bind(f"tcp://127.0.0.1:{port}")
    assert receive(socket).sample_id == "00000001"
    until(lambda: outbox.held == 0)


def test_a_sample_above_the_budget_goes_alone(socket):
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    outbox = Outbox([f"tcp://127.0.0.1:{port}"], 1000)
    assert outbox.has_room(6_000_000)
    outbox.put(0, big(1), None)
    assert not outbox.has_room(1)
    assert receive(socket).sample_id == "00000001"
    until(lambda: outbox.has_room(6_000_000))


def test_ranks_get_their_own(socket):
    other = zmq.Context.instance().socket(zmq.PULL)
    ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (socket, other)]
    outbox = Outbox([f"tcp://127.0.0.1:{port}" for port in ports], 10**6)
    for seed in range(6):
        outbox.put(seed % 2, sample(seed=seed), None)
    assert [receive(socket).sample_id for _ in range(3)] == ["00000000", "00000002", "00000004"]
    assert [receive(other).sample_id for _ in range(3)] == ["00000001", "00000003", "00000005"]
    other.close(0)


def test_the_benchmark_times_all_ways():
    rows = bench_stream.measure(tokens=16, count=2, rounds=2)
    assert [row["round"] for row in rows] == [0, 1] and all(
        row[way] > 0 for row in rows for way in ("tcp", "shared memory", "files")
    )


@pytest.mark.bench
def test_bench_a_verifier_streams_and_answers_both_by_turns():
    for row in bench_stream.measure_verifier(1, {"texts": (1, 4), "answers": (16, 4)}):
        assert row["plain"] > 0 and row["streaming"] > 0
