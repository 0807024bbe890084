"""Looking inside a drafter with both heads (notebook 01): what its blocks see, and where they go wrong.

Shapes: T tokens of a prompt and its answer, R rows of them that predict the answer, A anchors, n drafts, H hidden,
D draft vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspark.config import DSparkConfig
from dspark.drafter import DSparkDrafter
from dspark.kernels import block_attention
from dspark.target import KVCache, Target

LIKELY = 0.1  # the least probability of a token that the backbone is said to consider
TOP = 3  # candidates of a slot that are looked at


class Reading(NamedTuple):
    """The target's pass over a prompt and the answer that begins at row `start`. tokens [T]; features [T, m*H] for
    the drafter; states [R, depth, H]: every block's output in rows start - 1 .. T - 1; p [R, D]: what the target
    says after these rows, the part of its distribution that the drafter can name; cache: the pass's keys and values."""

    tokens: Tensor
    start: int
    features: Tensor
    states: Tensor
    p: Tensor
    cache: KVCache


class Blocks(NamedTuple):
    """A block drafted at each of A anchors. Slot k predicts what comes k + 1 tokens after the anchor.

    base_p, base_ids [A, n, TOP]: likeliest tokens of the bare backbone; head_p, head_ids [A, n, TOP]: of backbone and
    Markov head, each slot following the head's own choices; truth [A, n]: the target's tokens; confidence [A, n];
    overlap [A, n]: sum of min(p, q), the chance that a sampled draft is accepted where all before it are true.
    """

    base_p: Tensor
    base_ids: Tensor
    head_p: Tensor
    head_ids: Tensor
    truth: Tensor
    confidence: Tensor
    overlap: Tensor

    def run_lengths(self, ids: Tensor) -> Tensor:
        """[A] leading drafts that are the target's own tokens, for ids [A, n, TOP] that draft their first."""
        return (ids[..., 0] == self.truth).int().cumprod(1).sum(1)


class Collision(NamedTuple):
    """Slots k - 1 and k of a block: the backbone's favourites `first` and `second` do not go together, for the target
    continues `first` by `wanted`. It continues by `second`, too, but after `rival`, another likely token of k - 1."""

    block: int
    k: int
    first: int
    second: int
    wanted: int
    rival: int
    likely: float  # the smaller of the probabilities of `rival` and of `second`


@torch.no_grad()
def read(target: Target, drafter: DSparkDrafter, prompt: list[int], answer: list[int]) -> Reading:
    """Read prompt and answer in one pass; target.layer_ids must be all layers."""
    tokens, start = torch.tensor(prompt + answer, device=target.device), len(prompt)
    cache = target.new_cache(1, len(tokens))
    out = target.forward(tokens[None], cache, 0)
    states = out.features[0].unflatten(-1, (target.num_hidden_layers, target.hidden_size))
    features = states[:, list(drafter.config.target_layer_ids)].flatten(1)
    ids = drafter.to_target_ids(torch.arange(drafter.config.vocab_size_out, device=tokens.device))
    p = target.logits(out.hidden[0, start - 1 :]).float().softmax(-1)[:, ids]
    return Reading(tokens, start, features, states[start - 1 :].clone(), p, cache)


@torch.no_grad()
def draft_blocks(drafter: DSparkDrafter, reading: Reading, n: int) -> Blocks:
    """Draft n tokens at every anchor of the answer that has n tokens after it; needs an answer of more than n."""
    rows = torch.arange(len(reading.tokens), device=reading.tokens.device)
    anchors = rows[reading.start : len(rows) - n]
    hidden = drafter.block_hidden(reading.features, rows, reading.tokens, anchors, torch.zeros_like(anchors), n)
    base, after = drafter.lm_head(hidden).float(), anchors[:, None] + rows[:n]  # slot k predicts row after[k] + 1
    ids = drafter.to_target_ids(torch.arange(base.shape[-1], device=base.device))
    previous, state = reading.tokens[anchors], drafter.markov_head.initial_state(len(anchors))
    slots = []
    for k in range(n):
        m, state = drafter.markov_head.step(previous, hidden[:, k], state)
        q = (base[:, k] + drafter.markov_head.bias(m).float()).softmax(-1)
        overlap = torch.minimum(reading.p[after[:, k] - reading.start + 1], q).sum(-1)
        confidence = drafter.confidence_head(hidden[:, k], drafter.markov_head.markov_w1(previous)).sigmoid()
        top = q.topk(TOP)
        slots.append((top.values, ids[top.indices], confidence, overlap))
        previous = ids[top.indices[:, 0]]
    head_p, head_ids, confidence, overlap = (torch.stack(part, 1) for part in zip(*slots, strict=True))
    top = base.softmax(-1).topk(TOP)
    return Blocks(top.values, ids[top.indices], head_p, head_ids, reading.tokens[after + 1], confidence, overlap)


@torch.no_grad()
def collisions(target: Target, reading: Reading, blocks: Blocks) -> list[Collision]:
    """The blocks whose first wrong token, drafted by the bare backbone, is what the target says after a rival of the
    token before it. Both must be LIKELY, and the rival among that slot's TOP; the target itself is asked."""
    found = []
    runs = enumerate(blocks.run_lengths(blocks.base_ids).tolist())
    broken = [(block, k) for block, k in runs if 0 < k < blocks.truth.shape[1]]
    # from the right: asking about a rival overwrites its row of the cache, which later rows alone would see
    for block, k in sorted(broken, key=sum, reverse=True):
        first, second, wanted = (int(t) for t in (*blocks.base_ids[block, k - 1 : k + 1, 0], blocks.truth[block, k]))
        for rival, chance in zip(blocks.base_ids[block, k - 1, 1:], blocks.base_p[block, k - 1, 1:], strict=True):
            likely = float(min(chance, blocks.base_p[block, k, 0]))
            if likely < LIKELY:
                break
            out = target.forward(rival.view(1, 1), reading.cache, reading.start + block + k)
            if int(target.logits(out.hidden[0, 0]).argmax()) == second:
                found.append(Collision(block, k, first, second, wanted, int(rival), likely))
                break
    return sorted(found)


def visible(config: DSparkConfig, context: int, later: int, n: int, layer: int = 0) -> np.ndarray:
    """bool [slots, context + later + slots]: the keys that each slot of a block sees in draft layer `layer`, found by
    asking block_attention. ValueError if there is no such layer.

    `context` rows before the anchor, `later` rows from it on (training has them, decoding does not), then the slots.
    All keys are equal and the values are rows of an identity, so that a slot's output is its row of weights.
    """
    if not 0 <= layer < config.num_hidden_layers:
        raise ValueError(f"layer = {layer}: draft layers are 0..{config.num_hidden_layers - 1}")
    slots, rows = config.block_length(n), context + later
    window = config.sliding_window if layer in config.sliding_layers else None
    width = 1 << (rows + slots - 1).bit_length()  # kernels want powers of two
    values = torch.eye(rows + slots, width)[:, None]  # [keys, 1, width]
    equal = torch.zeros(rows + slots, 1, width)
    block, at = equal[rows:][None], torch.tensor([context])
    own = values[rows:][None]
    masks = {"causal": config.causal(layer), "window": window}
    weights = block_attention(block, equal[:rows], values[:rows], block, own, at, at - context, **masks)
    return (weights[0, :, 0, : rows + slots] > 0).numpy()
