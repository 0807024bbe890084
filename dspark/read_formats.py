"""config.json of the public drafter formats, read: the table in `formats` says which there are.

What a config leaves out is decided as vLLM 0.32 decides it (config/speculative.py, models/qwen3_dflash.py and
transformers_utils/configs/speculators/algos.py there), and each decision is a note for the caller to say aloud.
"""

import dataclasses
import json
import logging
from types import UnionType
from typing import get_args

from dspark.config import DSparkConfig
from dspark.formats import DRAFT, EARLY, begins_early, kind_of

_LARGEST = 2**24  # of any integer in a config: beyond it lies damage, and products stay within 64 bits
_FIELDS = {field.name: field for field in dataclasses.fields(DSparkConfig)}
_RENAMED = {  # DSparkConfig's name -> the formats' name
    "target": "target_model", "target_num_hidden_layers": "num_target_layers",
    "confidence_head": "enable_confidence_head",
}  # fmt: skip
_STATED = ("block_size", "markov_rank", "rms_norm_eps")  # defaults of DSparkConfig that no file may lean on
_COMPUTED = {  # only these values are what DSparkDrafter computes
    "hidden_act": "silu", "attention_bias": False, "is_neox_style": True, "logit_scale": 1.0,
    "use_aux_hidden_state": True, "quantization_config": None, "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False, "attention_value_scale": None, "partial_rotary_factor": 1.0,
}  # fmt: skip
log = logging.getLogger(__name__)


def read_config(raw: dict, target=None) -> tuple[DSparkConfig, list[str]]:
    """The config of a block drafter in any of the formats, and notes on what was left open and how it was decided.

    `target` (a dspark.target.Target) supplies its name and depth where the file states none. ValueError names a key
    that is missing, of the wrong type or out of range, or that asks for what DSparkDrafter does not compute.
    """
    kind, notes = kind_of(raw), []
    if kind == "eagle3":
        raise ValueError("config.json is an Eagle3 head's, not a block drafter's")
    flat = _flatten(raw, kind, notes)
    _whose(flat, target, notes)
    missing = sorted(
        _RENAMED.get(name, name)
        for name, field in _FIELDS.items()
        if flat.get(name) is None and (field.default is dataclasses.MISSING or name in _STATED)
    )
    if missing:
        raise ValueError(f"config.json is not a {kind} drafter's: it lacks {', '.join(missing)}")
    _refuse_uncomputed(flat, raw)
    _decide(flat, kind, notes)
    values = {
        name: typed(_RENAMED.get(name, name), field.type, flat[name]) for name, field in _FIELDS.items() if name in flat
    }
    config = DSparkConfig(**values)
    _refuse_padding(config, raw)
    if kind == "speculators" and begins_early(config):
        raise ValueError(f"markov_head_type = 'rnn' in the fill-in layout cannot be read from speculators: {EARLY}")
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        ids = flat.get(name)
        if config.mask_token_id in (ids if isinstance(ids, list) else [ids]):
            raise ValueError(f"mask_token_id = {config.mask_token_id} is also {name}: the target uses it")
    return config, notes


def _flatten(raw: dict, kind: str, notes: list[str]) -> dict:
    """One dictionary with DSparkConfig's names where the file has them; other keys as they are."""
    layer = _nested(raw, "transformer_layer_config") if kind == "speculators" else raw
    if kind == "speculators" and not layer:
        raise ValueError("config.json is not a speculators drafter's: it lacks transformer_layer_config")
    nested = {**_nested(layer, "eagle_config"), **_nested(layer, "dflash_config")}
    flat = {**layer, **nested}
    if kind == "speculators":
        flat |= {name: raw[name] for name in (*DRAFT, "enable_confidence_head", "target_hidden_size") if name in raw}
        verifier = _nested(_nested(raw, "speculators_config"), "verifier")
        flat |= {"target_model": verifier.get("name_or_path"), "num_target_layers": raw.get("num_target_layers")}
        flat["sliding_window_non_causal"] = raw.get("sliding_window_non_causal")
        if raw["speculators_model_type"] == "dflash":
            flat |= {"markov_rank": 0, "enable_confidence_head": False}
    elif kind == "dflash":
        flat |= {"markov_rank": 0, "enable_confidence_head": False}
    for name, theirs in _RENAMED.items():
        flat[name] = flat.pop(theirs, None)
    flat["target_layer_ids"] = _taps(raw, layer, nested, kind, notes)
    flat["rope_theta"] = _rope_theta(layer, notes)
    return flat


def _nested(raw: dict, name: str) -> dict:
    value = raw.get(name)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"config.json: {name} = {value!r} must be an object")
    return value or {}


def _taps(raw: dict, layer: dict, nested: dict, kind: str, notes: list[str]):
    """Tapped block outputs counted from zero. The only other place where ids are shifted is
    `DSparkConfig.aux_hidden_state_layer_ids`, which writes what is read here."""
    shifted = "aux_hidden_state_layer_ids" if kind == "speculators" else "eagle_aux_hidden_state_layer_ids"
    found = {shifted: raw.get(shifted)} | {
        "dflash_config.target_layer_ids": nested.get("target_layer_ids"),
        "dspark_target_layer_ids": layer.get("dspark_target_layer_ids"),
        "target_layer_ids": layer.get("target_layer_ids"),
    }  # in the order in which vLLM looks
    stated = {}
    for name, ids in found.items():
        if ids:
            ids = typed(name, tuple[int, ...], ids)
            stated[name] = tuple(i - 1 for i in ids) if name == shifted else ids
    if kind == "speculators" and shifted not in stated:
        raise ValueError(f"config.json is not a speculators drafter's: it lacks {shifted}")
    if len(set(stated.values())) > 1:
        notes.append(f"target layers are stated differently by {', '.join(stated)}: {next(iter(stated))} is taken")
    return next(iter(stated.values()), None)


def _rope_theta(layer: dict, notes: list[str]):
    """theta from `rope_scaling`, `rope_parameters` or the top level, in transformers' order; plain rotary only."""
    rope = _nested(layer, "rope_scaling") or _nested(layer, "rope_parameters")
    for name in ("sliding_attention", "full_attention"):  # one set a layer type: speculators takes the first of these
        rope = _nested(rope, name) or rope
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported: the drafter computes plain rotary positions")
    for name in ("factor", "partial_rotary_factor"):
        if rope.get(name) not in (None, 1):
            raise ValueError(f"config.json: {name} = {rope[name]!r} of the rotary positions is not supported, only 1")
    inner, outer = rope.get("rope_theta"), layer.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        notes.append(f"rope_theta is {outer} at the top level and {inner} in the rope dictionary: {inner} is taken")
    return outer if inner is None else inner


def _refuse_uncomputed(flat: dict, raw: dict) -> None:
    for name, wanted in _COMPUTED.items():
        value = flat.get(name, raw.get(name))
        if value is not None and value != wanted:
            raise ValueError(f"config.json: {name} = {value!r} is not supported, only {wanted!r}")
    width = flat.get("target_hidden_size")
    if width is not None and width != flat.get("hidden_size"):
        raise ValueError(f"target_hidden_size = {width!r}: the drafter must be as wide, not {flat.get('hidden_size')}")


def _refuse_padding(config: DSparkConfig, raw: dict) -> None:
    """A Markov head that is called padding must be a vanilla one that nothing else reads, or it could not be left out
    again."""
    if raw.get("markov_head_is_padding") is not True:
        return
    faults = {
        "markov_rank": config.markov_rank == 0,
        "markov_head_type": config.markov_head_type != "vanilla",
        "confidence_head_with_markov": config.confidence_head and config.confidence_head_with_markov,
    }
    for name, wrong in faults.items():
        if wrong:
            stated = f"{name} = {getattr(config, name)!r}"
            raise ValueError(f"config.json: markov_head_is_padding = True, but {stated}: one of the two is wrong")


def _decide(flat: dict, kind: str, notes: list[str]) -> None:
    """Fill in what servers disagree on, as vLLM does."""

    def left_out(name: str, value, reason: str) -> None:
        if flat.get(name) is None:
            flat[name] = value
            notes.append(f"{_RENAMED.get(name, name)} is not stated: {json.dumps(value)}, {reason}")

    if kind == "native":
        left_out("sample_from_anchor", True, "as vLLM reads the native format (the anchor predicts first)")
    elif kind == "speculators":
        left_out("sample_from_anchor", False, "as vLLM reads this format (speculators' own class says true for dspark)")
    elif flat.get("sample_from_anchor") is None:
        flat["sample_from_anchor"] = False  # DFlash's only layout
    left_out("confidence_head", False, "as vLLM reads it")
    if flat["confidence_head"] is True:
        left_out("confidence_head_with_markov", False, "as vLLM reads it")
    elif flat.get("confidence_head_with_markov") is None:
        flat["confidence_head_with_markov"] = bool(flat.get("markov_rank"))
    if flat.get("markov_head_type") is None:
        flat["markov_head_type"] = "vanilla"
    if flat.get("draft_vocab_size") == flat.get("vocab_size"):
        flat["draft_vocab_size"] = None
    _decide_attention(flat, kind, notes)


def _decide_attention(flat: dict, kind: str, notes: list[str]) -> None:
    types, layers = flat.get("layer_types"), flat.get("num_hidden_layers")
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        raise ValueError(f"config.json: layer_types = {types!r} must name the kind of each of {layers} layers")
    sliding = [i for i, name in enumerate(types or []) if name == "sliding_attention"]
    other = sorted({str(name) for name in types or []} - {"sliding_attention", "full_attention"})
    if other:
        raise ValueError(f"config.json: layer_types holds {other}, not full or sliding attention")
    if flat.get("use_swa") and not sliding:
        sliding = list(range(typed("num_hidden_layers", int, layers)))
    if flat.get("swa_window_size") is not None:
        flat["sliding_window"] = flat["swa_window_size"]
    flat["sliding_layers"] = sliding
    if not sliding:
        flat["sliding_window"] = None  # configs of other models carry one that no layer uses
    bidirectional = flat.get("sliding_window_non_causal")
    if flat.get("is_causal") is None:
        flat["is_causal"] = flat.get("causal")  # of dflash_config
    if flat["is_causal"] is None and sliding:
        if bidirectional is True:
            flat["is_causal"] = False
            notes.append("is_causal is not stated: false, by sliding_window_non_causal (vLLM 0.32 ignores that key)")
        else:
            notes.append("is_causal is not stated: sliding layers are causal inside the block, as in vLLM")
    elif flat["is_causal"] is None:
        flat["is_causal"] = False
    if sliding and kind == "speculators":
        notes.append("speculators counts the sliding window back from the anchor, vLLM and this engine from each slot")


def _whose(flat: dict, target, notes: list[str]) -> None:
    """Name and depth of the target where the file states none."""
    if flat["target"] is None:
        flat["target"] = "an unnamed target" if target is None else target.name
        notes.append(f"the file names no target: {flat['target']}")
    if flat["target_num_hidden_layers"] is None and flat["target_layer_ids"]:
        known = None if target is None else target.num_hidden_layers
        depth = flat["target_num_hidden_layers"] = known or max(flat["target_layer_ids"]) + 1
        notes.append(f"the target's depth is not stated: {'' if known else 'at least '}{depth}")


def typed(name: str, kind, value):
    """`value` if it is of `kind` (a type of a config's field) and of sane size; ValueError names it. Texts reach
    terminals and cards, so that they must be printable."""
    if isinstance(kind, UnionType):
        if value is None:
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
    if kind == tuple[int, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"config.json: {name} = {value!r} must be a list of integers")
        return tuple(typed(name, int, item) for item in value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits = {
        int: whole and abs(value) <= _LARGEST,
        float: (whole or isinstance(value, float)) and abs(value) < 1e12,  # so neither NaN nor infinite
        bool: isinstance(value, bool),
        str: isinstance(value, str) and value.isprintable(),
    }
    if not fits[kind]:
        limit = {int: f" of at most {_LARGEST}", float: " below 1e12", str: " of printable characters"}.get(kind, "")
        raise ValueError(f"config.json: {name} = {str(value)[:60]!r} must be {kind.__name__}{limit}")
    return value


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Shape of an Eagle3 head (arXiv 2503.01840), Llama- or Qwen3-style. `aux_hidden_state_layer_ids` index
    transformers' `hidden_states`; None: the file leaves them to the server, which takes 2, depth // 2, depth - 3."""

    target: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    draft_vocab_size: int
    aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self):
        for name, wrong, mend in self._faults():
            if wrong:
                raise ValueError(f"Eagle3Config.{name} = {getattr(self, name)!r}: {mend}")

    def _faults(self):
        for field in dataclasses.fields(Eagle3Config):
            yield field.name, field.type is int and getattr(self, field.name) < 1, "must be at least 1"
        for name in ("rope_theta", "rms_norm_eps"):
            yield name, getattr(self, name) <= 0, "must be positive"
        heads = self.num_attention_heads
        yield "num_key_value_heads", heads % self.num_key_value_heads != 0, f"must divide {heads} query heads"
        yield "head_dim", self.head_dim % 2 != 0, "must be even: rotary embedding turns pairs"
        yield "draft_vocab_size", self.draft_vocab_size > self.vocab_size, f"must lie in 1..{self.vocab_size}"


def read_eagle3(raw: dict, target=None) -> Eagle3Config:
    """Shape of an Eagle3 head, in speculators' format, DeepSpec's or its authors'. ValueError as of read_config.

    Where the file does not say which states are fused, a `target` decides, as in vLLM, and that is logged.
    """
    layer = _nested(raw, "transformer_layer_config") or raw
    eagle = _nested(raw, "eagle_config")
    fields = {field.name: field for field in dataclasses.fields(Eagle3Config)}
    flat = {**layer, **{name: raw[name] for name in fields if name in raw}, **eagle}
    if any(flat.get(name) is not None for name in ("kv_lora_rank", "q_lora_rank")):
        raise ValueError("config.json is an Eagle3 head's with compressed latent attention, which is not supported")
    verifier = _nested(_nested(raw, "speculators_config"), "verifier")
    flat["target"] = verifier.get("name_or_path") or raw.get("target_model_name_or_path") or "an unnamed target"
    ids = flat.get("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"))
    if ids is None and layer.get("target_layer_ids") is not None:  # DeepSpec counts from zero
        ids = [i + 1 for i in typed("target_layer_ids", tuple[int, ...], layer["target_layer_ids"])]
    if ids is None and target is not None:
        depth = target.num_hidden_layers
        ids = [2, depth // 2, depth - 3]
        log.warning("eagle_aux_hidden_state_layer_ids is not stated: %s, as vLLM takes them", ids)
    flat["aux_hidden_state_layer_ids"] = ids
    flat["rope_theta"] = _rope_theta(layer, [])
    _refuse_uncomputed(flat, raw)
    flat["draft_vocab_size"] = flat.get("draft_vocab_size") or flat.get("vocab_size")
    if flat.get("head_dim") is None and flat.get("num_attention_heads"):
        width, heads = (typed(name, int, flat.get(name)) for name in ("hidden_size", "num_attention_heads"))
        flat["head_dim"] = width // heads
    missing = [n for n, f in fields.items() if flat.get(n) is None and f.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"config.json is not an Eagle3 head's: it lacks {', '.join(missing)}")
    return Eagle3Config(**{n: typed(n, f.type, flat[n]) for n, f in fields.items() if flat.get(n) is not None})
