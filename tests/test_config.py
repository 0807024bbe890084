"""The drafter's configuration: every fault refused at once, both layouts, the presets and their public sizes."""

import dataclasses

import pytest
import torch
from tiny import tiny_config

from dspark.config import PRESETS, DSparkConfig
from dspark.drafter import DSparkDrafter

FAULTS = {
    "no tap": ({"target_layer_ids": ()}, "target_layer_ids"),
    "a tap twice": ({"target_layer_ids": (0, 0)}, "target_layer_ids"),
    "taps not rising": ({"target_layer_ids": (2, 0)}, "target_layer_ids"),
    "tap before the first block": ({"target_layer_ids": (-1, 2)}, "target_layer_ids"),
    "tap behind the last block": ({"target_layer_ids": (0, 4)}, "target_layer_ids"),
    "mask id below 0": ({"mask_token_id": -1}, "mask_token_id"),
    "mask id = vocabulary": ({"mask_token_id": 40}, "mask_token_id"),
    "no layer": ({"num_hidden_layers": 0}, "num_hidden_layers"),
    "3 kv heads for 4": ({"num_key_value_heads": 3}, "num_key_value_heads"),
    "no kv head": ({"num_key_value_heads": 0}, "num_key_value_heads"),
    "odd head": ({"head_dim": 7}, "head_dim"),
    "empty block": ({"block_size": 0}, "block_size"),
    "a block of the anchor alone": ({"block_size": 1, "sample_from_anchor": False}, "block_size"),
    "negative rank": ({"markov_rank": -1}, "markov_rank"),
    "unknown head": ({"markov_head_type": "lstm"}, "markov_head_type"),
    "confidence without its Markov embedding": ({"markov_rank": 0}, "confidence_head_with_markov"),
    "empty draft vocabulary": ({"draft_vocab_size": 0}, "draft_vocab_size"),
    "draft vocabulary too large": ({"draft_vocab_size": 41}, "draft_vocab_size"),
    "sliding without a window": ({"sliding_layers": (1,)}, "sliding_window"),
    "window 0": ({"sliding_layers": (1,), "sliding_window": 0}, "sliding_window"),
    "negative window": ({"sliding_layers": (1,), "sliding_window": -3}, "sliding_window"),
    "sliding layer missing": ({"sliding_layers": (2,), "sliding_window": 8}, "sliding_layers"),
}


@pytest.mark.parametrize("changes, field", FAULTS.values(), ids=FAULTS)
def test_every_fault_names_its_field_and_value(changes, field):
    with pytest.raises(ValueError) as error:
        tiny_config(**changes)
    message = str(error.value)
    value = changes.get(field, getattr(tiny_config(), field))
    assert message.startswith(f"DSparkConfig.{field} = {value!r}: ") and "\n" not in message


def test_edges_of_the_faults_are_allowed():
    tiny_config(target_layer_ids=(0, 3), mask_token_id=39, draft_vocab_size=40)
    tiny_config(block_size=1)
    tiny_config(block_size=2, sample_from_anchor=False)
    tiny_config(markov_rank=0, confidence_head_with_markov=False)
    tiny_config(markov_rank=0, confidence_head=False)  # DFlash; the flag of a head that is off does not matter
    tiny_config(sliding_layers=(0, 1), sliding_window=1)


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ValueError, match="markov_rank"):
        tiny_config().replace(markov_rank=-1)


def test_lists_from_json_become_tuples():
    assert tiny_config(target_layer_ids=[0, 2], sliding_layers=[1], sliding_window=4) == tiny_config(
        sliding_layers=(1,), sliding_window=4
    )


# ---- conventions that differ by one


def test_aux_layer_ids_are_one_more_and_come_back():
    config = tiny_config(target_layer_ids=(0, 3))
    assert config.aux_hidden_state_layer_ids == (1, 4)
    back = tuple(aux - 1 for aux in config.aux_hidden_state_layer_ids)
    assert config.replace(target_layer_ids=back) == config
    assert PRESETS["kimi-k2.6"].aux_hidden_state_layer_ids == (1, 29, 57)


@pytest.mark.parametrize("sample_from_anchor, most", [(True, 8), (False, 7)])
def test_drafts_and_slots_of_both_layouts(sample_from_anchor, most):
    config = tiny_config(block_size=8, sample_from_anchor=sample_from_anchor)
    assert config.max_draft_tokens == most
    assert [config.block_length(n) for n in range(1, most + 1)] == list(range(9 - most, 9))
    for n in (0, -1, most + 1):
        with pytest.raises(ValueError, match=f"num_speculative_tokens = {n}: .*1..{most} tokens"):
            config.block_length(n)


def test_width_of_the_logits():
    assert tiny_config().vocab_size_out == 40
    assert tiny_config(draft_vocab_size=7).vocab_size_out == 7


# ---- presets and sizes


def test_presets_are_those_of_the_design():
    assert set(PRESETS) == {"smollm2-135m", "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "kimi-k2.6", "kimi-k2.7-code"}
    assert PRESETS["qwen3-4b"].target_layer_ids == (1, 9, 17, 25, 33)
    assert PRESETS["smollm2-135m"].target_layer_ids == (1, 14, 26)
    for name in ("kimi-k2.6", "kimi-k2.7-code"):
        assert PRESETS[name].max_draft_tokens == 7 and PRESETS[name].draft_vocab_size == 32000
    differing = dataclasses.asdict(PRESETS["kimi-k2.6"]).items() ^ dataclasses.asdict(PRESETS["kimi-k2.7-code"]).items()
    assert {name for name, _ in differing} == {"target"}


def on_meta(config: DSparkConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return DSparkDrafter(config).state_dict()


@pytest.mark.parametrize("name", ["kimi-k2.6", "kimi-k2.7-code"])
def test_kimi_preset_has_the_tensors_of_the_release(name):
    tensors = on_meta(PRESETS[name])
    assert len(tensors) == 44 and sum(key.startswith("layers.") for key in tensors) == 33
    rest = {key for key in tensors if not key.startswith("layers.")}
    assert rest == {
        "fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "embed_tokens.weight",
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
        "confidence_head.proj.bias", "d2t", "t2d",
    }  # fmt: skip
    assert tensors["fc.weight"].shape == (7168, 3 * 7168)
    assert tensors["markov_head.markov_w1.weight"].shape == (163840, 256)  # target ids
    assert tensors["markov_head.markov_w2.weight"].shape == (32000, 256)  # draft ids
    assert tensors["d2t"].shape == (32000,) and tensors["t2d"].shape == (163840,) and tensors["t2d"].dtype == torch.bool
    bfloat16 = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in tensors.values())
    assert 6.25e9 < bfloat16 < 6.35e9


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name):
    config = PRESETS[name]
    tensors = on_meta(config)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (
        config.num_attention_heads * config.head_dim,
        config.hidden_size,
    )


HIDDEN, RANK, VOCAB = 32, 8, 40
LAYER = (
    2 * 32 * HIDDEN  # q, o
    + 2 * 16 * HIDDEN  # k, v
    + 2 * 8  # their norms
    + 3 * HIDDEN * 48  # gate, up, down
    + 2 * HIDDEN  # the layer's norms
)
BACKBONE = 2 * LAYER + 2 * HIDDEN * HIDDEN + 2 * HIDDEN  # two layers, fc, hidden_norm and norm
COUNTS = {
    "DFlash": ({"markov_rank": 0, "confidence_head": False}, 0),
    "confidence only": ({"markov_rank": 0, "confidence_head_with_markov": False}, HIDDEN + 1),
    "markov only": ({"confidence_head": False}, 2 * VOCAB * RANK),
    "both": ({}, 2 * VOCAB * RANK + HIDDEN + RANK + 1),
    "both, apart": ({"confidence_head_with_markov": False}, 2 * VOCAB * RANK + HIDDEN + 1),
    "gated": ({"markov_head_type": "gated"}, 2 * VOCAB * RANK + (HIDDEN + RANK + 1) * RANK + HIDDEN + RANK + 1),
    "rnn": ({"markov_head_type": "rnn"}, 2 * VOCAB * RANK + (HIDDEN + 2 * RANK + 1) * 3 * RANK + HIDDEN + RANK + 1),
    "pruned": ({"draft_vocab_size": 10}, (VOCAB + 10) * RANK + HIDDEN + RANK + 1),
}


@pytest.mark.parametrize("changes, heads", COUNTS.values(), ids=COUNTS)
def test_trained_parameters_are_counted_exactly(changes, heads):
    drafter = DSparkDrafter(tiny_config(**changes))
    assert sum(p.numel() for p in drafter.parameters() if p.requires_grad) == BACKBONE + heads
    frozen = {name for name, p in drafter.named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}
