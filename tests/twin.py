"""A plain twin of the drafter in float64: one block at a time, loops, concatenated keys and a dense mask."""

import itertools

import torch


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x, positions, theta):
    """Rotary embedding as complex numbers: x [S, heads, d], positions [S]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)  # [S, half]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def dense_attention(q, k, v, mask):
    """q [L, Hq, d], k and v [S, Hkv, d], mask [L, S] True where seen -> [L, Hq, d]."""
    groups = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].T / q.shape[-1] ** 0.5
        out[:, head] = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v[:, head // groups]
    return out


def seen(slots: int, anchor: int, start: int, causal: bool, window: int | None) -> torch.Tensor:
    """[slots, anchor - start + slots]: context rows start..anchor-1, then the block's own slots."""
    mask = torch.zeros(slots, anchor - start + slots, dtype=torch.bool)
    for i, row in itertools.product(range(slots), range(start, anchor)):
        mask[i, row - start] = window is None or anchor + i - row < window
    for i, j in itertools.product(range(slots), repeat=2):
        mask[i, anchor - start + j] = j <= i or not causal
    return mask


def twin_hidden(drafter, features, anchor_token: int, n: int) -> torch.Tensor:
    """Hidden states [n, H] of the slots that predict; features [L-1, m*H]: the anchor is the L-th token."""
    config, weights = drafter.config, {k: v.double() for k, v in drafter.state_dict().items()}
    eps, theta, d = config.rms_norm_eps, config.rope_theta, config.head_dim
    length, at = n + (not config.sample_from_anchor), len(features)
    context = norm(features.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    x = weights["embed_tokens.weight"][[anchor_token] + [config.mask_token_id] * (length - 1)]
    before, own = torch.arange(at, dtype=torch.float64), torch.arange(at, at + length, dtype=torch.float64)
    for i in range(config.num_hidden_layers):
        w = {k.removeprefix(f"layers.{i}."): v for k, v in weights.items() if k.startswith(f"layers.{i}.")}
        h = norm(x, w["input_layernorm.weight"], eps)

        def project(states, name, w=w):
            return (states @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, d))

        q = turn(norm(project(h, "q"), w["self_attn.q_norm.weight"], eps), own, theta)
        k = norm(project(torch.cat([context, h]), "k"), w["self_attn.k_norm.weight"], eps)
        k, v = turn(k, torch.cat([before, own]), theta), project(torch.cat([context, h]), "v")
        window = config.sliding_window if i in config.sliding_layers else None
        out = dense_attention(q, k, v, seen(length, at, 0, config.causal(i), window))
        x = x + out.flatten(1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"], eps)
        gate, up = h @ w["mlp.gate_proj.weight"].T, h @ w["mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], eps)[length - n :]


def twin_heads(drafter, hidden, previous) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, D] and confidence [n] for hidden [n, H] and the target ids before each slot [n]."""
    config, weights = drafter.config, {k: v.double() for k, v in drafter.state_dict().items()}
    logits, confidence, s = [], [], torch.zeros(config.markov_rank, dtype=torch.float64)
    for h, token in zip(hidden, previous.tolist(), strict=True):
        z, e = weights["lm_head.weight"] @ h, h[:0]
        if config.markov_rank:
            e = weights["markov_head.markov_w1.weight"][token]
            m = e
            if config.markov_head_type == "gated":
                gate = weights["markov_head.gate_proj.weight"] @ torch.cat([h, e])
                m = (gate + weights["markov_head.gate_proj.bias"]).sigmoid() * e
            elif config.markov_head_type == "rnn":
                joint = weights["markov_head.joint_proj.weight"] @ torch.cat([s, e, h])
                g, c, o = (joint + weights["markov_head.joint_proj.bias"]).chunk(3)
                s, m = g.sigmoid() * s + (1 - g.sigmoid()) * c.tanh(), o.tanh()
            z = z + weights["markov_head.markov_w2.weight"] @ m
        if config.confidence_head:
            joined = torch.cat([h, e]) if config.confidence_head_with_markov else h
            score = weights["confidence_head.proj.weight"][0] @ joined + weights["confidence_head.proj.bias"][0]
            confidence.append(score.sigmoid())
        logits.append(z)
    return torch.stack(logits), torch.stack(confidence) if confidence else None
