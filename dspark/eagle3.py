"""Eagle3 (arXiv 2503.01840), the chain drafter that DSpark is measured against, with standard or latent attention.

One decoder layer, fed with the embedding of a token and the fused hidden states of the position before it, drafts one
token a pass; from the second pass on it reads its own output in place of the target's states. Training-time test runs
the same chain on the data's tokens (`block_hidden`). The interface is DSparkDrafter's.

Shapes: T context tokens, A chains, n drafts, H hidden, m taps, h query and g key-value heads, d a head's width,
w what the cache keeps of a token and key-value head, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark import read_formats
from dspark.config import DSparkConfig
from dspark.drafter import MLP, Draft, DSparkDrafter
from dspark.kernels import cpu
from dspark.packed import pack
from dspark.target import multiplies_bfloat16, rotate

LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Eagle3Config(read_formats.Eagle3Config):
    """Shape of an Eagle3 drafter. With a `kv_lora_rank` its attention is latent (MLA, DeepSeek-V2, arXiv 2405.04434,
    queries uncompressed); the names of those four fields are DeepSeek's. Any number of drafts can be chained."""

    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    def __post_init__(self):
        super().__post_init__()
        one_layer = {"num_hidden_layers": 1, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False}
        for name, value in (one_layer | {"norm_output": False}).items():
            if getattr(self, name) != value:
                raise ValueError(f"Eagle3Config.{name} = {getattr(self, name)!r}: this engine computes {value} only")
        latent = [getattr(self, name) for name in LATENT]
        if any(latent) and not all(latent):
            raise ValueError(f"Eagle3Config: latent attention needs all of {', '.join(LATENT)}, got {latent}")
        if any(latent) and min(latent) < 1:
            raise ValueError(f"Eagle3Config: {', '.join(LATENT)} = {latent}: each must be at least 1")
        if any(latent) and self.qk_rope_head_dim % 2:
            raise ValueError(f"Eagle3Config.qk_rope_head_dim = {self.qk_rope_head_dim}: rotary embedding turns pairs")
        if not self.aux_hidden_state_layer_ids:
            raise ValueError("Eagle3Config.aux_hidden_state_layer_ids is missing: say which hidden states are fused")
        if min(self.aux_hidden_state_layer_ids) < 1:
            ids = self.aux_hidden_state_layer_ids
            raise ValueError(f"Eagle3Config.aux_hidden_state_layer_ids = {ids}: block outputs count from 1")

    max_draft_tokens = 1 << 20

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The taps as block outputs counted from zero, as in DSparkConfig."""
        return tuple(layer - 1 for layer in self.aux_hidden_state_layer_ids)

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim or self.head_dim

    def block_length(self, num_speculative_tokens: int) -> int:
        """Passes for n drafts."""
        if num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens = {num_speculative_tokens}: draft at least 1")
        return num_speculative_tokens

    check_taps = DSparkConfig.check_taps

    def check_target(self, target) -> None:
        """ValueError unless a drafter of this shape can serve `target`."""
        for name in ("vocab_size", "hidden_size"):
            mine, theirs = getattr(self, name), getattr(target, name)
            if mine != theirs:
                raise ValueError(f"Eagle3Config.{name} = {mine}, but target {target.name!r} has {theirs}")
        if max(self.target_layer_ids) >= target.num_hidden_layers:
            ids = self.aux_hidden_state_layer_ids
            raise ValueError(f"Eagle3Config.aux_hidden_state_layer_ids = {ids}: {target.name!r} is not so deep")


class Attention(nn.Module):
    """Grouped-query attention over [embedding; hidden states]. `rows` is what the cache keeps: keys and values."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        H, d = 2 * config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = d, d**-0.5
        self.q_proj = nn.Linear(H, self.heads * d, bias=False)
        self.k_proj = nn.Linear(H, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(H, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, config.hidden_size, bias=False)
        self.width = 2 * d

    def rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., 2H] with cos, sin [..., 1, d] -> [..., g, w]."""
        k, v = (proj(x).unflatten(-1, (self.kv_heads, -1)) for proj in (self.k_proj, self.v_proj))
        return torch.cat([rotate(k, cos, sin).to(v.dtype), v], -1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[..., g, w] -> keys and values."""
        return rows[..., : self.head_dim], rows[..., self.head_dim :]

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        return rotate(q, cos, sin).to(q.dtype)

    def forward(self, x: Tensor, cos, sin, context: Tensor, visible: Tensor | None, own: Tensor) -> Tensor:
        """Last slots x [A, 2H] of A chains over context [T, g, w], as far as visible [A, T], and own [A, j, g, w]."""
        q = self.queries(x, cos, sin).unflatten(1, (self.kv_heads, -1))  # [A, g, h/g, d]
        (k, v), (own_k, own_v) = self.split(context), self.split(own)
        to_context = torch.einsum("agqd,tgd->agqt", q, k).float()
        if visible is not None:
            to_context = to_context.masked_fill(~visible[:, None, None], float("-inf"))
        to_own = torch.einsum("agqd,ajgd->agqj", q, own_k).float()
        weights = (torch.cat([to_context, to_own], -1) * self.scale).softmax(-1).to(own_v.dtype)
        T = len(context)
        out = torch.einsum("agqt,tgd->agqd", weights[..., :T], v)
        out = out + torch.einsum("agqj,ajgd->agqd", weights[..., T:], own_v)
        return self.output(out.flatten(1, 2))

    def next(self, x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, at: int) -> Tensor:
        """`forward` of one chain while decoding: its last slot x [1, 2H] over rows [> at, g, w], whose row `at` it
        writes, and no later one -> [1, H]."""
        rows[at] = self.rows(x, cos, sin)[0]
        q = self.queries(x, cos, sin).view(self.kv_heads, -1, self.split(rows)[0].shape[-1])  # [g, h/g, d]
        k, v = (part[: at + 1].transpose(0, 1) for part in self.split(rows))  # [g, T, d]
        weights = ((q @ k.transpose(1, 2)).float() * self.scale).softmax(-1).to(v.dtype)
        return self.output((weights @ v).flatten(0, 1)[None])

    def output(self, attended: Tensor) -> Tensor:
        """[A, h, d] -> [A, H]."""
        return self.o_proj(attended.flatten(1))


def _heads(x: Tensor, weights: Tensor) -> Tensor:
    """[A, h, i] by each head's [h, i, o] -> [A, h, o], in the weights' dtype."""
    return (x.transpose(0, 1).to(weights.dtype) @ weights).transpose(0, 1)


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), with absorbed projections.

    The cache keeps one latent and one rotary key a token, [1, d_c + d_rope], for all heads: k_nope = W_uk c is never
    formed, the query goes into the latent space instead (q . W_uk c = W_uk^T q . c), and W_uv maps the attended latent.
    Rotary pairs are interleaved, as in DeepSeek's checkpoints.
    """

    def __init__(self, config: Eagle3Config):
        nn.Module.__init__(self)
        H, r, self.heads, self.kv_heads = 2 * config.hidden_size, config.kv_lora_rank, config.num_attention_heads, 1
        self.nope, rope, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.rank, self.width, self.scale = r, r + rope, (self.nope + rope) ** -0.5
        self.up = None  # `_up`, laid out once a drafter is trained no more
        self.q_proj = nn.Linear(H, self.heads * (self.nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(H, r + rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(r, eps=config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(r, self.heads * (self.nope + values), bias=False)
        self.o_proj = nn.Linear(self.heads * values, config.hidden_size, bias=False)

    def rows(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        latent, rope = self.kv_a_proj_with_mqa(x).unsqueeze(-2).split([self.rank, self.width - self.rank], -1)
        return torch.cat([self.kv_a_layernorm(latent).to(rope.dtype), self._rotate(rope, cos, sin)], -1)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, rows[..., : self.rank]

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_uk [h, d_nope, d_c] and W_uv transposed [h, d_c, d_v]."""
        if self.up is not None:
            return self.up
        both = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        return both[:, : self.nope], both[:, self.nope :].transpose(1, 2)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1))
        nope, rope = q[..., : self.nope], q[..., self.nope :]
        return torch.cat([_heads(nope, self._up()[0]), self._rotate(rope, cos, sin)], -1)

    def output(self, attended: Tensor) -> Tensor:
        return self.o_proj(_heads(attended, self._up()[1]).flatten(1).to(self.o_proj.weight.dtype))

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Interleaved pairs -> half-split ones, turned: queries and keys alike, so that their products are the same."""
        return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin).to(x.dtype)


class Layer(nn.Module):
    """The decoder layer: normalised embedding and hidden states side by side into attention, then the FFN."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)  # of the embedding
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = (LatentAttention if config.kv_lora_rank else Attention)(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """[..., H] and [..., H] -> [..., 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def forward(self, x, hidden, cos, sin, context, visible, own) -> Tensor:
        hidden = hidden + self.self_attn(x, cos, sin, context, visible, own)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ChainCache:
    """rows [capacity, g, w] of the committed tokens' slots; feature [1, H]: fused states of the last of them.

    Row t belongs to token t and the states of t - 1; the first token has none before it, and its row is never read.
    """

    def __init__(self, rows: Tensor, feature: Tensor):
        self.rows, self.feature, self.length = rows, feature, 0


class Eagle3Drafter(nn.Module):
    """Parameters carry the names of public Eagle3 checkpoints (`layers.0` is their `midlayer`). Embedding and LM head
    are the target's and frozen, as in the public Kimi Eagle3-MLA drafters; d2t and t2d as in DSparkDrafter."""

    adopt_target = DSparkDrafter.adopt_target
    to_target_ids = DSparkDrafter.to_target_ids
    to_draft_ids = DSparkDrafter.to_draft_ids

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        self.notes, self.own = [], set()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        taps = len(config.aux_hidden_state_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = self.confidence_head = self.confidence_source = None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self.embed_tokens.weight.requires_grad_(False)
        self.lm_head.weight.requires_grad_(False)
        for linear in (module for module in (self.fc, *self.layers.modules()) if isinstance(module, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.02)
        nn.init.constant_(self.norm.weight, 0.25)  # as in DSparkDrafter, for the same reason

    def pack(self) -> "Eagle3Drafter":
        """Lay a drafter that is trained no more out for decoding."""
        attention, dtype = self.layers[0].self_attn, self.fc.weight.dtype
        if isinstance(attention, LatentAttention):
            if cpu.serves(self.fc.weight) and not multiplies_bfloat16():
                dtype = torch.float32  # where torch's bfloat16 products would take several times float32's time
            attention.up = tuple(part.detach().to(dtype).contiguous() for part in attention._up())
        return pack(self)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [...] -> cos, sin [..., 1, d], float32."""
        d = self.config.rope_dim
        exponents = torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d
        angles = positions[..., None].float() * self.config.rope_theta**-exponents
        angles = torch.cat([angles, angles], -1)[..., None, :]
        return angles.cos(), angles.sin()

    def _fuse(self, features: Tensor) -> Tensor:
        """Tapped states [T, m*H] -> [T, H]."""
        return self.fc(features.to(self.fc.weight.dtype))

    def _context(self, tokens: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Cache rows [T, g, w] of tokens [T] at positions [T] with the fused states before them [T, H]."""
        layer = self.layers[0]
        embedding = self.embed_tokens(tokens).to(hidden.dtype)
        return layer.self_attn.rows(layer.inputs(embedding, hidden), *self._rotary(positions - 1))

    def _pass(self, tokens, hidden, positions, context, visible, own) -> tuple[Tensor, Tensor]:
        """One pass of A chains: tokens [A] at positions [A], hidden [A, H] of the slot before -> (hidden [A, H] before
        the final norm, own [A, j + 1, g, w])."""
        layer = self.layers[0]
        x = layer.inputs(self.embed_tokens(tokens).to(hidden.dtype), hidden)
        cos, sin = self._rotary(positions - 1)  # a slot stands where its hidden states come from
        row = layer.self_attn.rows(x, cos, sin)[:, None]
        own = row if own is None else torch.cat([own, row], 1)
        return layer(x, hidden, cos, sin, context, visible, own), own

    def block_hidden(self, features, positions, tokens, anchors, starts, num_speculative_tokens: int) -> Tensor:
        """Training-time test: chains of n passes from every anchor of a packed row, on the data's tokens.

        Arguments as for DSparkDrafter.block_hidden. Returns [A, n, H]; slot j predicts the token at anchor + 1 + j.
        A chain reads the target's states before its anchor and from then on its own.
        """
        before = self._fuse(features).roll(1, 0)
        before = torch.where((positions > 0)[:, None], before, torch.zeros_like(before))
        context = self._context(tokens, before, positions)
        at = torch.arange(len(tokens), device=tokens.device)
        visible = (at > starts[:, None]) & (at < anchors[:, None])  # [A, T]
        hidden, own, outputs = before[anchors], None, []
        for k in range(self.config.block_length(num_speculative_tokens)):
            token = tokens[(anchors + k).clamp_max(len(tokens) - 1)]  # beyond the end nothing is supervised
            hidden, own = self._pass(token, hidden, positions[anchors] + k, context, visible, own)
            outputs.append(self.norm(hidden))
        return torch.stack(outputs, 1)

    def new_cache(self, capacity: int) -> ChainCache:
        attention, weight = self.layers[0].self_attn, self.fc.weight
        dtype = attention.up[0].dtype if self.config.kv_lora_rank and attention.up else weight.dtype
        rows = weight.new_zeros(capacity, attention.kv_heads, attention.width, dtype=dtype)
        return ChainCache(rows, weight.new_zeros(1, self.config.hidden_size))

    def extend(self, cache: ChainCache, features: Tensor, tokens: Tensor) -> None:
        """Append committed tokens [S] and their target features [S, m*H] to the context."""
        fused, end = self._fuse(features), cache.length + len(tokens)
        before = torch.cat([cache.feature, fused[:-1]])
        positions = torch.arange(cache.length, end, device=tokens.device)
        cache.rows[cache.length : end] = self._context(tokens, before, positions)
        cache.feature, cache.length = fused[-1:], end

    def draft(self, anchor: Tensor, cache: ChainCache, n: int, temperature=0.0, generator=None) -> Draft:
        """Draft n tokens after the anchor token [1] in n passes; what they write is forgotten afterwards."""
        layer, passes, hidden = self.layers[0], self.config.block_length(n), cache.feature
        rows = torch.cat([cache.rows[1 : cache.length], cache.rows.new_empty(passes, *cache.rows.shape[1:])])
        # a slot stands where its hidden states come from
        cos, sin = self._rotary(torch.arange(cache.length - 1, cache.length - 1 + passes, device=anchor.device))
        previous, tokens, probabilities = anchor, [], []
        for k in range(passes):
            x = layer.inputs(self.embed_tokens(previous).to(hidden.dtype), hidden)
            hidden = hidden + layer.self_attn.next(x, cos[k], sin[k], rows, len(rows) - passes + k)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits = self.lm_head(self.norm(hidden)).float()
            if temperature > 0:
                probabilities.append((logits / temperature).softmax(-1))
                choice = torch.multinomial(probabilities[-1], 1, generator=generator)[:, 0]
            else:
                choice = logits.argmax(-1)
            previous = self.to_target_ids(choice)
            tokens.append(previous)
        return Draft(torch.cat(tokens), torch.cat(probabilities) if probabilities else None, None)
