"""The acceptance loss on a GPU: matrix products in chunks of rows, and one Triton kernel between them.

With z the draft logits, q = softmax(z), p = softmax(t) the target restricted to the draft vocabulary, s = sign(q - p),
e the one-hot label and known = [the label is in the draft vocabulary]:

    CE = -known log q(label)        dCE/dz = known (q - e)
    L1 = sum |q - p|                dL1/dz = q (s - <q, s>)
    KL = sum p log(p / q)           dKL/dz = q - p
    c* = 1 - L1 / 2                 dz = w (ce dCE/dz + l1 dL1/dz + kl dKL/dz)   (DSpark paper, section 3.3)

A chunk's z and t are float32, as they leave the products' accumulators: bfloat16 logits would be off by more than q - p
is at high acceptance (speculators pull 788). The kernel takes a row a program: maxima and sums, then (for L1) <q, s>,
then dz, rounded once to the dtype of the products that turn it into gradients of the features and of head and W2.
The target's logits are computed in the chunk for its own rows, again where blocks overlap, and never kept.

Floor: the products, 2 N H D (target) + 4 N (H + r) D FLOPs, 2 N r D more for W2 and 2 N H D for an LM head that is
trained; the kernel adds 8 bytes read two or three times and 2 or 4 written a logit.

Memory beside the inputs, counted: z, t and dz of one chunk, in bfloat16 10 bytes a logit (D = 32,000: 164 MB); and the
gradients, of hidden and m in their dtype, of W2 and a trained head in float32 (Kimi-K2.6's N = 3,584, H = 7,168 and
r = 256 with a frozen head: 86 MB), twice while backward scales them. A head of another dtype than hidden is copied.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.acceptance_loss_reference import LossTerms

CHUNK = 512  # rows: 512 FLOPs a byte of the heads that each product reads, where an H200 balances at some 200


@triton.jit
def _softmax(x, best, total):
    """exp(x - best) / total; 0 where x is -inf, as in dead columns."""
    return tl.exp(x - best) / total


@triton.jit
def _rows(Z, T, LABELS, WEIGHTS, DZ, CE, L1, KL, GREEDY, D, ce_weight, l1_weight, kl_weight, WITH_L1: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    """One row of z and t [rows, D]: its terms, and dz."""
    row = tl.program_id(0).to(tl.int64)
    Z, T, DZ = Z + row * D, T + row * D, DZ + row * D
    z_top, t_top = tl.full([BD], float("-inf"), tl.float32), tl.full([BD], float("-inf"), tl.float32)
    z_sum, t_sum = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    z_at, t_at = tl.zeros([BD], tl.int32), tl.zeros([BD], tl.int32)
    for begin in range(0, D, BD):  # running maxima, their places, and sums about them, a lane each
        d = begin + tl.arange(0, BD)
        z = tl.load(Z + d, mask=d < D, other=float("-inf"))
        t = tl.load(T + d, mask=d < D, other=float("-inf"))
        z_at, t_at = tl.where(z > z_top, d, z_at), tl.where(t > t_top, d, t_at)
        z_high, t_high = tl.maximum(z_top, z), tl.maximum(t_top, t)
        z_base, t_base = tl.where(z_high == float("-inf"), 0.0, z_high), tl.where(t_high == float("-inf"), 0.0, t_high)
        z_sum = z_sum * tl.exp(z_top - z_base) + tl.exp(z - z_base)
        t_sum = t_sum * tl.exp(t_top - t_base) + tl.exp(t - t_base)
        z_top, t_top = z_high, t_high
    z_best, t_best = tl.max(z_top, 0), tl.max(t_top, 0)
    z_total, t_total = tl.sum(z_sum * tl.exp(z_top - z_best), 0), tl.sum(t_sum * tl.exp(t_top - t_best), 0)
    z_first, t_first = tl.min(tl.where(z_top == z_best, z_at, D), 0), tl.min(tl.where(t_top == t_best, t_at, D), 0)
    label, weight = tl.load(LABELS + row), tl.load(WEIGHTS + row)
    known = tl.where(label >= 0, 1.0, 0.0)
    log_z = tl.log(z_total)
    at_label = tl.load(Z + tl.maximum(label, 0)) - z_best - log_z
    tl.store(CE + row, -known * at_label)
    tl.store(GREEDY + row, tl.where(z_first == t_first, 1.0, 0.0))
    inner = 0.0
    if WITH_L1:  # <q, s>
        inner_sum = tl.zeros([BD], tl.float32)
        for begin in range(0, D, BD):
            d = begin + tl.arange(0, BD)
            q = _softmax(tl.load(Z + d, mask=d < D, other=float("-inf")), z_best, z_total)
            p = _softmax(tl.load(T + d, mask=d < D, other=float("-inf")), t_best, t_total)
            inner_sum += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
        inner = tl.sum(inner_sum, 0)
    l1, kl = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    for begin in range(0, D, BD):
        d = begin + tl.arange(0, BD)
        z = tl.load(Z + d, mask=d < D, other=float("-inf"))
        t = tl.load(T + d, mask=d < D, other=float("-inf"))
        q, p = _softmax(z, z_best, z_total), _softmax(t, t_best, t_total)
        difference = q - p
        l1 += tl.abs(difference)
        kl += tl.where(p > 0, p * ((t - t_best - tl.log(t_total)) - (z - z_best - log_z)), 0.0)
        dz = ce_weight * known * (q - tl.where(d == label, 1.0, 0.0)) + kl_weight * difference
        if WITH_L1:
            sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
            dz += l1_weight * q * (sign - inner)
        tl.store(DZ + d, (weight * dz).to(DZ.dtype.element_ty), mask=d < D)
    tl.store(L1 + row, tl.sum(l1, 0))
    tl.store(KL + row, tl.sum(kl, 0))


def _product(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """out <- beta out + a @ b, out float32, without rounding the sums to a's dtype; beta 0 does not read out."""
    rounding = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    torch.addmm(out, a, b, beta=beta, out=out, **rounding)


class _AcceptanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, m, w2, target_hidden, target_head, index, labels, weights, mix):
        N, D = len(hidden), len(head)
        states, heads = ([hidden], [head]) if m is None else ([hidden, m], [head, w2])
        grad_states = [torch.empty_like(x) for x in states]
        grad_heads = [torch.zeros_like(w, dtype=torch.float32) if w.requires_grad else None for w in heads]
        heads, target_head = [w.to(hidden.dtype) for w in heads], target_head.to(target_hidden.dtype)
        ce, l1, kl, greedy = (torch.empty(N, device=hidden.device) for _ in range(4))
        BD = min(4096, triton.next_power_of_2(D))
        for start in range(0, N, CHUNK):
            rows = slice(start, min(start + CHUNK, N))
            z, t = (ce.new_empty(rows.stop - start, D) for _ in range(2))
            dz = torch.empty_like(z, dtype=hidden.dtype)
            for i, (x, w) in enumerate(zip(states, heads, strict=True)):
                _product(z, x[rows], w.t(), beta=i)  # U_k, then + B_k
            _product(t, target_hidden[index[rows]], target_head.t(), beta=0)
            _rows[len(z),](
                z, t, labels[rows], weights[rows], dz, ce[rows], l1[rows], kl[rows], greedy[rows], D, *mix,
                WITH_L1=mix[1] != 0, BD=BD, num_warps=8 if BD == 4096 else 4,
            )  # fmt: skip
            for x, w, grad_x, grad_w in zip(states, heads, grad_states, grad_heads, strict=True):
                torch.mm(dz, w, out=grad_x[rows])
                if grad_w is not None:
                    _product(grad_w, dz.t(), x[rows], beta=1)
            del z, t, dz  # before the next chunk's are allocated
        c_star = 1 - 0.5 * l1
        total = mix[0] * ce + mix[1] * l1 + mix[2] * kl
        pairs = zip(grad_states, grad_heads, strict=True)
        ctx.save_for_backward(*(gradient for pair in pairs for gradient in pair))
        ctx.mark_non_differentiable(ce, l1, c_star, greedy)
        return (total * weights).sum(), ce, l1, c_star, greedy

    @staticmethod
    def backward(ctx, grad, *unused):
        gradients = [None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors]
        return (*gradients, *[None] * (10 - len(gradients)))


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
    """As the reference; where a target gives a token no mass at all, KL's term is 0, whatever the draft says."""
    m, mix = None if m is None else m.to(hidden.dtype), (ce_weight, l1_weight, kl_weight)
    with torch.autocast(hidden.device.type, enabled=False):
        terms = _AcceptanceLoss.apply(
            hidden, lm_head, m, w2, target_hidden.detach(), target_head.detach(), index, labels, weights, mix
        )
    return LossTerms(terms[0] / normaliser, *terms[1:4], terms[4] > 0)
