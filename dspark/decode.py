"""Speculative decoding for one request: draft, verify, accept. The output is the target's, whatever the drafter says.

p is the target's distribution, q the drafter's. n = 0 is the autoregressive baseline of the same engine.
"""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark import schedule
from dspark.drafter import DSparkDrafter
from dspark.kernels import cpu, verify
from dspark.target import Target


class Step(NamedTuple):
    """One verification step. emitted: the accepted drafts, then the target's own token, cut at a stop token or at
    max_new_tokens. The first step of an answer is the prefill: nothing drafted, one token emitted."""

    drafts: list[int]  # target ids, those sent to verification
    accepted: int  # 0..len(drafts), before any cut
    emitted: list[int]
    confidence: list[float] | None


@dataclass
class Answer:
    """tokens: emitted ids, stop token included. steps counts verifications, not the prefill; accepted[s] drafts kept
    at step s of drafted[s]; seconds: wall time from prompt to last token."""

    tokens: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def tau(self) -> float:
        """Accepted length, bonus token included: 1 + accepted drafts a step."""
        return pooled_tau([self])


def pooled_tau(answers: Iterable[Answer]) -> float:
    """tau of a corpus: all tokens over all steps, never a mean of means. NaN without a step."""
    answers = list(answers)
    steps = sum(answer.steps for answer in answers)
    return 1 + sum(sum(answer.accepted) for answer in answers) / steps if steps else float("nan")


def verify_greedy(logits: Tensor, drafts: Tensor) -> tuple[int, int]:
    """One request: logits [n+1, V] after the anchor and each draft, drafts [n] -> (accepted, the target's next)."""
    accepted, following = verify(logits[None], drafts[None])
    return int(accepted), int(following)


def check_temperature(temperature: float) -> None:
    """ValueError unless it is 0 (greedy) or a finite number above. No other is a distribution to draw from."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature = {temperature}: give 0 (greedy) or a finite number above it")


@torch.inference_mode()
def decode(
    target: Target,
    drafter: DSparkDrafter | None,
    prompt: list[int],
    n: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: frozenset[int] | None = None,
    policy=None,
    temperatures: np.ndarray | None = None,
) -> Iterator[Step]:
    """Answer `prompt` with n drafts a step, yielding each Step as it is verified; n = 0 decodes without a drafter.

    policy: Threshold or Scheduler of dspark.schedule, which choose the prefix of them that is verified; None verifies
    all. temperatures [>= n] calibrate the confidences that it sees. c_k looks at the tokens before draft k only, so no
    choice depends on a token that it admits: lossless."""
    check_temperature(temperature)
    if n and drafter is None:
        raise ValueError(f"num_speculative_tokens = {n} needs a drafter; n = 0 is the autoregressive baseline")
    if not prompt:
        raise ValueError("the prompt holds no token: give at least one")
    if n:
        drafter.config.check_taps(target)
    if policy is not None and n and drafter.confidence_source is None:
        raise ValueError(f"{policy.name} needs a drafter with a confidence head")
    stop = target.eos_token_ids if stop_token_ids is None else stop_token_ids
    generator = torch.Generator(target.device).manual_seed(seed)
    cache = target.new_cache(1, len(prompt) + max_new_tokens + n + 1)
    tokens = torch.tensor(prompt, device=target.device)
    out = target.forward(tokens[None], cache, 0)
    anchor = _pick(target.logits(out.hidden[0, -1:]), temperature, generator)
    context = None
    if n:
        context = drafter.new_cache(len(prompt) + max_new_tokens + n + 1)
        drafter.extend(context, None if out.features is None else out.features[0], tokens)
    length = len(prompt)  # committed tokens before the anchor
    budget = max_new_tokens
    step = Step([], 0, [int(anchor)][:budget], None)
    while True:
        emitted = _cut(step.emitted, stop, budget)
        budget -= len(emitted)
        yield step._replace(emitted=emitted)
        if budget <= 0 or emitted[-1] in stop:
            return
        choice = (policy, temperatures)
        step, features = _step(target, drafter, anchor, cache, context, length, n, temperature, choice, generator)
        if context is not None:
            drafter.extend(context, features, anchor.new_tensor([int(anchor), *step.drafts[: step.accepted]]))
        length += step.accepted + 1
        anchor = anchor.new_tensor([step.emitted[-1]])


def _step(target, drafter, anchor, cache, context, length, n, temperature, choice, generator):
    """One draft-verify-accept cycle: (the Step, target features [accepted + 1, m*H] of what it committed)."""
    drafts, q, confidence = anchor[:0], None, None
    if n:
        drafts, q, confidence = drafter.draft(anchor, context, n, temperature, generator)
        policy, temperatures = choice
        if policy is not None:
            survival = schedule.survival(confidence.float().cpu().numpy()[None], temperatures)
            drafts = drafts[: policy.lengths(survival)[0]]
    out = target.forward(torch.cat([anchor, drafts])[None], cache, length)
    uniforms = None
    if temperature > 0:
        uniforms = torch.rand(1, len(drafts) + 1, generator=generator, device=drafts.device)
    to_draft = draft_ids(q, drafter, target.vocab_size)
    q = None if q is None else q[None, : len(drafts)]
    verified = verify(target.logits(out.hidden), drafts[None], None, temperature, uniforms, q, to_draft)
    accepted, following = (int(x) for x in verified)
    drafts = drafts.tolist()
    confidence = None if confidence is None else confidence[: len(drafts)].tolist()
    features = None if out.features is None else out.features[0, : accepted + 1]
    return Step(drafts, accepted, [*drafts[:accepted], following], confidence), features


def draft_ids(q: Tensor | None, drafter, vocab_size: int) -> Tensor | None:
    """[V] id in q [..., D] of each target id, -1 for none; None where there is no q or the ids are the same."""
    if q is None or q.shape[-1] == vocab_size:
        return None
    ids = torch.arange(q.shape[-1], device=q.device)
    return torch.full((vocab_size,), -1, device=q.device).index_put_((drafter.to_target_ids(ids),), ids)


def _pick(logits: Tensor, temperature: float, generator) -> Tensor:
    if temperature > 0:
        return torch.multinomial(cpu.probabilities(logits, temperature), 1, generator=generator)[:, 0]
    return cpu.argmax(logits)


def _cut(tokens: list[int], stop: frozenset[int], budget: int) -> list[int]:
    """Nothing after a stop token, nothing beyond the budget."""
    for i, token in enumerate(tokens):
        if token in stop:
            return tokens[: min(i + 1, budget)]
    return tokens[:budget]


def answer(target: Target, drafter, prompt: list[int], n: int, max_new_tokens: int, **options) -> Answer:
    """Run `decode` to its end and count. Options are those of `decode`."""
    result, first = Answer(), True
    begun = time.perf_counter()
    for step in decode(target, drafter, prompt, n, max_new_tokens, **options):
        result.tokens += step.emitted
        if not first:
            result.drafted.append(len(step.drafts))
            result.accepted.append(step.accepted)
        first = False
    result.seconds = time.perf_counter() - begun
    return result


def heldout_tau(target: Target, drafter, prompts: list[str], n: int, max_new_tokens: int = 64) -> float:
    """Greedy accepted length of real decoding, pooled over prompts (user texts)."""
    chats = [target.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    return pooled_tau(answer(target, drafter, chat, n, max_new_tokens) for chat in chats)


@torch.inference_mode()
def step_parts(target: Target, drafters: dict, cells: list[tuple[str, int]], chat: list[int], repeats: int = 20):
    """What one greedy step after `chat` is made of: {(drafter, n): median ms of its parts}, each timed alone, all in
    turn, so that noise hits all alike. ("autoregressive", 0) is one plain token.

    draft_ms makes n drafts, verify_ms runs the target over n + 1 tokens and accepts, commit_ms takes two tokens into
    the drafter's context. cells: (name, n) of trained `drafters`.
    """
    cells = [("autoregressive", 0), *cells]
    capacity, prompt = len(chat) + max(n for _, n in cells) + 2, torch.tensor(chat, device=target.device)
    cache, contexts, times = target.new_cache(1, capacity), {}, {cell: [] for cell in cells}
    for name, drafter in drafters.items():
        target.layer_ids = drafter.config.target_layer_ids
        contexts[name] = drafter.new_cache(capacity)
        drafter.extend(contexts[name], target.forward(prompt[None], cache, 0).features[0], prompt)
    target.layer_ids = ()
    anchor = target.logits(target.forward(prompt[None], cache, 0).hidden[0, -1:]).argmax(-1)

    def now() -> float:
        if anchor.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(repeats + 1):  # the first warms up
        for name, n in cells:
            drafter, drafts = drafters.get(name), anchor[:0]
            target.layer_ids = drafter.config.target_layer_ids if drafter else ()
            clock = [now()]
            if drafter:
                drafts = drafter.draft(anchor, contexts[name], n)[0]
            clock.append(now())
            out = target.forward(torch.cat([anchor, drafts])[None], cache, len(chat))
            verify(target.logits(out.hidden), drafts[None])
            clock.append(now())
            if drafter:
                drafter.extend(contexts[name], out.features[0, :2], torch.cat([anchor, drafts])[:2])
                contexts[name].length -= 2
            clock.append(now())
            times[name, n].append([1e3 * (b - a) for a, b in zip(clock, clock[1:], strict=False)])
    parts = ("draft_ms", "verify_ms", "commit_ms")
    medians = {cell: torch.tensor(rows[1:]).median(0).values.tolist() for cell, rows in times.items()}
    return {cell: dict(zip(parts, row, strict=True)) for cell, row in medians.items()}
