"""Frozen decoder layers for decoding on a CPU: weights laid out once for the kernels of dspark.kernels.cpu, and the
forward pass of a few rows through them, which the target and the drafter share.

Row-invariant: a token's states are bit for bit the same whether it is decoded alone or verified beside others.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.kernels import cpu


class Packed:
    """x [..., K] -> x W^T + b [..., O] for a frozen W [O, K], kept in blocks of C outputs, [O/C, K/2, C, 2], where
    the kernels serve."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.outputs, self.blocked, self.bias = len(weight), cpu.serves(weight), bias
        if self.blocked:
            columns = torch.ops.dspark.columns()
            weight = F.pad(weight.detach(), (0, 0, 0, -len(weight) % columns))
            weight = weight.view(-1, columns, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.blocked:
            return F.linear(x, self.weight, self.bias)
        out = torch.ops.dspark.linear(x, self.weight, self.outputs)
        return out if self.bias is None else out + self.bias


class PackedLayer(NamedTuple):
    """A decoder layer: q, k, v and gate, up in one product each; q_norm and k_norm [d] where a family has them."""

    input_norm: Tensor
    qkv: Packed
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Packed
    post_norm: Tensor
    gate_up: Packed
    down: Packed


def pack_layer(layer: nn.Module) -> PackedLayer:
    """A Llama-, Qwen- or Mistral-style decoder layer, packed."""
    attn, mlp = layer.self_attn, layer.mlp
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    bias = torch.cat([p.bias.detach() for p in projections]) if attn.q_proj.bias is not None else None
    norms = [getattr(attn, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in norms)
    return PackedLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=Packed(torch.cat([p.weight.detach() for p in projections]), bias),
        q_norm=q_norm,
        k_norm=k_norm,
        o=Packed(attn.o_proj.weight.detach()),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=Packed(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()])),
        down=Packed(mlp.down_proj.weight.detach()),
    )


def kernels_fit(layers: list[PackedLayer], head_dim: int) -> bool:
    """Whether `forward_rows` can run these layers."""
    widths = [len(layers[0].input_norm), layers[0].gate_up.outputs // 2]
    every = [product for layer in layers for product in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return head_dim in (64, 128) and not any(w % 16 for w in widths) and all(product.blocked for product in every)


class Places(NamedTuple):
    """Of N rows: which request [N] each belongs to, its position [N] there, and how many places it sees [N]; int64."""

    requests: Tensor
    positions: Tensor
    visible: Tensor


def forward_rows(layers, x: Tensor, places: Places, rope, caches, eps: float, taps=()) -> tuple[Tensor, Tensor, list]:
    """x [N, H] through packed layers -> the stream [N, H], what the last layer adds to it [N, H], the stream after
    each layer of `taps`.

    rope: cos, sin [L, d], float32. caches: for each layer keys and values [B, Hkv, max_len, d], any strides but the
    last; the rows' own are left there before any row looks.
    """
    kernels, delta, tapped = torch.ops.dspark, None, []
    for index, (layer, (keys, values)) in enumerate(zip(layers, caches, strict=True)):
        x, h = kernels.add_rms_norm(x, delta, layer.input_norm, eps)
        if index - 1 in taps:
            tapped.append(x)
        requests, positions, visible = places
        attended = kernels.attend(
            layer.qkv(h), layer.q_norm, layer.k_norm, eps, *rope, positions, requests, visible, keys, values
        )
        x, h = kernels.add_rms_norm(x, layer.o(attended), layer.post_norm, eps)
        delta = layer.down(kernels.silu_mul(layer.gate_up(h)))
    if len(layers) - 1 in taps:
        tapped.append(x + delta)
    return x, delta, tapped


def pack(module: nn.Module) -> nn.Module:
    """Give linear layers, norms and gated MLPs of a module that is trained no more the kernels, where they serve."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and cpu.serves(part.weight):
            part.forward = Packed(part.weight, part.bias)
        if isinstance(part, nn.RMSNorm) and cpu.serves(part.weight) and len(part.weight) % 16 == 0:
            part.forward = _norm(part.weight, part.eps)
        if hasattr(part, "up_proj") and cpu.serves(part.up_proj.weight) and part.up_proj.out_features % 16 == 0:
            part.forward = _mlp(part)
    return module


def _mlp(mlp: nn.Module):
    gate_up, down = Packed(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])), Packed(mlp.down_proj.weight)
    return lambda x: down(torch.ops.dspark.silu_mul(gate_up(x)))


def _norm(weight: Tensor, eps: float):
    return lambda x: torch.ops.dspark.add_rms_norm(x, None, weight, eps)[1]
