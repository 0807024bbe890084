"""The acceptance loss, the PyTorch reference: CE, L1, KL of the drafts, their overlap c* (DSpark paper, section 3.3).

It takes its gradient in the forward pass, in chunks: draft logits of all slots never exist at once. The target's do, in
the dtype of its hidden states: [U, D], once a position however many blocks look at it (the kernel keeps none).
Shapes: N supervised slots, U target positions that they look at, H hidden, r Markov rank, D draft vocabulary.
Floor: the LM head's products, 2 U H D + 4 N (H + r) D FLOPs with a frozen head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 256  # rows whose [chunk, D] float32 logits stay in a CPU's last-level cache


class LossTerms(NamedTuple):
    """loss: scalar to differentiate. Detached, per slot [N]: ce, l1 = ||q - p||_1, overlap c* = 1 - l1 / 2, and
    greedy: does the draft's argmax equal the target's (both over the draft vocabulary)."""

    loss: Tensor
    ce: Tensor
    l1: Tensor
    c_star: Tensor
    greedy: Tensor


class _AcceptanceLoss(torch.autograd.Function):
    """With z the draft logits, q = softmax(z), p the target restricted to the draft vocabulary, s = sign(q - p):
    dCE/dz = q - onehot(label);  dL1/dz = q (s - <q, s>);  dKL(p || q)/dz = q - p."""

    @staticmethod
    def forward(ctx, features, head, w2, target_hidden, target_head, index, labels, weights, mix):
        ce_weight, l1_weight, kl_weight = mix
        trained_head = head.requires_grad
        joint = head if w2 is None else torch.cat([head, w2], 1).to(features.dtype)  # one product for U_k + B_k
        joint, target_head = joint.to(features.dtype), target_head.to(target_hidden.dtype)
        grad_features = torch.empty_like(features)
        grad_joint = torch.zeros(joint.shape, dtype=torch.float32, device=joint.device)
        ce, l1, kl, greedy = (torch.empty(len(features), device=features.device) for _ in range(4))
        first_trained = 0 if trained_head else head.shape[1]
        target_logits = F.linear(target_hidden, target_head)  # [U, D]: once a position, however many blocks look at it
        for start in range(0, len(features), _CHUNK):
            rows = slice(start, start + _CHUNK)
            z = F.linear(features[rows], joint).float()
            target = target_logits[index[rows]].float()
            label = labels[rows].clamp_min(0)[:, None]
            known = (labels[rows] >= 0).float()[:, None]
            greedy[rows] = (z.argmax(-1) == target.argmax(-1)).float()
            log_q, p = z.log_softmax(-1), target.softmax(-1)
            ce[rows] = -(log_q.gather(1, label) * known)[:, 0]
            if kl_weight:
                kl[rows] = F.kl_div(log_q, p, reduction="none").sum(-1)
            q = log_q.exp_()
            difference = q - p
            l1[rows] = torch.linalg.vector_norm(difference, 1, -1)
            dz = (q * (ce_weight * known)).scatter_add_(1, label, -ce_weight * known)
            if kl_weight:
                dz.add_(difference, alpha=kl_weight)
            if l1_weight:
                sign = difference.sign_()
                dz.addcmul_(q, sign - (q * sign).sum(-1, keepdim=True), value=l1_weight)
            dz = dz.mul_(weights[rows, None]).to(features.dtype)
            grad_features[rows] = dz @ joint
            if first_trained < joint.shape[1]:
                grad_joint[:, first_trained:] += (dz.t() @ features[rows, first_trained:]).float()
        c_star = 1 - 0.5 * l1
        total = ce_weight * ce + l1_weight * l1
        if kl_weight:
            total = total + kl_weight * kl
        ctx.save_for_backward(grad_features, grad_joint)
        ctx.hidden, ctx.trained_head, ctx.markov = head.shape[1], trained_head, w2 is not None
        ctx.mark_non_differentiable(ce, l1, c_star, greedy)
        return (total * weights).sum(), ce, l1, c_star, greedy

    @staticmethod
    def backward(ctx, grad, *unused):
        grad_features, grad_joint = ctx.saved_tensors
        head = grad * grad_joint[:, : ctx.hidden] if ctx.trained_head else None
        w2 = grad * grad_joint[:, ctx.hidden :] if ctx.markov else None
        return (grad_features * grad.to(grad_features.dtype), head, w2, *[None] * 6)


def acceptance_loss(
    hidden: Tensor,
    m: Tensor | None,
    lm_head: Tensor,
    w2: Tensor | None,
    target_hidden: Tensor,
    target_head: Tensor,
    index: Tensor,
    labels: Tensor,
    weights: Tensor,
    normaliser: float,
    ce_weight: float = 0.1,
    l1_weight: float = 0.9,
    kl_weight: float = 0.0,
) -> LossTerms:
    """Weighted loss of N supervised slots.

    hidden [N, H] and Markov states m [N, r] of the drafter; lm_head [D, H], w2 [D, r]; target_hidden [U, H] after
    the target's final norm, target_head [D, H] the target's LM head rows of the draft vocabulary, index [N] -> U;
    labels [N] draft ids of the data (-1: outside the draft vocabulary, no CE); weights [N]; normaliser: the sum of the
    weights over every micro-batch and rank of the step. l1 is the full L1 distance, twice the total variation.
    The target side receives no gradient. Softmax, sums and gradients of logits are float32.
    """
    features = hidden if m is None else torch.cat([hidden, m.to(hidden.dtype)], -1)
    mix = (ce_weight, l1_weight, kl_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        terms = _AcceptanceLoss.apply(
            features, lm_head, w2, target_hidden.detach(), target_head.detach(), index, labels, weights, mix
        )
    return LossTerms(terms[0] / normaliser, *terms[1:4], terms[4] > 0)
