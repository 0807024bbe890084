"""Markov decode as a Triton kernel: one launch a position, no V-wide bias in memory.

    logits_k[c] = U_k[c] + W2[c] . W1[x_{k-1}]        x_k = argmax_c logits_k[c], or of logits_k[c] / T + g_c

with g = -log(-log u) Gumbel noise, so that x_k is a draw from softmax(logits_k / T) (DSpark paper, section 3.1). A
program takes a tile of columns c and up to 64 requests. Its best column goes into the request's 64-bit word by an
atomic maximum: the float's bits, made to order as an integer does, above the complement of the column, so that the
lowest column wins ties. A maximum has no order, so runs repeat exactly, and the next launch reads x_{k-1} from that
word: no reduction in between, no synchronisation, nothing that a CUDA graph could not hold.

The base logits come from one product over all positions, which reads the LM head once; a kernel that took hidden
states instead would read it n times. u is Philox noise of (the request's seed, k D + c), whatever else is in the batch.

Floor: W2 and U once a position, and of W1 a row a request. W2 is r / B times U. Where it stays in the cache from one
position to the next (r = 256, D = 32,000: 16 MB in bfloat16; an H200's L2 has 50 MB, Qwen3's W2 78 MB), memory is read
less than the floor says, and a share of the memory's bandwidth can exceed 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import markov_decode_reference
from dspark.kernels.markov_decode_reference import MarkovDraft

NOTHING = -(2**63)  # below every key


@triton.jit
def _key(score, column):
    """int64 that orders as the float32 score does, then by falling column."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit(do_not_specialize=["k"])
def _position(BASE, ANCHORS, W1, W2, D2T, SEEDS, KEYS, LOGITS, EMBEDDINGS, k, B, D, inverse_temperature,
              FIRST: tl.constexpr, PRUNED: tl.constexpr, SAMPLED: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
              BR: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr):  # fmt: skip
    """Position k of BB requests, BC of the columns of BASE [B, N, D]."""
    row = tl.program_id(1) * BB + tl.arange(0, BB)
    live = row < B
    at = row.to(tl.int64) * N + k
    if FIRST:
        previous = tl.load(ANCHORS + row, mask=live, other=0)
    else:
        previous = 0x7FFFFFFF - (tl.load(KEYS + at - 1, mask=live, other=0) & 0xFFFFFFFF)
        if PRUNED:
            previous += tl.load(D2T + previous, mask=live, other=0)
    column = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = column < D
    bias = tl.zeros([BB, BC], tl.float32)
    for first in range(0, R, BR):
        rank = first + tl.arange(0, BR)
        m = tl.load(W1 + previous[:, None] * R + rank[None, :], mask=live[:, None] & (rank[None, :] < R), other=0.0)
        if tl.program_id(0) == 0:
            tl.store(EMBEDDINGS + at[:, None] * R + rank[None, :], m, mask=live[:, None] & (rank[None, :] < R))
        w2 = tl.load(W2 + column[:, None].to(tl.int64) * R + rank[None, :],
                     mask=inside[:, None] & (rank[None, :] < R), other=0.0)  # fmt: skip
        if BB < 16:  # one request: no matrix unit will help
            bias += tl.sum(w2.to(tl.float32) * m.to(tl.float32), 1)[None, :]
        else:
            bias += tl.dot(m, tl.trans(w2), input_precision="ieee")
    both = live[:, None] & inside[None, :]
    logits = tl.load(BASE + at[:, None] * D + column[None, :], mask=both, other=0.0).to(tl.float32) + bias
    if SAMPLED:
        logits = logits * inverse_temperature
        tl.store(LOGITS + at[:, None] * D + column[None, :], logits, mask=both)
        seed = tl.load(SEEDS + row, mask=live, other=0)
        logits -= tl.log(-tl.log(tl.rand(seed[:, None], k * D + column[None, :] + tl.zeros([BB, BC], tl.int32))))
    key = tl.where(both, _key(logits, column[None, :]), -0x8000000000000000)
    tl.atomic_max(KEYS + at, tl.max(key, 1), mask=live, sem="relaxed")


def markov_decode(
    base: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    head,
    d2t: Tensor | None = None,
    temperature: float = 0.0,
    seeds: Tensor | None = None,
) -> MarkovDraft:
    """As the reference, with other random numbers. Only the vanilla head has a kernel: no head, gated and rnn are the
    reference's, whose bias depends on hidden states."""
    if head is None or head.kind != "vanilla":
        return markov_decode_reference.markov_decode(base, hidden, anchors, head, d2t, temperature, seeds)
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    (B, n, D), rank = base.shape, w1.shape[1]
    base, anchors = base.contiguous(), anchors.contiguous()
    keys = base.new_full((B, n), NOTHING, dtype=torch.int64)
    embeddings = w1.new_empty(B, n, rank)
    logits = base.new_empty(B, n, D, dtype=torch.float32) if temperature > 0 else None
    BB = 1 if B == 1 else max(16, min(64, triton.next_power_of_2(B)))
    BC = 64 if BB > 1 and w2.dtype != torch.float32 else 32
    for k in range(n):
        _position[triton.cdiv(D, BC), triton.cdiv(B, BB)](
            base, anchors, w1, w2, d2t, seeds, keys, logits, embeddings, k, B, D,
            1 / temperature if temperature > 0 else 1.0, FIRST=k == 0, PRUNED=d2t is not None,
            SAMPLED=temperature > 0, N=n, R=rank, BR=max(16, min(128, triton.next_power_of_2(rank))), BC=BC, BB=BB,
            num_warps=4,
        )  # fmt: skip
    choice = 0x7FFFFFFF - (keys & 0xFFFFFFFF)
    return MarkovDraft(choice if d2t is None else choice + d2t[choice], logits, embeddings)
