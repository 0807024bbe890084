"""What a DSpark drafter is made of: one frozen dataclass, and the presets of the targets that matter."""

import dataclasses
from dataclasses import dataclass

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig:
    """Shape and conventions of one drafter. Symbols are those of the DSpark paper (arXiv 2607.05147).

    `target_layer_ids` count block outputs from zero: id L is the hidden state that leaves block L. (speculators'
    `aux_hidden_state_layer_ids` are L + 1; `aux_hidden_state_layer_ids` below is the only place that converts.)
    With both heads off (`markov_rank=0`, `confidence_head=False`) the drafter is DFlash (arXiv 2602.06036).
    """

    target: str  # name of the target model that this drafter serves
    vocab_size: int  # target vocabulary
    hidden_size: int
    target_num_hidden_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int  # an id that the target never emits
    num_hidden_layers: int  # draft layers
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    max_position_embeddings: int  # trained context, in tokens
    rms_norm_eps: float = 1e-6
    block_size: int = 8  # gamma
    sample_from_anchor: bool = True  # True: slot k predicts anchor+k+1; False (DFlash fill-in): anchor+k
    is_causal: bool | None = False  # inside the block; None: in the sliding layers only
    sliding_window: int | None = None  # a slot of a sliding layer sees context less than this far back, and its block
    sliding_layers: tuple[int, ...] = ()  # draft layers that slide
    draft_vocab_size: int | None = None  # None: the whole target vocabulary
    markov_rank: int = 256  # 0: no Markov head
    markov_head_type: str = "vanilla"
    confidence_head: bool = True
    confidence_head_with_markov: bool = True

    def __post_init__(self):
        for name in ("target_layer_ids", "sliding_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON gives lists
        for name, wrong, mend in self._faults():
            if wrong:
                raise ValueError(f"DSparkConfig.{name} = {getattr(self, name)!r}: {mend}")

    def _faults(self):
        sizes = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings")
        for name in sizes:
            yield name, getattr(self, name) < 1, "must be at least 1"
        for name in ("rope_theta", "rms_norm_eps"):
            yield name, not getattr(self, name) > 0, "must be positive"
        ids = self.target_layer_ids
        depth = self.target_num_hidden_layers
        yield "target_layer_ids", not ids or list(ids) != sorted(set(ids)), "give distinct ids in rising order"
        yield "target_layer_ids", min(ids) < 0 or max(ids) >= depth, f"ids count block outputs 0..{depth - 1}"
        yield "mask_token_id", not 0 <= self.mask_token_id < self.vocab_size, f"must lie in 0..{self.vocab_size - 1}"
        yield "num_hidden_layers", self.num_hidden_layers < 1, "a drafter needs at least 1 layer"
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        yield "num_key_value_heads", kv_heads < 1 or heads % kv_heads != 0, f"must divide {heads} query heads"
        yield "head_dim", self.head_dim < 2 or self.head_dim % 2 != 0, "must be even: rotary embedding turns pairs"
        least = 1 if self.sample_from_anchor else 2
        yield "block_size", self.block_size < least, f"this layout needs at least {least}"
        yield "markov_rank", self.markov_rank < 0, "must be 0 (no Markov head) or positive"
        yield "markov_head_type", self.markov_head_type not in MARKOV_HEAD_TYPES, f"one of {MARKOV_HEAD_TYPES}"
        lonely = self.confidence_head and self.confidence_head_with_markov and self.markov_rank == 0
        yield "confidence_head_with_markov", lonely, "set it to False where markov_rank is 0"
        pruned = self.draft_vocab_size
        yield "draft_vocab_size", pruned is not None and not 0 < pruned <= self.vocab_size, "1..vocab_size or None"
        windowless = bool(self.sliding_layers) and (self.sliding_window or 0) < 1
        yield "sliding_window", windowless, "sliding layers need a window of at least 1 token"
        outside = any(not 0 <= layer < self.num_hidden_layers for layer in self.sliding_layers)
        yield "sliding_layers", outside, f"draft layers are 0..{self.num_hidden_layers - 1}"

    @property
    def max_draft_tokens(self) -> int:
        """Largest num_speculative_tokens: block_size when the anchor predicts, one less when it does not."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def causal(self, layer: int) -> bool:
        """Whether a slot of draft layer `layer` sees only the slots of its block up to itself."""
        return layer in self.sliding_layers if self.is_causal is None else self.is_causal

    @property
    def vocab_size_out(self) -> int:
        """Width of the drafter's logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def aux_hidden_state_layer_ids(self) -> tuple[int, ...]:
        """The same taps in the speculators / transformers convention: id L is `hidden_states[L]`."""
        return tuple(layer + 1 for layer in self.target_layer_ids)

    def block_length(self, num_speculative_tokens: int) -> int:
        """Slots to feed for n drafts: n when the anchor predicts, n + 1 when it does not."""
        if not 1 <= num_speculative_tokens <= self.max_draft_tokens:
            raise ValueError(
                f"num_speculative_tokens = {num_speculative_tokens}: a block of {self.block_size} with "
                f"sample_from_anchor={self.sample_from_anchor} drafts 1..{self.max_draft_tokens} tokens"
            )
        return num_speculative_tokens if self.sample_from_anchor else num_speculative_tokens + 1

    def check_target(self, target) -> None:
        """ValueError unless a drafter of this shape can serve `target` (a dspark.target.Target)."""
        theirs = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "target_num_hidden_layers": target.num_hidden_layers,
        }
        for name, value in theirs.items():
            if getattr(self, name) != value:
                raise ValueError(f"DSparkConfig.{name} = {getattr(self, name)}, but target {target.name!r} has {value}")
        special = set(target.eos_token_ids)
        if target.tokenizer is not None:
            special |= {target.tokenizer.bos_token_id, target.tokenizer.pad_token_id}
        if self.mask_token_id in special:
            mask = f"DSparkConfig.mask_token_id = {self.mask_token_id}"
            raise ValueError(f"{mask}: {target.name!r} begins, ends or pads with it; take an id that it never uses")

    def check_taps(self, target) -> None:
        """ValueError unless `target` taps the layers that the drafter reads: others would run, and draft badly."""
        if target.layer_ids != self.target_layer_ids:
            wanted = f"the drafter reads {self.target_layer_ids}: set layer_ids"
            raise ValueError(f"target {target.name!r} taps layers {target.layer_ids}, {wanted}")

    def replace(self, **changes) -> "DSparkConfig":
        return dataclasses.replace(self, **changes)


def _qwen3(target, hidden, layers, taps, draft_layers, heads, kv, ffn):
    return DSparkConfig(
        target=target, vocab_size=151936, hidden_size=hidden, target_num_hidden_layers=layers, target_layer_ids=taps,
        mask_token_id=151669, num_hidden_layers=draft_layers, num_attention_heads=heads, num_key_value_heads=kv,
        head_dim=128, intermediate_size=ffn, rope_theta=1e6, max_position_embeddings=4096, block_size=7,
    )  # fmt: skip


def _kimi(target):
    return DSparkConfig(
        target=target, vocab_size=163840, hidden_size=7168, target_num_hidden_layers=61, target_layer_ids=(0, 28, 56),
        mask_token_id=163608, num_hidden_layers=3, num_attention_heads=56, num_key_value_heads=8, head_dim=128,
        intermediate_size=18432, rope_theta=5e4, max_position_embeddings=20000, rms_norm_eps=1e-5,
        sample_from_anchor=False, draft_vocab_size=32000,
    )  # fmt: skip


PRESETS = {
    "smollm2-135m": DSparkConfig(
        target="smollm2-135m", vocab_size=49152, hidden_size=576, target_num_hidden_layers=30,
        target_layer_ids=(1, 14, 26), mask_token_id=16, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, intermediate_size=1536, rope_theta=1e5, max_position_embeddings=2048,
        rms_norm_eps=1e-5, draft_vocab_size=6144, markov_rank=64,
    ),
    "qwen3-0.6b": _qwen3("Qwen/Qwen3-0.6B", 1024, 28, (1, 13, 25), 3, 16, 8, 3072),
    "qwen3-4b": _qwen3("Qwen/Qwen3-4B", 2560, 36, (1, 9, 17, 25, 33), 5, 32, 8, 9728),
    "qwen3-8b": _qwen3("Qwen/Qwen3-8B", 4096, 36, (1, 9, 17, 25, 33), 5, 32, 8, 12288),
    "kimi-k2.6": _kimi("moonshotai/Kimi-K2.6"),
    "kimi-k2.7-code": _kimi("moonshotai/Kimi-K2.7-Code"),
}  # fmt: skip
"""`smollm2-135m` is the embedded default; the Kimi release states its taps as aux ids 1, 29, 57."""
