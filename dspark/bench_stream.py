"""The transport alone: samples of the Kimi shape from one process to another, against files on the same disk.

`python3 -m dspark bench stream` alternates both in one run and prints GB/s of each round. Checksums, and for files
safetensors' own writing and reading, are part of the time; producing the states is not.
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
import zmq
from safetensors.torch import load_file, save_file

from dspark.config import PRESETS
from dspark.wire import Outbox, WireSample, decode

LAYERS = (*PRESETS["kimi-k2.6"].aux_hidden_state_layer_ids, PRESETS["kimi-k2.6"].target_num_hidden_layers)


def kimi_sample(tokens: int) -> WireSample:
    states = torch.empty(tokens, len(LAYERS), PRESETS["kimi-k2.6"].hidden_size, dtype=torch.bfloat16).normal_()
    return WireSample("0" * 16, "bench", "kimi-k2.6", LAYERS, torch.arange(tokens, dtype=torch.int32), states)


def send(endpoint: str, tokens: int, turns, going) -> None:
    """The verifier's process: at each turn so many samples, through the outbox that vLLM's connector uses."""
    torch.set_num_threads(1)
    sample, outbox = kimi_sample(tokens), Outbox([endpoint], 1 << 30)
    while (count := turns.get()) is not None:
        going.set()
        for _ in range(count):
            while not outbox.has_room(sample.states.nbytes):
                time.sleep(0.0005)
            outbox.put(0, sample, None)


def stream_round(socket, turns, going, count: int) -> float:
    """Seconds until `count` samples have arrived and passed their checks."""
    going.clear()
    turns.put(count)
    going.wait()
    begun = time.perf_counter()
    for _ in range(count):
        decode([part.buffer for part in socket.recv_multipart(copy=False)])
    return time.perf_counter() - begun


def file_round(folder: Path, sample: WireSample, count: int) -> float:
    """Seconds to write `count` samples as safetensors files, read and touch them, one after the other."""
    begun = time.perf_counter()
    for number in range(count):
        path = folder / f"{number}.safetensors"
        save_file({"states": sample.states, "token_ids": sample.token_ids}, path)
        load_file(path)["states"].clone()  # the file is mapped: only touching it reads it
        path.unlink()
    return time.perf_counter() - begun


def measure(tokens: int = 2048, count: int = 8, rounds: int = 3) -> list[dict]:
    """One row a round: GB/s of `stream` and of `files`."""
    context = multiprocessing.get_context("spawn")
    turns, going = context.Queue(), context.Event()
    rows = []
    with zmq.Context.instance().socket(zmq.PULL) as socket, tempfile.TemporaryDirectory() as folder:
        socket.set(zmq.RCVHWM, 1)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        process = context.Process(target=send, args=(f"tcp://127.0.0.1:{port}", tokens, turns, going), daemon=True)
        process.start()
        sample = kimi_sample(tokens)
        size = count * sample.states.nbytes / 1e9
        stream_round(socket, turns, going, 1)  # warm
        for number in range(rounds):
            streamed, filed = stream_round(socket, turns, going, count), file_round(Path(folder), sample, count)
            rows.append({"round": number, "stream": size / streamed, "files": size / filed})
        turns.put(None)
        process.join(10)
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark bench stream", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--count", type=int, default=8, help="samples a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    for row in measure(args.tokens, args.count, args.rounds):
        ratio = row["stream"] / row["files"]
        print(f"round {row['round']}: stream {row['stream']:.2f} GB/s, files {row['files']:.2f} GB/s, {ratio:.1f}x")
