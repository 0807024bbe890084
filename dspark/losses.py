"""The training objective: CE, L1, KL on the drafts and BCE on the confidence (DSpark paper, section 3.3).

Shapes: N supervised slots, A blocks, n drafts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.kernels import acceptance_loss


def position_weights(n: int, gamma_decay: float) -> Tensor:
    """w_k = exp(-(k - 1) / gamma_decay) for drafts k = 1..n: [n]."""
    return torch.exp(-torch.arange(n, dtype=torch.float32) / gamma_decay)


def confidence_loss(logits: Tensor, c_star: Tensor, weights: Tensor, normaliser: float) -> Tensor:
    """BCE of the confidence logits [N] against the detached overlap c* [N], weighted as the drafts are."""
    loss = F.binary_cross_entropy_with_logits(logits.float(), c_star.detach().clamp(0, 1), reduction="none")
    return (loss * weights).sum() / normaliser


def accepted_length(correct: Tensor, supervised: Tensor) -> float:
    """Mean accepted length tau (bonus token included) of teacher-forced blocks: realised runs, never products.

    correct, supervised [A, n] bool; a block counts its run of leading correct slots. Only whole blocks enter.
    """
    whole = supervised.all(1)
    if not bool(whole.any()):
        return float("nan")
    return 1 + correct[whole].int().cumprod(1).sum(1).float().mean().item()


def drafter_loss(
    drafter: nn.Module, target_head: Tensor, batch, normaliser: float, config
) -> tuple[Tensor, dict[str, float]]:
    """(loss to differentiate, sums for the log) of one micro-batch; target_head [D, H]: the draft vocabulary's rows.
    batch: an anchors.MicroBatch; config: a train.TrainConfig."""
    row, anchors, supervised = batch.row, batch.anchors, batch.supervised
    n = batch.labels.shape[1]
    hidden = drafter.block_hidden(row.features, row.positions, row.tokens, anchors, row.starts[anchors], n)
    hidden = hidden.to(getattr(torch, config.dtype))
    previous = torch.cat([row.tokens[anchors][:, None], batch.labels[:, :-1]], 1)  # x_{k-1}, x_0 the anchor
    markov = drafter.markov_head
    m = markov(previous, hidden)[supervised] if markov else None
    looked_at = (anchors[:, None] + torch.arange(n, device=anchors.device))[supervised]
    unique, index = looked_at.unique(return_inverse=True)
    weights, draft_labels = batch.weights[supervised], drafter.to_draft_ids(batch.labels[supervised])
    terms = acceptance_loss(
        hidden[supervised], m, drafter.lm_head.weight, markov.markov_w2.weight if markov else None,
        row.hidden[unique].to(hidden.dtype), target_head, index, draft_labels, weights, normaliser, config.ce_weight,
        config.l1_weight, config.kl_weight,
    )  # fmt: skip
    loss, bce = terms.loss, torch.zeros(())
    if drafter.confidence_head:
        w1 = markov.markov_w1(previous)[supervised] if drafter.confidence_head.with_markov else None
        state = hidden[supervised]
        if config.detach_confidence:
            state, w1 = state.detach(), w1 if w1 is None else w1.detach()
        bce = confidence_loss(drafter.confidence_head(state, w1), terms.c_star, weights, normaliser)
        loss = loss + config.confidence_weight * bce
    # terms.greedy compares within the draft vocabulary, decoding with the target's best token of all: where that is
    # outside, no draft is accepted. The whole LM head would tell, at several times the cost of this loss; the data's
    # token stands in for it (in greedy answers they are the same).
    known = draft_labels >= 0
    hits = terms.greedy & known
    greedy = torch.zeros_like(supervised)
    greedy[supervised] = hits
    log = {
        "loss": float(loss.detach()),
        "ce": float((terms.ce * weights).sum() / normaliser),
        "l1": float((terms.l1 * weights).sum() / normaliser),
        "bce": float(bce.detach()),
        "draft_tokens": int(supervised.sum()),
        "greedy_hits": int(hits.sum()),
        "covered": int(known.sum()),
        "tau_teacher": accepted_length(greedy, supervised),
        "whole_blocks": int(supervised.all(1).sum()),  # those that tau_teacher is the mean of
    }
    return loss, log
