"""config.json of the public drafter formats: what they are, and how they are written. `read_formats` reads them.
Dictionaries only: tensors are `checkpoint`'s. And what calibration.json, beside it, may hold.

| format | told by | target layers | a missing `sample_from_anchor` |
|---|---|---|---|
| native (DeepSpec, vLLM) | `architectures: [Qwen3DSparkModel]` | `target_layer_ids`, block outputs from zero | true |
| speculators | `speculators_model_type: dspark or dflash` | `aux_hidden_state_layer_ids`, one more | false in vLLM |
| dflash (z-lab) | `architectures: [DFlashDraftModel]`, `dflash_config` | as native | false |
| eagle3 | `Eagle3` in the architecture, or speculators' `eagle3` | as speculators | no block |
"""

import json
import sys
from pathlib import Path

from dspark.config import DSparkConfig

CALIBRATION = "calibration.json"  # temperatures fitted to a drafter's confidences, of dspark.schedule
TEMPERATURES = {"head": "temperatures", "probability": "probability_temperatures"}  # its key of a confidence_source
FORMATS = ("native", "vllm", "speculators")  # to write; `vllm` is native, held to what vLLM can serve
PADDING_RANK = 8  # of the all-zero Markov head that vLLM needs where there is none
_LAYER = (  # what speculators keeps in `transformer_layer_config`
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "rms_norm_eps", "max_position_embeddings", "sliding_window",
)  # fmt: skip
DRAFT = (  # what is at the top level there
    "mask_token_id", "block_size", "sample_from_anchor", "draft_vocab_size", "markov_rank", "markov_head_type",
    "confidence_head_with_markov",
)  # fmt: skip
EARLY = "its state runs through the anchor's slot there, and begins after it here"  # an rnn head's, in speculators


def read_json(path: Path) -> dict:
    """The JSON object in a file. FileNotFoundError, or ValueError where it is damaged or no object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.parent.name} is damaged: {path.name} is no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path.parent.name} is damaged: {path.name} holds no JSON object")
    return raw


def read_temperatures(path: Path, n: int = 1, source: str = "head") -> list[float]:
    """The temperatures, n or more, that a calibration.json, which may be anybody's, has for a confidence_source.
    ValueError names file and fault."""
    where, mend = f"{path.parent.name}/{path.name}", "`python3 -m dspark calibrate` fits them anew"
    temperatures = read_json(path).get(key := TEMPERATURES[source])
    if not isinstance(temperatures, list):
        raise ValueError(f"{where}: {key} = {str(temperatures)[:60]!r} must be a list of numbers; {mend}")
    for temperature in temperatures:
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not number or not 0 < temperature <= sys.float_info.max:
            stated = str(temperature)[:60]
            raise ValueError(f"{where} holds the temperature {stated!r}: want finite numbers above 0; {mend}")
    if len(temperatures) < n:
        raise ValueError(f"{where} holds {len(temperatures)} temperatures, want {n}; {mend}")
    return temperatures


def check_temperatures(path: Path) -> None:
    """ValueError as of read_temperatures where those of some confidence_source could not be read back."""
    raw = read_json(path)
    for source in [source for source, key in TEMPERATURES.items() if key in raw] or ["head"]:
        read_temperatures(path, source=source)


def kind_of(raw: dict) -> str:
    """`native`, `speculators`, `dflash` or `eagle3`; ValueError that names what else it is."""
    algorithm = raw.get("speculators_model_type")
    if algorithm is not None:
        if algorithm in ("dspark", "dflash"):
            return "speculators"
        if algorithm == "eagle3":
            return "eagle3"
        raise ValueError(f"speculators_model_type = {algorithm!r}: dspark, dflash and eagle3 can be read")
    stated = raw.get("architectures")
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    if any("Eagle3" in name for name in names):
        return "eagle3"
    if "Qwen3DSparkModel" in names or ("DSparkDraftModel" in names and raw.get("model_type") == "qwen3"):
        return "native"
    if "DFlashDraftModel" in names:
        return "dflash"
    raise ValueError(f"config.json is no drafter's: architectures = {stated!r}, no speculators_model_type")


# ---- writing


def begins_early(config: DSparkConfig) -> bool:
    return config.markov_rank > 0 and config.markov_head_type == "rnn" and not config.sample_from_anchor


def to_native(config: DSparkConfig) -> dict:
    """config.json of the native format. Every default that servers disagree on is written out."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        **_layer_config(config),
        **_draft_config(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_layer_ids": list(config.target_layer_ids),
        "dtype": "bfloat16",
        "target_model": config.target,
        "num_target_layers": config.target_num_hidden_layers,
    }


def to_speculators(config: DSparkConfig) -> dict:
    """config.json that speculators 0.9.0 and vLLM read. `is_causal` and `num_target_layers` are additions, which both
    ignore or obey as they should. ValueError where the format cannot say what the drafter computes."""
    if config.is_causal and len(config.sliding_layers) < config.num_hidden_layers:
        raise ValueError("the speculators format has no full attention that is causal in the block: export as native")
    if begins_early(config):
        raise ValueError(f"an rnn head in the fill-in layout cannot be exported to speculators: {EARLY}")
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.max_draft_tokens}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": config.target, "architectures": []},
        },
        "transformer_layer_config": {"model_type": "qwen3", **_layer_config(config)},
        **_draft_config(config),
        "draft_vocab_size": config.vocab_size_out,
        "target_hidden_size": config.hidden_size,
        "aux_hidden_state_layer_ids": list(config.aux_hidden_state_layer_ids),
        "sliding_window_non_causal": config.is_causal is False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "num_target_layers": config.target_num_hidden_layers,
    }


def _layer_config(config: DSparkConfig) -> dict:
    layers = range(config.num_hidden_layers)
    causal = {} if config.is_causal is None else {"is_causal": config.is_causal}
    return {
        **{name: getattr(config, name) for name in _LAYER},
        **causal,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": ["sliding_attention" if i in config.sliding_layers else "full_attention" for i in layers],
        "use_sliding_window": bool(config.sliding_layers),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _draft_config(config: DSparkConfig) -> dict:
    fields = {name: getattr(config, name) for name in DRAFT if name != "draft_vocab_size"}
    return {**fields, "enable_confidence_head": config.confidence_head}


def vllm_limits(config: DSparkConfig, padded: bool = False) -> list[str]:
    """What vLLM 0.32 does otherwise with this drafter, without a word; empty where it serves it as it is. padded: as
    the format `vllm` writes it."""
    limits = []
    if config.markov_rank and config.markov_head_type != "vanilla":
        limits.append(f"vLLM serves only vanilla Markov heads and would run this {config.markov_head_type} one as such")
    if config.markov_rank == 0 and padded:
        limits.append("its Markov head is all zero: padding, which vLLM needs")
    elif config.markov_rank == 0:
        limits.append("vLLM needs a Markov head and there is none here: --format vllm writes an all-zero one")
    if not config.sample_from_anchor:
        n = config.max_draft_tokens
        limits.append(f"vLLM drafts block_size = {n + 1} tokens unless told num_speculative_tokens = {n}")
    return limits
