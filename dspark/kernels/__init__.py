"""The block operations that make drafting fast, each as a plain PyTorch reference."""

from dspark.kernels.block_attention_reference import block_attention

__all__ = ["block_attention"]
