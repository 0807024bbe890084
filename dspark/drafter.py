"""The DSpark drafter: a DFlash backbone fed with the target's hidden states, a Markov head, a confidence head.

Two ways in, one arithmetic: `block_hidden` drafts every anchored block of a packed training row at once, `draft`
drafts one block while decoding from a cache of committed context (`draft_batch`: one for each of B requests). Same
block, same logits (tested).

Shapes: T context tokens, A blocks, L slots fed, n drafts, H hidden, m taps, V target and D draft vocabulary.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.config import DSparkConfig
from dspark.heads import ConfidenceHead, MarkovHead
from dspark.kernels import block_attention, markov_decode
from dspark.kernels.markov_decode_reference import MarkovDraft
from dspark.packed import Packed, Places, forward_rows, kernels_fit, pack, pack_layer
from dspark.target import rotate

BLOCK_ROOM = 16  # places that a context keeps behind its tokens for the block that is being drafted


class Draft(NamedTuple):
    """tokens [n] target ids; q [n, D] draft probabilities (None when greedy); confidence [n] or None.
    Of a batch: [B, n], [B, n, D], [B, n]."""

    tokens: Tensor
    q: Tensor | None
    confidence: Tensor | None


class ContextCache:
    """Committed context of one request: keys and values [layers, capacity, Hkv, d], a row of storage that it may share
    with others, [layers, rows, capacity, Hkv, d]. Rejected tokens never enter it."""

    def __init__(self, storage: tuple[Tensor, Tensor], row: int):
        self.storage, self.row, self.length = storage, row, 0
        self.k, self.v = (part[:, row] for part in storage)


class Attention(nn.Module):
    """Queries from the block; keys and values from H_ctx (KV injection, DFlash) and from the block itself."""

    def __init__(self, config: DSparkConfig, layer: int):
        super().__init__()
        hidden, d = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, d
        self.q_proj = nn.Linear(hidden, self.heads * d, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, hidden, bias=False)
        self.q_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.causal = config.causal(layer)
        self.window = config.sliding_window if layer in config.sliding_layers else None

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., H] with cos, sin [..., 1, d] -> k, v [..., Hkv, d]."""
        shape = (*x.shape[:-1], self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(shape)
        return rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin).to(v.dtype), v

    def forward(self, x, cos, sin, context_k, context_v, anchors, starts):
        """x [A, L, H], context_k and context_v [T, Hkv, d], anchors and starts [A] rows of the context -> [A, L, H]."""
        A, L, _ = x.shape
        q = rotate(self.q_norm(self.q_proj(x).view(A, L, self.heads, self.head_dim)), cos, sin)
        k, v = self.keys_values(x, cos, sin)
        out = block_attention(
            q.to(v.dtype), context_k, context_v, k, v, anchors, starts, causal=self.causal, window=self.window
        )
        return self.o_proj(out.reshape(A, L, -1))


class MLP(nn.Module):
    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Qwen3 decoder layer whose attention also reads the injected context."""

    def __init__(self, config: DSparkConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x, cos, sin, context_k, context_v, anchors, starts):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context_k, context_v, anchors, starts)
        return x + self.mlp(self.post_attention_layernorm(x))


class DSparkDrafter(nn.Module):
    """Parameters carry the public checkpoints' names (design: native `Qwen3DSparkModel`).

    Embedding and LM head are the target's own rows and frozen. With a pruned draft vocabulary `d2t` [D] holds OFFSETS
    (target id = draft id + d2t[draft id]) and `t2d` [V] marks the kept ids.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config = config
        self.rope = None  # see `_rope`
        self.packed = None  # the layers for a CPU's kernels, once trained; see `pack`
        self.notes = []  # what a checkpoint left open and how reading it was decided
        self.own = set()  # embed_tokens.weight, lm_head.weight where a checkpoint's are not the target's
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size_out, bias=False)
        self.register_buffer("d2t", None)
        self.register_buffer("t2d", None)
        if config.draft_vocab_size is not None:
            self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.long)
            self.t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.embed_tokens.weight.requires_grad_(False)
        self.lm_head.weight.requires_grad_(False)
        for linear in (module for module in (self.fc, *self.layers.modules()) if isinstance(module, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)
        # Before training the stream is little more than the mask's embedding, and at norm weight 1 a tied LM head
        # would answer it with huge logits (CE 59 on SmolLM2, where ln D is 8.7).
        nn.init.constant_(self.norm.weight, 0.25)
        # Last, so that drafters of one seed begin with the same backbone whatever heads they have.
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
        self.confidence_source = "head" if config.confidence_head else None  # of what draft() tells; or "probability"

    def adopt_target(self, embed_tokens: Tensor, lm_head: Tensor, draft_ids: Tensor | None = None) -> "DSparkDrafter":
        """Take the target's embedding [V, H] and LM head [V, H] (the rows `draft_ids` [D] of it, rising, if pruned)."""
        self.embed_tokens.weight.data = embed_tokens
        if draft_ids is not None:
            self.d2t, self.t2d = vocabulary_maps(draft_ids, self.config.vocab_size)
            lm_head = lm_head[draft_ids]
        if lm_head.shape != self.lm_head.weight.shape:
            raise ValueError(
                f"LM head is {tuple(lm_head.shape)}, this drafter wants {tuple(self.lm_head.weight.shape)}"
            )
        self.lm_head.weight.data = lm_head.clone()
        return self

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]

    def to_draft_ids(self, target_ids: Tensor) -> Tensor:
        """-1 where the token is outside the draft vocabulary."""
        if self.t2d is None:
            return target_ids
        draft_ids = self.t2d.cumsum(0)[target_ids] - 1
        return torch.where(self.t2d[target_ids], draft_ids, -1)

    def pack(self) -> "DSparkDrafter":
        """Lay a drafter that is trained no more out for decoding on a CPU, where the kernels of dspark.kernels.cpu
        serve it."""
        pack(self)
        layers, attention = [pack_layer(layer) for layer in self.layers], [layer.self_attn for layer in self.layers]
        alike = len({a.causal for a in attention}) == 1 and all(a.window is None for a in attention)
        if alike and kernels_fit(layers, self.config.head_dim):
            self.packed = layers
            self.context_kv = [Packed(torch.cat([a.k_proj.weight, a.v_proj.weight]).detach()) for a in attention]
        return self

    # the backbone

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] (absolute) -> cos, sin [..., 1, d], float32."""
        d = self.config.head_dim
        exponents = torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d
        angles = positions[..., None].float() * self.config.rope_theta**-exponents
        angles = torch.cat([angles, angles], -1)[..., None, :]
        return angles.cos(), angles.sin()

    def context_keys_values(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Target features [T, m*H] at positions [T] -> each layer's context keys and values [T, Hkv, d]."""
        context = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))  # H_ctx
        cos, sin = self._rotary(positions)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]

    def _blocks(self, anchor_tokens: Tensor, length: int) -> Tensor:
        """Anchor and masks: [A] -> [A, length]."""
        blocks = anchor_tokens.new_full((len(anchor_tokens), length), self.config.mask_token_id)
        blocks[:, 0] = anchor_tokens
        return blocks

    def _backbone(self, anchor_tokens, anchor_positions, length, context, anchors, starts) -> Tensor:
        """Hidden states of the slots that predict, after the final norm: [A, n, H]."""
        positions = anchor_positions[:, None] + torch.arange(length, device=anchor_positions.device)
        cos, sin = self._rotary(positions)
        x = self.embed_tokens(self._blocks(anchor_tokens, length)).to(self.fc.weight.dtype)
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            x = layer(x, cos, sin, keys, values, anchors, starts)
        x = self.norm(x)
        return x if self.config.sample_from_anchor else x[:, 1:]

    def block_hidden(self, features, positions, tokens, anchors, starts, num_speculative_tokens: int) -> Tensor:
        """Training: draft all anchored blocks of one packed row.

        features [T, m*H], positions [T] (restarting with each document), tokens [T], anchors [A] rows of the row,
        starts [A] first row of each anchor's document; blocks of one document adjacent. Returns [A, n, H]; slot j
        predicts the token at anchor + 1 + j. A block sees no feature at or after its own anchor.
        """
        length = self.config.block_length(num_speculative_tokens)
        context = self.context_keys_values(features, positions)
        return self._backbone(tokens[anchors], positions[anchors], length, context, anchors, starts)

    # decoding

    def new_caches(self, rows: int, capacity: int) -> list[ContextCache]:
        """Empty contexts of `rows` requests that can be drafted for together."""
        config, weight = self.config, self.fc.weight
        shape = (config.num_hidden_layers, rows, capacity + BLOCK_ROOM, config.num_key_value_heads, config.head_dim)
        storage = (weight.new_zeros(shape), weight.new_zeros(shape))
        return [ContextCache(storage, row) for row in range(rows)]

    def new_cache(self, capacity: int) -> ContextCache:
        return self.new_caches(1, capacity)[0]

    def extend(self, cache: ContextCache, features: Tensor, tokens: Tensor | None = None) -> None:
        """Append committed tokens' target features [S, m*H] to the context. The tokens [S] are for other drafters."""
        self.extend_batch([cache], features, [len(features)])

    def extend_batch(self, caches: list[ContextCache], features: Tensor, counts: list[int]) -> None:
        """Append to each of B contexts, from one `new_caches`, its next counts[b] rows of features [sum, m*H]."""
        added = torch.tensor(counts, device=features.device)
        first = torch.tensor([cache.length for cache in caches], device=features.device)
        rows = torch.tensor([cache.row for cache in caches], device=features.device).repeat_interleave(added)
        within = torch.arange(len(features), device=features.device)
        positions = within - (added.cumsum(0) - added - first).repeat_interleave(added)
        self._commit(features, rows, positions, caches[0].storage)
        for cache, count in zip(caches, counts, strict=True):
            cache.length += count

    def _commit(self, features: Tensor, rows: Tensor, positions: Tensor, storage) -> None:
        """Features [S, m*H] to every layer's keys and values at rows [S] and positions [S] of the storage."""
        k, v = storage
        if self.packed is None:
            for index, (keys, values) in enumerate(self.context_keys_values(features, positions)):
                k[index, rows, positions] = keys
                v[index, rows, positions] = values
            return
        context, rope = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype))), self._rope(k.shape[2])
        for layer, kv, keys, values in zip(self.packed, self.context_kv, k, v, strict=True):
            torch.ops.dspark.attend(  # of no query
                kv(context), None, layer.k_norm, self.config.rms_norm_eps, *rope, positions, rows, positions,
                keys.transpose(1, 2), values.transpose(1, 2),
            )  # fmt: skip

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos, sin [>= length, d] of positions from 0 on, float32."""
        if self.rope is None or len(self.rope[0]) < length:
            positions = torch.arange(length, device=self.fc.weight.device)
            self.rope = tuple(part[:, 0].contiguous() for part in self._rotary(positions))
        return self.rope

    def _draft_rows(self, anchors: Tensor, lengths: Tensor, rows: Tensor, length: int, storage) -> Tensor:
        """`_backbone` for decoding by the kernels: contexts of lengths [B] in rows [B] of the storage -> [B, n, H]."""
        places = lengths[:, None] + torch.arange(length, device=anchors.device)  # [B, length]
        visible = places + 1 if self.layers[0].self_attn.causal else (lengths + length)[:, None].expand_as(places)
        x = self.embed_tokens(self._blocks(anchors, length).flatten()).to(self.fc.weight.dtype)
        caches = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in zip(*storage, strict=True)]
        where = Places(rows.repeat_interleave(length), places.flatten(), visible.flatten())
        eps = self.config.rms_norm_eps
        x, delta, _ = forward_rows(self.packed, x, where, self._rope(storage[0].shape[2]), caches, eps)
        x = torch.ops.dspark.add_rms_norm(x, delta, self.norm.weight, eps)[1].view(len(anchors), length, -1)
        return x if self.config.sample_from_anchor else x[:, 1:]

    def draft(self, anchor: Tensor, cache: ContextCache, n: int, temperature=0.0, generator=None) -> Draft:
        """Draft n tokens after the anchor token [1], whose position is cache.length (context covers all before it)."""
        drafts = self.draft_batch(anchor, [cache], n, temperature, generator)
        return Draft(*(None if part is None else part[0] for part in drafts))

    def draft_batch(
        self, anchors: Tensor, caches: list[ContextCache], n: int, temperature=0.0, generator=None
    ) -> Draft:
        """Draft n tokens for each of B requests in one pass: anchors [B], their contexts from one `new_caches`."""
        length, storage = self.config.block_length(n), caches[0].storage
        if any(cache.storage is not storage for cache in caches):
            raise ValueError("contexts of a batch must come from one call of new_caches")
        lengths = anchors.new_tensor([cache.length for cache in caches])
        rows = anchors.new_tensor([cache.row for cache in caches])
        if self.packed is not None and length <= BLOCK_ROOM:
            hidden = self._draft_rows(anchors, lengths, rows, length, storage)  # [B, n, H]
        else:
            starts = rows * storage[0].shape[2]
            context = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in zip(*storage, strict=True)]
            hidden = self._backbone(anchors, lengths, length, context, starts + lengths, starts)
        seeds = None
        if temperature > 0:
            seeds = torch.randint(2**63 - 1, anchors.shape, generator=generator, device=anchors.device)
        base = self.lm_head(hidden)  # U [B, n, D]
        drafted = markov_decode(base, hidden, anchors, self.markov_head, self.d2t, temperature, seeds)
        confidence = None
        if self.confidence_source == "head":
            confidence = torch.sigmoid(self.confidence_head(hidden, drafted.embeddings))
        elif self.confidence_source == "probability":
            confidence = self._highest_probability(base, hidden, anchors, drafted)
        return Draft(drafted.tokens, drafted.logits.softmax(-1) if temperature > 0 else None, confidence)

    def _highest_probability(self, base: Tensor, hidden: Tensor, anchors: Tensor, drafted: MarkovDraft) -> Tensor:
        """[B, n]: the most that q_k gives to any token (greedily: to the drafted one). As the confidence head's, it
        depends on the tokens before draft k only, so that it may decide whether k is verified."""
        logits = drafted.logits
        if logits is None:
            logits = base.float()
            if self.markov_head:
                previous = torch.cat([anchors[:, None], drafted.tokens[:, :-1]], 1)
                logits = logits + self.markov_head.bias(self.markov_head(previous, hidden))
        return logits.softmax(-1).amax(-1)


def vocabulary_maps(draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Kept target ids [D], rising -> d2t [D] offsets and t2d [V] mask."""
    if not bool((draft_ids[1:] > draft_ids[:-1]).all()) or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= vocab_size:
        raise ValueError(f"draft vocabulary ids must rise strictly within 0..{vocab_size - 1}")
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    t2d[draft_ids] = True
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device), t2d
