"""The training objective: CE, L1, KL on the drafts and BCE on the confidence (DSpark paper, section 3.3).

Shapes: N supervised slots, A blocks, n drafts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.kernels import acceptance_loss

__all__ = ["acceptance_loss", "accepted_length", "confidence_loss", "position_weights"]


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
