"""Frozen weights laid out for the processor, once, so that a product with a few rows costs what reading them costs.

oneDNN, which multiplies bfloat16 on a CPU, wants a weight in blocks of its own. `F.linear` lays it out anew in every
call, and for the few rows of a decoding step that takes longer than the product.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Packed:
    """x [..., I] -> x W^T + b [..., O] for a frozen W [O, I]; on a CPU in bfloat16 W is kept in oneDNN's own layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.blocked = _profits(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.blocked else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)


def _profits(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(module: nn.Module) -> nn.Module:
    """Give the linear layers of a module that is trained no more a packed copy of their weights, where that profits."""
    for part in module.modules():
        if isinstance(part, nn.Linear) and _profits(part.weight):
            part.forward = Packed(part.weight, part.bias)
    return module
