"""Speculative decoding of many requests at once: one drafting pass and one ragged verification a step.

Requests join as soon as a row is free and leave when they are done (continuous admission). Rows live in one KV cache,
the active ones in front; how many drafts of each are verified is a policy's choice (dspark.schedule). Every answer is
what dspark.decode gives to its prompt alone. Shapes: R active requests, n drafts a step, V target vocabulary.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dspark import schedule
from dspark.decode import Answer, _cut, _pick, check_temperature, draft_ids
from dspark.kernels import verify
from dspark.target import KVCache, Target


@dataclass
class Served(Answer):
    """An answer given under load. drafted counts the drafts that were VERIFIED; seconds run from admission, prefill
    included, to the last token. confidence [steps][n]: of all drafts made, empty where none is told. admitted, at
    [tokens]: seconds that the service had spent in steps, without prefills, when it was admitted and when each token
    came."""

    confidence: list[np.ndarray] = field(default_factory=list)
    admitted: float = 0.0
    at: list[float] = field(default_factory=list)


@dataclass
class _Row:
    """An active request. `anchor` is its last token, `length` the committed tokens before it."""

    index: int
    served: Served
    context: object
    anchor: int
    length: int
    begun: float


class Engine:
    """Up to `concurrency` requests on one target and drafter (None where the policy's n is 0). temperatures [n]
    calibrate the confidences that the policy sees. ValueError names what cannot be batched, or does not fit."""

    def __init__(self, target: Target, drafter, policy, concurrency: int, max_len: int, temperature=0.0, seed=0,
                 temperatures=None):  # fmt: skip
        check_temperature(temperature)
        if policy.n and drafter is None:
            raise ValueError(f"{policy.name} drafts {policy.n} tokens a step: give a drafter, or schedule.Fixed(0)")
        if policy.n and policy.needs_confidence and drafter.confidence_source is None:
            raise ValueError(f"{policy.name} needs a drafter with a confidence head")
        if policy.n:
            drafter.config.check_taps(target)
        if policy.n and not hasattr(drafter, "new_caches"):
            kind = type(drafter).__name__
            raise ValueError(f"drafter {kind} cannot draft for a batch: decode one request at a time, by dspark.decode")
        self.target, self.drafter, self.policy = target, drafter if policy.n else None, policy
        self.temperature, self.temperatures, self.max_len = temperature, temperatures, max_len
        self.generator = torch.Generator(target.device).manual_seed(seed)
        self.cache = target.new_cache(concurrency, max_len)
        if not isinstance(self.cache, KVCache):  # a TransformersTarget's
            mend = "decode one request at a time, by dspark.decode"
            raise ValueError(f"target {target.name!r} cannot hold requests of different lengths: {mend}")
        self.free = drafter.new_caches(concurrency, max_len) if policy.n else []  # contexts that no row has
        self.rows: list[_Row] = []

    def _rows_cache(self, first: int, last: int) -> KVCache:
        """A view of some rows, written through."""
        view = object.__new__(KVCache)
        view.k, view.v = ([layer[first:last] for layer in part] for part in (self.cache.k, self.cache.v))
        return view

    def admit(self, index: int, prompt: list[int]) -> _Row:
        """Prefill `prompt` in a free row; its first token is the row's anchor."""
        begun, at = time.perf_counter(), len(self.rows)
        tokens = torch.tensor(prompt, device=self.target.device)
        out = self.target.forward(tokens[None], self._rows_cache(at, at + 1), 0)
        anchor = int(_pick(self.target.logits(out.hidden[0, -1:]), self.temperature, self.generator))
        context = None
        if self.drafter:
            context = self.free.pop()
            context.length = 0
            self.drafter.extend(context, out.features[0], tokens)
        row = _Row(index, Served(), context, anchor, len(prompt), begun)
        self.rows.append(row)
        return row

    def leave(self, row: _Row) -> None:
        """Free a row; the last one moves into its place."""
        at, last = self.rows.index(row), self.rows.pop()
        if row.context is not None:
            self.free.append(row.context)
        if last is not row:
            self.rows[at] = last
            for layer in (*self.cache.k, *self.cache.v):
                layer[at, :, : last.length] = layer[len(self.rows), :, : last.length]

    def step(self) -> list[list[int]]:
        """One draft-verify-accept cycle of all active rows: the tokens that each emits, before any cut."""
        device, R = self.target.device, len(self.rows)
        anchors = torch.tensor([row.anchor for row in self.rows], device=device)
        drafts, q, confidence = self._draft(anchors)
        survival = np.ones((R, self.policy.n))
        if confidence is not None:
            survival = schedule.survival(confidence, self.temperatures)
        lengths = self.policy.lengths(survival)
        tokens = torch.cat([anchors[:, None], drafts[:, : max(lengths)]], 1)  # [R, 1 + longest]
        real = torch.arange(tokens.shape[1], device=device) <= torch.tensor(lengths, device=device)[:, None]
        packed = None if bool(real.all()) else real.flatten().nonzero()[:, 0]
        start = torch.tensor([row.length for row in self.rows], device=device)
        out = self.target.forward(tokens, self._rows_cache(0, R), start, packed)
        hidden, features = out.hidden.flatten(0, 1), out.features
        logits = self.target.logits(hidden)  # [N, V], N = R + sum of lengths
        rows = (real.flatten().cumsum(0) - 1).view_as(real).where(real, -1)  # [R, 1 + longest]: where logits lie
        accepted, following = self._verify(logits, tokens[:, 1:], rows, q)
        if self.drafter:
            kept = torch.arange(tokens.shape[1], device=device) <= torch.tensor(accepted, device=device)[:, None]
            contexts, counts = [row.context for row in self.rows], [count + 1 for count in accepted]
            self.drafter.extend_batch(contexts, features.flatten(0, 1)[rows[kept]], counts)
        emitted = []
        for i, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            emitted.append([*drafts[i, : accepted[i]].tolist(), following[i]])
            row.served.drafted.append(length)
            row.served.accepted.append(accepted[i])
            if confidence is not None:
                row.served.confidence.append(confidence[i])
            row.length, row.anchor = row.length + accepted[i] + 1, following[i]
        return emitted

    def _draft(self, anchors: Tensor) -> tuple[Tensor, Tensor | None, np.ndarray | None]:
        """n drafts for each row: tokens [R, n], q [R, n, D] (None when greedy), confidence [R, n] or None."""
        n = self.policy.n
        if not n:
            return anchors.new_empty(len(anchors), 0), None, None
        tokens, q, confidence = self.drafter.draft_batch(
            anchors, [row.context for row in self.rows], n, self.temperature, self.generator
        )
        return tokens, q, None if confidence is None else confidence.float().cpu().numpy()

    def _verify(self, logits: Tensor, drafts: Tensor, rows: Tensor, q: Tensor | None) -> list[list[int]]:
        """Packed logits [N, V], drafts [R, longest], rows [R, 1 + longest] -> accepted and following, of R each."""
        uniforms = None
        if self.temperature > 0:
            uniforms = torch.rand(rows.shape, generator=self.generator, device=rows.device)
        to_draft = draft_ids(q, self.drafter, self.target.vocab_size)
        q = None if q is None else q[:, : drafts.shape[1]]
        return [part.tolist() for part in verify(logits, drafts, rows, self.temperature, uniforms, q, to_draft)]


@torch.inference_mode()
def serve(
    target: Target, drafter, prompts: list[list[int]], policy, concurrency: int, max_new_tokens: int,
    temperature: float = 0.0, seed: int = 0, stop_token_ids: frozenset[int] | None = None, temperatures=None,
) -> list[Served]:  # fmt: skip
    """Answer all prompts, `concurrency` at a time, in order of admission; the answers come in the prompts' order."""
    if not prompts or not all(prompts):
        raise ValueError("every prompt must hold at least one token")
    stop = target.eos_token_ids if stop_token_ids is None else stop_token_ids
    max_len = max(map(len, prompts)) + max_new_tokens + policy.n + 1
    engine = Engine(target, drafter, policy, concurrency, max_len, temperature, seed, temperatures)
    waiting, answers = deque(enumerate(prompts)), [None] * len(prompts)
    stepping = 0.0

    def emit(row: _Row, tokens: list[int]) -> None:
        served = row.served
        served.tokens += _cut(tokens, stop, max_new_tokens - len(served.tokens))
        served.at += [stepping] * (len(served.tokens) - len(served.at))
        if len(served.tokens) >= max_new_tokens or served.tokens[-1] in stop:
            served.seconds = time.perf_counter() - row.begun
            answers[row.index] = served
            engine.leave(row)

    while waiting or engine.rows:
        while waiting and len(engine.rows) < concurrency:
            row = engine.admit(*waiting.popleft())
            row.served.admitted = stepping
            emit(row, [row.anchor])
        rows, begun = list(engine.rows), time.perf_counter()
        emitted = engine.step() if rows else []
        stepping += time.perf_counter() - begun
        for row, tokens in zip(rows, emitted, strict=True):
            emit(row, tokens)
    return answers


@dataclass
class _Forced:
    """Verifies `drafts` of n, to time what that costs."""

    n: int
    drafts: int = 0
    needs_confidence = False
    name = "profile"

    def lengths(self, survival: np.ndarray) -> list[int]:
        return [self.drafts] * len(survival)


@torch.inference_mode()
def profile_steps(
    target: Target, drafter, prompts: list[list[int]], drafts: list[int], requests: tuple[int, ...], repeats: int
) -> pd.DataFrame:
    """Time whole steps of the real engine: R requests that make n of `drafts` each, j = 0..n of them verified, so
    B = R * (1 + j) tokens.

    One row an (n, R, B): step_ms is the median of `repeats`, taken in turn over all n and j of an R, so that a slow
    minute hits all that is compared; sps is steps/s. Prompts are used in turn to fill the rows, and every step is the
    first after them: its context is as long whatever n is.
    """
    rows = []
    for R in requests:
        engines, begins, times = {}, {}, {(n, j): [] for n in drafts for j in range(n + 1)}
        for n in drafts:
            engines[n] = Engine(target, drafter, _Forced(n), R, max(map(len, prompts)) + 2 * (n + 1))
            filled = [engines[n].admit(i, prompts[i % len(prompts)]) for i in range(R)]
            begins[n] = [(row.length, row.anchor) for row in filled]
        for _, (n, j) in itertools.product(range(repeats + 1), times):
            engine = engines[n]
            engine.policy.drafts, begun = j, time.perf_counter()
            engine.step()
            times[n, j].append(time.perf_counter() - begun)
            for row, (row.length, row.anchor) in zip(engine.rows, begins[n], strict=True):
                if row.context is not None:
                    row.context.length = row.length
        for (n, j), seconds in times.items():
            ms = 1e3 * np.median(seconds[1:])  # the first warms up
            rows.append({"drafts": n, "requests": R, "tokens": R * (1 + j), "step_ms": ms, "sps": 1e3 / ms})
    return pd.DataFrame(rows)


def observed_blocks(answers: list[Served], n: int) -> tuple[np.ndarray, np.ndarray]:
    """What calibration rests on: confidence [N, n] and drafts kept [N] of every step that verified all n drafts."""
    steps = (zip(served.confidence, served.drafted, served.accepted, strict=True) for served in answers)
    whole = [(confidence, accepted) for confidence, drafted, accepted in itertools.chain(*steps) if drafted == n]
    if not whole:
        raise ValueError(f"no step verified all {n} drafts with a confidence head: serve with schedule.Fixed({n})")
    confidence, accepted = zip(*whole, strict=True)
    return np.stack(confidence), np.array(accepted)


def load_row(answers: list[Served], seconds: float) -> dict:
    """Counts and speeds of one run that took `seconds`. per_user_tokens_per_s: median over requests of tokens per
    second since admission; verified_per_token: drafts and anchors that the target computed per token emitted."""
    tokens, steps = sum(len(served.tokens) for served in answers), sum(served.steps for served in answers)
    verified = sum(sum(served.drafted) for served in answers)
    accepted = sum(sum(served.accepted) for served in answers)
    return {
        "requests": len(answers), "output_tokens": tokens, "steps": steps, "verified": verified, "accepted": accepted,
        "tau": 1 + accepted / steps if steps else float("nan"), "verified_per_token": (verified + steps) / tokens,
        "seconds": seconds, "tokens_per_s": tokens / seconds,
        "per_user_tokens_per_s": float(np.median([len(served.tokens) / served.seconds for served in answers])),
    }  # fmt: skip


def saturated(answers: list[Served], concurrency: int) -> tuple[int, float]:
    """(tokens, seconds) of the steps of a service in which every place was taken: from the admission that took the last
    free one to the last admission. What comes after is drained with fewer and fewer requests. Prefills, and the tokens
    that they give, are left out: no policy changes them. (0, 0.0) if none waited."""
    admitted = sorted(served.admitted for served in answers)
    if len(admitted) <= concurrency:
        return 0, 0.0
    first, last = admitted[concurrency - 1], admitted[-1]
    return sum(first < at <= last for served in answers for at in served.at[1:]), last - first


class Contestant(NamedTuple):
    """What a load test compares: a policy (made anew for each service), the drafter it is for, and the temperatures
    [n] that calibrate that drafter's confidences."""

    name: str
    policy: Callable
    drafter: object = None
    temperatures: np.ndarray | None = None


def load_test(
    target: Target, contestants: list[Contestant], prompts: list[list[int]], concurrency: int, rounds: int,
    max_new_tokens: int,
) -> pd.DataFrame:  # fmt: skip
    """One row a contestant and round: all prompts served at this concurrency, the contestants in turn in each round, so
    that a slow minute hits all of them."""
    rows = []
    for number in range(rounds):
        turn = number % len(contestants)
        for name, policy, drafter, temperatures in contestants[turn:] + contestants[:turn]:
            chosen, begun = policy(), time.perf_counter()
            answers = serve(target, drafter, prompts, chosen, concurrency, max_new_tokens, temperatures=temperatures)
            row = load_row(answers, time.perf_counter() - begun)
            tokens, seconds = saturated(answers, concurrency)
            row["decode_tokens_per_s"] = tokens / seconds if seconds else float("nan")
            rows.append({"policy": name, "concurrency": concurrency, "round": number, **row})
    return pd.DataFrame(rows)
