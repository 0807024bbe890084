"""The target's own forward pass against transformers': real weights, every family, every tap, cache and ragged rows."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_model, tiny_target
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dspark.config import PRESETS
from dspark.decode import answer
from dspark.target import EMBEDDED, Target, embedded_target
from dspark.target_ends import TargetEnds
from dspark.transformers_target import TransformersTarget

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 2,
}  # fmt: skip
LONG_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 32, "rope_theta": 1e4}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama, tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama, scaled rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LONG_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2 with bias": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3 with q/k norm": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
TEXTS = ("The capital of France is Paris, and", "def fib(n):\n    if n < 2:", "Hi")


def random_model(config_class, model_class, changes):
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **changes})).eval()
    for parameter in model.parameters():  # biases and norms too, which start as 0 and 1
        parameter.data += torch.randn_like(parameter) * (0.1 if parameter.ndim == 2 else 0.3)
    return model


def run(target, tokens, start=0, cache=None):
    tokens = torch.tensor(tokens)
    cache = cache or target.new_cache(len(tokens), 64)
    return target.forward(tokens, cache, start)


# ---- every family, tiny and random


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_equals_transformers(family):
    model = random_model(*family)
    target = Target(model, None, "toy")
    tokens = torch.randint(50, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens).logits
    cache = target.new_cache(2, 60)
    parts = [target.forward(tokens[:, a:b], cache, a).hidden for a, b in ((0, 40), (40, 47), (47, 48), (48, 60))]
    torch.testing.assert_close(target.logits(torch.cat(parts, 1)), wanted, rtol=1e-4, atol=1e-4)


# ---- taps and the final norm (pitfalls 11 to 15)


@pytest.mark.parametrize("layer_ids", [(0,), (0, 2), (1, 3), (0, 1, 2, 3), ()])
def test_taps_are_block_outputs_in_transformers_counting_plus_one(layer_ids):
    model, target = tiny_model(), tiny_target(layer_ids)
    outputs = []
    for layer in model.model.layers:  # what leaves each block, the last one before the final norm
        layer.register_forward_hook(lambda *a: outputs.append(a[2][0] if isinstance(a[2], tuple) else a[2]))
    tokens = torch.tensor([[5, 6, 7, 8, 30]])
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states
    out = run(target, tokens.tolist())
    if not layer_ids:
        assert out.features is None
        return
    wanted = torch.cat([outputs[layer] for layer in layer_ids], -1)
    torch.testing.assert_close(out.features, wanted, rtol=1e-4, atol=1e-4)
    for slot, layer in enumerate(layer_ids):
        if layer < 3:  # hidden_states[L + 1]; its last entry is after the final norm
            mine = out.features[..., 32 * slot : 32 * (slot + 1)]
            torch.testing.assert_close(mine, states[layer + 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.hidden, states[-1], rtol=1e-4, atol=1e-4)


# ---- every other architecture, through transformers' own forward

MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
       "num_key_value_heads": 4}  # fmt: skip
OTHERS = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, {"n_positions": 128}),
    "gemma3, sliding and scaled embeddings": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"head_dim": 8, "sliding_window": 8},
    ),
    "qwen3 mixture of experts": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek v3, latent attention": (DeepseekV3Config, DeepseekV3ForCausalLM, MLA),
    "mistral, sliding": (MistralConfig, MistralForCausalLM, {"sliding_window": 16}),
    "llama with attention bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
    "llama with MLP bias": (LlamaConfig, LlamaForCausalLM, {"mlp_bias": True}),
    "llama, another activation": (LlamaConfig, LlamaForCausalLM, {"hidden_act": "gelu"}),
}


@pytest.mark.parametrize("family", OTHERS.values(), ids=OTHERS)
def test_other_architectures_forget_rejected_drafts(family):
    """In parts, wrong tokens run in between and taken back, as verification does: the model's own logits and taps."""
    model = random_model(*family)
    assert not Target.writes_out(model)
    target = TransformersTarget(model, None, "toy", (0, 1))
    tokens = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = model(tokens, output_hidden_states=True)
    cache, hidden, features = target.new_cache(1, 48), [], []
    for begin, end in ((0, 20), (20, 21), (21, 29), (29, 30), (30, 40)):
        target.forward(tokens[:, begin:end].flip(1) + 1 - 50 * (tokens[:, begin:end].flip(1) == 49), cache, begin)
        out = target.forward(tokens[:, begin:end], cache, begin)
        hidden.append(out.hidden)
        features.append(out.features)
    torch.testing.assert_close(target.logits(torch.cat(hidden, 1)), wanted.logits, rtol=1e-4, atol=1e-4)
    taps = torch.cat(wanted.hidden_states[1:3], -1)
    torch.testing.assert_close(torch.cat(features, 1), taps, rtol=1e-4, atol=1e-4)


def test_another_architecture_decodes_as_transformers_generates(tmp_path):
    model = random_model(*OTHERS["gpt2"])
    model.save_pretrained(tmp_path)
    tokenizer(tmp_path)
    target = Target.load(str(tmp_path))
    assert isinstance(target, TransformersTarget)
    prompt = [5, 6, 7, 8]
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)[0]
    assert answer(target, None, prompt, 0, 30).tokens == wanted[4:].tolist()


# ---- refused


def test_a_recurrent_target_is_refused():
    config = Mamba2Config(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8,
                          n_groups=1)  # fmt: skip
    with pytest.raises(ValueError, match="target 'toy' keeps a recurrent state"):
        TransformersTarget(Mamba2ForCausalLM(config).eval(), None, "toy")


def test_a_target_that_scales_its_logits_is_refused():
    model = random_model(CohereConfig, CohereForCausalLM, {"logit_scale": 0.5})
    with pytest.raises(ValueError, match="target 'toy' changes its LM head's logits"):
        TransformersTarget(model, None, "toy")


def test_an_unknown_name_says_what_was_tried():
    with pytest.raises(OSError, match="target 'no/such-model': not a folder here and not reachable on the hub"):
        Target.load("no/such-model")


def test_more_tokens_than_the_target_holds_are_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="257 tokens asked for, but tiny holds 256"):
        target.new_cache(1, 257)


def tokenizer(folder):
    """A word-level tokenizer of three words, so that the folder loads."""
    from tokenizers import Tokenizer, models

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)


def test_a_local_folder_loads_with_its_stop_tokens(tmp_path):
    model = random_model(*FAMILIES["llama"])
    model.generation_config.eos_token_id = [2, 7]
    model.save_pretrained(tmp_path)
    tokenizer(tmp_path)
    target = Target.load(str(tmp_path), layer_ids=(1,))
    assert target.eos_token_ids == {2, 7} and target.layer_ids == (1,) and target.dtype == torch.float32
    with torch.no_grad():
        wanted = model(torch.tensor([[4, 9]])).logits
    torch.testing.assert_close(target.logits(run(target, [[4, 9]]).hidden), wanted, rtol=1e-4, atol=1e-4)


def test_stop_token_of_the_model_config_where_generation_names_none():
    model = random_model(*FAMILIES["llama"])
    model.generation_config.eos_token_id = None
    assert Target(model, None, "toy").eos_token_ids == {2}


# ---- the two ends alone

ENDS = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}  # what a config must state


def ends_of(folder, config: dict, generation: dict | None = None) -> TargetEnds:
    """The ends of a target of eight tokens with these JSON files, whose config keeps the language model's apart."""
    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,), "lm_head.weight": (8, 4)}
    if not (folder / "model.safetensors").exists():
        save_file({name: torch.ones(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "of its own", "text_config": config}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return TargetEnds(str(folder), torch.float32)


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": None, "temperature": 0.6}])
def test_ends_do_without_what_a_target_does_without(tmp_path, generation):
    """No stop token anywhere, no limit of positions; then the config's stop token."""
    ends = ends_of(tmp_path, ENDS, generation)
    assert (ends.eos_token_ids, ends.max_position_embeddings) == (frozenset(), 2**20)
    stated = ends_of(tmp_path, ENDS | {"eos_token_id": 7, "max_position_embeddings": 64}, generation)
    assert (stated.eos_token_ids, stated.max_position_embeddings) == ({7}, 64)


def test_the_generation_configs_stop_tokens_come_first(tmp_path):
    assert ends_of(tmp_path, ENDS | {"eos_token_id": 7}, {"eos_token_id": [3, 4]}).eos_token_ids == {3, 4}


@pytest.mark.parametrize("key", ENDS)
def test_a_key_that_the_ends_need_is_named(tmp_path, key):
    for without in ({name: value for name, value in ENDS.items() if name != key}, ENDS | {key: None}):
        with pytest.raises(ValueError, match=f"config.json lacks {key}: its ends cannot be told"):
            ends_of(tmp_path, without)


# ---- the embedded real model


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(embedded_target(), dtype=torch.float32).eval()


def test_the_embedded_target_is_what_its_preset_says(target):
    config = PRESETS[EMBEDDED]
    assert (target.vocab_size, target.hidden_size) == (config.vocab_size, config.hidden_size)
    assert target.num_hidden_layers == config.target_num_hidden_layers
    assert target.layer_ids == config.target_layer_ids
    assert config.mask_token_id not in target.eos_token_ids
    assert target.tokenizer.decode(list(target.eos_token_ids)) == "<|im_end|>"


@torch.no_grad()
def test_real_logits_and_taps_equal_transformers(target, reference):
    """Pitfalls 12, 13: the LM head on `hidden` is the target's logits; on a state before the final norm it is not."""
    ids = target.tokenizer(TEXTS[0])["input_ids"]
    out = run(target, [ids])
    wanted = reference(torch.tensor([ids]), output_hidden_states=True)
    torch.testing.assert_close(target.logits(out.hidden), wanted.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(target.logits(out.hidden).argmax(-1), wanted.logits.argmax(-1))
    taps = torch.cat([wanted.hidden_states[layer + 1] for layer in target.layer_ids], -1)
    torch.testing.assert_close(
        out.features, taps, rtol=1e-4, atol=1e-2
    )  # the stream's largest values are in the thousands
    last = []
    hook = reference.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    reference(torch.tensor([ids]))
    hook.remove()
    assert float((target.logits(last[0]) - wanted.logits).abs().max()) > 1


@torch.no_grad()
def test_real_cache_continuation_and_ragged_rows_equal_transformers(target, reference):
    """Right-padded prefill, then rows that stand at different lengths go on together; a rejected row is overwritten."""
    rows = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    lengths, more = torch.tensor([len(row) for row in rows]), [[28, 30], [216, 39], [17, 253]]
    padded = [row + [0] * (int(lengths.max()) - len(row)) for row in rows]
    cache = target.new_cache(3, 32)
    prefill = target.logits(target.forward(torch.tensor(padded), cache, 0).hidden)
    target.forward(torch.tensor([[99, 98, 97]] * 3), cache, lengths)  # drafts that will be rejected
    two = target.logits(target.forward(torch.tensor(more), cache, lengths).hidden)
    one = target.logits(target.forward(torch.tensor([[42]] * 3), cache, lengths + 2).hidden)
    for i, row in enumerate(rows):
        wanted = reference(torch.tensor([row + more[i] + [42]])).logits[0]
        tight = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(prefill[i, : len(row)], wanted[: len(row)], **tight)
        torch.testing.assert_close(torch.cat([two[i], one[i]]), wanted[len(row) :], **tight)


def test_chat_ids_are_the_templates(target):
    ids = target.encode_chat([{"role": "user", "content": "Hi"}])
    text = target.tokenizer.decode(ids)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    bare = target.encode_chat([{"role": "user", "content": "Hi"}], add_generation_prompt=False)
    assert target.tokenizer.decode(bare) + "<|im_start|>assistant\n" == text
