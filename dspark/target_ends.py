"""The two ends of a target that is too large to load beside the drafter: embedding, final norm, LM head.

A trainer that is fed by a live verifier needs no more of the target.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open

from dspark.formats import read_json
from dspark.target import EMBEDDED, Target, embedded_target, stop_ids

NAMES = {  # attribute -> its tensor's name; a multimodal checkpoint has a prefix before it
    "embed_tokens": r"(.*\.)?model\.embed_tokens\.weight",
    "final_norm": r"(.*\.)?model\.norm\.weight",
    "lm_head": r"(.*\.)?lm_head\.weight",
}
REQUIRED = ("vocab_size", "hidden_size", "rms_norm_eps", "num_hidden_layers")
# The rest may be missing: no stop token, and no limit, as of Target.
DEFAULTS = {"eos_token_id": None, "max_position_embeddings": 2**20, "tie_word_embeddings": False}


class TargetEnds(Target):
    """`logits` and `encode_chat` of a Target, and what describes it; `forward` is the verifier's. OSError where the
    target lacks a file, ValueError where a file lacks what the ends are told by."""

    def __init__(self, name: str, dtype=torch.bfloat16, device="cpu", layer_ids: tuple[int, ...] = ()):
        self.name, self.source = name, embedded_target() if name == EMBEDDED else name
        config = self._config()
        self.layer_ids, self.tokenizer = tuple(layer_ids), self._tokenizer()
        self.vocab_size, self.hidden_size, self.eps = config.vocab_size, config.hidden_size, config.rms_norm_eps
        self.num_hidden_layers = config.num_hidden_layers
        self.max_position_embeddings = config.max_position_embeddings
        generation = SimpleNamespace(eos_token_id=None)
        try:
            generation.eos_token_id = read_json(self._file("generation_config.json")).get("eos_token_id")
        except OSError:
            pass  # some have none
        self.eos_token_ids = stop_ids(config, generation)
        self.dtype, self.device = dtype, torch.device(device)
        for attribute, pattern in NAMES.items():
            tied = attribute == "lm_head" and config.tie_word_embeddings
            tensor = self.embed_tokens if tied else self._tensor(pattern).to(device, dtype)
            setattr(self, attribute, tensor)

    def _config(self) -> SimpleNamespace:
        """config.json, of a multimodal target its language model's part."""
        raw = read_json(self._file("config.json"))
        stated = raw.get("text_config") or raw
        config = DEFAULTS | {key: value for key, value in stated.items() if value is not None}
        missing = [key for key in REQUIRED if key not in config]
        if missing:
            raise ValueError(f"target {self.name!r}: config.json lacks {', '.join(missing)}: its ends cannot be told")
        return SimpleNamespace(**config)

    def _file(self, name: str) -> Path:
        """A file of the target, from its folder or the hub."""
        folder = Path(self.source)
        if not folder.is_dir():
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(str(self.source), name))
        if not (folder / name).exists():
            raise FileNotFoundError(f"target {self.name!r} has no {name}")
        return folder / name

    def _tokenizer(self):
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.source)
        except (ValueError, OSError) as error:  # it wants to run its own code: then the data must hold token ids
            print(f"target {self.name!r} is used without its tokenizer ({str(error).splitlines()[0]})")
            return None

    def _tensor(self, pattern: str) -> torch.Tensor:
        """The one tensor of the checkpoint whose name fits; only its shard is read."""
        try:
            index = json.loads(self._file("model.safetensors.index.json").read_text())["weight_map"]
        except OSError:
            with safe_open(self._file("model.safetensors"), "pt") as shard:
                index = dict.fromkeys(shard.keys(), "model.safetensors")
        found = [name for name in index if re.fullmatch(pattern, name)]
        if len(found) != 1:
            raise ValueError(f"target {self.name!r} has {len(found)} tensors named {pattern}: its ends cannot be told")
        with safe_open(self._file(index[found[0]]), "pt") as shard:
            return shard.get_tensor(found[0])
