"""Block attention as Triton kernels: no mask tensor, no concatenated keys, no tile that nobody sees.

Block a with anchor p, in a document that starts at context row s, has n slots of Hq query heads; G = Hq / Hkv query
heads share a key head. Slot i sees S(i) = {context rows j: s <= j < p, p + i - j < window} and its own block's slots
i' (causal: i' <= i), under one softmax (FlashAttention, arXiv 2205.14135, over two key lists one after the other):

    x_j = q . k_j / sqrt(d)      P_j = exp(x_j - lse),  lse = log sum_j exp(x_j)      o = sum_j P_j v_j
    delta = do . o               dx_j = P_j (do . v_j - delta)
    dq = sum_j dx_j k_j / sqrt(d)     dk_j = sum over rows dx_j q / sqrt(d)     dv_j = sum over rows P_j do

A row is (block, slot, query head of the group): row = (a n + i) G + g for a key head. BM rows make a tile, so blocks
share tiles whatever n and G are. A row tile walks the context from its lowest start to its highest anchor: with
anchors sorted these lie close together and little is computed only to be masked; unsorted they are right, and slow.
A key tile's backward walks the rows of the blocks that may see it. Every output has one writer: deterministic.

Floor: q, k, v, o once; 4 d FLOPs a visible (row, key) pair forward and 10 d backward (14 d with what is recomputed).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels import processors

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _row_tile(first_row, ROWS, ANCHORS, STARTS, A, N: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """ROWS <= BM rows from first_row: their block, slot, anchor and document start, [BM, 1]; dead ones see nothing."""
    row = first_row + tl.arange(0, BM)[:, None]
    live = row < tl.minimum(first_row + ROWS, A * N * GROUP)
    block = tl.where(live, row // (N * GROUP), -1)
    anchor = tl.load(ANCHORS + block, mask=live, other=0).to(tl.int32)
    start = tl.load(STARTS + block, mask=live, other=2147483647).to(tl.int32)
    return row, live, block, row // GROUP % N, anchor, start


@triton.jit
def _load(X, index, live, stride, D: tl.constexpr, BD: tl.constexpr):
    """X[index] as [tile, BD], rows `stride` apart; index and live [tile, 1]. Dead rows and columns are 0."""
    column = tl.arange(0, BD)[None, :]
    return tl.load(X + index.to(tl.int64) * stride + column, mask=live & (column < D), other=0.0)


@triton.jit
def _visible(key, block, slot, anchor, start, CONTEXT: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr,
             WINDOW: tl.constexpr):  # fmt: skip
    """[rows, keys]: which keys (context rows, or slots a n + i of the blocks) each row sees; key [1, keys]."""
    if CONTEXT:
        seen = (key >= start) & (key < anchor)
        if WINDOW > 0:
            seen = seen & (anchor + slot - key < WINDOW)
    else:
        seen = key // N == block
        if CAUSAL:
            seen = seen & (key % N <= slot)
    return seen


@triton.jit
def _attend(q, top, total, acc, K, V, first, end, block, slot, anchor, start, KV, scale, CONTEXT: tl.constexpr,
            N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr,
            BD: tl.constexpr):  # fmt: skip
    """Keys first .. end of one list into the online softmax: running maximum, sum (base 2) and output of each row."""
    for begin in range(first, end, BN):
        key = begin + tl.arange(0, BN)
        k = _load(K, key[:, None], key[:, None] < end, KV * D, D, BD)
        v = _load(V, key[:, None], key[:, None] < end, KV * D, D, BD)
        seen = _visible(key[None, :], block, slot, anchor, start, CONTEXT, N, CAUSAL, WINDOW) & (key[None, :] < end)
        x = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E), float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen nothing yet
        p = tl.exp2(x - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        top = higher
    return top, total, acc


@triton.jit
def _context_range(block, slot, anchor, start, WINDOW: tl.constexpr):
    """Lowest and one past the highest context row that any row of a tile sees."""
    low = start
    if WINDOW > 0:
        low = tl.maximum(start, anchor + slot - WINDOW + 1)
    return tl.min(tl.where(block < 0, 2147483647, low)), tl.max(anchor)


@triton.jit
def _own_range(first_row, ROWS, A, N: tl.constexpr, GROUP: tl.constexpr):
    """The slots of the blocks that a row tile touches, as keys of the blocks' list."""
    last_row = tl.minimum(first_row + ROWS, A * N * GROUP) - 1
    return first_row // (N * GROUP) * N, (last_row // (N * GROUP) + 1) * N


@triton.jit
def _forward(Q, CK, CV, BK, BV, ANCHORS, STARTS, OUT, LSE, A, KV, ROWS, scale, SPLITS: tl.constexpr,
             N: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One row tile, key head and share of the context; OUT [SPLITS, A, n, Hq, d], LSE [SPLITS, A, n, Hq]."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # long contexts first
    head, split = tl.program_id(1), tl.program_id(2)
    row, live, block, slot, anchor, start = _row_tile(first_row, ROWS, ANCHORS, STARTS, A, N, GROUP, BM)
    at = row // GROUP * (KV * GROUP) + head * GROUP + row % GROUP  # the row's (block, slot, query head) in q and out
    q = _load(Q, at, live, D, D, BD)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    low, high = _context_range(block, slot, anchor, start, WINDOW)
    share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BN), SPLITS) * BN
    first = low + split * share
    top, total, acc = _attend(q, top, total, acc, CK + head * D, CV + head * D, first, tl.minimum(first + share, high),
                              block, slot, anchor, start, KV, scale, True, N, D, CAUSAL, WINDOW, BN, BD)  # fmt: skip
    own, own_end = _own_range(first_row, ROWS, A, N, GROUP)
    own_end = tl.where(split == 0, own_end, own)
    top, total, acc = _attend(q, top, total, acc, BK + head * D, BV + head * D, own, own_end,
                              block, slot, anchor, start, KV, scale, False, N, D, CAUSAL, WINDOW, BN, BD)  # fmt: skip
    some = tl.where(total == 0, 1.0, total)  # only a split can be without any key: its lse is -inf
    out, lse = acc / some[:, None], (top + tl.log2(some)) / LOG2E
    at = at + (split * A * N).to(tl.int64) * (KV * GROUP)
    column = tl.arange(0, BD)[None, :]
    tl.store(OUT + at.to(tl.int64) * D + column, out.to(OUT.dtype.element_ty), mask=live & (column < D))
    tl.store(LSE + at, lse[:, None], mask=live)


@triton.jit
def _dq_of(q, do, lse, delta, dq, K, V, first, end, block, slot, anchor, start, KV, scale, CONTEXT: tl.constexpr,
           N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BN: tl.constexpr,
           BD: tl.constexpr):  # fmt: skip
    """Adds the part of dq that comes from keys first .. end of one list."""
    for begin in range(first, end, BN):
        key = begin + tl.arange(0, BN)
        k = _load(K, key[:, None], key[:, None] < end, KV * D, D, BD)
        v = _load(V, key[:, None], key[:, None] < end, KV * D, D, BD)
        seen = _visible(key[None, :], block, slot, anchor, start, CONTEXT, N, CAUSAL, WINDOW) & (key[None, :] < end)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.where(seen, tl.exp2(x - lse * LOG2E), 0.0)
        dx = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        dq = dq + tl.dot(dx.to(k.dtype), k, input_precision="ieee")
    return dq


@triton.jit
def _backward_q(Q, CK, CV, BK, BV, ANCHORS, STARTS, OUT, LSE, DO, DQ, DELTA, A, KV, ROWS, scale,
                N: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """dq of one row tile and key head; also delta, which the keys' gradients need."""
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1)
    row, live, block, slot, anchor, start = _row_tile(first_row, ROWS, ANCHORS, STARTS, A, N, GROUP, BM)
    at = row // GROUP * (KV * GROUP) + head * GROUP + row % GROUP
    q, do = _load(Q, at, live, D, D, BD), _load(DO, at, live, D, D, BD)
    lse = tl.load(LSE + at, mask=live, other=0.0)
    out = _load(OUT, at, live, D, D, BD)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)[:, None]
    tl.store(DELTA + at, delta, mask=live)
    low, high = _context_range(block, slot, anchor, start, WINDOW)
    dq = tl.zeros([BM, BD], tl.float32)
    dq = _dq_of(q, do, lse, delta, dq, CK + head * D, CV + head * D, low, high, block, slot, anchor, start, KV, scale,
                True, N, D, CAUSAL, WINDOW, BN, BD)  # fmt: skip
    own, own_end = _own_range(first_row, ROWS, A, N, GROUP)
    dq = _dq_of(q, do, lse, delta, dq, BK + head * D, BV + head * D, own, own_end, block, slot, anchor, start, KV,
                scale, False, N, D, CAUSAL, WINDOW, BN, BD)  # fmt: skip
    column = tl.arange(0, BD)[None, :]
    tl.store(DQ + at.to(tl.int64) * D + column, (dq * scale).to(DQ.dtype.element_ty), mask=live & (column < D))


@triton.jit
def _backward_kv(Q, K, V, ANCHORS, STARTS, LSE, DO, DELTA, FIRST, LAST, DK, DV, A, KV, keys, scale,
                 CONTEXT: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                 WINDOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """dk, dv of one tile of keys (of the context, or of the blocks) and key head, over blocks FIRST .. LAST."""
    tile, head = tl.program_id(0), tl.program_id(1)
    key = tile * BN + tl.arange(0, BN)
    k = _load(K + head * D, key[:, None], key[:, None] < keys, KV * D, D, BD)
    v = _load(V + head * D, key[:, None], key[:, None] < keys, KV * D, D, BD)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BD], tl.float32)
    if CONTEXT:
        first, last = tl.load(FIRST + tile).to(tl.int32), tl.load(LAST + tile).to(tl.int32)
    else:
        first, last = tile * BN // N, (tl.minimum(tile * BN + BN, keys) - 1) // N + 1
    for first_row in range(first * (N * GROUP), last * (N * GROUP), BM):
        row, live, block, slot, anchor, start = _row_tile(first_row, BM, ANCHORS, STARTS, A, N, GROUP, BM)
        at = row // GROUP * (KV * GROUP) + head * GROUP + row % GROUP
        q, do = _load(Q, at, live, D, D, BD), _load(DO, at, live, D, D, BD)
        lse = tl.load(LSE + at, mask=live, other=0.0)
        delta = tl.load(DELTA + at, mask=live, other=0.0)
        seen = _visible(key[None, :], block, slot, anchor, start, CONTEXT, N, CAUSAL, WINDOW)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
        p = tl.where(seen, tl.exp2(x - lse * LOG2E), 0.0)
        dv = dv + tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
        dx = p * (tl.dot(do, tl.trans(v), input_precision="ieee") - delta)
        dk = dk + tl.dot(tl.trans(dx.to(q.dtype)), q, input_precision="ieee")
    column = tl.arange(0, BD)[None, :]
    at = (key.to(tl.int64)[:, None] * KV + head) * D + column
    alive = (key[:, None] < keys) & (column < D)
    tl.store(DK + at, (dk * scale).to(DK.dtype.element_ty), mask=alive)
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=alive)


# ---- launchers


def _shape(q: Tensor, context_k: Tensor, causal: bool, window: int | None) -> dict:
    """The kernels' compile-time numbers."""
    _, n, heads, d = q.shape
    group = heads // context_k.shape[1]
    return {
        "N": n, "GROUP": group, "D": d, "CAUSAL": causal, "WINDOW": window or 0,
        "BD": max(16, triton.next_power_of_2(d)),
    }  # fmt: skip


def _row_tiles(q: Tensor, context_k: Tensor, most: int) -> tuple[int, int, int]:
    """(number of row tiles, rows of each, BM). Blocks share tiles unless their contexts are long, as in decoding, where
    each is another request's and a shared tile would walk from the first request's rows to the last one's."""
    a_block = q.shape[1] * q.shape[2] // context_k.shape[1]
    alone = max(rows for rows in range(1, most + 1) if a_block % rows == 0)
    rows = alone if len(context_k) >= 64 * len(q) else most
    tiles = triton.cdiv(len(q) * a_block, rows)
    return tiles, rows, max(16, triton.next_power_of_2(min(rows, len(q) * a_block)))


def _ranges(anchors: Tensor, starts: Tensor, T: int, window: int | None, tile: int) -> tuple[Tensor, Tensor]:
    """Blocks first .. last - 1 that may see each tile of context rows: [tiles], no wider than needed when sorted."""

    def suffix_min(x):
        return x.flip(0).cummin(0).values.flip(0)

    low = torch.arange(0, T, tile, device=anchors.device)
    high = (low + tile - 1).clamp_max(T - 1)
    first = torch.searchsorted(anchors.cummax(0).values, low, right=True)  # all before end at or before the tile
    last = torch.searchsorted(suffix_min(starts), high, right=True)  # all from here on start after it
    if window is not None:
        last = torch.minimum(last, torch.searchsorted(suffix_min(anchors), high + window - 1, right=True))
    return first, last


@torch.library.custom_op("dspark::block_attention", mutates_args=())
def _attention(
    q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor, anchors: Tensor, starts: Tensor,
    causal: bool, window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [A, n, Hq, d] and lse [A, n, Hq], float32."""
    A, n, heads, d = q.shape
    kv, half = context_k.shape[1], q.dtype != torch.float32
    tiles, rows, BM = _row_tiles(q, context_k, 128 if half else 16)
    BN, warps, stages = (64, 8 if BM == 128 else 4, 2) if half else (32, 4, 1)
    # Few blocks and a long context, as in decoding: several programs share a tile's context.
    splits = max(1, min(32, processors(q.device) // (tiles * kv), triton.cdiv(len(context_k), 2 * BN)))
    out = q.new_empty(splits, A, n, heads, d, dtype=q.dtype if splits == 1 else torch.float32)
    lse = q.new_empty(splits, A, n, heads, dtype=torch.float32)
    _forward[tiles, kv, splits](
        q, context_k, context_v, block_k, block_v, anchors, starts, out, lse, A, kv, rows, d**-0.5, SPLITS=splits,
        BM=BM, BN=BN, num_warps=warps, num_stages=stages, **_shape(q, context_k, causal, window),
    )  # fmt: skip
    if splits == 1:
        return out[0], lse[0]
    weights = lse.softmax(0)[..., None]
    return (weights * out).sum(0).to(q.dtype), lse.logsumexp(0)


@torch.library.custom_op("dspark::block_attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor, anchors: Tensor, starts: Tensor,
    out: Tensor, lse: Tensor, grad: Tensor, causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, context_k, context_v, block_k and block_v."""
    A, n, heads, d = q.shape
    T, kv, half = len(context_k), context_k.shape[1], q.dtype != torch.float32
    shape = _shape(q, context_k, causal, window)
    grads = [torch.empty_like(x) for x in (q, context_k, context_v, block_k, block_v)]
    delta = torch.empty_like(lse)
    tiles, rows, BM = _row_tiles(q, context_k, 128 if half else 16)
    BN, warps, stages = (64, 8 if BM == 128 else 4, 2) if half else (32, 4, 1)
    _backward_q[tiles, kv](
        q, context_k, context_v, block_k, block_v, anchors, starts, out, lse, grad, grads[0], delta, A, kv, rows,
        d**-0.5, BM=BM, BN=BN, num_warps=warps, num_stages=stages, **shape,
    )  # fmt: skip
    BM, warps = (64, 8) if half else (16, 4)
    first, last = _ranges(anchors, starts, T, window, BN)
    lists = ((context_k, context_v, grads[1], grads[2], T, True), (block_k, block_v, grads[3], grads[4], A * n, False))
    for k, v, dk, dv, keys, context in lists:
        if keys:
            _backward_kv[triton.cdiv(keys, BN), kv](
                q, k, v, anchors, starts, lse, grad, delta, first, last, dk, dv, A, kv, keys, d**-0.5,
                CONTEXT=context, BM=BM, BN=BN, num_warps=warps, num_stages=stages, **shape,
            )  # fmt: skip
    return tuple(grads)


@_attention.register_fake
def _(q, context_k, context_v, block_k, block_v, anchors, starts, causal, window):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attention_backward.register_fake
def _(q, context_k, context_v, block_k, block_v, anchors, starts, out, lse, grad, causal, window):
    return tuple(torch.empty_like(x) for x in (q, context_k, context_v, block_k, block_v))


def _setup(ctx, inputs, output):
    *tensors, ctx.causal, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx, grad, _):
    grads = _attention_backward(*ctx.saved_tensors, grad.contiguous(), ctx.causal, ctx.window)
    return (*grads, None, None, None, None)


_attention.register_autograd(_differentiate, setup_context=_setup)


def block_attention(
    q: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    anchors: Tensor,
    starts: Tensor,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """As the reference, differentiable in q, keys and values; float32, bfloat16 or float16, n and d up to 16 and 128.

    Softmax and sums are float32. Sort the anchors: order changes the speed only.
    """
    tensors = (q, context_k, context_v, block_k, block_v, anchors, starts)
    return _attention(*(x.contiguous() for x in tensors), causal, window)[0]
