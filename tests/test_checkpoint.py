"""Drafters on disk: what is written is read back exactly, and what does not fit is refused by name."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB, packed_row, tiny_config, tiny_drafter, tiny_model, tiny_target

from dspark import checkpoint, formats, read_formats, schedule
from dspark.config import PRESETS
from dspark.decode import answer, heldout_tau
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.initial import new_drafter
from dspark.read_formats import read_config
from dspark.target import Target

KEPT = torch.arange(0, VOCAB, 3)
VARIANTS = {
    "anchor-first": {},
    "fill-in": {"sample_from_anchor": False},
    "pruned": {"draft_ids": KEPT},
    "gated": {"markov_head_type": "gated"},
    "rnn, pruned": {"markov_head_type": "rnn", "draft_ids": KEPT},
    "no heads": {"markov_rank": 0, "confidence_head": False},
    "confidence alone": {"markov_rank": 0, "confidence_head_with_markov": False},
    "markov alone": {"confidence_head": False},
    "sliding": {"sliding_layers": (1,), "sliding_window": 6},
    "causal": {"is_causal": True},
}


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


@pytest.fixture
def saved(toy, tmp_path):
    """Folder of a pruned drafter with both heads."""
    checkpoint.save(tiny_drafter(toy, draft_ids=KEPT), tmp_path / "drafter", torch.float32)
    return tmp_path / "drafter"


@torch.no_grad()
def draft(drafter):
    cache, row = drafter.new_cache(9), packed_row([9])
    drafter.extend(cache, row.features[:8].to(drafter.fc.weight.dtype))
    n = drafter.config.max_draft_tokens
    return drafter.draft(row.tokens[8:], cache, n, 1.0, torch.Generator().manual_seed(0))


def same_draft(a, b):
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.q, b.q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.confidence, b.confidence, rtol=1e-5, atol=1e-6)


def rewrite(folder, **tensors):
    """Put tensors into the file; None takes one out. Dots in names are written as __."""
    found = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / "model.safetensors")


def reconfigure(folder, **fields):
    native = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(native))


# ---- round trip


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_drafter_comes_back_with_identical_drafts(toy, variant, tmp_path):
    drafter = tiny_drafter(toy, **variant)
    checkpoint.save(drafter, tmp_path / "drafter", torch.float32)
    back = checkpoint.load(tmp_path / "drafter", toy)
    assert back.config == drafter.config
    weights, returned = drafter.state_dict(), back.state_dict()
    assert set(weights) == set(returned) and all(torch.equal(weights[name], returned[name]) for name in weights)
    same_draft(draft(back), draft(drafter))
    assert not any(p.requires_grad for p in back.parameters())


def test_flipping_is_causal_in_the_config_changes_the_drafts(toy, saved):
    """Pitfall 54: the file carries it, and the loader obeys."""
    bidirectional = draft(checkpoint.load(saved, toy))
    assert json.loads((saved / "config.json").read_text())["is_causal"] is False
    reconfigure(saved, is_causal=True)
    assert float((draft(checkpoint.load(saved, toy)).q - bidirectional.q).abs().max()) > 1e-3


def test_bfloat16_is_the_default_and_rounds_once(toy, tmp_path):
    drafter = tiny_drafter(toy, draft_ids=KEPT)
    checkpoint.save(drafter, tmp_path / "drafter")
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {torch.bfloat16, torch.int64, torch.bool}
    back = checkpoint.load(tmp_path / "drafter", toy)
    assert back.fc.weight.dtype == toy.dtype
    assert torch.equal(back.fc.weight, drafter.fc.weight.bfloat16().float())
    assert torch.equal(back.d2t, drafter.d2t) and torch.equal(back.t2d, drafter.t2d)
    assert checkpoint.load(tmp_path / "drafter", toy, torch.bfloat16).fc.weight.dtype == torch.bfloat16


# ---- the public format


def test_weight_names_are_the_public_ones(toy, tmp_path):
    layer = [
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"), "self_attn.q_norm.weight", "self_attn.k_norm.weight",
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")), "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]  # fmt: skip
    common = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
        f"layers.{i}.{name}" for i in (0, 1) for name in layer
    }
    heads = {f"markov_head.markov_w{i}.weight" for i in (1, 2)} | {
        f"confidence_head.proj.{k}" for k in ("weight", "bias")
    }
    for changes, extra in (({}, set()), ({"draft_ids": KEPT}, {"lm_head.weight", "d2t", "t2d"})):
        checkpoint.save(tiny_drafter(toy, **changes), tmp_path / "drafter")
        assert set(load_file(tmp_path / "drafter" / "model.safetensors")) == common | heads | extra


def test_config_states_every_default_that_servers_disagree_on(toy, saved):
    native = json.loads((saved / "config.json").read_text())
    assert native["architectures"] == ["Qwen3DSparkModel"]
    assert native["sample_from_anchor"] is True and native["is_causal"] is False
    assert native["block_size"] == 4 and native["mask_token_id"] == 1 and native["target_layer_ids"] == [0, 2]
    assert native["enable_confidence_head"] is True and native["markov_head_type"] == "vanilla"
    assert native["layer_types"] == ["full_attention"] * 2


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_the_format(name):
    for write in (formats.to_native, formats.to_speculators):
        assert read_config(json.loads(json.dumps(write(PRESETS[name])))) == (PRESETS[name], [])


# ---- a file's own embedding and LM head (pitfalls 17, 42)


def test_own_embedding_and_head_in_the_file_win_over_the_targets(toy, tmp_path):
    drafter = tiny_drafter(toy)
    checkpoint.save(drafter, tmp_path / "drafter", torch.float32)
    shared = checkpoint.load(tmp_path / "drafter", toy)
    assert torch.equal(shared.lm_head.weight, toy.lm_head) and torch.equal(shared.embed_tokens.weight, toy.embed_tokens)
    head, embedding = torch.randn(VOCAB, 32), torch.randn(VOCAB, 32)
    rewrite(tmp_path / "drafter", lm_head__weight=head, embed_tokens__weight=embedding)
    own = checkpoint.load(tmp_path / "drafter", toy)
    assert torch.equal(own.lm_head.weight, head) and torch.equal(own.embed_tokens.weight, embedding)


@pytest.mark.parametrize("foreign", [False, True])
def test_the_targets_own_embedding_is_told_from_a_foreign_one_in_a_coarser_dtype(foreign, tmp_path):
    """A bfloat16 file read for a target in float16, which cannot hold the file's smallest values."""
    model = tiny_model(torch.bfloat16)
    model.model.embed_tokens.weight.data[3, 4] = 1e-6
    toy = Target(model, None, "tiny", (0, 2))
    checkpoint.save(tiny_drafter(toy), tmp_path / "drafter")
    stored = toy.embed_tokens.clone()
    stored[5, 6] *= 1 + foreign
    rewrite(tmp_path / "drafter", embed_tokens__weight=stored, lm_head__weight=toy.lm_head.clone())
    half = Target(model.to(torch.float16), None, "tiny", (0, 2))
    assert not torch.equal(half.embed_tokens.bfloat16(), toy.embed_tokens)  # or nothing is tested
    back = checkpoint.load(tmp_path / "drafter", half)
    assert back.own == ({"embed_tokens.weight"} if foreign else set())
    checkpoint.save(back, tmp_path / "again", torch.float16)
    assert ("embed_tokens.weight" in load_file(tmp_path / "again" / "model.safetensors")) == foreign


def test_a_pruned_head_that_the_file_lacks_is_the_targets_rows_and_must_be_written_for_vllm(toy, saved, tmp_path):
    assert torch.equal(checkpoint.load(saved, toy).lm_head.weight, toy.lm_head[KEPT])
    rewrite(saved, lm_head__weight=None)
    drafter = checkpoint.load(saved, toy)
    assert torch.equal(drafter.lm_head.weight, toy.lm_head[KEPT]) and "target's rows" in drafter.notes[0]
    for format in ("vllm", "speculators"):
        with pytest.raises(ValueError, match="name the target"):
            checkpoint.write(checkpoint.read(saved), tmp_path / format, format=format)
    checkpoint.save(drafter, tmp_path / "whole", format="vllm")
    assert "lm_head.weight" in load_file(tmp_path / "whole" / "model.safetensors")


# ---- refusals: tensors

BAD_TENSORS = {
    "missing": ({"fc__weight": None}, r"drafter: missing tensors \['fc.weight'\]"),
    "missing in a layer": ({"layers__1__mlp__up_proj__weight": None}, "layers.1.mlp.up_proj.weight"),
    "missing head": ({"confidence_head__proj__bias": None}, "confidence_head.proj.bias"),
    "missing d2t": ({"d2t": None}, "d2t"),
    "extra": ({"layers__2__mlp__up_proj__weight": torch.ones(1)}, r"unexpected \['layers.2.mlp.up_proj.weight'\]"),
    "wrong shape": ({"fc__weight": torch.zeros(32, 32)}, r"fc.weight is \(32, 32\), config.json says \(32, 64\)"),
    "transposed": ({"markov_head__markov_w1__weight": torch.zeros(8, VOCAB)}, r"markov_w1.weight is \(8, 40\)"),
    "NaN": ({"norm__weight": torch.full((32,), torch.nan)}, "norm.weight holds NaN or Inf"),
    "Inf": ({"norm__weight": torch.full((32,), torch.inf)}, "norm.weight holds NaN or Inf"),
    "a dtype that cannot be searched for NaN": (
        {"verifier_norm__weight": torch.ones(32).to(torch.float8_e4m3fn)}, "verifier_norm.weight has dtype F8_E4M3",
    ),
    "integer weights": ({"norm__weight": torch.ones(32, dtype=torch.int8)}, "norm.weight has dtype I8"),
    "absolute ids": ({"d2t": KEPT.clone()}, "d2t does not hold the offsets.*absolute ids"),
    "another vocabulary": ({"t2d": torch.arange(VOCAB) % 3 == 1}, "d2t does not hold the offsets"),
    "too small a vocabulary": ({"t2d": torch.arange(VOCAB) == 0}, "d2t does not hold the offsets"),
}  # fmt: skip


@pytest.mark.parametrize("tensors, message", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(toy, saved, tensors, message):
    rewrite(saved, **tensors)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved, toy)


@pytest.mark.parametrize("name", ["layers.\u00b2.x", f"layers.{'9' * 5000}.x"], ids=["superscript", "5000 digits"])
def test_a_layer_is_counted_whatever_its_name(toy, saved, name):
    rewrite(saved, **{name: torch.ones(1)})
    reconfigure(saved, num_hidden_layers=900, layer_types=None)
    with pytest.raises(ValueError, match="num_hidden_layers = 900, the file has 3"):
        checkpoint.load(saved, toy)


def test_a_line_break_in_a_name_does_not_break_the_message(toy, saved):
    header = json.dumps({"a\nb": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}).encode()
    (saved / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(ValueError, match="drafter is damaged.*invalid offset for tensor `a b`$"):
        checkpoint.load(saved, toy)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_truncated_file_is_damaged(toy, saved, size):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="drafter is damaged"):
        checkpoint.load(saved, toy)


def test_missing_and_broken_files_are_named(toy, saved):
    (saved / "config.json").write_text('{"vocab_size": 4')
    with pytest.raises(ValueError, match="drafter is damaged"):
        checkpoint.load(saved, toy)
    (saved / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="no drafter in drafter: config.json is missing"):
        checkpoint.load(saved, toy)
    with pytest.raises(FileNotFoundError, match="no drafter in nowhere"):
        checkpoint.load(saved.parent / "nowhere", toy)


# ---- refusals: config


def test_every_missing_key_is_named_or_decided_as_vllm_does(saved):
    native = json.loads((saved / "config.json").read_text())
    wanted, none = read_config(native)
    assert not none
    described = {"model_type", "use_sliding_window", "hidden_act", "attention_bias", "dtype", "tie_word_embeddings"}
    decided = {"enable_confidence_head": False, "confidence_head_with_markov": False, "num_target_layers": 3,
               "sample_from_anchor": True, "target_model": "an unnamed target"}  # fmt: skip
    silent = described | {"rope_theta", "rope_parameters", "sliding_window", "layer_types", "is_causal",
                          "markov_head_type", "draft_vocab_size"}  # fmt: skip
    refused = set()
    for key in native:
        try:
            config, notes = read_config({k: v for k, v in native.items() if k != key})
        except ValueError as error:
            assert key in str(error)
            refused.add(key)
            continue
        if key in decided:
            name = {v: k for k, v in read_formats._RENAMED.items()}.get(key, key)
            assert getattr(config, name) == decided[key] and len(notes) == 1
        else:
            assert key in silent and not notes and (config == wanted) == (key != "draft_vocab_size")
    assert refused == set(native) - set(decided) - silent
    no_rope = {k: v for k, v in native.items() if not k.startswith("rope")}
    with pytest.raises(ValueError, match="lacks rope_theta"):
        read_config(no_rope)


BAD_FIELDS = {
    "hidden size of another target": ({"hidden_size": 64}, "drafter does not fit 'tiny': .*hidden_size = 64.*has 32"),
    "another name and hidden size": (
        {"hidden_size": 64, "target_model": "big"}, "does not fit 'tiny', it drafts for 'big': .*hidden_size = 64",
    ),
    "vocabulary of another target": ({"vocab_size": 48}, "vocab_size = 48.*has 40"),
    "depth of another target": ({"num_target_layers": 5}, "target_num_hidden_layers = 5.*has 4"),
    "mask outside the vocabulary": ({"mask_token_id": 40}, "mask_token_id = 40"),
    "mask -1": ({"mask_token_id": -1}, "mask_token_id = -1"),
    "mask is the stop token": ({"mask_token_id": 2}, "mask_token_id = 2.*ends"),
    "no mask": ({"mask_token_id": None}, "lacks mask_token_id"),
    "rank of other weights": ({"markov_rank": 16}, "is .* config.json says"),
    "another head": ({"markov_head_type": "rnn"}, "missing tensors.*markov_head.joint_proj"),
    "whole vocabulary": ({"draft_vocab_size": None}, r"lm_head.weight is \(14, 32\), config.json says \(40, 32\)"),
}  # fmt: skip


@pytest.mark.parametrize("fields, message", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_a_config_that_does_not_fit_is_refused(toy, saved, fields, message):
    reconfigure(saved, **fields)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved, toy)


def test_mask_id_is_checked_before_training_too(toy):
    """Pitfall 18: it must not be an id that begins, ends or pads a text."""
    new_drafter(tiny_config(), toy, [], 0)
    with pytest.raises(ValueError, match="mask_token_id = 2"):
        new_drafter(tiny_config(mask_token_id=2), toy, [], 0)
    with pytest.raises(ValueError, match="hidden_size"):
        new_drafter(tiny_config(hidden_size=64), toy, [], 0)

    class Tokenizer:
        bos_token_id, pad_token_id = 5, 7

    padded = Target(tiny_model(), Tokenizer(), "padded", (0, 2))
    for token in (2, 5, 7):
        with pytest.raises(ValueError, match=f"mask_token_id = {token}: 'padded' begins, ends or pads"):
            tiny_config(mask_token_id=token).check_target(padded)
    tiny_config(mask_token_id=6).check_target(padded)


# ---- what is written over, and what is not written


def test_a_new_checkpoint_carries_only_its_own_history(toy, saved, tmp_path):
    """What tells of the drafter that was there, or changes the new one, goes; files that are somebody's own stay."""
    for name in (*checkpoint.HISTORY, "mask_embedding.pt"):
        (saved / name).write_text("of the old drafter")
    (saved / "notes.txt").write_text("mine")
    (saved / "other").mkdir()
    for name in ("model.safetensors", "config.json", "recipe.json"):
        (saved / "other" / name).write_text("of another drafter")
    checkpoint.save(tiny_drafter(toy, seed=5, draft_ids=KEPT), saved, torch.float32)
    names = ["README.md", "config.json", "model.safetensors", "notes.txt", "other"]
    assert sorted(path.name for path in saved.iterdir()) == names and len(list((saved / "other").iterdir())) == 3
    assert "Not recorded" in (saved / "README.md").read_text() and checkpoint.load(saved, toy)


def test_history_and_temperatures_go_along_with_an_export(toy, saved, tmp_path):
    (saved / "recipe.json").write_text('{"response_tokens": 7}')
    schedule.save_temperatures(saved, {"head": torch.tensor([1.5, 0.5])})
    assert schedule.CALIBRATION in checkpoint.HISTORY
    found = checkpoint.read(saved)
    for folder in (tmp_path / "out", saved):  # the latter over itself
        checkpoint.write(found, folder, history=saved)
        assert schedule.load_temperatures(folder, 2).tolist() == [1.5, 0.5]
        assert "| response tokens | 7 |" in (folder / "README.md").read_text()


BAD_HISTORY = {
    "no JSON": ("recipe.json", "{", "run is damaged: recipe.json is no JSON"),
    "no object": ("recipe.json", "[1]", "run is damaged: recipe.json holds no JSON object"),
    "empty table": ("heldout.csv", "", "run is damaged: heldout.csv is no table of numbers"),
    "words": ("heldout.csv", "step,tau\n1,high\n", "run is damaged: heldout.csv is no table of numbers.*'high'"),
    "binary": ("heldout.csv", "step\n\udcff", "run is damaged: heldout.csv is no table of numbers"),
    "no temperatures": ("calibration.json", "{}", "run/calibration.json: temperatures = 'None' must be a list"),
    "infinite": ("calibration.json", '{"temperatures": [Infinity]}', "calibration.json holds the temperature 'inf'"),
    "of the probability": (
        "calibration.json",
        '{"temperatures": [1.0], "probability_temperatures": [0]}',
        "calibration.json holds the temperature '0'",
    ),
}


@pytest.mark.parametrize("name, content, message", BAD_HISTORY.values(), ids=BAD_HISTORY)
def test_a_broken_history_is_named_before_anything_is_written(toy, tmp_path, name, content, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as refusal:
        checkpoint.save(tiny_drafter(toy), tmp_path / "drafter", history=tmp_path / "run")
    assert "\n" not in str(refusal.value) and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_recipe_of_another_shape_is_shown_as_it_is(toy, tmp_path):
    (tmp_path / "recipe.json").write_text('{"training": [1, 2]}')
    checkpoint.save(tiny_drafter(toy), tmp_path / "drafter", history=tmp_path)
    assert "| training | 1, 2 |" in (tmp_path / "drafter" / "README.md").read_text()


UNREADABLE = {
    "too large for float16": (1e5, torch.float16, "nothing is written: fc.weight is too large for float16"),
    "NaN": (torch.nan, torch.bfloat16, "nothing is written: fc.weight holds NaN or Inf"),
    "Inf": (-torch.inf, None, "nothing is written: fc.weight holds NaN or Inf"),
}


@pytest.mark.parametrize("value, dtype, message", UNREADABLE.values(), ids=UNREADABLE)
def test_what_would_be_refused_on_reading_is_not_written(toy, saved, value, dtype, message):
    drafter, before = tiny_drafter(toy), (saved / "model.safetensors").read_bytes()
    drafter.fc.weight.data[3, 4] = value
    for folder in (saved, saved.parent / "new"):
        with pytest.raises(ValueError, match=message):
            checkpoint.save(drafter, folder, dtype)
    assert (saved / "model.safetensors").read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == ["drafter"]


# ---- interrupted saves


def test_a_leftover_of_a_killed_save_does_not_block(toy, saved):
    (saved.parent / ".drafter.saving").mkdir()
    (saved.parent / ".drafter.saving" / "model.safetensors").write_bytes(b"half")
    other = tiny_drafter(toy, seed=5, draft_ids=KEPT)
    checkpoint.save(other, saved, torch.float32)
    same_draft(draft(checkpoint.load(saved, toy)), draft(other))
    assert sorted(p.name for p in saved.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert not (saved.parent / ".drafter.saving").exists()


def test_the_committed_drafter_serves_the_embedded_target(target):
    drafter = checkpoint.load(COMMITTED_DRAFTER, target)
    assert drafter.config.target == target.name
    assert drafter.config.target_layer_ids == PRESETS[target.name].target_layer_ids
    assert sum(file.stat().st_size for file in COMMITTED_DRAFTER.iterdir()) < 32e6
    prompt = target.encode_chat([{"role": "user", "content": "Count from 1 to 10."}])
    plain, got = answer(target, None, prompt, 0, 16), answer(target, drafter, prompt, 4, 16)
    assert got.tokens == plain.tokens and got.tau > 1
    assert heldout_tau(target, drafter, ["Count from 1 to 10."], 4, 16) == got.tau
