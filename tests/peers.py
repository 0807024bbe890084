"""Other implementations of the drafter, run on the same inputs: speculators 0.9.0 in this process, vLLM 0.32 by `main`
in one of its own (its environment must be set before it is imported)."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

GAMMA_DECAY = 4.0
TERMS = {"ce": (1.0, 0.0, 0.0), "tv": (0.0, 0.5, 0.0), "kl_div": (0.0, 0.0, 1.0)}  # acceptance_loss's mix; tv = L1 / 2


@torch.no_grad()
def our_block(drafter, target, row, before_norm) -> dict[str, torch.Tensor]:
    """Logits [A, n, D], confidence logits [A, n] and loss terms of blocks at every anchor with a whole block after it.

    before_norm [T, H]: the target's last hidden states, before its final norm. CE's label is the target's argmax and
    terms are normalised by the count of slots, which is speculators' way.
    """
    from dspark.losses import acceptance_loss, confidence_loss, position_weights

    n, rows = drafter.config.max_draft_tokens, torch.arange(len(row.tokens))
    anchors = rows[: len(rows) - drafter.config.block_size]
    hidden = drafter.block_hidden(row.features, row.positions, row.tokens, anchors, row.starts[anchors], n)
    index = anchors[:, None] + rows[:n]  # slot k predicts what comes after row anchor + k
    out, m, w1, previous = {}, None, None, row.tokens[index]
    if drafter.markov_head:
        m, w1 = drafter.markov_head(previous, hidden), drafter.markov_head.markov_w1(previous)
    logits = drafter.lm_head(hidden)
    out["logits"] = logits if m is None else logits + drafter.markov_head.bias(m)
    target_hidden = F.rms_norm(before_norm, target.final_norm.shape, target.final_norm, target.eps)
    head = target.lm_head if drafter.t2d is None else target.lm_head[drafter.t2d]
    labels = F.linear(target_hidden, head).argmax(-1)[index].flatten()
    weights = position_weights(n, GAMMA_DECAY).repeat(len(anchors))
    w2 = None if m is None else drafter.markov_head.markov_w2.weight
    for name, mix in TERMS.items():
        flat_m = None if m is None else m.flatten(0, 1)
        places = (index.flatten(), labels, weights, len(weights), *mix)
        terms = acceptance_loss(hidden.flatten(0, 1), flat_m, drafter.lm_head.weight, w2, target_hidden, head, *places)
        out[name] = terms.loss
    if drafter.confidence_head:
        out["confidence"] = drafter.confidence_head(hidden, w1)
        out["bce"] = confidence_loss(out["confidence"].flatten(), terms.c_star, weights, len(weights))
    return out


@torch.no_grad()
def speculators_block(folder: Path, row, before_norm, save_to: Path | None = None) -> dict[str, torch.Tensor]:
    """The same from speculators' own DSparkDraftModel, loaded from `folder` and, if asked, saved again."""
    from speculators.losses import eager, resolve_loss_config
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, core

    config = DSparkSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = DSparkDraftModel.from_pretrained(folder, config=config).eval()
    if save_to is not None:
        model.save_pretrained(save_to)
    seen, original = {}, core.compute_metrics

    def spy(logits, targets, confidence_logits, loss_mask, *rest, **options):
        seen.update(logits=logits[0], confidence=confidence_logits, mask=loss_mask[0].bool())
        return original(logits, targets, confidence_logits, loss_mask, *rest, **options)

    core.compute_metrics = spy
    anchors = len(row.tokens) - model.block_size
    try:
        _, _, metrics = model(
            row.features[None], row.tokens[None], row.loss_mask[None], before_norm[None],
            torch.zeros_like(row.tokens)[None], row.positions[None], max_anchors=anchors, gamma=GAMMA_DECAY,
            loss_config=resolve_loss_config(json.dumps(dict.fromkeys(TERMS, 1.0)), "eager"), tv_loss_fn=eager.tv_loss,
        )  # fmt: skip
    finally:
        core.compute_metrics = original
    out = {"logits": seen["logits"][seen["mask"]].unflatten(0, (anchors, -1))}
    out |= {name: metrics[f"{name}_loss_sum"] for name in TERMS}
    if seen["confidence"] is not None:
        confidence = seen["confidence"].flatten()[seen["mask"]].unflatten(0, (anchors, -1))
        out |= {"confidence": confidence, "bce": metrics["confidence_loss_sum"]}
    return out


def speculators_eagle3(folder: Path, target, kept: torch.Tensor) -> dict[str, torch.Tensor]:
    """A random Eagle3 head as speculators saves it; the file's tensors."""
    from safetensors.torch import load_file
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rope_theta=1e4,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm="eagle3",
        default_proposal_method="greedy",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=len(kept), eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=about,
        )
    )  # fmt: skip
    marked = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, kept, True)
    model.load_vocab_mappings(marked, kept - torch.arange(len(kept)))
    model.lm_head.weight.data, model.embed_tokens.weight.data = target.lm_head[kept], target.embed_tokens.clone()
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


# ---- vLLM


class DenseAttention(torch.nn.Module):
    """Stands in for vLLM's paged attention, which needs an engine: one request, its context's keys and values as vLLM's
    own precomputation hands them to the cache, and no mask inside the block."""

    def __init__(self, layer):
        super().__init__()
        self.shape, self.scaling = (-1, layer.num_kv_heads, layer.head_dim), layer.scaling
        self.kv_cache, self.impl = None, SimpleNamespace(do_kv_cache_update=self.keep)

    def keep(self, layer, keys, values, cache, slots):
        self.keys, self.values = keys, values

    def forward(self, q, k, v):
        k, v = (torch.cat([old, new.view(self.shape)]) for old, new in ((self.keys, k), (self.values, v)))
        q, k, v = q.view(len(q), -1, self.shape[-1]).transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scaling, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)


def vllm_model(target: Path, drafter: Path, n: int):
    """Qwen3DSparkForCausalLM as vLLM loads it, sharing the target's embedding and LM head as vLLM decides."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

    options = {"method": "dspark", "model": str(drafter), "num_speculative_tokens": n}
    engine = EngineArgs(
        model=str(target), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
        max_num_seqs=1, speculative_config=options,
    )  # fmt: skip
    config = engine.create_engine_config()
    weights = load_file(target / "model.safetensors")
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            meeting = f"file://{target.parent}/meeting"
            parallel_state.init_distributed_environment(1, 0, meeting, 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        theirs = torch.nn.Module()
        theirs.model = torch.nn.Module()
        theirs.model.embed_tokens = VocabParallelEmbedding(*weights["model.embed_tokens.weight"].shape)
        theirs.lm_head = ParallelLMHead(*weights["lm_head.weight"].shape)
        for layer, name in ((theirs.model.embed_tokens, "model.embed_tokens"), (theirs.lm_head, "lm_head")):
            layer.weight_loader(layer.weight, weights[f"{name}.weight"])
            layer.quant_method.process_weights_after_loading(layer)
        return config, load_dspark_model(theirs, config)


@torch.no_grad()
def vllm_drafts(target: Path, drafter: Path, job: dict) -> dict:
    """Greedy drafts, their logits and confidence, by vLLM's own model and its own sequential sampling."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    n, context = job["n"], torch.tensor(job["features"])
    config, model = vllm_model(target, drafter, n)
    layers = [layer.self_attn for layer in model.model.layers]
    assert not any(model.get_draft_attn_causal()) and not any(layer.sliding_window for layer in layers)
    for layer in layers:
        layer.attn = DenseAttention(layer)
    model.model._attn_layers = [layer.attn for layer in layers]
    hf = config.speculative_config.draft_model_config.hf_config
    length, at = n + (not getattr(hf, "sample_from_anchor", True)), len(context)
    tokens = torch.tensor([job["anchor"]] + [model.model.mask_token_id] * (length - 1))
    seen = []
    speculator = SimpleNamespace(
        _draft_topk=None, num_speculative_steps=n, model=model, draft_logits=None, _step_cols=range(n),
        sample_indices=torch.arange(length - n, length), sample_idx_mapping=torch.zeros(n, dtype=torch.int),
        sample_pos=torch.arange(n), _anchor_idx=torch.tensor([0]), draft_tokens=torch.zeros(1, n, dtype=torch.long),
        input_buffers=SimpleNamespace(input_ids=tokens), draft_token_confidence_probs=torch.zeros(1, n),
        use_confidence_head=model.model.confidence_head is not None,
        _maybe_predict_acceptance=lambda logits, *rest: seen.append(logits),
    )  # fmt: skip
    speculator._sample_logits = lambda *rest: DSparkSpeculator._sample_logits(speculator, *rest)
    with set_current_vllm_config(config), set_forward_context(None, config):
        slots = [torch.zeros(at, dtype=torch.long)] * len(layers)
        model.precompute_and_store_context_kv(model.combine_hidden_states(context), torch.arange(at), slots)
        hidden = model(tokens, torch.arange(at, at + length))
        DSparkSpeculator._sample_sequential(speculator, 1, hidden)
    confidence = speculator.draft_token_confidence_probs[0].tolist() if speculator.use_confidence_head else None
    return {"tokens": speculator.draft_tokens[0].tolist(), "logits": torch.cat(seen).tolist(), "confidence": confidence}


def vllm_decisions(raw: dict) -> dict:
    """How vLLM reads a config: layout, layers whose output it taps (counted from one), causal layers, mask."""
    from transformers import Qwen3Config
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    if "speculators_model_type" in raw:
        hf = SpeculatorsConfig(**SpeculatorsConfig.extract_transformers_pre_trained_config(raw))
    else:
        hf = Qwen3Config(**raw)
    dflash = getattr(hf, "dflash_config", {})
    layout = getattr(hf, "sample_from_anchor", True) if "DFlashDraftModel" not in hf.architectures else False
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=hf))
    confidence = getattr(hf, "enable_confidence_head", False)
    return {
        "sample_from_anchor": layout,
        "aux_hidden_state_layer_ids": get_eagle3_aux_layers_from_config(spec),
        "causal": [_dflash_layer_causal(hf, i) for i in range(hf.num_hidden_layers)],
        "mask_token_id": dflash.get("mask_token_id", getattr(hf, "mask_token_id", None)),
        "rope_theta": hf.rope_parameters["rope_theta"],
        "confidence": confidence and ("with Markov" if getattr(hf, "confidence_head_with_markov", False) else "alone"),
    }


def main(job_file: str) -> None:
    """Answer each of the job's checkpoints and configs; answers go beside the job."""
    from test_vllm import on_cpu

    if os.environ.get("TRITON_INTERPRET") == "1":
        on_cpu()
        torch.accelerator.empty_cache = lambda: None  # the loader's, without an accelerator
    job = json.loads(Path(job_file).read_text())
    answers = {
        name: vllm_drafts(Path(job["target"]), Path(cell["folder"]), cell) for name, cell in job["cells"].items()
    }
    decisions = {name: vllm_decisions(raw) for name, raw in job["configs"].items()}
    Path(job_file).with_name("answers.json").write_text(json.dumps({"cells": answers, "configs": decisions}))


if __name__ == "__main__":
    main(*sys.argv[1:])
