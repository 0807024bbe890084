"""The planner's arithmetic against modules on the meta device, a real trainer's memory, and what it must refuse."""

import dataclasses
import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, Qwen3Config

from dspark import UserError, plan
from dspark.anchors import micro_batches
from dspark.config import PRESETS
from dspark.data import Sample
from dspark.drafter import DSparkDrafter
from dspark.initial import new_drafter
from dspark.losses import drafter_loss
from dspark.plan import TARGETS, activations, drafter_size, state_bytes
from dspark.serve import PROFILES
from dspark.source import LocalSource
from dspark.train import TrainConfig, Trainer

QWEN3_8B = Qwen3Config(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=151936, tie_word_embeddings=False,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, tie_word_embeddings=True,
)  # fmt: skip
KIMI = DeepseekV3Config(
    hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=64,
    num_key_value_heads=64, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8, n_group=1, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128,
    v_head_dim=128, vocab_size=163840, tie_word_embeddings=False,
)  # fmt: skip


def parameters(config) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name, config", [("smollm2-135m", SMOLLM2), ("Qwen/Qwen3-8B", QWEN3_8B)])
def test_targets_have_the_meta_models_parameters(name, config):
    assert TARGETS[name].weights == 2 * parameters(config)
    heads = config.num_key_value_heads * (getattr(config, "head_dim", None) or config.hidden_size // 9)
    assert TARGETS[name].kv_bytes == config.num_hidden_layers * 2 * heads * 2


def test_kimis_trillion_parameters_are_the_meta_models():
    target, routed = TARGETS["moonshotai/Kimi-K2.6"], 60 * 384 * 3 * 7168 * 2048
    rest = (target.weights - routed * (0.5 + 2 / 32)) / 2
    assert rest + routed == pytest.approx(parameters(KIMI), rel=1e-7)  # but for the router's 23,040 biases
    assert 1.02e12 < rest + routed < 1.03e12 and 31e9 < target.active < 34e9  # "1T parameters, 32B active"
    assert target.kv_bytes == 61 * (512 + 64) * 2


@pytest.mark.parametrize("preset", ["smollm2-135m", "qwen3-8b", "kimi-k2.6"])
def test_drafters_have_the_meta_modules_parameters(preset):
    with torch.device("meta"):
        drafter = DSparkDrafter(PRESETS[preset])
    size = drafter_size(PRESETS[preset])
    assert sum(size) == sum(parameter.numel() for parameter in drafter.parameters())
    assert size.matrices + size.rest == sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    if preset == "kimi-k2.6":
        assert 2 * sum(size) == pytest.approx(6.3e9, rel=0.01)  # as released


def saved_bytes(run: Trainer, batch) -> int:
    """Of the tensors that autograd keeps for the backward pass, each storage once, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in run.drafter.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = drafter_loss(run.drafter, run.target_head, batch, 1.0, run.config)
    loss.backward()
    return sum(size for size, _ in kept.values())


def test_a_real_trainers_memory_is_what_the_plan_says(target, tmp_path):
    """Exactly, for weights, gradients and optimizers; activations are bounded from above, by less than twice."""
    shape = PRESETS["smollm2-135m"]
    ids = torch.randint(20, 49000, (512,), generator=torch.Generator().manual_seed(0))
    sample = Sample(ids, torch.arange(512) >= 8)
    config = TrainConfig(steps=1, micro_batches=1, row_tokens=512, anchors=64, heldout_every=10, save_every=10)
    source = LocalSource(target, [sample], tmp_path / "hidden")
    run = Trainer(new_drafter(shape, target, [sample], 0), target, source, [], config, tmp_path / "run")
    _, (batch,) = next(micro_batches(source, run.config, 0))
    measured = saved_bytes(run, batch)
    said = activations(shape, 512, 64, dense=True)
    assert measured < said < 2 * measured
    gradients = sum(p.grad.nbytes for p in run.parameters)
    run._update(1.0)
    states = [v for o in run.optimizers for s in o.state.values() for v in s.values() if v.ndim]
    made = plan.plan(replace(PROFILES["cpu"], trainers=1)).trainer
    assert sum(p.nbytes for p in run.parameters) == gradients == made["drafter, float32"] == made["gradients"]
    assert sum(state.nbytes for state in states) == made["optimizers"]


def test_states_of_a_token():
    assert state_bytes(PRESETS["kimi-k2.6"]) == 2 * 4 * 7168 and state_bytes(PRESETS["smollm2-135m"]) == 2 * 4 * 576


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_fits(name, capsys):
    made = plan.plan(PROFILES[name])
    assert not made.faults
    assert all(value > 0 for part in (made.verifier, made.trainer) for value in part.values())
    assert 0 < made.rate <= min(made.verifier_rate, made.trainer_rate) and made.bandwidth <= made.link * 8
    plan.main(["--profile", name])
    printed = capsys.readouterr().out
    assert "target weights" in printed and "GB/s needed" in printed and "rows of" in printed


REFUSED = {
    "half the GPUs for Kimi": ("kimi-k2.6", {"tensor_parallel": 4}, "weights and engine take 1[45].* of 96 GB a GPU"),
    "no room for a request": ("kimi-k2.6", {"gpu_memory": 0.58, "max_model_len": 262144}, "where one request may have"),
    "no room for a trainer": (
        "kimi-k2.6",
        {"gpu_memory": 0.9},
        "a trainer takes .* of 14.1 GB a GPU: lower gpu_memory",
    ),
    "rows too long": ("h200x8", {"row_tokens": 400_000}, "a trainer takes .* of 141.0 GB"),
    "too many ranks": ("h200x8", {"trainers": 7}, "9 GPUs are needed and 8 are there: lower trainers"),
    "too many beside it": ("kimi-k2.6", {"trainers": 9}, "9 GPUs are needed and 8 are there: lower trainers"),
}


@pytest.mark.parametrize("name, changes, named", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(name, changes, named):
    with pytest.raises(UserError, match=f"{name} does not fit: .*{named}"):
        plan.main(["--profile", name, "--config", json.dumps(changes)])


def test_more_gpus_and_shorter_requests_are_faster_and_roomier():
    profile = PROFILES["h200x8"]
    wider = plan.plan(replace(profile, tensor_parallel=4, trainers=4))
    narrow = plan.plan(profile)
    assert wider.verifier_rate == 2 * narrow.verifier_rate and wider.trainer_rate < narrow.trainer_rate
    assert wider.cached_tokens > narrow.cached_tokens
    slow = plan.plan(profile, dataclasses.replace(plan.H200, link=1e6))
    assert slow.bandwidth == pytest.approx(1e6 * profile.trainers)


def test_bytes_are_those_of_the_profiles_dtype():
    """Float32 doubles all but what is float32 in any case, and experts of 4 bits."""
    narrow, wide = (plan.plan(replace(PROFILES["h200x8"], trainers=1, dtype=d)) for d in ("bfloat16", "float32"))
    assert wide.verifier["target weights"] == 2 * narrow.verifier["target weights"]
    for name in ("target's embedding and LM head", "activations", "hidden states of a step"):
        assert wide.trainer[name] == 2 * narrow.trainer[name]
    for name in ("drafter, float32", "gradients", "optimizers"):
        assert wide.trainer[name] == narrow.trainer[name]
    assert wide.bandwidth / wide.rate == pytest.approx(2 * narrow.bandwidth / narrow.rate)
    cpu = [plan.plan(replace(PROFILES["cpu"], dtype=d)).cached_tokens for d in ("bfloat16", "float32")]
    assert cpu[0] // 2 == cpu[1]
    narrow, wide = (plan.plan(replace(PROFILES["kimi-k2.6"], dtype=d)) for d in ("bfloat16", "float32"))
    experts = 60 * 384 * 3 * 7168 * 2048 * (0.5 + 2 / 32) / 8  # of each GPU
    assert wide.verifier["target weights"] == pytest.approx(2 * narrow.verifier["target weights"] - experts)
    with pytest.raises(ValueError, match="dtype = 'float16': choose one of bfloat16, float32"):
        plan.plan(replace(PROFILES["cpu"], dtype="float16"))
