"""What tests/test_stream_targets.py runs in a process of its own: vLLM on tiny random targets of other kinds.

Each prompt goes through twice, in chunks of 16 tokens and then from the prefix cache; the states go to the test. (On a
CPU, vLLM has neither chunks nor a prefix cache for latent attention: there a step has to hold the whole prompt.)
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MinistralConfig

from dspark.serve import ON_CPU, speculative_config, transfer_config

SIZE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512}
SIZE |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False}
KINDS = {
    "mla": DeepseekV3Config(  # DeepSeek-V3's family, as Kimi's: latent attention, shared and routed experts
        **SIZE, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=32,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
        q_lora_rank=32, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=16, v_head_dim=16,
        topk_method="noaux_tc", scoring_func="sigmoid",  # vLLM wants them said
    ),
    "sliding": MinistralConfig(  # full and sliding attention in turn
        **SIZE, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}  # fmt: skip
LAYERS = (1, 3, 4)  # after one block, after three, and the last before the norm
PROMPTS = [[(7 * i + 3 * k) % 250 + 2 for i in range(n)] for k, n in enumerate((5, 90, 140))]
PROMPTS.append(PROMPTS[2][:70] + [9, 8, 7])


def build(kind: str, folder: Path) -> torch.nn.Module:
    """The model, with logits spread enough that nothing hides in the noise; also written to `folder`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(KINDS[kind]).float().eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(4.0)
    model.save_pretrained(folder)
    if kind == "sliding":  # vLLM has these layers in its Llama
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (folder / "config.json").write_text(json.dumps(config))
    return model


def main(kind: str, folder: str, endpoint: str) -> None:
    os.environ |= ON_CPU | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_seqs=2,
        max_num_batched_tokens=256 if kind == "mla" else 16, enforce_eager=True,
        gpu_memory_utilization=0.3, enable_prefix_caching=True,
        # vLLM 0.32's own rotary operator for a CPU leaves latent queries, which are slices, unrotated or worse
        compilation_config={"custom_ops": ["none" if kind == "mla" else "all"]},
        speculative_config=speculative_config(LAYERS),
        kv_transfer_config=transfer_config([endpoint], 1 << 20, shared_memory=False),
    )  # fmt: skip
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    cached = []
    for again in range(2):
        for number, prompt in enumerate(PROMPTS):
            params = {"rank": 0, "sample_id": f"{10 * again + number:08d}"}
            asked = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": params})
            (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
            cached.append(output.num_cached_tokens)
    llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)  # steps
    told = {"groups": [type(group.kv_cache_spec).__name__ for group in groups], "cached": cached}
    print("TOLD", json.dumps(told), flush=True)
    import time

    time.sleep(2)  # the outbox sends in the background
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
