"""The trainer's half of hidden-state streaming: a source like LocalSource whose states come from a live verifier.

A rank asks the verifier for its own samples over the OpenAI-compatible API, several at a time, and receives their
states on its own socket (dspark/wire.py). Which samples make which batch is decided by the trainer alone, so the order
of arrival changes nothing. Whatever does not arrive is asked for again; whatever arrives unasked is refused.
"""

import http.client
import json
import os
import queue
import secrets
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.nn.functional as F
import zmq
from torch import Tensor

from dspark.data import Sample
from dspark.paths import cache_dir
from dspark.serve import STARTUP, open_url
from dspark.shared import Reader
from dspark.source import PackedRow, data_digest, pack_row
from dspark.wire import WireError, WireSample, decode, frame_limit

CHAT_PROBE = [{"role": "user", "content": "How do you do?"}]
PROBE_TOKENS = 64
ARRIVAL = 30.0  # seconds of silence after a request's answer, then its states are lost: the verifier died in between
PATIENCE = STARTUP + 300.0  # the verifier may die late in an answer, and `serve` needs a moment to see it
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}  # nats, mean over the probe


class Away(ConnectionError):
    """The verifier does not answer now; asking again may help."""


class Verifier:
    """A vLLM server's HTTP side: `url` as http://host:port, `model` the name that it must serve."""

    def __init__(self, url: str, model: str, timeout: float = 120.0):
        self.url, self.model, self.timeout = url.rstrip("/"), model, timeout

    def post(self, path: str, **body) -> dict:
        """The answer to a request about `model`. Away if there is none now, ValueError if the request is refused."""
        data = json.dumps({"model": self.model, **body}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with open_url(request, timeout=self.timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            if error.code >= 500:
                raise Away(f"{self.url} answered {error.code}") from error
            raise ValueError(f"verifier {self.url} refuses {path} for model {self.model!r}: {said}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise Away(f"{self.url}: {error}") from error


class SampleCache:
    """Samples kept on disk as they came over the wire, one file each, within `budget` bytes; `ranks` share the folder
    and, evenly, its budget."""

    def __init__(self, folder: Path, budget: float, ranks: int = 1):
        self.folder, self.budget = folder, budget / ranks
        folder.mkdir(parents=True, exist_ok=True)
        self.used = sum(path.stat().st_size for path in folder.glob("*.sample")) / ranks
        self.full = False
        self.lock = threading.Lock()  # several samples arrive at a time, each in its own thread

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:08d}.sample"

    def get(self, index: int) -> WireSample | None:
        """The sample, if it is here and whole; a damaged file is named and removed."""
        path = self._path(index)
        if not path.exists():
            return None
        try:
            return decode(_split(bytearray(path.read_bytes())))
        except (WireError, struct.error) as error:
            print(f"cache: {path.name} is damaged ({error}): asking the verifier again", file=sys.stderr)
            self.used -= path.stat().st_size
            path.unlink()
            return None

    def put(self, index: int, frames: list) -> None:
        """Keep the frames of a sample, unless budget or disk are full: then say so once and keep no more."""
        size = sum(len(frame) + 8 for frame in frames)
        partial = self.folder / f"{index:08d}.{threading.get_ident()}.partial"
        with self.lock:
            if self.full or self._path(index).exists():
                return
            try:
                if self.used + size > self.budget:
                    raise OSError(f"budget of {self.budget / 1e9:.3g} GB")
                with partial.open("wb") as file:
                    for frame in frames:
                        file.write(struct.pack("<Q", len(frame)))
                        file.write(frame)
                os.replace(partial, self._path(index))
                self.used += size
            except OSError as error:
                partial.unlink(missing_ok=True)
                self.full = True
                print(f"cache: full ({error}): further samples are streamed only", file=sys.stderr)


def _split(data: bytearray) -> list[memoryview]:
    frames, at, view = [], 0, memoryview(data)
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        frames.append(view[at + 8 : at + 8 + size])
        at += 8 + size
    return frames


class StreamSource:
    """Hidden states of `samples`, streamed by a live verifier; `row(ids)` packs them as LocalSource does.

    endpoint: tcp://host:port that this rank listens on, and which the verifier was started with as number `rank`.
    `expect(ids)` asks ahead (the trainer calls it for `lookahead` steps to come), so memory holds no more than those.
    response_tokens: on-policy; the verifier answers each sample's prompt itself with so many tokens at most.
    cache: states are kept there, and samples that are there already are not asked for.
    patience: seconds until row() raises Away, because a sample has not come however often it was asked for.
    """

    def __init__(
        self, target, samples: list[Sample], verifier: Verifier, endpoint: str, rank: int = 0, lookahead: int = 1,
        in_flight: int = 8, patience: float = PATIENCE, response_tokens: int = 0, temperature: float = 0.0,
        cache: SampleCache | None = None,
    ):  # fmt: skip
        self.target, self.verifier, self.rank, self.cache = target, verifier, rank, cache
        self.lookahead, self.patience = lookahead, patience
        self.response_tokens, self.temperature = response_tokens, temperature
        self.samples = [_planned(sample, response_tokens) for sample in samples] if response_tokens else samples
        self.layer_ids = tuple(layer + 1 for layer in target.layer_ids) + (target.num_hidden_layers,)
        self.counts = {"received": 0, "bytes": 0, "cached": 0, "retried": 0, "unasked": 0, "damaged": 0, "lost": 0}
        self.waited = 0.0  # seconds that row() stood still
        self.timeline: deque[dict] = deque(maxlen=10_000)  # seconds of asked, answered, arrived, used, by sample
        self._expected: dict[int, Future] = {}
        self._asked: dict[str, Future] = {}
        self._heard = 0.0  # when the last sample arrived, whosoever asked for it
        self._trusted: set[str] = set()  # instances of the verifier that passed the probe
        self._probing, self._counting = threading.Lock(), threading.Lock()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = threading.Event()
        self._reader = Reader()
        threads = [self._work] * in_flight
        if endpoint is not None:
            self._listen(endpoint)
            threads.append(self._receive)
        self._threads = [threading.Thread(target=run, daemon=True) for run in threads]
        for thread in self._threads:
            thread.start()

    def _listen(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, 1)
        longest = max(map(len, self.samples), default=0)  # with the response that it may get
        self._limit = frame_limit(longest, len(self.layer_ids), self.target.hidden_size)
        self._socket.set(
            zmq.MAXMSGSIZE, self._limit
        )  # a peer that sends more is disconnected before memory is taken for it
        deadline = time.monotonic() + 2.0  # a rank that was killed a moment ago may still hold the port
        while True:
            try:
                self._socket.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline:
                    self._socket.close(0)
                    raise OSError(f"cannot listen on {endpoint} ({error}): free the port or choose another") from error
                time.sleep(0.1)
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Stop asking and listening."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        self._threads[-1].join()

    def expect(self, ids: list[int]) -> None:
        """Begin to fetch samples that a later row() will want."""
        for i in ids:
            if i not in self._expected:
                self._expected[i] = Future()
                self._jobs.put((i, self._expected[i]))

    def row(self, ids: list[int]) -> PackedRow:
        """Samples `ids` packed into one row; waits for what has not arrived yet."""
        self.expect(ids)
        begun = time.perf_counter()
        fetched = [self._expected.pop(i).result() for i in ids]
        self.waited += time.perf_counter() - begun
        return pack_row([s for s, _ in fetched], [states for _, states in fetched], self.target)

    # ---- asking

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            index, future = job
            try:
                future.set_result(self._fetch(index))
            except BaseException as error:  # row() raises it
                future.set_exception(error)

    def _fetch(self, index: int) -> tuple[Sample, Tensor]:
        """(sample, states [T, (m+1)*H], the last H of them after the final norm), from the cache or the verifier."""
        sample, exact = self.samples[index], not self.response_tokens
        prompt = sample.token_ids.tolist() if exact else prompt_ids(sample)
        got = self.cache.get(index) if self.cache else None
        if got is None:
            got = self._insist(index, prompt)
        else:
            self._count("cached")
        self._check(got, prompt, exact)
        if not exact:
            ids = got.token_ids.long()
            sample = Sample(ids, torch.arange(len(ids)) >= len(prompt))
        return sample, self._finish(got.states, len(sample))

    def _insist(self, index: int, prompt: list[int]) -> WireSample:
        """Ask until the sample is there; Away once `patience` seconds have passed without it."""
        begun, told = time.monotonic(), False
        while True:
            try:
                times = {"sample": index, "asked": time.perf_counter()}
                _, got, frames = self._ask(prompt, self.response_tokens, times)
                self._trust(got.instance)
                self.timeline.append(times)
                if self.cache:
                    self.cache.put(index, frames)
                return got
            except Away as error:
                if self._closed.is_set() or time.monotonic() - begun > self.patience:
                    raise Away(f"the verifier stays away ({error}): start it again, then resume") from error
                if not told:
                    print(f"rank {self.rank} waits for the verifier ({error})", file=sys.stderr)
                told = True
                self._count("retried")
                self._closed.wait(0.5)

    def _ask(self, prompt: list[int], response_tokens: int, times: dict, **extra) -> tuple[dict, WireSample, list]:
        """One request for one sample: the HTTP answer, then the message. Away if either does not come in time."""
        sample_id, arrival = secrets.token_hex(8), Future()
        body = {"prompt": prompt, "max_tokens": response_tokens or 1, "temperature": self.temperature, **extra}
        body["kv_transfer_params"] = {"rank": self.rank, "sample_id": sample_id, "response": response_tokens > 0}
        self._asked[sample_id] = arrival
        try:
            answer = self.verifier.post("/v1/completions", **body)
            times["answered"] = time.perf_counter()
            said = answer.get("kv_transfer_params") or {}
            if "sent" not in said:
                raise ValueError(
                    f"the verifier sent no states: {said.get('error', 'it was started without streaming')}"
                )
            got, frames, times["arrived"] = self._arrived(arrival)
            return answer, got, frames
        except TimeoutError as error:
            raise Away("it answered, but the states have not arrived") from error
        finally:
            del self._asked[sample_id]

    def _arrived(self, arrival: Future) -> tuple[WireSample, list, float]:
        """The message of a request that was answered just now. TimeoutError once nothing has come for ARRIVAL seconds:
        on a slow link samples wait for each other, and asking again would only lengthen the queue."""
        answered, silence = time.monotonic(), min(self.verifier.timeout, ARRIVAL)
        while (left := max(answered, self._heard) + silence - time.monotonic()) > 0:
            try:
                return arrival.result(left)
            except TimeoutError:
                pass  # others may have come meanwhile
        raise TimeoutError

    def _receive(self) -> None:
        """Hand each message to whom asked for it; refuse damaged and unasked ones, and count them."""
        while not self._closed.is_set():
            if not self._socket.poll(200):
                continue
            parts = self._socket.recv_multipart(copy=False)
            try:
                frames = self._reader.fetch([part.buffer for part in parts], self._limit)
                got = decode(frames)
            except FileNotFoundError as error:
                self._count("lost")
                print(f"rank {self.rank} lost a message: {error}", file=sys.stderr)
                continue
            except WireError as error:
                self._count("damaged")
                print(f"rank {self.rank} refuses a message: {error}", file=sys.stderr)
                continue
            self._heard = time.monotonic()
            arrival = self._asked.get(got.sample_id)
            if arrival is None or arrival.done():
                self._count("unasked")  # of a former try, or a stranger's
                continue
            self._count("received")
            self._count("bytes", sum(map(len, frames)))
            arrival.set_result((got, frames, time.perf_counter()))
        self._socket.close(0)

    def _count(self, name: str, by: int = 1) -> None:
        with self._counting:
            self.counts[name] += by

    # ---- checking

    def _check(self, got: WireSample, prompt: list[int], exact: bool) -> None:
        """ValueError unless these are this sample's states from the verifier that this trainer wants."""
        H, told = self.target.hidden_size, f"verifier {self.verifier.url}"
        if got.model != self.verifier.model:
            raise ValueError(f"{told} serves {got.model!r}, want {self.verifier.model!r}: start it with that model")
        if got.layer_ids != self.layer_ids:
            raise ValueError(f"{told} sends layers {got.layer_ids}, the drafter reads {self.layer_ids}: start it anew")
        if got.states.shape[2] != H or got.states.dtype != self.target.dtype:
            have = f"{got.states.dtype} of width {got.states.shape[2]}"
            raise ValueError(f"{told} sends {have}, want {self.target.dtype} of width {H}: set --dtype on both sides")
        ids = got.token_ids.tolist()
        if ids[: len(prompt)] != prompt or (exact and len(ids) > len(prompt)):
            raise ValueError(f"{told} sent states of other tokens than it was asked for: report this as a bug")

    def _finish(self, states: Tensor, tokens: int) -> Tensor:
        """[R, L, H] as sent -> [tokens, L*H], the last H after the final norm.

        A response's last token was never run by the target. Its row is zero; no anchor can read it, because the
        context ends before the anchor and the last token anchors nothing.
        """
        states[:, -1] = self._final(states[:, -1])
        return F.pad(states.flatten(1), (0, 0, 0, tokens - len(states)))

    def _final(self, last: Tensor) -> Tensor:
        """[T, H] before the final norm -> after it, on the CPU."""
        last = last.to(self.target.device)
        if hasattr(self.target, "model"):  # a TransformersTarget: the norm is a module of its own kind
            return self.target.model.norm(last).cpu()
        return F.rms_norm(last, last.shape[-1:], self.target.final_norm, self.target.eps).cpu()

    def _trust(self, instance: str) -> None:
        """Before anything of a new instance of the verifier is used: compare it with its own logprobs and template."""
        with self._probing:
            if instance in self._trusted:
                return
            self._check_chat()
            probe = self.samples[0].token_ids[:PROBE_TOKENS].tolist()
            answer, got, _ = self._ask(probe, 0, {}, prompt_logprobs=1)
            self._check(got, probe, exact=True)
            self._check_logprobs(got.states[:, -1], answer["choices"][0]["prompt_logprobs"])
            self._trusted.add(got.instance)

    def _check_chat(self) -> None:
        if self.target.tokenizer is None or not getattr(self.target.tokenizer, "chat_template", None):
            return
        theirs = self.verifier.post("/tokenize", messages=CHAT_PROBE, add_generation_prompt=True)["tokens"]
        ours = self.target.encode_chat(CHAT_PROBE)
        if theirs != ours:
            raise ValueError(f"the verifier renders a chat as {theirs}, the trainer as {ours}: give both one template")

    def _check_logprobs(self, last: Tensor, logprobs: list[dict | None]) -> None:
        """The LM head on the last states [T, H] must give the verifier's own logprobs of its prompt tokens."""
        rows, ids, theirs = [], [], []
        for row, entries in enumerate(logprobs[1:]):
            for token, entry in entries.items():
                rows, ids, theirs = [*rows, row], [*ids, int(token)], [*theirs, entry["logprob"]]
        limit = TOLERANCE[last.dtype]

        def difference(hidden: Tensor) -> float:
            ours = self.target.logits(hidden.to(self.target.device)).float().log_softmax(-1).cpu()
            return float((ours[rows, ids] - torch.tensor(theirs)).abs().mean())

        off = difference(self._final(last))
        if off > limit:
            normed = difference(last) <= limit
            cause = "it sends the last state after the final norm" if normed else "other weights, or another last layer"
            raise ValueError(f"the verifier's states do not give its own logprobs (mean {off:.2g} nats off): {cause}")


def add_arguments(parser) -> None:
    """The options of a streamed training."""
    group = parser.add_argument_group("streaming", "read the hidden states from a live verifier (dspark serve)")
    group.add_argument("--verifier", metavar="URL", help="its API, as http://127.0.0.1:8000")
    group.add_argument("--listen", default="tcp://127.0.0.1:29600", help="rank r listens on this port + r: %(default)s")
    group.add_argument(
        "--transport", choices=("zmq", "mooncake"), default="zmq", help="mooncake: see dspark/mooncake.py"
    )
    group.add_argument("--mooncake-master", default="127.0.0.1:50051", metavar="HOST:PORT", help="%(default)s")
    group.add_argument("--mooncake-protocol", choices=("tcp", "rdma"), default="tcp")
    group.add_argument(
        "--cache", type=float, metavar="GB", default=0.0, help="keep streamed states on disk, for later epochs"
    )
    group.add_argument(
        "--on-policy", type=int, metavar="TOKENS", default=0, help="let the verifier write the responses"
    )
    group.add_argument("--temperature", type=float, default=0.0, help="of those responses: %(default)s")
    group.add_argument(
        "--patience", type=float, metavar="SECONDS", default=PATIENCE, help="with a verifier that is away: %(default)s"
    )


def open_source(options: dict, target, samples: list[Sample], rank: int = 0, ranks: int = 1) -> StreamSource:
    """The source that the options of `add_arguments` describe, for one rank."""
    shared = {"response_tokens": options["on_policy"], "temperature": options["temperature"]}
    shared["patience"] = options["patience"]
    if options["cache"]:
        name = f"{data_digest(target, samples)}-{options['on_policy']}"
        if options["on_policy"]:  # other responses
            name += f"-{options['temperature']}"
        folder = cache_dir() / "stream" / name
        shared["cache"] = SampleCache(folder, options["cache"] * 1e9, ranks)
    verifier = Verifier(options["verifier"], target.name)
    if options["transport"] == "mooncake":
        from dspark.mooncake import MooncakeSource

        where = {"master": options["mooncake_master"], "protocol": options["mooncake_protocol"]}
        return MooncakeSource(target, samples, verifier, rank, **where, **shared)
    address, _, port = options["listen"].rpartition(":")
    return StreamSource(target, samples, verifier, f"{address}:{int(port) + rank}", rank, **shared)


def prompt_ids(sample: Sample) -> list[int]:
    """The tokens before the first that the assistant wrote."""
    mask = sample.loss_mask
    return sample.token_ids[: int(mask.int().argmax()) if mask.any() else len(mask)].tolist()


def _planned(sample: Sample, response_tokens: int) -> Sample:
    """A stand-in as long as prompt and response can become, by which the trainer packs its rows."""
    prompt = torch.tensor(prompt_ids(sample))
    ids = F.pad(prompt, (0, response_tokens))
    return Sample(ids, torch.arange(len(ids)) >= len(prompt))
