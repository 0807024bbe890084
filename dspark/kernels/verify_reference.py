"""Verification, the PyTorch reference: how many drafts survive, and which token follows them.

Greedy: the longest prefix that equals the target's argmax, then the target's own token. Sampling (Leviathan et al.,
arXiv 2211.17192): accept x_k with min(1, p_k(x_k) / q_k(x_k)), p = softmax(logits / T); at the first rejection draw
from norm(max(p - q, 0)), after the last draft from p. The emitted tokens are distributed as p, provided that q is what
the drafts were really drawn from. Shapes: B requests, n drafts, V target and D draft vocabulary. Floor: the target's
logits once, and of q a row of each request that rejects a draft.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dspark.kernels import cpu


class Verified(NamedTuple):
    """accepted [B] drafts and following [B], the target's next token; int64."""

    accepted: Tensor
    following: Tensor


def verify(
    logits: Tensor,
    drafts: Tensor,
    rows: Tensor | None = None,
    temperature: float = 0.0,
    uniforms: Tensor | None = None,
    q: Tensor | None = None,
    to_draft: Tensor | None = None,
) -> Verified:
    """logits [B, n+1, V] of the target after the anchor and after each draft, drafts [B, n] target ids -> Verified.

    Requests that verify different numbers of drafts give logits [N, V], packed, and rows [B, n+1]: where theirs lie, -1
    after a request's last draft. Above temperature 0: uniforms [B, n+1] in [0, 1), one for each draft and one for the
    token that follows; q [B, n, D], what the drafts were drawn from (None: they were certain), where id v of the target
    is id to_draft[v] of q, -1 for none (to_draft None: the same). Draws are by the inverse of the cumulative
    distribution in the order of the ids. logits are of any float dtype and p of float32 at least; uniforms and q are
    float32, ids and rows int64.
    """
    n = drafts.shape[1]
    if temperature == 0:
        choice = cpu.argmax(logits)  # [B, n+1]
        choice = choice if rows is None else choice[rows.clamp_min(0)]
        hits = choice[:, :n] == drafts
    else:
        p = cpu.probabilities(logits, temperature)
        p = p if rows is None else p[rows.clamp_min(0)]
        drafted = p[:, :n].gather(-1, drafts[..., None])[..., 0]
        if q is not None:
            drafted = drafted / q.gather(-1, (drafts if to_draft is None else to_draft[drafts])[..., None])[..., 0]
        hits = uniforms[:, :n] < drafted
    if rows is not None:
        hits = hits & (rows[:, 1:] >= 0)
    accepted = hits.int().cumprod(1).sum(1)
    if temperature == 0:
        return Verified(accepted, choice.gather(1, accepted[:, None])[:, 0])
    rejected = accepted < (n if rows is None else (rows[:, 1:] >= 0).sum(1))
    p = p[torch.arange(len(p), device=p.device), accepted]  # [B, V]
    weights = torch.where(rejected[:, None], _residual(p, drafts, accepted, q, to_draft), p) if n else p
    # p = q up to rounding: a rejection has probability zero, and p itself is the answer
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, p).double().cumsum(-1)
    at = uniforms[:, n:].double() * weights[:, -1:]
    return Verified(accepted, torch.searchsorted(weights, at, right=True)[:, 0])


def _residual(p, drafts, accepted, q, to_draft) -> Tensor:
    """max(p - q, 0) [B, V] at the rejected draft; p [B, V] already is."""
    slot = accepted.clamp_max(drafts.shape[1] - 1)
    if q is None:
        return p.scatter(1, drafts.gather(1, slot[:, None]), 0.0)
    q = q[torch.arange(len(q), device=q.device), slot]  # [B, D]
    if to_draft is not None:
        q = torch.where(to_draft >= 0, q[:, to_draft.clamp_min(0)], 0.0)
    return (p - q).clamp_min(0)
