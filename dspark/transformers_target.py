"""Any other causal LM of the hub, through transformers' own forward pass: slower than `Target`, the same interface."""

import torch
from torch import Tensor
from transformers import DynamicCache

from dspark.target import Target, TargetOutput


class TransformersTarget(Target):
    """A frozen causal LM of an architecture that `Target` does not write out itself.

    The one assumption, checked at load: its logits are its output embedding applied to its last hidden state. Rows of
    a batch stay at one length (`start` is an int): batched decoding of requests at different lengths needs `Target`.
    """

    def __init__(self, model, tokenizer, name: str, layer_ids: tuple[int, ...] = ()):
        self._describe(model, tokenizer, name, layer_ids)
        self.model = model.base_model
        self.embed_tokens = model.get_input_embeddings().weight.detach()
        self.lm_head = model.get_output_embeddings().weight.detach()
        self.dtype, self.device = self.lm_head.dtype, self.lm_head.device
        self._check(model)

    @torch.no_grad()
    def _check(self, model) -> None:
        """ValueError where a drafter could not know the logits, or a rejected draft could not be taken back."""
        probe = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        cache = self.new_cache(1, 8)
        if not cache.is_croppable:
            raise ValueError(f"target {self.name!r} keeps a recurrent state, which cannot forget a rejected draft")
        mine, theirs = self.logits(self.forward(probe, cache, 0).hidden), model(probe).logits
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.05
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, rtol=tolerance, atol=tolerance):
            raise ValueError(f"target {self.name!r} changes its LM head's logits (bias, cap or scale): not supported")

    def new_cache(self, batch: int, max_len: int) -> DynamicCache:
        self._check_length(max_len)
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()  # a sliding window must give back what a rejected draft pushed out
        return cache

    @torch.no_grad()
    def forward(self, tokens: Tensor, cache: DynamicCache, start: int) -> TargetOutput:
        """Run tokens [B, S] at positions start..start+S-1; what the cache holds from `start` on is dropped first."""
        if cache.get_seq_length():
            cache.crop(start - cache.get_seq_length())
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        out = self.model(
            tokens,
            past_key_values=cache,
            position_ids=positions,
            use_cache=True,
            output_hidden_states=bool(self.layer_ids),
        )
        features = None
        if self.layer_ids:
            features = torch.cat([self._block_output(out, layer) for layer in self.layer_ids], -1)
        return TargetOutput(out.last_hidden_state, features)

    def _block_output(self, out, layer: int) -> Tensor:
        if layer + 1 == self.num_hidden_layers:
            raise ValueError(
                f"target {self.name!r}: layer {layer} is the last, and its output before the norm is not shown"
            )
        return out.hidden_states[layer + 1]
