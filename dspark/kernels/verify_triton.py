"""Verification as one Triton launch: accepted lengths and following tokens of B requests.

    greedy    accept x_k while x_k = argmax p_k, then argmax p_k
    sampling  accept x_k while u_k < p_k(x_k) / q_k(x_k), then the smallest v with sum_{w <= v} r(w) > u_n sum r,
              r = max(p - q, 0) at the rejected draft, or p after the last one (arXiv 2211.17192)

with p_k(v) = exp(z_k(v) / T - top_k) / total_k. A program reads a share of one row of target logits and keeps the row's
maximum with its first place, and when sampling the sum of exponentials about it. Programs count themselves in; the
last one of a request puts the shares together and decides, so no second launch is needed. Decisions use no sum whose
order could change: runs repeat exactly. Rows that a ragged request has not are not read.

Floor: the target's logits once (sampling reads one row of each request twice more, from the cache).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import processors
from dspark.kernels.verify_reference import Verified

NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _share(ROW, first, end, inverse_temperature, SAMPLED: tl.constexpr, BV: tl.constexpr):
    """Maximum of logits first .. end, its first index, and the sum of exponentials about it."""
    best = tl.full([BV], float("-inf"), tl.float32)
    index = tl.full([BV], NONE, tl.int32)
    total = tl.zeros([BV], tl.float32)
    for begin in range(first, end, BV):
        v = begin + tl.arange(0, BV)
        x = tl.load(ROW + v, mask=v < end, other=float("-inf")).to(tl.float32) * inverse_temperature
        index = tl.where((x > best) | (index == NONE), v, index)
        higher = tl.maximum(best, x)
        if SAMPLED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(best - base) + tl.exp(x - base)
        best = higher
    top = tl.max(best, 0)
    if SAMPLED:
        total = total * tl.exp(best - tl.where(top == float("-inf"), 0.0, top))
    return top, tl.min(tl.where(best == top, index, NONE), 0), tl.sum(total, 0)


@triton.jit
def _weights(ROW, Q, TO_DRAFT, v, V, top, total, draft, rejected, inverse_temperature, KIND: tl.constexpr):
    """p(v) and what to draw from, r(v): max(p - q, 0) where a draft was rejected, else p."""
    x = tl.load(ROW + v, mask=v < V, other=float("-inf")).to(tl.float32) * inverse_temperature
    p = tl.exp(x - top) / total
    if KIND == "certain":
        q = tl.where(v == draft, 1.0, 0.0)
    else:
        at = v
        if KIND == "pruned":
            at = tl.load(TO_DRAFT + v, mask=v < V, other=-1).to(tl.int32)
        q = tl.load(Q + at, mask=(v < tl.where(rejected, V, 0)) & (at >= 0), other=0.0)
    return p, tl.where(rejected, tl.maximum(p - q, 0.0), p)


@triton.jit
def _draw(ROW, Q, TO_DRAFT, V, top, total, draft, rejected, uniform, inverse_temperature, KIND: tl.constexpr,
          BV: tl.constexpr):  # fmt: skip
    """A token from r by the inverse of its cumulative sum; from p where r is zero everywhere (p = q)."""
    sums = tl.zeros([BV], tl.float32)
    for begin in range(0, V, BV):
        p, r = _weights(ROW, Q, TO_DRAFT, begin + tl.arange(0, BV), V, top, total, draft, rejected,
                        inverse_temperature, KIND)  # fmt: skip
        sums += r
    mass = tl.sum(sums, 0)
    nothing = mass <= 0
    goal = uniform * tl.where(nothing, 1.0, mass)
    chosen, last, before = V, 0, 0.0
    begin = 0
    while (chosen == V) & (begin < V):
        v = begin + tl.arange(0, BV)
        p, r = _weights(ROW, Q, TO_DRAFT, v, V, top, total, draft, rejected, inverse_temperature, KIND)
        r = tl.where(nothing, p, r)
        reached = (r > 0) & (before + tl.cumsum(r, 0) > goal)
        chosen = tl.min(tl.where(reached, v, V), 0)
        last = tl.maximum(last, tl.max(tl.where(r > 0, v, 0), 0))
        before += tl.sum(r, 0)
        begin += BV
    return tl.where(chosen == V, last, chosen)  # rounding may leave the goal just above the sum


@triton.jit
def _verify(LOGITS, DRAFTS, ROWS, UNIFORMS, Q, TO_DRAFT, TOPS, PLACES, TOTALS, COUNTS, ACCEPTED, FOLLOWING, V, D,
            inverse_temperature, N: tl.constexpr, RAGGED: tl.constexpr, SAMPLED: tl.constexpr, KIND: tl.constexpr,
            SPLITS: tl.constexpr, BK: tl.constexpr, BS: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """Program (request, position, split). BK >= N + 1, BS >= SPLITS: powers of two."""
    request, k, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row = request * (N + 1) + k
    if RAGGED:
        row = tl.load(ROWS + row)
    if row >= 0:
        share = tl.cdiv(tl.cdiv(V, BV), SPLITS) * BV
        first = split * share
        top, place, total = _share(LOGITS + row * V, first, tl.minimum(first + share, V),
                                   inverse_temperature, SAMPLED, BV)  # fmt: skip
        at = (request * (N + 1) + k) * SPLITS + split
        tl.store(TOPS + at, top)
        tl.store(PLACES + at, place)
        tl.store(TOTALS + at, total)
    tl.debug_barrier()  # all threads have stored before this program counts itself in
    if tl.atomic_add(COUNTS + request, 1, sem="acq_rel") == (N + 1) * SPLITS - 1:
        slot = tl.arange(0, BK)
        rows = request * (N + 1) + slot
        if RAGGED:
            rows = tl.load(ROWS + rows, mask=slot <= N, other=-1)
        length = tl.sum(tl.where((slot <= N) & (rows >= 0), 1, 0), 0) - 1
        at = (request * (N + 1) + slot)[:, None] * SPLITS + tl.arange(0, BS)[None, :]
        real = (slot <= length)[:, None] & (tl.arange(0, BS) < SPLITS)[None, :]
        tops = tl.load(TOPS + at, mask=real, other=float("-inf"), cache_modifier=".cg")
        places = tl.load(PLACES + at, mask=real, other=NONE, cache_modifier=".cg")
        top = tl.max(tops, 1)
        draft = tl.load(DRAFTS + request * N + slot, mask=slot < length, other=-1)
        if SAMPLED:
            totals = tl.load(TOTALS + at, mask=real, other=0.0, cache_modifier=".cg")
            base = tl.where(top == float("-inf"), 0.0, top)
            total = tl.sum(totals * tl.exp(tops - base[:, None]), 1)
            x = tl.load(LOGITS + rows * V + draft, mask=slot < length, other=0.0).to(tl.float32)
            ratio = tl.exp(x * inverse_temperature - base) / total
            if KIND != "certain":
                named = draft
                if KIND == "pruned":
                    named = tl.load(TO_DRAFT + draft, mask=slot < length, other=0)
                ratio /= tl.load(Q + (request * N + slot) * D + named, mask=slot < length, other=1.0)
            hit = tl.load(UNIFORMS + request * (N + 1) + slot, mask=slot < length, other=1.0) < ratio
        else:
            choice = tl.min(tl.where(tops == top[:, None], places, NONE), 1)
            hit = choice == draft
        accepted = tl.min(tl.where(hit & (slot < length), BK, slot), 0)
        tl.store(ACCEPTED + request, accepted.to(tl.int64))
        here = slot == accepted
        if SAMPLED:
            q_row = Q
            if KIND != "certain":
                q_row = Q + (request * N + accepted) * D  # read only where a draft was rejected, so accepted < N
            following = _draw(
                LOGITS + tl.sum(tl.where(here, rows, 0), 0) * V, q_row, TO_DRAFT, V,
                tl.sum(tl.where(here, base, 0.0), 0), tl.sum(tl.where(here, total, 0.0), 0),
                tl.sum(tl.where(here, draft, 0), 0), accepted < length,
                tl.load(UNIFORMS + request * (N + 1) + N), inverse_temperature, KIND, BV,
            )  # fmt: skip
        else:
            following = tl.sum(tl.where(here, choice, 0), 0)
        tl.store(FOLLOWING + request, following.to(tl.int64))


def verify(
    logits: Tensor,
    drafts: Tensor,
    rows: Tensor | None = None,
    temperature: float = 0.0,
    uniforms: Tensor | None = None,
    q: Tensor | None = None,
    to_draft: Tensor | None = None,
) -> Verified:
    """As the reference, in float32."""
    (B, n), V, sampled = drafts.shape, logits.shape[-1], temperature > 0
    BV = 1024 if V > 1024 else triton.next_power_of_2(V)
    splits = max(1, min(triton.cdiv(V, BV), triton.cdiv(2 * processors(logits.device), B * (n + 1))))
    tops, totals = (logits.new_empty(B, n + 1, splits, dtype=torch.float32) for _ in range(2))
    places = torch.empty_like(tops, dtype=torch.int32)
    counts = torch.zeros(B, dtype=torch.int32, device=logits.device)
    accepted, following = (torch.empty(B, dtype=torch.int64, device=logits.device) for _ in range(2))
    inputs = [None if x is None else x.contiguous() for x in (logits, drafts, rows, uniforms, q, to_draft)]
    _verify[B, n + 1, splits](
        *inputs, tops, places, totals, counts, accepted, following, V, V if q is None else q.shape[-1],
        1 / temperature if sampled else 1.0, N=n, RAGGED=rows is not None, SAMPLED=sampled,
        KIND="certain" if q is None else "same" if to_draft is None else "pruned", SPLITS=splits,
        BK=triton.next_power_of_2(n + 1), BS=triton.next_power_of_2(splits), BV=BV, num_warps=4,
    )  # fmt: skip
    return Verified(accepted, following)
