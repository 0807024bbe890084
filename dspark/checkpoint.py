"""Drafters on disk, in the native format of vLLM and DeepSpec: `architectures: ["Qwen3DSparkModel"]`, flat config.

Safetensors only. A file that does not fit is refused with the tensor and the fault named, never half-loaded.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dspark.config import DSparkConfig
from dspark.drafter import DSparkDrafter

_SAME_NAME = (
    "vocab_size", "hidden_size", "mask_token_id", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "rope_theta", "max_position_embeddings", "rms_norm_eps",
    "block_size", "sample_from_anchor", "is_causal", "sliding_window", "draft_vocab_size", "markov_rank",
    "markov_head_type", "confidence_head_with_markov",
)  # fmt: skip
_OPTIONAL = {  # where a config leaves them out, the defaults of DSparkConfig are the format's
    "sample_from_anchor", "is_causal", "sliding_window", "draft_vocab_size", "markov_head_type",
    "confidence_head_with_markov",
}  # fmt: skip


def to_native(config: DSparkConfig) -> dict:
    """config.json of the native format. Every default that servers disagree on is written out."""
    native = {name: getattr(config, name) for name in _SAME_NAME}
    sliding = [
        "sliding_attention" if i in config.sliding_layers else "full_attention" for i in range(config.num_hidden_layers)
    ]
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **native,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "target_layer_ids": list(config.target_layer_ids),
        "enable_confidence_head": config.confidence_head,
        "layer_types": sliding,
        "use_sliding_window": bool(config.sliding_layers),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "target_model": config.target,
        "num_target_layers": config.target_num_hidden_layers,
    }


def from_native(native: dict) -> DSparkConfig:
    """Inverse of to_native; a missing field is a ValueError that names it."""
    rope = native.get("rope_theta") or native.get("rope_parameters", {}).get("rope_theta")
    native = {**native, "rope_theta": rope}
    needed = {*_SAME_NAME, "target_model", "num_target_layers", "target_layer_ids"} - _OPTIONAL
    missing = sorted(name for name in needed if native.get(name) is None)
    if missing:
        raise ValueError(f"config.json is not a native DSpark config: it lacks {', '.join(missing)}")
    return DSparkConfig(
        target=native["target_model"],
        target_num_hidden_layers=native["num_target_layers"],
        target_layer_ids=native["target_layer_ids"],
        sliding_layers=[i for i, t in enumerate(native.get("layer_types") or []) if t == "sliding_attention"],
        confidence_head=native.get("enable_confidence_head", False),
        **{name: native[name] for name in _SAME_NAME if name in native},
    )


def _own(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    """What a checkpoint holds: all but what the target shares (embedding; LM head where the vocabulary is whole)."""
    shared = {"embed_tokens.weight"} | ({"lm_head.weight"} if drafter.d2t is None else set())
    return {name: tensor for name, tensor in drafter.state_dict().items() if name not in shared}


def save(drafter: DSparkDrafter, folder: Path, dtype=torch.bfloat16) -> None:
    """Write folder/{config.json, model.safetensors}; the folder appears whole or not at all."""
    folder = Path(folder)
    temporary = folder.with_name(f".{folder.name}.saving")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {k: v.to("cpu", dtype if v.is_floating_point() else v.dtype) for k, v in _own(drafter).items()}
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "config.json").write_text(json.dumps(to_native(drafter.config), indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    for file in temporary.iterdir():
        file.replace(folder / file.name)
    temporary.rmdir()


def load(folder: Path, target, dtype=None) -> DSparkDrafter:
    """A drafter ready to draft for `target`, with the target's embedding and LM head where the file has none."""
    folder = Path(folder)
    try:
        config = from_native(json.loads((folder / "config.json").read_text()))
        tensors = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no drafter in {folder.name}: {Path(error.filename).name} is missing") from error
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder.name} is damaged: {error}") from error
    try:
        config.check_target(target)
    except ValueError as error:
        raise ValueError(f"{folder.name} drafts for {config.target!r}, not {target.name!r}: {error}") from error
    with torch.device("meta"):
        drafter = DSparkDrafter(config)
    _check(tensors, drafter, folder.name)
    if config.draft_vocab_size is not None:
        _check_vocabulary(tensors["d2t"], tensors["t2d"], folder.name)
    tensors.setdefault("embed_tokens.weight", target.embed_tokens)  # a file's own tensors win
    tensors.setdefault("lm_head.weight", target.lm_head)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(dtype or target.dtype).to(target.device).eval().requires_grad_(False)


def _check(found: dict, drafter: DSparkDrafter, name: str) -> None:
    wanted = drafter.state_dict()
    missing, unexpected = sorted(set(_own(drafter)) - set(found)), sorted(set(found) - set(wanted))
    if missing or unexpected:
        raise ValueError(
            f"{name}: missing tensors {missing[:4]}, unexpected {unexpected[:4]}: not this config's weights"
        )
    for key, tensor in found.items():
        if tensor.shape != wanted[key].shape:
            raise ValueError(f"{name}: {key} is {tuple(tensor.shape)}, config.json says {tuple(wanted[key].shape)}")
        if tensor.is_floating_point() != wanted[key].is_floating_point():
            raise ValueError(f"{name}: {key} has dtype {tensor.dtype}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name}: {key} holds NaN or Inf")


def _check_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor, name: str) -> None:
    """d2t must be OFFSETS (target id - draft id) that land, rising, exactly on the ids that t2d marks."""
    ids = d2t.long() + torch.arange(len(d2t))
    if not torch.equal(ids, t2d.nonzero().squeeze(1)):
        raise ValueError(
            f"{name}: d2t does not hold the offsets of the ids in t2d (absolute ids, or another vocabulary)"
        )
