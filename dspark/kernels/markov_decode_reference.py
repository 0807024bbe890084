"""Markov decode, the PyTorch reference: a block's tokens, left to right, each biased by the token before it.

logits_k = U_k + B(x_{k-1}), x_0 the anchor; x_k = argmax logits_k, or a draw from q_k = softmax(logits_k / T) as
argmax (logits_k / T + g), g Gumbel noise (DSpark paper, section 3.1). Shapes: B requests, n drafts, H hidden, r Markov
rank, V target and D draft vocabulary. Floor: W2 [D, r] and U once a position, and of W1 [V, r] a row a request;
2 B n D r FLOPs.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class MarkovDraft(NamedTuple):
    """tokens [B, n] target ids; logits [B, n, D] over the temperature, float32, of which q is the softmax (None when
    greedy); embeddings [B, n, r]: W1[x_{k-1}], None without a head."""

    tokens: Tensor
    logits: Tensor | None
    embeddings: Tensor | None


def markov_decode(
    base: Tensor,
    hidden: Tensor,
    anchors: Tensor,
    head,
    d2t: Tensor | None = None,
    temperature: float = 0.0,
    seeds: Tensor | None = None,
) -> MarkovDraft:
    """base logits U [B, n, D] and hidden states [B, n, H] of the slots, anchors [B] target ids -> MarkovDraft.

    head: a dspark.heads.MarkovHead, or None for U alone; d2t [D]: offsets from draft to target ids, None where they are
    the same. temperature 0 is greedy, the lowest id winning ties; above 0 each request draws by its own seed, seeds [B]
    int64. base, hidden and the head have one float dtype; the bias is added, and the token chosen, in float32. anchors
    and d2t are int64.
    """
    generators = [torch.Generator(base.device).manual_seed(seed) for seed in seeds.tolist()] if temperature > 0 else []
    state = head.initial_state(len(anchors)) if head else None
    previous, tokens, every, embeddings = anchors, [], [], []
    for k, logits in enumerate(base.float().unbind(1)):  # [B, D]
        if head:
            m, state = head.step(previous, hidden[:, k], state)
            embeddings.append(m if head.kind == "vanilla" else head.markov_w1(previous))
            logits = logits + head.bias(m)
        if temperature > 0:
            every.append(logits)
            noise = [torch.empty_like(logits[0]).exponential_(generator=generator) for generator in generators]
            choice = (logits / temperature - torch.stack(noise).log_()).argmax(-1)
        else:
            choice = logits.argmax(-1)
        previous = choice if d2t is None else choice + d2t[choice]
        tokens.append(previous)
    scaled = torch.stack(every, 1) / temperature if temperature > 0 else None
    return MarkovDraft(torch.stack(tokens, 1), scaled, torch.stack(embeddings, 1) if head else None)
