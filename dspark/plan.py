"""Whether a streaming profile fits its machine, and what it will be short of: memory per GPU, bytes a second, rates.

Sizes are exact (they are compared with the modules on the `meta` device and with bytes on the wire in the tests), but
for activations, which are bounded from above. Rates are estimates from the assumptions below, and are printed as such.
"""

import argparse
import json
import os
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from dspark import UserError
from dspark.config import PRESETS, DSparkConfig

GB = 1e9
ITEM = {"bfloat16": 2, "float32": 4}  # bytes; the dtypes that `train` takes


@dataclass(frozen=True)
class Target:
    """What vLLM loads. Bytes of the released weights, bytes of a token's keys and values, both in bfloat16, parameters
    that a token passes through, and whether tensor parallelism divides keys and values (the latent of MLA is on every
    GPU). quantized: bytes of `weights` that stay as they are in any dtype."""

    weights: float
    kv_bytes: float
    active: float
    kv_shards: int
    quantized: float = 0.0


def dense(layers, hidden, ffn, heads, kv_heads, head_dim, vocab, tied=False, qk_norm=False) -> Target:
    """A Llama- or Qwen3-style target in bfloat16."""
    layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn + 2 * hidden + 2 * head_dim * qk_norm
    parameters = layers * layer + vocab * hidden * (1 if tied else 2) + hidden
    return Target(2 * parameters, 2 * 2 * layers * kv_heads * head_dim, parameters, kv_heads)


def kimi_k2() -> Target:
    """DeepSeek-V3's architecture at Kimi K2's size; routed experts in 4 bits with a bf16 scale to 32 weights."""
    layers, hidden, heads, q_rank, kv_rank, rope, nope, v = 61, 7168, 64, 1536, 512, 64, 128, 128
    attention = hidden * (q_rank + kv_rank + rope) + q_rank * heads * (nope + rope) + kv_rank * heads * (nope + v)
    attention += heads * v * hidden + q_rank + kv_rank + 2 * hidden
    expert, experts, chosen, sparse = 3 * hidden * 2048, 384, 8, 60
    rest = layers * attention + 3 * hidden * 18432 + sparse * (expert + experts * hidden + experts)
    rest += 2 * 163840 * hidden + hidden
    routed = sparse * experts * expert * (0.5 + 2 / 32)  # bytes
    active = rest + sparse * chosen * expert
    return Target(2 * rest + routed, 2 * layers * (kv_rank + rope), active, 1, routed)


TARGETS = {
    "smollm2-135m": dense(30, 576, 1536, 9, 3, 64, 49152, tied=True),
    "Qwen/Qwen3-0.6B": dense(28, 1024, 3072, 16, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-4B": dense(36, 2560, 9728, 32, 8, 128, 151936, tied=True, qk_norm=True),
    "Qwen/Qwen3-8B": dense(36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    "moonshotai/Kimi-K2.6": kimi_k2(),
    "moonshotai/Kimi-K2.7-Code": kimi_k2(),
}


@dataclass(frozen=True)
class Machine:
    """One GPU, or the whole machine where there is none. The assumptions are ours; `link` is bytes/s over loopback as
    `python3 -m dspark bench stream` measures it."""

    memory: float
    flops: float  # dense bfloat16, as the vendor states it
    prefill_share: float = 0.35  # of them that a prefill reaches
    training_share: float = 0.25
    engine: float = 6e9  # what vLLM needs beside weights and cache: activations, graphs, communication
    runtime: float = 2e9  # a trainer's libraries and fragmentation
    link: float = 1.5e9


H200 = Machine(memory=141e9, flops=989e12)


def this_machine() -> Machine:
    """A CPU of two AMX cores, with the memory that is here; 1.2 TFLOP/s is what its bf16 products were seen to do."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(memory, 1.2e12, prefill_share=0.7, engine=1.5e9, runtime=1e9)


class Drafter(NamedTuple):
    matrices: int  # parameters under Muon
    rest: int  # trained parameters under AdamW
    embedding: int  # frozen
    lm_head: int  # frozen, of the draft vocabulary


@cache
def drafter_size(shape: DSparkConfig) -> Drafter:
    """Parameters of the drafter, counted on the `meta` device."""
    import torch

    from dspark.drafter import DSparkDrafter
    from dspark.optim import optimizers
    from dspark.train import TrainConfig

    with torch.device("meta"):
        drafter = DSparkDrafter(shape)
    matrices, rest = ([p for g in o.param_groups for p in g["params"]] for o in optimizers(drafter, TrainConfig()))
    counts = (sum(p.numel() for p in group) for group in (matrices, rest))
    return Drafter(*counts, drafter.embed_tokens.weight.numel(), drafter.lm_head.weight.numel())


def state_bytes(shape: DSparkConfig, dtype: str = "bfloat16") -> int:
    """A token's hidden states: all taps and the last."""
    return ITEM[dtype] * (len(shape.target_layer_ids) + 1) * shape.hidden_size


def activations(shape: DSparkConfig, row_tokens: int, anchors: int, dense: bool = False) -> float:
    """Bytes kept for the backward pass of one packed row, from above: bfloat16 products and weights, float32 norms.

    dense: the attention matrices too, which the plain PyTorch attention of a CPU keeps and the Triton kernel does not.
    """
    H, ffn, taps = shape.hidden_size, shape.intermediate_size, len(shape.target_layer_ids)
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    layers, slots, size = shape.num_hidden_layers, anchors * shape.block_size, drafter_size(shape)
    context = row_tokens * (2 * (taps + 1) * H + 12 * H + layers * 24 * kv)
    blocks = slots * (layers * (30 * H + 16 * ffn + 24 * q + 24 * kv) + 16 * H)
    heads = 4 * (H + shape.markov_rank) * (shape.vocab_size_out + 3 * slots)
    matrices = layers * 6 * shape.num_attention_heads * slots * row_tokens if dense else 0
    return context + blocks + heads + matrices + 2 * size.matrices


@dataclass(frozen=True)
class Plan:
    """bytes: {what: bytes} of a GPU of the verifier and of a trainer's; rates in tokens/s and bytes/s."""

    verifier: dict[str, float]
    trainer: dict[str, float]
    verifier_room: float
    trainer_room: float
    cached_tokens: int  # that the verifier's cache holds
    verifier_rate: float  # tokens/s that it can prefill
    trainer_rate: float  # tokens/s that all trainers can train on
    rate: float  # of both together
    bandwidth: float  # bytes/s of states at that rate
    link: float
    faults: tuple[str, ...]


def plan(profile, machine: Machine | None = None) -> Plan:
    """The plan of a dspark.serve.Profile; ValueError for a dtype that is not of ITEM."""
    if profile.dtype not in ITEM:
        raise ValueError(f"dtype = {profile.dtype!r}: choose one of {', '.join(ITEM)}")
    shape, wider = PRESETS[profile.preset], ITEM[profile.dtype] / 2
    token_states = state_bytes(shape, profile.dtype)
    machine = machine or (H200 if profile.gpus else this_machine())
    target, tp = TARGETS[shape.target], profile.tensor_parallel
    per_token = wider * target.kv_bytes / min(tp, target.kv_shards) + token_states  # every GPU keeps the states whole
    weights = wider * (target.weights - target.quantized) + target.quantized
    room = machine.memory * profile.gpu_memory if profile.gpus else machine.memory
    verifier = {"target weights": weights / tp, "engine": machine.engine}
    if profile.gpus:
        verifier["cache"] = max(0.0, room - sum(verifier.values()))
    else:
        verifier["cache"] = 1 << 30  # VLLM_CPU_KVCACHE_SPACE
    cached_tokens = int(verifier["cache"] / per_token)
    rows = -(-profile.micro_batches // profile.trainers)  # a rank's, a step
    size, ranks = drafter_size(shape), profile.trainers
    trained = 4 * (size.matrices + size.rest)
    beside = trained / ranks if ranks > 1 else 0.0  # a rank's own share under FSDP2, beside the whole of a step
    # still from above in float32: norms are counted in it already
    kept = wider * activations(shape, profile.row_tokens, profile.anchors, dense=not profile.gpus)
    trainer = {
        "drafter, float32": trained + beside,
        "gradients": trained + beside,
        "optimizers": (4 * size.matrices + 8 * size.rest) / ranks,
        "target's embedding and LM head": ITEM[profile.dtype] * (2 * size.embedding + 2 * size.lm_head),
        "activations": max(kept, trained) if ranks > 1 else kept,  # gone when the gradients are laid out for the sum
        "hidden states of a step": rows * profile.row_tokens * token_states,
        "runtime": machine.runtime,
    }
    trainer_room = machine.memory * (1 - profile.gpu_memory) if profile.colocated else machine.memory
    if not profile.gpus:  # everything shares one memory
        trainer = {name: value * profile.trainers for name, value in trainer.items()}
        trainer_room = machine.memory - sum(verifier.values()) - profile.budget
    rates = _rates(profile, shape, target, size, machine)
    faults = tuple(_faults(profile, verifier, trainer, room, trainer_room, cached_tokens))
    needed = rates[2] * token_states
    return Plan(verifier, trainer, room, trainer_room, cached_tokens, *rates, needed, machine.link, faults)


def _rates(profile, shape, target, size, machine) -> tuple[float, float, float]:
    """Tokens/s of the verifier's prefill, of all trainers, and of both together; the link limits the last. Products are
    taken for bfloat16's, whatever the dtype."""
    devices = max(1, profile.tensor_parallel) if profile.gpus else 1
    verifier = devices * machine.flops * machine.prefill_share / (2 * target.active)
    slots = profile.anchors * shape.block_size / profile.row_tokens  # a token of data
    context = len(shape.target_layer_ids) * shape.hidden_size**2
    keys = 2 * shape.num_hidden_layers * shape.hidden_size * shape.num_key_value_heads * shape.head_dim
    heads = (size.lm_head + shape.markov_rank * shape.vocab_size_out) * slots
    flops = 6 * (context + keys + (size.matrices - context) * slots + heads) + 2 * size.lm_head * min(1.0, slots)
    trainer = (profile.trainers if profile.gpus else 1) * machine.flops * machine.training_share / flops
    shared = profile.colocated or not profile.gpus
    together = 1 / (1 / verifier + 1 / trainer) if shared else min(verifier, trainer)
    return verifier, trainer, min(together, machine.link * profile.trainers / state_bytes(shape, profile.dtype))


def _faults(profile, verifier, trainer, room, trainer_room, cached_tokens):
    gpu = "GPU" if profile.gpus else "machine"
    both = profile.tensor_parallel, profile.trainers
    used = max(both) if profile.colocated else sum(both)
    if profile.gpus and used > profile.gpus:
        yield f"{used} GPUs are needed and {profile.gpus} are there: lower trainers or tensor_parallel"
    if sum(verifier.values()) > room * 1.0001 or cached_tokens < profile.max_model_len:
        mend = "raise tensor_parallel or gpu_memory, or lower max_model_len"
        need = (verifier["target weights"] + verifier["engine"]) / GB
        yield (
            f"the verifier's weights and engine take {need:.0f} of {room / GB:.0f} GB a {gpu}, and the cache holds "
            f"{cached_tokens} tokens where one request may have {profile.max_model_len}: {mend}"
        )
    if sum(trainer.values()) > trainer_room:
        mend = "lower gpu_memory, row_tokens, anchors or micro_batches"
        total = sum(trainer.values()) / GB
        yield f"a trainer takes {total:.1f} of {trainer_room / GB:.1f} GB a {gpu}: {mend}"


def table(profile, made: Plan) -> str:
    """The plan as text."""
    what = "GPU" if profile.gpus else "machine"
    lines = []
    for role, parts, room in (
        ("verifier", made.verifier, made.verifier_room),
        ("trainer", made.trainer, made.trainer_room),
    ):
        lines.append(f"{role}, GB a {what} (room: {room / GB:.1f})")
        lines += [f"  {name:32}{value / GB:9.2f}" for name, value in parts.items()]
        lines.append(f"  {'sum':32}{sum(parts.values()) / GB:9.2f}")
    samples = made.rate / profile.row_tokens
    lines += [
        f"cache: {made.cached_tokens} tokens, {made.cached_tokens / profile.max_model_len:.1f} requests of full length",
        f"estimates: verifier {made.verifier_rate:.0f} tokens/s, trainers {made.trainer_rate:.0f}, together "
        f"{made.rate:.0f} = {samples:.2f} rows of {profile.row_tokens} tokens a second",
        f"hidden states: {made.bandwidth / GB:.2f} GB/s needed, {made.link / GB:.2f} GB/s a rank assumed",
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    from dspark.serve import PROFILES

    parser = argparse.ArgumentParser(prog="dspark plan", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="cpu", choices=PROFILES)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of Profile fields to change")
    args = parser.parse_args(argv)
    profile = replace(PROFILES[args.profile], **args.config)
    made = plan(profile)
    print(table(profile, made))
    if made.faults:
        raise UserError(f"{args.profile} does not fit: {'; '.join(made.faults)}")
