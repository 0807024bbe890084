"""What streaming costs: the transport alone, and the rate of a real verifier.

`python3 -m dspark bench stream` sends samples of the Kimi shape from one process to another, over loopback TCP and
through shared memory, and writes and reads them as files on the same disk, by turns, and prints GB/s of each round.
Checksums, and for files safetensors' own writing and reading, are part of the time; producing the states is not: the
connector gathers them into the memory from which they are sent, whichever that is. With `--verifier` two vLLM servers
of the embedded target read and answer the same prompts by turns, one of them streaming the states.
"""

import argparse
import itertools
import multiprocessing
import os
import secrets
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import zmq
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dspark.config import PRESETS
from dspark.data import OWN_SETS, load_prompts
from dspark.evaluate import hardware
from dspark.outbox import Outbox
from dspark.serve import HUGE_PAGES, PROFILES, Fleet, free_ports, verifier_command
from dspark.shared import Reader
from dspark.stream import Verifier
from dspark.target import EMBEDDED, embedded_target, encode_chat
from dspark.wire import WireSample, decode

LAYERS = (*PRESETS["kimi-k2.6"].aux_hidden_state_layer_ids, PRESETS["kimi-k2.6"].target_num_hidden_layers)


WAYS = {  # of a verifier's work -> tokens of each answer, requests at once
    "texts read, 8 at once": (1, 8),  # a training on texts that are there
    "answers, 2 at once": (64, 2),
    "answers, 8 at once": (64, 8),  # an on-policy training
}


def kimi_sample(tokens: int) -> WireSample:
    states = torch.empty(tokens, len(LAYERS), PRESETS["kimi-k2.6"].hidden_size, dtype=torch.bfloat16).normal_()
    return WireSample("0" * 16, "bench", "kimi-k2.6", LAYERS, torch.arange(tokens, dtype=torch.int32), states)


def send(endpoint: str, tokens: int, turns, going) -> None:
    """The verifier's process: at each turn so many samples, through the outbox that vLLM's connector uses."""
    torch.set_num_threads(1)
    sample = kimi_sample(tokens)
    outboxes = {
        way: Outbox([endpoint], 1 << 30, shared_memory=way == "shared memory") for way in ("tcp", "shared memory")
    }
    outboxes["shared memory"].slab.memory.random_()  # states of a sort, wherever a sample will lie
    while (turn := turns.get()) is not None:
        (way, count), shape = turn, sample.states.shape
        outbox = outboxes[way]
        going.set()
        for _ in range(count):
            while not outbox.has_room(sample.states.nbytes):
                time.sleep(0.0005)
            states = sample.states if way == "tcp" else outbox.empty(shape, sample.states.dtype)
            outbox.put(0, sample._replace(states=states), None)


def stream_round(socket, reader: Reader, turns, going, way: str, count: int) -> float:
    """Seconds until `count` samples have arrived and passed their checks."""
    going.clear()
    turns.put((way, count))
    going.wait()
    begun = time.perf_counter()
    for _ in range(count):
        parts = socket.recv_multipart(copy=False)
        decode(reader.fetch([part.buffer for part in parts], 1 << 30))
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
    """One row a round: GB/s of `tcp`, `shared memory` and `files`, which take turns at being first."""
    context = multiprocessing.get_context("spawn")
    turns, going = context.Queue(), context.Event()
    rows, reader = [], Reader()
    with zmq.Context.instance().socket(zmq.PULL) as socket, tempfile.TemporaryDirectory() as folder:
        socket.set(zmq.RCVHWM, 1)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        process = context.Process(target=send, args=(f"tcp://127.0.0.1:{port}", tokens, turns, going), daemon=True)
        process.start()
        sample = kimi_sample(tokens)
        size = count * sample.states.nbytes / 1e9
        ways = {
            "tcp": lambda: stream_round(socket, reader, turns, going, "tcp", count),
            "shared memory": lambda: stream_round(socket, reader, turns, going, "shared memory", count),
            "files": lambda: file_round(Path(folder), sample, count),
        }
        for warm in ways.values():
            warm()
        for number in range(rounds):
            order = [*ways][number % 3 :] + [*ways][: number % 3]
            rates = {way: size / ways[way]() for way in order}
            rows.append({"way": "transport", "round": number, **{way: rates[way] for way in ways}})
        turns.put(None)
        process.join(10)
    return rows


def drain(endpoint: str, received: list[int], stop: threading.Event) -> None:
    """A trainer that only counts: the bytes of each sample that arrives."""
    reader = Reader()
    with zmq.Context.instance().socket(zmq.PULL) as socket:
        socket.bind(endpoint)
        while not stop.is_set():
            if socket.poll(100):
                parts = socket.recv_multipart(copy=False)
                received.append(sum(map(len, reader.fetch([part.buffer for part in parts], 1 << 30))))


def answer_all(verifier: Verifier, prompts: list[list[int]], tokens: int, streamed: bool, at_once: int) -> float:
    """Seconds in which the verifier answers every prompt with exactly `tokens` tokens."""

    def ask(prompt: list[int]) -> None:
        wanted = {"rank": 0, "sample_id": secrets.token_hex(8), "response": tokens > 1}
        extra = {"kv_transfer_params": wanted} if streamed else {}
        verifier.post("/v1/completions", prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, **extra)

    begun = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(ask, prompts))
    return time.perf_counter() - begun


def texts_of_round(number: int, tokens: int) -> list[list[int]]:
    """24 prompts to answer, or to be read 24 longer texts, which begin differently in each round: nothing of them is in
    a prefix cache."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_target())
    texts = [text for name in OWN_SETS for text in load_prompts(name, 4).prompts]
    if tokens == 1:
        texts = [f"{number}, {i}: " + " ".join(texts[i:] + texts[:i])[:1000] for i in range(len(texts))]
    return [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in texts]


def measure_verifier(rounds: int, ways: dict[str, tuple[int, int]] = WAYS) -> list[dict]:
    """One row a way and round: tokens/s (of the texts read, or of the answers) of a real vLLM that streams nothing,
    `plain`, and of one that streams the states too. RuntimeError if a sample does not arrive."""
    profile = replace(PROFILES["cpu"], trainers=1, max_num_seqs=max(at_once for _, at_once in ways.values()))
    http, other, port = free_ports(3)
    endpoint, received, stop = f"tcp://127.0.0.1:{port}", [], threading.Event()
    streaming = verifier_command(profile, [endpoint], port=http, model=str(embedded_target()))
    plain = verifier_command(profile, [endpoint], port=other, model=str(embedded_target()))
    for option in ("--speculative-config", "--kv-transfer-config"):
        at = plain.argv.index(option)
        del plain.argv[at : at + 2]
    rows, sent = [], 0
    with tempfile.TemporaryDirectory() as scratch, Fleet(Path(scratch), quiet=True) as fleet:
        threading.Thread(target=drain, args=(endpoint, received, stop), daemon=True).start()
        servers = {"plain": (other, plain), "streaming": (http, streaming)}
        for name, (at, command) in servers.items():
            fleet.start(name, command)
            fleet.wait_healthy(name, f"http://127.0.0.1:{at}", 300)
        for number, (way, (tokens, at_once)) in itertools.product(range(-1, rounds), ways.items()):
            prompts = texts_of_round(number, tokens)
            work = sum(map(len, prompts)) if tokens == 1 else tokens * len(prompts)
            row = {"way": way, "round": number}
            for name in servers if number % 2 else reversed(servers):
                client = Verifier(f"http://127.0.0.1:{servers[name][0]}", EMBEDDED)
                row[name] = work / answer_all(client, prompts, tokens, name == "streaming", at_once)
            sent += len(prompts)
            if number >= 0:  # the first round warms up
                rows.append(row)
        deadline = time.monotonic() + 30
        while len(received) < sent and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
    if len(received) != sent:
        raise RuntimeError(f"{len(received)} of {sent} samples arrived: nothing may be lost")
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark bench stream", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--count", type=int, default=8, help="samples a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--verifier", action="store_true", help="the rate of a real vLLM, with and without streaming")
    parser.add_argument("--out", type=Path, help="folder for the table, bench_stream.csv or bench_verifier.csv")
    args = parser.parse_args(argv)
    if args.verifier:
        rows, unit, name = measure_verifier(args.rounds), "tokens/s", "bench_verifier.csv"
    else:
        os.environ |= HUGE_PAGES  # as `serve` gives them to both ends: a process takes them when it starts
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            rows = apart.submit(measure, args.tokens, args.count, args.rounds).result()
        unit, name = "GB/s", "bench_stream.csv"
    table = pd.DataFrame(rows)
    base = "plain" if args.verifier else "files"
    ours = ["streaming"] if args.verifier else ["tcp", "shared memory"]
    for name in ours:
        table[f"{name} / {base}"] = table[name] / table[base]
    print(table.round(3).to_string(index=False))
    print(f"means in {unit}, and of the ratios:")
    print(table.drop(columns="round").groupby("way", sort=False).mean().round(3).to_string())
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        table.assign(unit=unit, hardware=hardware()).round(4).to_csv(args.out / name, index=False)
