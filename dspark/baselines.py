"""What DSpark is measured against: Eagle3 of the same size, prompt lookup, and how they are read and written.

Each follows the interface that `decode` calls: new_cache, extend, draft. DFlash is a DSparkDrafter with both heads off.
"""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark import checkpoint, formats, read_formats
from dspark.checkpoint import SINGLE
from dspark.config import DSparkConfig
from dspark.drafter import Draft, DSparkDrafter
from dspark.eagle3 import LATENT, Eagle3Config, Eagle3Drafter

PROMPT_LOOKUP = "prompt-lookup"
KINDS = ("dspark", "eagle3", "eagle3-mla")  # to train


def trained_parameters(drafter: nn.Module) -> int:
    """Size of what training changes: not the embedding and LM head, which are the target's."""
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def eagle3_config(shape: DSparkConfig, latent: bool) -> Eagle3Config:
    """An Eagle3 drafter with the taps, heads, draft vocabulary and trained parameters of a DSpark drafter `shape`.

    The width of the FFN takes up the difference, in multiples of 16. Latent sizes are DeepSeek-V2's: d_c = 4 d, half
    a head for the rotary part.
    """
    names = {field.name for field in fields(read_formats.Eagle3Config)} & {field.name for field in fields(DSparkConfig)}
    same = {name: getattr(shape, name) for name in names} | {
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "draft_vocab_size": shape.vocab_size_out,
        "aux_hidden_state_layer_ids": shape.aux_hidden_state_layer_ids,
    }
    if latent:
        heads, d = shape.num_attention_heads, shape.head_dim
        same |= dict(zip(LATENT, (4 * d, d, d // 2, d), strict=True)) | {
            "head_dim": d // 2,
            "num_key_value_heads": heads,
        }
    smallest = Eagle3Config(**same)
    with torch.device("meta"):
        budget = trained_parameters(DSparkDrafter(shape))
        missing = budget - trained_parameters(Eagle3Drafter(smallest))
    steps = max(0, round(missing / (3 * shape.hidden_size * 16)))
    return replace(smallest, intermediate_size=16 + 16 * steps)


def shape_of(kind: str, shape: DSparkConfig) -> DSparkConfig | Eagle3Config:
    """The shape of a drafter of one of KINDS that compares with the DSpark drafter `shape`."""
    return shape if kind == "dspark" else eagle3_config(shape, latent=kind == "eagle3-mla")


def build(config: DSparkConfig | Eagle3Config):
    return Eagle3Drafter(config) if isinstance(config, Eagle3Config) else DSparkDrafter(config)


class PromptLookup:
    """Drafts what followed the last occurrence of the text's end (its longest suffix of up to `max_ngram` tokens);
    nothing where even its last token is new. No weights, no hidden states."""

    confidence_source = None

    class config:
        target_layer_ids, max_draft_tokens = (), Eagle3Config.max_draft_tokens
        block_length = staticmethod(lambda n: n)
        check_taps = staticmethod(lambda target: None)

    def __init__(self, vocab_size: int, max_ngram: int = 3):
        self.vocab_size, self.max_ngram = vocab_size, max_ngram

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def new_cache(self, capacity: int) -> list[int]:
        return []

    def extend(self, cache: list[int], features: Tensor | None, tokens: Tensor) -> None:
        cache += tokens.tolist()

    def draft(self, anchor: Tensor, cache: list[int], n: int, temperature=0.0, generator=None) -> Draft:
        """Up to n tokens; q puts all on them, so that verification accepts a draft with probability p."""
        drafts = anchor.new_tensor(self.find([*cache, int(anchor)], n), dtype=torch.long)
        q = F.one_hot(drafts, self.vocab_size).float() if temperature > 0 else None
        return Draft(drafts, q, None)

    def find(self, text: list[int], n: int) -> list[int]:
        for size in range(min(self.max_ngram, len(text) - 1), 0, -1):
            suffix = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == suffix:
                    return text[start + size : start + size + n]
        return []


# ---- on disk


def load(source: str | Path, target, dtype=None):
    """The drafter in a folder, Eagle3 or block drafter, or `prompt-lookup`, ready to draft for `target`.

    FileNotFoundError or ValueError where the folder holds none, or one that does not fit.
    """
    if str(source) == PROMPT_LOOKUP:
        return PromptLookup(target.vocab_size)
    folder = Path(source)
    raw = checkpoint._config_json(folder)
    if formats.kind_of(raw) != "eagle3":
        return checkpoint.load(folder, target, dtype)
    latent = {name: raw[name] for name in LATENT if raw.get(name) is not None}
    try:
        latent = {name: read_formats.typed(name, int, value) for name, value in latent.items()}
        plain = read_formats.read_eagle3({name: value for name, value in raw.items() if name not in latent}, target)
        config = Eagle3Config(**asdict(plain) | latent)
        config.check_target(target)
    except ValueError as error:
        raise ValueError(f"{folder.name}: {error}") from error
    tensors = _fitting(config, folder, target)
    with torch.device("meta"):
        drafter = Eagle3Drafter(config)
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(dtype or target.dtype).to(target.device).eval().requires_grad_(False).pack()


def _fitting(config: Eagle3Config, folder: Path, target) -> dict[str, Tensor]:
    """The folder's tensors by this module's names, checked against the config, with the target's where it has none."""
    V, D = config.vocab_size, config.draft_vocab_size
    found = checkpoint.headers(folder)
    layer = "midlayer." if any(name.startswith("midlayer.") for name in found) else "layers.0."
    with torch.device("meta"):
        state = Eagle3Drafter(config).state_dict()
    wanted = {name.replace("layers.0.", layer): tensor.shape for name, tensor in state.items()}
    optional = {"embed_tokens.weight", "lm_head.weight", "t2d"} | ({"d2t"} if D == V else set())
    faults = checkpoint.misfits(found, wanted, optional)
    if faults:
        raise ValueError(f"{folder.name}: {faults[0]}")
    tensors = {"embed_tokens.weight": target.embed_tokens, "d2t": torch.zeros(D, dtype=torch.long)}
    tensors |= {name.replace(layer, "layers.0."): t for name, t in checkpoint._tensors(folder).items()}
    ids = checkpoint._check_d2t(tensors["d2t"], tensors.get("t2d"), V, folder.name)
    tensors["d2t"] = tensors["d2t"].long()
    tensors.setdefault("lm_head.weight", target.lm_head[ids.to(target.lm_head.device)])
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save(drafter, folder: Path, dtype=torch.bfloat16, history: Path | None = None) -> None:
    """Write a trained drafter. Eagle3 goes out as vLLM and SGLang read it: `midlayer` names, d2t and t2d, the LM head
    of the draft vocabulary, no embedding. Others, and history, as of checkpoint.write."""
    if not isinstance(drafter, Eagle3Drafter):
        return checkpoint.save(drafter, folder, dtype, history=history)
    state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in drafter.state_dict().items()}
    del state["embed_tokens.weight"]
    tensors = checkpoint.cast(state, dtype)
    with checkpoint.replacing(folder, history) as new:
        save_file({name: t.contiguous() for name, t in tensors.items()}, new / SINGLE, metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(_config_json(drafter.config, dtype), indent=2) + "\n")


def _config_json(config: Eagle3Config, dtype) -> dict:
    written = {name: value for name, value in asdict(config).items() if value is not None and value is not False}
    target, ids = written.pop("target"), list(written.pop("aux_hidden_state_layer_ids"))
    latent = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None}
    plain = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    return {
        **(latent if config.kv_lora_rank else plain),
        **written,
        "target_model_name_or_path": target,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
