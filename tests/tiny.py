"""Random tiny models for unit tests: real classes, real arithmetic, a few thousand weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DSparkConfig
from dspark.drafter import DSparkDrafter
from dspark.source import PackedRow
from dspark.target import Target

VOCAB, HIDDEN, EOS = 40, 32, 2


def tiny_model(dtype=torch.float32, seed=0, scale=6.0) -> LlamaForCausalLM:
    """A random 4-layer Llama with grouped queries; its logits are spread so that argmax has no ties.

    Its greedy text soon repeats itself (a random drafter then gets some drafts accepted); at scale 12 it never does.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, eos_token_id=EOS, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(dtype).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(scale)
    return model


def tiny_target(layer_ids=(0, 2), dtype=torch.float32, seed=0, scale=6.0) -> Target:
    return Target(tiny_model(dtype, seed, scale), None, "tiny", layer_ids)


def tiny_config(**changes) -> DSparkConfig:
    return DSparkConfig(
        target="tiny", vocab_size=VOCAB, hidden_size=HIDDEN, target_num_hidden_layers=4, target_layer_ids=(0, 2),
        mask_token_id=1, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, rope_theta=1e4, max_position_embeddings=256, block_size=4, markov_rank=8,
    ).replace(**changes)  # fmt: skip


def tiny_drafter(target: Target, seed=1, draft_ids=None, **changes) -> DSparkDrafter:
    """A random drafter whose every part (Markov bias and confidence too) is far from zero."""
    torch.manual_seed(seed)
    if draft_ids is not None:
        changes["draft_vocab_size"] = len(draft_ids)
    drafter = DSparkDrafter(tiny_config(**changes)).to(target.dtype)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter.data, std=0.3)
    return drafter.adopt_target(target.embed_tokens, target.lm_head, draft_ids).eval()


def packed_row(lengths: list[int], seed=0) -> PackedRow:
    """Documents of these lengths with random tokens and hidden states, all supervised, packed into one row."""
    generator = torch.Generator().manual_seed(seed)
    total, counts = sum(lengths), torch.tensor(lengths)
    ends = counts.cumsum(0)
    starts = (ends - counts).repeat_interleave(counts)
    return PackedRow(
        tokens=torch.randint(3, VOCAB, (total,), generator=generator),
        loss_mask=torch.ones(total, dtype=torch.bool),
        positions=torch.arange(total) - starts,
        starts=starts,
        ends=ends.repeat_interleave(counts),
        features=torch.randn(total, 2 * HIDDEN, generator=generator),
        hidden=torch.randn(total, HIDDEN, generator=generator),
    )
