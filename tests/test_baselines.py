"""The baselines: as lossless as DSpark, of the same size, trained on what decoding needs, in a public format."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decode import LIKED, NEVER, PROMPTS, SMALL, p_value
from test_train import log_of
from tiny import HIDDEN, VOCAB, packed_row, tiny_config, tiny_target
from transformers import DeepseekV2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from dspark import baselines, eagle3, train
from dspark.baselines import PromptLookup, eagle3_config, trained_parameters
from dspark.config import PRESETS, DSparkConfig
from dspark.data import Sample
from dspark.decode import answer, pooled_tau
from dspark.drafter import DSparkDrafter
from dspark.eagle3 import Eagle3Drafter
from dspark.initial import new_drafter
from dspark.kernels import cpu
from dspark.read_formats import read_eagle3
from dspark.source import LocalSource
from dspark.target import Target
from dspark.train import TrainConfig, Trainer

KINDS = pytest.mark.parametrize("latent", [False, True], ids=["standard", "latent"])
TIGHT = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


def chain_drafter(target, latent: bool, draft_ids=LIKED, seed=3, shape=None) -> Eagle3Drafter:
    """A random Eagle3 drafter whose every part is far from zero."""
    torch.manual_seed(seed)
    shape = (shape or tiny_config()).replace(draft_vocab_size=None if draft_ids is None else len(draft_ids))
    drafter = Eagle3Drafter(eagle3_config(shape, latent))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter.data, mean=float(parameter.ndim == 1), std=0.3)
    return drafter.adopt_target(target.embed_tokens, target.lm_head, draft_ids).eval()


# ---- the arithmetic, against transformers' own attention


def theirs(drafter: Eagle3Drafter):
    """x [S, 2H] -> causal attention [S, H], by transformers' Llama or DeepSeek-V2 module with the drafter's weights."""
    config, mine = drafter.config, drafter.layers[0].self_attn
    shape = {
        "hidden_size": 2 * HIDDEN, "num_attention_heads": config.num_attention_heads, "head_dim": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads, "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }  # fmt: skip
    if config.kv_lora_rank:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        wide = DeepseekV2Config(**shape, q_lora_rank=None, **{name: getattr(config, name) for name in names})
        attention, rotary = DeepseekV2Attention(wide, 0), DeepseekV2RotaryEmbedding(wide)
        attention.kv_a_layernorm.variance_epsilon = config.rms_norm_eps
    else:
        wide = LlamaConfig(**shape)
        attention, rotary = LlamaAttention(wide, 0), LlamaRotaryEmbedding(wide)
    attention.o_proj = torch.nn.Linear(*mine.o_proj.weight.shape[::-1], bias=False)
    attention.load_state_dict(mine.state_dict())

    def attend(x):
        S = len(x)
        mask = torch.full((S, S), float("-inf")).triu(1)[None, None]
        positions = rotary(x[None], torch.arange(S)[None])
        return attention(x[None], attention_mask=mask, position_embeddings=positions)[0][0]

    return attend


def reference_chain(drafter, features, tokens, n: int) -> torch.Tensor:
    """[n, H] by definition: slot t holds token t and the states of t - 1; every pass runs all slots up to its own.
    features [a, m*H] of the tokens before the anchor, tokens [a + n] with the anchor at a."""
    layer, attend, a = drafter.layers[0], theirs(drafter), len(features)
    fused = drafter.fc(features)
    slots = [(tokens[t], fused[t - 1]) for t in range(1, a + 1)]
    outputs = []
    for k in range(n):
        x = [
            torch.cat([layer.input_layernorm(drafter.embed_tokens(token)), layer.hidden_norm(hidden)])
            for token, hidden in slots
        ]
        hidden = slots[-1][1] + attend(torch.stack(x))[-1]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        outputs.append(drafter.norm(hidden))
        if k + 1 < n:
            slots.append((tokens[a + k + 1], hidden))
    return torch.stack(outputs)


@KINDS
@torch.no_grad()
def test_training_and_decoding_and_the_definition_give_the_same_chain(toy, latent):
    drafter, n = chain_drafter(toy, latent), 4
    row = packed_row([11, 7])
    anchors = torch.tensor([1, 2, 5, 7, 12, 14])  # first and last rows whose chains end inside their document
    trained = drafter.block_hidden(row.features, row.positions, row.tokens, anchors, row.starts[anchors], n)
    assert trained.shape == (len(anchors), n, HIDDEN)
    for hidden, anchor in zip(trained, anchors.tolist(), strict=True):
        start = int(row.starts[anchor])
        features, tokens = row.features[start:anchor], row.tokens[start : anchor + n]
        torch.testing.assert_close(hidden, reference_chain(drafter, features, tokens, n), **TIGHT)
        cache = drafter.new_cache(20)
        before = row.tokens[start:anchor]
        drafter.extend(cache, features[:3], before[:3])  # prefill, then what a step committed
        if len(features) > 3:
            drafter.extend(cache, features[3:], before[3:])
        token = row.tokens[anchor : anchor + 1]
        draft = drafter.draft(token, cache, n, temperature=0.7, generator=torch.Generator().manual_seed(anchor))
        text = torch.cat([before, token, draft.tokens[:-1]])
        logits = drafter.lm_head(reference_chain(drafter, features, text, n))
        torch.testing.assert_close(draft.q, (logits / 0.7).softmax(-1), **TIGHT)
        assert set(draft.tokens.tolist()) <= set(LIKED.tolist())


@pytest.mark.skipif(not cpu.serves(torch.zeros(1, 2, dtype=torch.bfloat16)), reason="needs the CPU's kernels")
@torch.no_grad()
def test_latents_of_a_bfloat16_drafter_are_float32_where_torch_would_emulate(toy, monkeypatch):
    row, drafts = packed_row([20]), {}
    for native in (True, False):
        monkeypatch.setattr(eagle3, "multiplies_bfloat16", lambda native=native: native)
        drafter = chain_drafter(toy, latent=True).bfloat16().pack()
        cache = drafter.new_cache(30)
        assert cache.rows.dtype == (torch.bfloat16 if native else torch.float32)
        drafter.extend(cache, row.features[:12], row.tokens[:12])
        drafts[native] = drafter.draft(row.tokens[12:13], cache, 1, temperature=1.0)
    torch.testing.assert_close(drafts[False].q, drafts[True].q, rtol=0.1, atol=0.01)


@KINDS
def test_a_chain_sees_nothing_of_the_target_at_or_after_its_anchor(toy, latent):
    """Pitfalls 19 and 20: perturbing states reaches chains with a later anchor of the same document, and no other."""
    drafter, n = chain_drafter(toy, latent), 3
    row, anchors = packed_row([9, 8]), torch.tensor([2, 4, 5, 6, 11, 13])

    def chains(features):
        return drafter.block_hidden(features, row.positions, row.tokens, anchors, row.starts[anchors], n)

    for changed in (4, 10):
        features = row.features.clone()
        features[changed] += 1
        moved = (chains(features) != chains(row.features)).flatten(1).any(1)
        same_document = row.starts[anchors] == row.starts[changed]
        assert moved.tolist() == ((anchors > changed) & same_document).tolist()


@KINDS
def test_the_first_token_of_a_document_reads_nothing_of_the_one_before(toy, latent):
    drafter, row = chain_drafter(toy, latent), packed_row([9, 8])
    alone = packed_row([9, 8])
    alone = type(row)(*(tensor[9:] for tensor in alone))._replace(starts=torch.zeros(8, dtype=torch.long))
    for anchor in range(8):
        both = (
            drafter.block_hidden(r.features, r.positions, r.tokens, torch.tensor([a]), r.starts[[a]], 2)
            for r, a in ((row, anchor + 9), (alone, anchor))
        )
        torch.testing.assert_close(*both, **TIGHT)


# ---- lossless


@KINDS
@pytest.mark.parametrize("draft_ids", [LIKED, None], ids=["pruned", "whole vocabulary"])
def test_greedy_output_is_the_targets_at_every_n(toy, latent, draft_ids):
    drafter, answers = chain_drafter(toy, latent, draft_ids, seed=7), []
    for prompt in PROMPTS:
        plain = answer(toy, None, prompt, 0, 20)
        for n in (1, 2, 5):
            got = answer(toy, drafter, prompt, n, 20)
            assert got.tokens == plain.tokens and set(got.drafted) <= {n}
            answers.append(got)
    if draft_ids is not None:
        assert 1.02 < pooled_tau(answers) < 3  # some drafts were accepted and some rejected, or nothing was tested


def test_prompt_lookup_is_lossless_and_is_right_where_text_repeats(toy):
    lookup, answers = PromptLookup(VOCAB), []
    for prompt in (*PROMPTS, [5, 6, 7, 9, 5, 6, 7]):
        plain = answer(toy, None, prompt, 0, 40, stop_token_ids=NEVER)
        for n in (1, 3, 7):
            got = answer(toy, lookup, prompt, n, 40, stop_token_ids=NEVER)
            assert got.tokens == plain.tokens and all(0 <= d <= n for d in got.drafted)
            answers.append(got)
    assert pooled_tau(answers) > 1.5  # the toy target soon repeats itself
    assert any(a < d for got in answers for a, d in zip(got.accepted, got.drafted, strict=True))


def test_prompt_lookup_runs_without_hidden_states():
    bare = tiny_target(layer_ids=())
    plain = answer(bare, None, [5, 6, 7], 0, 12)
    assert answer(bare, PromptLookup(VOCAB), [5, 6, 7], 3, 12).tokens == plain.tokens


@pytest.mark.parametrize("text, n, wanted", [
    ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
    ([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 2, [9, 7]),  # three tokens far back beat two that are nearer
    ([4, 5, 1, 4, 6, 4], 3, [6, 4]),  # the nearest of equals, and no more than there is
    ([1, 2, 3], 3, []),
    ([7], 3, []),
    ([7, 7], 3, [7]),
])  # fmt: skip
def test_prompt_lookup_finds_the_longest_suffix(text, n, wanted):
    assert PromptLookup(VOCAB).find(text, n) == wanted


@pytest.fixture(scope="module")
def small():
    """A target of one layer over six tokens, whose joint distribution can be enumerated, and a drafter's shape."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": SMALL, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "head_dim": 8,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **shape)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(12)
    config = DSparkConfig(
        target="small", target_num_hidden_layers=1, target_layer_ids=(0,), mask_token_id=0, num_hidden_layers=1,
        rope_theta=1e4, **shape,
    )  # fmt: skip
    return Target(model, None, "small", (0,)), config


CHANCE = 1e-3  # a p-value that a sound sampler falls below once in a thousand seeds; a wrong q gives less than 1e-6


@KINDS
def test_sampled_answers_have_the_targets_distribution(small, latent):
    target, shape = small
    drafter = chain_drafter(target, latent, torch.tensor([0, 1, 2, 4, 5]), shape=shape)
    assert p_value(target, drafter, [3, 1], 1.0, 600) > CHANCE


def test_sampled_answers_with_prompt_lookup_have_the_targets_distribution(small):
    assert p_value(small[0], PromptLookup(SMALL), [3, 1, 0, 2, 3, 1, 4, 5, 0, 3, 1], 1.0, 600) > CHANCE


# ---- the context cache (pitfalls 50, 52)


@KINDS
def test_context_is_the_committed_tokens_and_nothing_else(toy, latent, monkeypatch):
    drafter, grown = chain_drafter(toy, latent, seed=7), set()
    draft = drafter.draft

    def checked(anchor, cache, *args):
        assert int(anchor) == text[cache.length]
        fresh = drafter.new_cache(cache.length)
        drafter.extend(fresh, features[: cache.length], text[: cache.length])
        torch.testing.assert_close(cache.rows[: cache.length], fresh.rows, rtol=0, atol=1e-4)
        torch.testing.assert_close(cache.feature, fresh.feature, rtol=0, atol=1e-4)
        cache.rows[cache.length :] = torch.nan  # stale rows must never be read
        lengths.append(cache.length)
        return draft(anchor, cache, *args)

    monkeypatch.setattr(drafter, "draft", checked)
    for prompt in PROMPTS:
        plain, lengths = answer(toy, None, prompt, 0, 30, stop_token_ids=NEVER).tokens, []
        text = torch.tensor(prompt + plain)
        features = toy.forward(text[None], toy.new_cache(1, len(text)), 0).features[0]
        assert answer(toy, drafter, prompt, 3, 30, stop_token_ids=NEVER).tokens == plain
        grown |= {b - a for a, b in itertools.pairwise(lengths)}
    assert {1, 2} <= grown  # rejections and partial acceptance both happened


# ---- the same budget, the same training


@pytest.mark.parametrize("preset", PRESETS)
@KINDS
def test_a_baseline_has_the_drafters_budget_within_a_tenth(preset, latent):
    shape = PRESETS[preset]
    with torch.device("meta"):
        mine, dspark = Eagle3Drafter(eagle3_config(shape, latent)), DSparkDrafter(shape)
    assert trained_parameters(mine) == pytest.approx(trained_parameters(dspark), rel=0.1)
    assert mine.config.target_layer_ids == shape.target_layer_ids
    assert mine.lm_head.weight.shape == dspark.lm_head.weight.shape


def test_latent_attention_keeps_less_of_a_token_than_the_key_value_heads():
    plain, latent = (eagle3_config(PRESETS["smollm2-135m"], latent) for latent in (False, True))
    with torch.device("meta"):
        kept = [d.new_cache(1).rows.numel() for d in (Eagle3Drafter(plain), Eagle3Drafter(latent))]
    assert kept == [2 * 3 * 64, 4 * 64 + 32]


@KINDS
def test_an_overfitted_text_is_accepted_whole(latent, tmp_path):
    """Pitfall 6, through the trainer that DSpark has: what training-time test learned is what decoding needs."""
    lively, K, prompt = tiny_target(scale=12.0), 4, [5, 6, 7]
    text = prompt + answer(lively, None, prompt, 0, 45, stop_token_ids=NEVER).tokens
    sample = Sample(torch.tensor(text), torch.arange(len(text)) >= 3)
    config = TrainConfig(
        steps=120, micro_batches=1, row_tokens=64, anchors=64, block_sizes=(K,), dtype="float32", lr=2e-2,
        muon_lr=2e-2, save_every=1000, heldout_every=1000, ce_weight=1.0, kl_weight=0.0,
    )  # fmt: skip
    drafter = new_drafter(eagle3_config(tiny_config(), latent), lively, [sample], 0)
    frozen = [drafter.embed_tokens.weight.clone(), drafter.lm_head.weight.clone()]
    run = Trainer(drafter, lively, LocalSource(lively, [sample], tmp_path / "hidden"), [], config, tmp_path / "run")
    run.run()
    log = log_of(tmp_path / "run")
    assert float(log[-1]["tau_teacher"]) == K + 1 and float(log[0]["tau_teacher"]) < 3
    assert torch.equal(frozen[0], drafter.embed_tokens.weight) and torch.equal(frozen[1], drafter.lm_head.weight)
    got = answer(lively, run.inference_drafter(), prompt, K, 45, stop_token_ids=NEVER)
    assert got.tokens == text[3:] and got.tau >= K + 1 - 0.2
    again = Trainer(drafter, lively, run.source, [], config, tmp_path / "run")  # finds the run finished
    assert again.step == 120


def test_a_chain_has_no_longest_block_and_trains_on_eight_drafts():
    assert TrainConfig().fitted(eagle3_config(tiny_config(), latent=False)).block_sizes == (8,)
    assert TrainConfig(block_sizes=(20,)).fitted(eagle3_config(tiny_config(), latent=True)).block_sizes == (20,)


def test_a_later_pass_trains_through_the_earlier_ones(toy):
    """Training-time test: the loss of pass 2 reaches the fused features through pass 1's output."""
    drafter = chain_drafter(toy, False)
    row, anchors = packed_row([9]), torch.tensor([1])  # before anchor 1 there is only one state
    features = row.features.clone().requires_grad_()
    hidden = drafter.block_hidden(features, row.positions, row.tokens, anchors, row.starts[anchors], 3)
    hidden[:, 2].sum().backward()
    assert features.grad[0].abs().sum() > 0 and not features.grad[1:].any()


@pytest.mark.parametrize("kind", ["eagle3", "eagle3-mla", "dflash"])
def test_the_command_trains_every_baseline(kind, target, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "cache_dir", lambda: tmp_path)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, how are you today, my friend?"}]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": talk, "split": "train"}) + "\n")
    shape = {"num_hidden_layers": 1, "intermediate_size": 32, "draft_vocab_size": 64, "markov_rank": 0}
    shape |= {"confidence_head": False} if kind == "dflash" else {"confidence_head_with_markov": False}
    train.main([
        "--drafter", "dspark" if kind == "dflash" else kind, "--config", json.dumps(shape),
        "--data", str(tmp_path / "mine.jsonl"), "--out", str(tmp_path / "run"), "--dtype", "float32", "--steps", "1",
        "--micro-batches", "1", "--block-sizes", "3", "--anchors", "4", "--ce-weight", "0", "--kl-weight", "1",
    ])  # fmt: skip
    drafter = baselines.load(tmp_path / "run" / "drafter", target)
    assert isinstance(drafter, DSparkDrafter if kind == "dflash" else Eagle3Drafter)
    assert drafter.markov_head is None and drafter.confidence_head is None
    prompt = target.encode_chat(talk[:1])
    assert answer(target, drafter, prompt, 3, 8).tokens == answer(target, None, prompt, 0, 8).tokens


# ---- on disk


@KINDS
@pytest.mark.parametrize("draft_ids", [LIKED, None], ids=["pruned", "whole vocabulary"])
def test_a_saved_drafter_comes_back_the_same(toy, latent, draft_ids, tmp_path):
    drafter = chain_drafter(toy, latent, draft_ids)
    baselines.save(drafter, tmp_path / "saved", torch.float32)
    back = baselines.load(tmp_path / "saved", toy)
    assert back.config == drafter.config
    mine = drafter.state_dict()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in back.state_dict().items())
    names = set(load_file(tmp_path / "saved" / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.hidden_norm.weight"} <= names
    assert "embed_tokens.weight" not in names
    smaller = load_file(tmp_path / "saved" / "model.safetensors")
    del smaller["lm_head.weight"]  # the target's rows
    save_file(smaller, tmp_path / "saved" / "model.safetensors")
    assert torch.equal(baselines.load(tmp_path / "saved", toy).lm_head.weight, mine["lm_head.weight"])
    (tmp_path / "recipe.json").write_text("{}")
    baselines.save(drafter, tmp_path / "saved", torch.float32, history=tmp_path)  # Eagle3 has one, too
    baselines.save(drafter, tmp_path / "other", torch.float32)
    assert [(tmp_path / name / "recipe.json").exists() for name in ("saved", "other")] == [True, False]
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3]  # taps (0, 2), counted from one
    if latent:
        assert raw["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and raw["kv_lora_rank"] == 32
    else:
        theirs = read_eagle3(raw)
        assert theirs.intermediate_size == drafter.config.intermediate_size


def test_what_does_not_fit_is_named(toy, tmp_path):
    drafter, folder = chain_drafter(toy, True), tmp_path / "saved"
    baselines.save(drafter, folder, torch.float32)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())

    for wanted, weights, changes in (
        ("missing tensors .*d2t", {"d2t": None}, {}),
        ("unexpected .*extra", {"extra": torch.zeros(1)}, {}),
        ("unexpected .*layers.0.hidden_norm", {"layers.0.hidden_norm.weight": torch.ones(HIDDEN)}, {}),  # two names
        ("fc.weight has dtype F64", {"fc.weight": tensors["fc.weight"].double()}, {}),
        ("fc.weight has dtype I8", {"fc.weight": tensors["fc.weight"].to(torch.int8)}, {}),
        ("fc.weight has dtype F8_E5M2", {"fc.weight": tensors["fc.weight"].to(torch.float8_e5m2)}, {}),
        ("d2t has dtype F32", {"d2t": tensors["d2t"].float()}, {}),
        ("fc.weight is", {"fc.weight": torch.zeros(3, 3)}, {}),
        ("NaN", {"fc.weight": tensors["fc.weight"] * torch.nan}, {}),
        ("d2t does not hold", {"d2t": LIKED}, {}),  # absolute ids
        ("vocab_size = 41", {}, {"vocab_size": 41}),
        ("not so deep", {}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}),
        ("latent attention", {}, {"q_lora_rank": 8}),
        ("needs all of", {}, {"v_head_dim": None}),
        ("v_head_dim = '8' must be int", {}, {"v_head_dim": "8"}),
        ("each must be at least 1", {}, {"kv_lora_rank": -32}),
        ("num_attention_heads = '4' must be int", {}, {"num_attention_heads": "4", "head_dim": None}),
        ("draft_vocab_size = -1: must be at least 1", {}, {"draft_vocab_size": -1}),
        ("draft_vocab_size = 99: must lie in", {}, {"draft_vocab_size": 99}),
        ("head_dim = 3: must be even", {}, {"head_dim": 3}),
        ("num_key_value_heads = 3: must divide 4", {}, {"num_key_value_heads": 3}),
        ("hidden_act = 'gelu' is not supported", {}, {"hidden_act": "gelu"}),
        ("norm_output = True", {}, {"norm_output": True}),
        ("num_hidden_layers = 2", {}, {"num_hidden_layers": 2}),
    ):
        save_file({k: v for k, v in (tensors | weights).items() if v is not None}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=wanted):
            baselines.load(folder, toy)
    with pytest.raises(FileNotFoundError, match="no drafter in nowhere"):
        baselines.load(tmp_path / "nowhere", toy)
    with pytest.raises(ValueError, match="num_speculative_tokens = 0"):
        drafter.config.block_length(0)
    with pytest.raises(ValueError, match="aux_hidden_state_layer_ids is missing"):
        replace(drafter.config, aux_hidden_state_layer_ids=None)
