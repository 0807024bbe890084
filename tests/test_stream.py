"""Streaming from a real vLLM serving the real model: every row right, in the trainer's order, once; faults named."""

import argparse
import copy
import json
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from scipy.stats import chisquare
from test_train import log_of
from tiny import HIDDEN, tiny_target
from transformers import AutoModelForCausalLM
from verifier import PROFILE, free_ports, running

from dspark import checkpoint, ranks, serve, stream, train
from dspark.anchors import micro_batches
from dspark.config import PRESETS
from dspark.data import Sample
from dspark.decode import answer
from dspark.paths import ROOT
from dspark.plan import state_bytes
from dspark.serve import trainer_command
from dspark.shared import Reader
from dspark.stream import Away, SampleCache, StreamSource, Verifier
from dspark.target import embedded_target
from dspark.train import TrainConfig
from dspark.wire import WireSample, _digest, encode, frame_limit

TEXTS = ["The quick brown fox jumps over the lazy dog. " * k for k in (1, 4, 9, 18)]
TEXTS += ["Once", "def add(a, b):\n    return a + b\n", TEXTS[3] + "But why?"]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    with running(tmp_path_factory.mktemp("verifier")) as running_verifier:
        yield running_verifier


@pytest.fixture(scope="module")
def samples(target) -> list[Sample]:
    every = [torch.tensor(target.tokenizer(text)["input_ids"]) for text in TEXTS]
    return [Sample(ids, torch.arange(len(ids)) >= min(3, len(ids) - 1)) for ids in every]


@pytest.fixture
def source(target, verifier):
    """Makes sources; closes them."""
    made = []

    def make(samples, rank=0, target=target, timeout=30.0, **options):
        made.append(StreamSource(target, samples, verifier.client(timeout), verifier.endpoints[rank], rank, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def reference(model, target, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' own features [T, m*H] and normed last states [T, H]."""
    with torch.inference_mode():
        states = model(ids[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in target.layer_ids], -1), states[-1][0]


def assert_same(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Within 1e-5 of the row's largest entry, row by row (SmolLM2's first token has entries of 2e4)."""
    error = (mine - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    assert float(error.max()) < tolerance


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32).eval()


# ---- every row right


def hits(verifier) -> float:
    with urllib.request.urlopen(f"{verifier.url}/metrics") as answered:
        lines = answered.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_states_equal_transformers(target, verifier, source, samples, model):
    """Chunks of 64 tokens cut most prompts; the second time blocks of 32 come from the prefix cache."""
    streamed, before = source(samples), hits(verifier)
    for _ in range(2):
        row = streamed.row([6, 0, 1, 2, 3, 4, 5])
        assert row.features.dtype == torch.float32 and row.features.shape[1] == 3 * 576
        at = 0
        for i in (6, 0, 1, 2, 3, 4, 5):
            here = slice(at, at + len(samples[i]))
            features, hidden = reference(model, target, samples[i].token_ids)
            assert torch.equal(row.tokens[here], samples[i].token_ids)
            assert torch.equal(row.loss_mask[here], samples[i].loss_mask)
            assert_same(row.features[here], features)
            assert_same(row.hidden[here], hidden)
            at += len(samples[i])
        assert at == len(row.tokens)
    assert hits(verifier) - before > 300
    assert len(streamed._reader.slabs) == 1  # they came through shared memory
    counted = {"received": 15, "retried": 0, "unasked": 0, "damaged": 0}  # of them one for the probe
    assert streamed.counts == streamed.counts | counted
    tokens = 2 * sum(map(len, samples)) + min(64, len(samples[0]))
    planned = tokens * (2 * state_bytes(PRESETS["smollm2-135m"]) + 4)  # float32 here, and the ids
    assert planned < streamed.counts["bytes"] < planned + 15 * 400


def test_a_response_streams_with_its_prompt(target, source, samples, model):
    """On-policy: the verifier's greedy answer is the target's own, and its states come in the same request."""
    chat = target.encode_chat([{"role": "user", "content": "Name three colours."}])
    wanted = answer(target, None, chat, 0, 24).tokens
    given = Sample(torch.tensor([*chat, 5, 6, 7]), torch.arange(len(chat) + 3) >= len(chat))
    streamed = source([given], response_tokens=24)
    assert len(streamed.samples[0]) == len(chat) + 24
    row = streamed.row([0])
    assert row.tokens.tolist() == [*chat, *wanted] and row.loss_mask.sum() == len(wanted)
    features, hidden = reference(model, target, row.tokens)
    for mine, theirs in ((row.features, features), (row.hidden, hidden)):
        assert_same(mine[:-1], theirs[:-1], 2e-5)  # float32's own error: 1.07e-5 of this prompt on a CPU with AVX2
    assert not row.features[-1].any() and not row.hidden[-1].any()  # the last token was never run


# ---- the trainer's order, once


def visited(source, steps, **options) -> list:
    config = TrainConfig(
        steps=steps, micro_batches=2, row_tokens=60, anchors=8, block_sizes=(4,), dtype="float32", decay=0.0
    )
    return [[micro.row for micro in batch] for _, batch in micro_batches(source, config, 0, **options)]


def test_batches_do_not_depend_on_the_order_of_arrival(source, samples):
    """One request at a time or eight, one rank or two: the same batches, each sample exactly once an epoch."""
    serial, parallel = source(samples, in_flight=1), source(samples, rank=1, in_flight=8, lookahead=3)
    one, eight = visited(serial, 6), visited(parallel, 6)
    for mine, theirs in zip(one, eight, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.allclose(a.hidden, b.hidden, atol=1e-3)
    serial.close(), parallel.close()
    halves = [visited(source(samples, rank=r), 6, rank=r, ranks=2) for r in range(2)]
    for whole, parts in zip(one, zip(*halves, strict=True), strict=True):
        assert [row.tokens.tolist() for row in whole] == [rows[0].tokens.tolist() for rows in parts]
    lengths, rows = [len(s) for s in samples], [row for step in one for row in step]
    first = [
        length for row in rows for length in row.ends.unique_consecutive().diff(prepend=torch.tensor([0])).tolist()
    ]
    assert sorted(first[: len(samples)]) == sorted(lengths)
    assert serial.counts["received"] == sum(len(row.ends.unique()) for row in rows) + 1  # each once, and the probe


# ---- what is refused


def test_a_rank_that_the_verifier_was_not_started_for_is_refused(target, verifier, samples):
    streamed = StreamSource(target, samples, verifier.client(), f"tcp://127.0.0.1:{free_ports(1)[0]}", rank=2)
    with pytest.raises(ValueError, match="rank = 2: this verifier was started with 2 endpoints"):
        streamed.row([0])
    streamed.close()


@pytest.mark.parametrize("params", [{"rank": "0", "sample_id": "0" * 16}, {"rank": 0, "sample_id": "../../etc"}])
def test_a_request_names_an_index_and_an_id_and_nothing_else(verifier, params):
    answered = verifier.client().post("/v1/completions", prompt=[5, 6, 7], max_tokens=1, kv_transfer_params=params)
    assert list(answered["kv_transfer_params"]) == ["error"]


def test_what_is_sampled_while_states_are_extracted_has_the_targets_distribution(target, verifier):
    """Pairs of tokens: the second comes of a step in which vLLM on a CPU sampled wrongly (its issue 55005)."""
    prompt, temperature, many = target.tokenizer("The colour of the sky is")["input_ids"], 0.8, 400
    wanted = {"max_tokens": 2, "n": many, "temperature": temperature, "seed": 3, "return_token_ids": True}
    answered = verifier.client(120).post("/v1/completions", prompt=prompt, ignore_eos=True, **wanted)
    drawn = Counter(tuple(choice["token_ids"]) for choice in answered["choices"])

    def chances(ids: list[int]) -> torch.Tensor:
        out = target.forward(torch.tensor([ids]), target.new_cache(1, len(ids)), 0)
        return (target.logits(out.hidden[0, -1]).double() / temperature).softmax(-1)

    first = chances(prompt)
    expected = {}
    for a in first.topk(8).indices.tolist():
        second = first[a] * chances([*prompt, a])
        expected |= {(a, b): many * float(second[b]) for b in second.topk(8).indices.tolist()}
    cells = [pair for pair, count in expected.items() if count >= 5]
    counts = [drawn[pair] for pair in cells]
    means = [expected[pair] for pair in cells]
    assert len(cells) >= 8
    assert chisquare([*counts, many - sum(counts)], [*means, many - sum(means)]).pvalue > 1e-3


def test_an_ordinary_request_streams_nothing(verifier):
    answered = verifier.client().post("/v1/completions", prompt=[5, 6, 7], max_tokens=2)
    assert answered["kv_transfer_params"] is None and answered["usage"]["completion_tokens"] == 2


def altered(target, **changes):
    other = copy.copy(target)
    vars(other).update(changes)
    return other


def test_another_model_layers_weights_or_template_are_named(target, source, samples):
    """What a verifier cannot know of the trainer's mistake: each is found before a sample is used."""
    wrong = {
        r"layers \(2, 15, 27, 30\), the drafter reads \(3, 15, 27, 30\)": altered(target, layer_ids=(2, 14, 26)),
        "other weights, or another last layer": altered(target, final_norm=target.final_norm.flip(0)),
        "of width 576, want torch.bfloat16": altered(target, dtype=torch.bfloat16),
        "renders a chat as": altered(target, encode_chat=lambda messages: [1, 2, 3]),
    }
    for named, other in wrong.items():
        streamed = source(samples, target=other)
        with pytest.raises(ValueError, match=named):
            streamed.row([0])
        assert streamed.counts["received"] <= 2
        streamed.close()
    streamed = source(samples)
    streamed.verifier = Verifier(streamed.verifier.url, "qwen3-0.6b")
    with pytest.raises(ValueError, match="refuses .* for model 'qwen3-0.6b'.*does not exist"):
        streamed.row([0])


def test_a_state_after_the_norm_is_told_from_one_before(target, source, samples):
    streamed = source(samples)
    finish, streamed._final = streamed._final, lambda last: last  # as if the verifier's came normed
    with pytest.raises(ValueError, match="do not give its own logprobs"):
        streamed.row([0])
    assert finish(torch.ones(1, 576)).shape == (1, 576)


# ---- faults on the way


class Relay:
    """Stands between verifier and trainer: passes on what `tamper(frames, number)` makes of each message."""

    def __init__(self, inside: str, tamper):
        self.tamper, self.passed, self.stopped = tamper, 0, threading.Event()
        self.endpoint = f"tcp://127.0.0.1:{free_ports(1)[0]}"  # the trainer's
        self.inside = inside
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        context, reader = zmq.Context.instance(), Reader()
        with context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
            until(lambda: bound(pull, self.inside), 10)
            push.set(zmq.LINGER, 0)
            push.connect(self.endpoint)
            while not self.stopped.is_set():
                if pull.poll(50):
                    frames = [bytearray(frame) for frame in reader.fetch(pull.recv_multipart(), 1 << 30)]
                    self.passed += 1
                    for message in self.tamper(frames, self.passed):
                        push.send_multipart(message)

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_) -> None:
        self.stopped.set()
        self.thread.join()


def bound(socket_: zmq.Socket, endpoint: str) -> bool:
    """False while the relay before still holds the port: ZeroMQ closes sockets in its own time."""
    try:
        socket_.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return False
    return True


def flip(frames: list[bytearray]) -> list[bytearray]:
    frames[2][1000] ^= 1
    return frames


STRANGE = WireSample("f" * 16, "x", "smollm2-135m", (1,), torch.ones(2, dtype=torch.int32), torch.ones(2, 1, 9))
FAULTS = {  # what happens to the last of three messages, those before being a sample and the probe that vouches for it
    "lost": (lambda frames, n: [frames] if n != 3 else [], {"retried": 1, "unasked": 0, "damaged": 0}),
    "a bit flipped": (lambda frames, n: [frames if n != 3 else flip(frames)], {"retried": 1, "damaged": 1}),
    "truncated": (lambda frames, n: [frames if n != 3 else frames[:3]], {"retried": 1, "damaged": 1}),
    "twice": (lambda frames, n: [frames, frames], {"retried": 0, "unasked": 3}),
    "a stranger's": (lambda frames, n: [encode(STRANGE), frames], {"retried": 0, "unasked": 3}),
}  # fmt: skip


@pytest.mark.parametrize("tamper, counted", FAULTS.values(), ids=FAULTS)
def test_what_is_lost_is_asked_again_and_what_is_damaged_or_unasked_refused(
    target, verifier, samples, model, tamper, counted
):
    with Relay(verifier.endpoints[1], tamper) as relay:
        streamed = StreamSource(target, samples, verifier.client(timeout=8.0), relay.endpoint, rank=1, in_flight=1)
        for i in (0, 5):  # the first brings the probe with it
            row = streamed.row([i])
            features, hidden = reference(model, target, samples[i].token_ids)
            assert_same(row.features, features)
            assert_same(row.hidden, hidden)
        if counted.get("unasked"):
            until(lambda: streamed.counts["unasked"] >= 3, 5)
        assert streamed.counts == streamed.counts | counted and streamed.counts["received"] == 3
        streamed.close()


def test_trainers_that_vanish_leave_nothing_that_the_next_would_train_on(target, source, samples):
    """Ten trainers die at odd moments, requests in flight; an eleventh at the same endpoint gets its own, once."""
    for number in range(10):
        streamed = source(samples)
        streamed.expect(list(range(len(samples))))
        time.sleep(0.05 * number)
        streamed.close()
    last = source(samples)
    row = last.row([3, 1])
    assert torch.equal(row.tokens, torch.cat([samples[i].token_ids for i in (3, 1)]))
    assert last.counts["received"] == 3 and last.counts["damaged"] == 0


class Nearby(Verifier):
    """A verifier in this process, which answers every request at once; what then arrives is `send(sample)`'s affair."""

    def __init__(self, send=None):
        super().__init__("http://nearby", "tiny")
        self.send = send

    def post(self, path, **body):
        ids = torch.tensor(body["prompt"], dtype=torch.int32)
        self.send(zeros(body["kv_transfer_params"]["sample_id"], ids))
        return {"kv_transfer_params": {"sent": len(ids)}}


def zeros(sample_id: str, ids: torch.Tensor) -> WireSample:
    return WireSample(sample_id, "nearby", "tiny", (1, 3, 4), ids, torch.zeros(len(ids), 3, HIDDEN))


def test_what_no_sample_can_be_neither_arrives_nor_stops_the_receiver():
    """A header nested beyond the parser's depth is refused, a frame longer than the longest sample's not even taken in;
    its sender is disconnected. A good sample of another peer arrives afterwards."""
    samples, context = [Sample(torch.arange(3, 15), torch.arange(12) >= 3)], zmq.Context.instance()
    with context.socket(zmq.PUSH) as stranger, context.socket(zmq.PUSH) as push:
        streamed = StreamSource(
            tiny_target(), samples, Nearby(lambda sample: push.send_multipart(encode(sample))), "tcp://127.0.0.1:*"
        )
        for socket_ in (stranger, push):
            socket_.set(zmq.LINGER, 0)
            socket_.connect(streamed.endpoint)
        streamed._trusted.add("nearby")  # there is no model behind it to compare
        began = time.monotonic()
        nested = [b"[" * 50_000, b"1234", b"12"]
        stranger.send_multipart([*nested, _digest(nested)])
        until(lambda: streamed.counts["damaged"], 10)
        disconnected = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        large = zeros("f" * 16, torch.ones(1000, dtype=torch.int32))
        assert large.states.nbytes > frame_limit(12, 3, HIDDEN)
        stranger.send_multipart(encode(large))
        assert disconnected.poll(10_000)
        stranger.disable_monitor()
        disconnected.close(0)
        row = streamed.row([0])
        assert torch.equal(row.tokens, samples[0].token_ids) and not row.features.any()
        wanted = {"received": 1, "damaged": 1, "unasked": 0, "retried": 0}
        assert streamed.counts == streamed.counts | wanted and streamed._heard >= began
        streamed.close()


def test_samples_that_wait_for_each_other_on_a_slow_link_are_not_asked_for_again(monkeypatch):
    """One in 20 seconds: the third arrives 60 seconds after its answer. Only after as many of silence as ARRIVAL says
    are states taken for lost."""
    streamed, now = StreamSource(tiny_target(), [], Nearby(), None, in_flight=0), [1000.0]
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Arrival:
        """A Future by the test's clock: done at `at`; meanwhile samples of other requests come."""

        def __init__(self, at: float, others: tuple[float, ...]):
            self.at, self.others = at, others

        def result(self, timeout: float) -> str:
            now[0] = min(self.at, now[0] + timeout)
            streamed._heard = max([other for other in self.others if other <= now[0]], default=streamed._heard)
            if now[0] < self.at:
                raise TimeoutError
            return "the sample"

    assert streamed._arrived(Arrival(1060.0, (1020.0, 1040.0))) == "the sample"
    with pytest.raises(TimeoutError):
        streamed._arrived(Arrival(1200.0, (1080.0,)))
    assert now[0] == 1080.0 + stream.ARRIVAL


def opened(monkeypatch, folder: Path, *argv: str) -> dict:
    """The options with which open_source makes a source for this command line, its cache below `folder`."""
    parser = argparse.ArgumentParser()
    stream.add_arguments(parser)
    monkeypatch.setattr(stream, "StreamSource", lambda *_, **options: options)
    monkeypatch.setattr(stream, "cache_dir", lambda: folder)
    options = vars(parser.parse_args(["--verifier", "http://nearby", *argv]))
    return stream.open_source(options, tiny_target(), [Sample(torch.arange(5), torch.arange(5) >= 2)])


def test_responses_of_another_temperature_are_cached_elsewhere(monkeypatch, tmp_path):
    """Given texts are the same at any; of responses the length counts too."""

    def folder(*argv: str) -> Path:
        return opened(monkeypatch, tmp_path, "--cache", "1", *argv)["cache"].folder

    greedy, warm = folder("--on-policy", "8"), folder("--on-policy", "8", "--temperature", "0.8")
    assert len({greedy, warm, folder("--on-policy", "9"), folder()}) == 4
    assert warm == folder("--on-policy", "8", "--temperature", "0.8") and folder() == folder("--temperature", "0.8")


def test_trainers_wait_longer_than_a_verifier_may_take_to_start_again(monkeypatch, tmp_path):
    """And not so long that the other ranks give up theirs; the command line has the last word."""
    assert serve.STARTUP < opened(monkeypatch, tmp_path)["patience"] < ranks.PATIENCE.total_seconds()
    assert opened(monkeypatch, tmp_path, "--patience", "5")["patience"] == 5.0


def test_a_verifier_that_stays_away_is_said_to(target, samples):
    nowhere = Verifier(f"http://127.0.0.1:{free_ports(1)[0]}", "smollm2-135m")
    streamed = StreamSource(target, samples, nowhere, "tcp://127.0.0.1:*", patience=0.6)
    with pytest.raises(Away, match="the verifier stays away .*: start it again, then resume"):
        streamed.row([0])
    streamed.close()


def test_a_taken_port_is_named(target, samples, verifier):
    first = StreamSource(target, samples, verifier.client(), "tcp://127.0.0.1:*")
    with pytest.raises(OSError, match=f"cannot listen on {first.endpoint}.*: free the port or choose another"):
        StreamSource(target, samples, verifier.client(), first.endpoint)
    first.close()


# ---- the disk cache


def test_cached_samples_need_no_verifier(target, source, samples, tmp_path):
    first = source(samples, cache=SampleCache(tmp_path, 1e9))
    before = first.row([0, 3, 2])
    first.close()
    nowhere = Verifier("http://127.0.0.1:1", "smollm2-135m")
    later = StreamSource(target, samples, nowhere, "tcp://127.0.0.1:*", cache=SampleCache(tmp_path, 1e9), patience=0.1)
    after = later.row([0, 3, 2])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert later.counts["cached"] == 3 and later.counts["received"] == 0
    with pytest.raises(Away):
        later.row([1])
    later.close()


def test_damaged_cache_files_are_named_and_asked_again(source, samples, tmp_path, capsys):
    first = source(samples, cache=SampleCache(tmp_path, 1e9))
    before = first.row([0, 2, 5])
    first.close()
    damaged = [tmp_path / f"{i:08d}.sample" for i in (0, 2, 5)]
    data = bytearray(damaged[0].read_bytes())
    data[-20] ^= 1  # a bit of the states
    damaged[0].write_bytes(data)
    damaged[1].write_bytes(damaged[1].read_bytes()[:-1000])
    damaged[2].write_bytes(struct.pack("<Q", 2**60) + b"{}")
    again = source(samples, rank=1, cache=SampleCache(tmp_path, 1e9))
    after = again.row([0, 2, 5])
    assert torch.equal(before.tokens, after.tokens) and torch.allclose(before.hidden, after.hidden, atol=1e-3)
    assert again.counts["cached"] == 0 and again.counts["received"] == 4
    said = capsys.readouterr().err
    assert all(f"cache: {path.name} is damaged" in said for path in damaged)


def test_a_full_cache_is_said_once_and_training_goes_on(source, samples, tmp_path, capsys):
    streamed = source(samples, cache=SampleCache(tmp_path, 300_000))
    streamed.row([0])  # alone, lest the largest, which has no room, arrive first
    for _ in range(2):
        streamed.row([1, 2, 3])
    streamed.row([0])
    kept = list(tmp_path.glob("*"))
    assert kept and sum(path.stat().st_size for path in kept) <= 300_000
    assert all(path.suffix == ".sample" for path in kept) and streamed.counts["cached"] == len(kept) < 4
    assert capsys.readouterr().err.count("cache: full (budget of 0.0003 GB)") == 1


def test_a_full_disk_is_said_once_and_leaves_no_partial_file(source, samples, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    streamed = source(samples, cache=SampleCache(tmp_path, 1e9))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as a quota would
    try:
        row = streamed.row([3])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(row.tokens, samples[3].token_ids) and not list(tmp_path.glob("*"))
    assert capsys.readouterr().err.count("cache: full (") == 1


# ---- the whole: one command, two ranks, a verifier killed on the way

TALK = [f"Tell me something about the number {n}, please." for n in range(16)]
SMALL = {"num_hidden_layers": 1, "intermediate_size": 64, "draft_vocab_size": 64, "markov_rank": 4}
STEPS, CONFIG = 10, {"row_tokens": 96, "anchors": 8, "micro_batches": 4, "dtype": "float32"}


def write_talk(target, folder) -> str:
    rows = []
    for text in TALK:
        prompt = target.encode_chat([{"role": "user", "content": text}])
        words = target.tokenizer(text + " It is a fine number.")["input_ids"] + [2]
        rows.append({"messages": [{"role": "user", "content": text}], "split": "train", "target": target.name,
                     "prompt_ids": prompt, "response_ids": words})  # fmt: skip
    path = folder / "talk.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_serve_trains_two_ranks_through_a_kill_as_if_nothing_had_been(target, verifier, tmp_path):
    """vLLM is killed at step 3 of 10: training waits, asks again, and equals one undisturbed rank's."""
    data, train_args = (
        write_talk(target, tmp_path),
        ["--steps", str(STEPS), "--heldout-prompts", "0", "--config", json.dumps(SMALL)],
    )
    for name, value in CONFIG.items():
        train_args += [f"--{name.replace('_', '-')}", str(value)]
    http_port, port = free_ports(2)
    profile = CONFIG | {"max_model_len": 512, "max_num_seqs": 4}
    command = [sys.executable, "-m", "dspark", "serve", "--profile", "cpu", "--config", json.dumps(profile)]
    command += [
        "--http-port",
        str(http_port),
        "--port",
        str(port),
        "--out",
        str(tmp_path / "two"),
        "--",
        "--data",
        data,
    ]
    log = (tmp_path / "serve.log").open("w")
    serving = subprocess.Popen([*command, *train_args], cwd=ROOT, stdout=log, stderr=log)
    try:
        began = tmp_path / "two" / "log.csv"
        until(lambda: serving.poll() is not None or (began.exists() and len(began.read_text().splitlines()) > 3), 400)
        pids = [int(pid) for pid in Path(f"/proc/{serving.pid}/task/{serving.pid}/children").read_text().split()]
        os.killpg(pids[0], signal.SIGKILL)
        serving.wait(400)
    finally:
        serving.terminate()
        serving.wait(30)
        log.close()
    said = (tmp_path / "serve.log").read_text()
    assert serving.returncode == 0, said[-3000:]
    assert "verifier died and is started again" in said and "waits for the verifier" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    alone = [
        "--data",
        data,
        "--out",
        str(tmp_path / "one"),
        "--verifier",
        verifier.url,
        "--listen",
        verifier.endpoints[0],
    ]
    train.main([*alone, *train_args])
    one, two = (log_of(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == STEPS
    for mine, theirs in zip(one, two, strict=True):
        assert mine["draft_tokens"] == theirs["draft_tokens"] and mine["epoch"] == theirs["epoch"]
        assert float(theirs["loss"]) == pytest.approx(float(mine["loss"]), rel=2e-3)
    assert checkpoint.load(tmp_path / "two" / "drafter", target).config.markov_rank == 4


KILLS = 20


@pytest.mark.slow
def test_twenty_kills_of_either_side_lose_double_and_damage_nothing(target, verifier, tmp_path, capsys):
    """Verifier or a trainer rank dies, in drawn order, at drawn moments; every step keeps its samples."""
    profile = replace(PROFILE, row_tokens=96, anchors=8)
    port = int(verifier.endpoints[0].rpartition(":")[2])
    fleet, data, drawn = verifier.fleet, write_talk(target, tmp_path), random.Random(0)

    def start(name: str) -> subprocess.Popen:
        options = ["--data", data, "--out", str(tmp_path / name), "--heldout-prompts", "0", "--save-every", "1"]
        options += ["--steps", "160", "--config", json.dumps(SMALL)]
        return fleet.start(name, trainer_command(profile, verifier.url, "127.0.0.1", port, options))

    def rows(name: str) -> int:
        log = tmp_path / name / "log.csv"
        return len(log_of(tmp_path / name)) if log.exists() else 0

    assert start("undisturbed").wait(600) == 0
    trainer = start("killed")
    for side in drawn.sample(["verifier", "trainer"] * (KILLS // 2), KILLS):
        before = rows("killed")
        until(lambda: trainer.poll() is not None or rows("killed") > before, 120)  # noqa: B023
        time.sleep(drawn.uniform(0, 1))
        assert trainer.poll() is None, "".join(fleet.last_lines["killed"])
        if side == "verifier":
            os.killpg(fleet.processes["verifier"].pid, signal.SIGKILL)
            fleet.start("verifier", verifier.command)
            fleet.wait_healthy("verifier", verifier.url, 300)
        else:
            ranks = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
            os.kill(int(drawn.choice(ranks)), signal.SIGKILL)
            assert trainer.wait(60) != 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
            trainer = start("killed")
    assert trainer.wait(600) == 0, "".join(fleet.last_lines["killed"])
    calm, shaken = log_of(tmp_path / "undisturbed"), log_of(tmp_path / "killed")
    assert [row["step"] for row in shaken] == [str(step) for step in range(1, 161)]
    for mine, theirs in zip(calm, shaken, strict=True):
        assert mine["draft_tokens"] == theirs["draft_tokens"] and mine["epoch"] == theirs["epoch"]
        assert float(theirs["loss"]) == pytest.approx(float(mine["loss"]), rel=5e-3)
    assert "refuses a message" not in (fleet.folder / "killed.log").read_text()
    for endpoint in verifier.endpoints:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections linger; listeners must not
            probe.bind(("127.0.0.1", int(endpoint.rpartition(":")[2])))
    with capsys.disabled():
        worst = max(abs(float(b["loss"]) / float(a["loss"]) - 1) for a, b in zip(calm, shaken, strict=True))
        print(f"\n{KILLS} kills, {len(shaken)} steps: every step's tokens as undisturbed, loss within {worst:.1e}")


def until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
