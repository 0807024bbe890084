"""What moves a drafter's weights: Muon on its matrices, AdamW on the rest, and the rate of both over the steps."""

import math
from functools import partial

import torch
from torch import Tensor, nn


def optimizers(drafter: nn.Module, config) -> list[torch.optim.Optimizer]:
    """Muon (or AdamW) on the matrices of fc and layers, AdamW on norms and heads, under one learning-rate scale.
    config: a train.TrainConfig."""
    matrices = [p for p in (*drafter.fc.parameters(), *drafter.layers.parameters()) if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in drafter.parameters() if p.requires_grad and id(p) not in chosen]
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0)
    muon = Float32Muon if config.dtype == "float32" else torch.optim.Muon
    muon = partial(muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    of_matrices = muon if config.matrix_optimizer == "muon" else adamw
    return [of_matrices(matrices, lr=config.muon_lr), adamw(rest, lr=config.lr)]


def lr_scale(step: int, steps: int, warmup_steps: int, decay: float) -> float:
    """Linear warm-up to 1, constant, then cosine to 0 over the last `decay` of the steps; never a jump."""
    rise = max(1, min(warmup_steps, steps))
    if step < rise:
        return (step + 1) / rise
    fall = max(rise, steps - round(decay * steps))
    return 0.5 * (1 + math.cos(math.pi * max(0, step + 1 - fall) / max(1, steps + 1 - fall)))


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw" and Nesterov momentum, all of it in the gradient's dtype.

    For trainings in float32: torch's orthogonalises in bfloat16, which a CPU that does not multiply it natively does
    some forty times more slowly (measured with AVX2)."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(
                    p.grad.lerp(momentum, group["momentum"]), group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * group["lr"])


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """x [A, B] with its singular values near 1, by Newton-Schulz iterations of degree five (Jordan et al., Muon)."""
    a, b, c = coefficients
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T
