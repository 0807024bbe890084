"""Block attention, the PyTorch reference: blocks that see a prefix of the context and themselves.

For block a with anchor position p_a inside a document that starts at row s_a of the packed context, slot i sees
  context rows j with s_a <= j < p_a                    (sliding layers: also p_a + i - j < window)
  own slots  i' with 0 <= i' < n                        (causal: i' <= i)
under one softmax over both. Blocks never see each other. Floor: q, k, v and the output once, FLOPs of the visible
part only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """Attention of anchored blocks.

    q [A, n, Hq, d]; context_k, context_v [T, Hkv, d]; block_k, block_v [A, n, Hkv, d]; anchors [A] and starts [A]
    (int64): rows of the packed context, blocks of one document adjacent. Returns [A, n, Hq, d] in q's dtype.
    Where a document has several blocks, the scores are rounded to q's dtype, the softmax is float32, and its weights
    are rounded to q's dtype; a single block is left to torch's own attention.
    """
    parts = []
    first = 0
    documents, counts = torch.unique_consecutive(starts, return_counts=True)
    for start, count in zip(documents.tolist(), counts.tolist(), strict=True):
        rows = slice(first, first + count)
        end = int(anchors[rows].max())
        lowest = start if window is None else max(start, int(anchors[rows].min()) - window)
        attend = _one_block if count == 1 else _one_document
        part = attend(
            q[rows], context_k[lowest:end], context_v[lowest:end], block_k[rows], block_v[rows],
            anchors[rows] - lowest, causal, window,
        )  # fmt: skip
        parts.append(part)
        first += count
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def _one_block(q, context_k, context_v, block_k, block_v, anchors, causal, window):
    """As _one_document for a single block, which is all that decoding has of a document: its keys can be joined."""
    _, n, heads, d = q.shape
    L, kv, _ = context_k.shape
    k, v = (torch.cat(parts).transpose(0, 1) for parts in ((context_k, block_k[0]), (context_v, block_v[0])))
    mask = None
    if causal or window is not None:
        rows = torch.arange(L + n, device=q.device)
        slots = rows[L:, None]
        seen = (rows <= slots) if causal else rows >= 0
        if window is not None:
            seen = seen & ((rows >= L) | (slots - rows < window))
        mask = seen.repeat_interleave(heads // kv, 0)  # grouped queries ride as extra rows of their key head
    q = q[0].view(n, kv, -1, d).permute(1, 0, 2, 3).reshape(kv, -1, d)  # [kv, n * g, d]
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
    return out.view(kv, n, -1, d).permute(1, 0, 2, 3).reshape(1, n, heads, d)


def _one_document(q, context_k, context_v, block_k, block_v, anchors, causal, window):
    """As block_attention, for blocks of one document: anchors [A] count from the first row of context_k [L, Hkv, d]."""
    A, n, heads, d = q.shape
    L, kv, _ = context_k.shape
    g = heads // kv
    q = q.view(A, n, kv, g, d)
    to_context = torch.einsum("ankgd,lkd->kganl", q, context_k).float()  # [kv, g, A, n, L]
    to_block = torch.einsum("ankgd,amkd->kganm", q, block_k).float()  # [kv, g, A, n, n]
    rows = torch.arange(L, device=q.device)
    unseen = (rows >= anchors[:, None])[:, None]  # [A, 1, L]
    if window is not None:
        slots = anchors[:, None] + torch.arange(n, device=q.device)  # [A, n], rows that the slots would take
        unseen = unseen | (slots[..., None] - rows >= window)
    to_context = to_context.masked_fill(unseen, float("-inf"))
    if causal:
        later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        to_block = to_block.masked_fill(later, float("-inf"))
    weights = (torch.cat([to_context, to_block], -1) * d**-0.5).softmax(-1).to(q.dtype)
    out = torch.einsum("kganl,lkd->ankgd", weights[..., :L], context_v)
    out = out + torch.einsum("kganm,amkd->ankgd", weights[..., L:], block_v)
    return out.reshape(A, n, heads, d)
