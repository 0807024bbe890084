"""Muon for trainings in float32. torch's orthogonalises in bfloat16, which a CPU that does not multiply it natively
does some forty times more slowly (measured with AVX2)."""

import math

import torch
from torch import Tensor


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon with adjust_lr_fn="match_rms_adamw" and Nesterov momentum, all of it in the gradient's dtype."""

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
