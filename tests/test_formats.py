"""Public checkpoints by their shape: each format is read as its servers read it, and `inspect`, `export` and `load` do
what they say. The dictionaries follow the released config.json files; no released weights are here.
"""

import http.server
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from unittest.mock import create_autospec

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled, SafetensorsParsingError
from safetensors.torch import load_file, save_file
from tiny import VOCAB, tiny_drafter, tiny_target

from dspark import card, checkpoint, exchange, formats, setup
from dspark.__main__ import main
from dspark.config import PRESETS
from dspark.drafter import DSparkDrafter
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.inspect_checkpoint import inspect
from dspark.paths import ROOT
from dspark.read_formats import read_config, read_eagle3

DEEPSEEK = {  # deepseek-ai/dspark_qwen3_4b_block7: a copy of the target's config, and what DeepSpec adds to it
    "architectures": ["Qwen3DSparkModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 7,
    "bos_token_id": 151643, "confidence_head_with_markov": True, "dtype": "bfloat16", "enable_confidence_head": True,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5, "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 151669,
    "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_anchors": 512,
    "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8, "num_target_layers": 36,
    "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33], "tie_word_embeddings": False, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
_KIMI_LAYERS = {
    "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
    "layer_types": ["full_attention"] * 3, "max_position_embeddings": 20000, "model_type": "qwen3",
    "num_attention_heads": 56, "num_hidden_layers": 3, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 50000.0, "sliding_window": None, "use_sliding_window": False,
    "vocab_size": 163840,
}  # fmt: skip
KIMI = {  # novita/kimi-k2.6-dspark: speculators' format of before `sample_from_anchor`
    "architectures": ["DSparkDraftModel"], "aux_hidden_state_layer_ids": [1, 29, 57], "block_size": 8,
    "confidence_head_with_markov": True, "draft_vocab_size": 32000, "dtype": "bfloat16",
    "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 256, "mask_token_id": 163608,
    "speculators_config": {
        "algorithm": "dspark", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["KimiK25ForConditionalGeneration"], "name_or_path": "moonshotai/Kimi-K2.6"},
    },
    "speculators_model_type": "dspark", "speculators_version": "0.7.0", "target_hidden_size": None,
    "tie_word_embeddings": False, "transformer_layer_config": _KIMI_LAYERS,
}  # fmt: skip
_SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 2048, "use_sliding_window": True}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DFLASH = {  # z-lab/Qwen3-8B-DFlash-b16
    **{name: value for name, value in DEEPSEEK.items() if "markov" not in name and "confidence" not in name},
    "architectures": ["DFlashDraftModel"], "block_size": 16, "hidden_size": 4096, "intermediate_size": 12288,
    "mask_token_id": None, "target_layer_ids": None, "rope_scaling": None, "rope_parameters": None,
    "rope_theta": 1000000, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
PUBLIC = {  # test_interop.py asks vLLM how it reads these
    "deepseek": DEEPSEEK,
    "deepspec's DFlash": DEEPSEEK | {"markov_rank": 0, "enable_confidence_head": False},
    "deepseek, fill-in": DEEPSEEK | {"sample_from_anchor": False},
    "no confidence stated": {k: v for k, v in DEEPSEEK.items() if "confidence" not in k},
    "kimi": KIMI,
    "kimi, anchor first": KIMI | {"sample_from_anchor": True},
    "speculators' own default": KIMI | {"transformer_layer_config": _KIMI_LAYERS | _SLIDING},
    "mixed attention": KIMI | {"transformer_layer_config": _KIMI_LAYERS | _MIXED},
    "our is_causal": KIMI | {"transformer_layer_config": _KIMI_LAYERS | _MIXED | {"is_causal": False}},
    "sliding native": DEEPSEEK | {"layer_types": ["sliding_attention"] * 5, "sliding_window": 64},
    "two thetas": DEEPSEEK | {"rope_theta": 5.0},
    "nested ids": DEEPSEEK | {"dflash_config": {"target_layer_ids": [2, 3, 4, 5, 6], "mask_token_id": 151670}},
    "aux ids": DEEPSEEK | {"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]},
    "z-lab": DFLASH,
}


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


@pytest.fixture
def no_set_up(monkeypatch):
    monkeypatch.setattr(setup, "ensure", lambda argv: None)


def shapes(config) -> dict:
    """Headers that a file of this config has, embedding and LM head included."""
    with torch.device("meta"):
        state = DSparkDrafter(config).state_dict()
    kinds = {torch.int64: "I64", torch.bool: "BOOL"}
    return {name: (tuple(tensor.shape), kinds.get(tensor.dtype, "BF16")) for name, tensor in state.items()}


# ---- the released shapes


def test_kimi_reads_as_the_preset_with_44_tensors():
    config, notes = read_config(KIMI)
    assert config == PRESETS["kimi-k2.6"].replace(target_num_hidden_layers=57)
    assert config.aux_hidden_state_layer_ids == (1, 29, 57) and config.max_draft_tokens == 7
    assert len(notes) == 2 and "depth is not stated: at least 57" in notes[0]
    assert notes[1].startswith("sample_from_anchor is not stated: false, as vLLM reads this format")
    found = shapes(config)
    assert len(found) == 44 and checkpoint.tensor_faults(config, found) == []


def test_deepseek_reads_as_the_preset_and_defaults_to_the_other_layout():
    config, notes = read_config(DEEPSEEK)
    expected = PRESETS["qwen3-4b"].replace(max_position_embeddings=40960, target="an unnamed target")
    assert config == expected and config.max_draft_tokens == 7
    assert len(notes) == 2 and notes[1].startswith("sample_from_anchor is not stated: true, as vLLM reads the native")
    found = shapes(config)
    assert checkpoint.tensor_faults(config, found) == []  # it ships embedding and LM head
    without = {name: found[name] for name in found if name not in ("embed_tokens.weight", "lm_head.weight")}
    assert checkpoint.tensor_faults(config, without) == []


@pytest.mark.parametrize("raw", [DFLASH, PUBLIC["deepspec's DFlash"]], ids=["z-lab", "DeepSpec"])
def test_dflash_has_no_heads_and_its_own_layout(raw):
    config, _ = read_config(raw)
    assert config.markov_rank == 0 and not config.confidence_head and config.mask_token_id == 151669
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.rope_theta == 1e6
    drafts = {"DFlashDraftModel": (False, 15), "Qwen3DSparkModel": (True, 7)}
    assert (config.sample_from_anchor, config.max_draft_tokens) == drafts[raw["architectures"][0]]


def test_attention_that_a_file_leaves_open():
    """speculators' default (all sliding, causal), mixed layers, and its flag, which vLLM does not read."""
    own, notes = read_config(PUBLIC["speculators' own default"])
    assert own.is_causal is None and own.sliding_layers == (0, 1, 2) and own.sliding_window == 2048
    assert any("counts the sliding window back from the anchor" in note for note in notes)
    mixed, _ = read_config(PUBLIC["mixed attention"])
    assert [mixed.causal(layer) for layer in range(3)] == [True, False, True]
    flagged, notes = read_config(PUBLIC["mixed attention"] | {"sliding_window_non_causal": True})
    assert flagged.is_causal is False and any("vLLM 0.32 ignores" in note for note in notes)
    assert read_config(PUBLIC["our is_causal"])[0].is_causal is False


def test_what_is_stated_twice_and_differently_is_noted():
    config, notes = read_config(PUBLIC["two thetas"])
    assert config.rope_theta == 1e6 and any("5.0 at the top level and 1000000" in note for note in notes)
    config, notes = read_config(PUBLIC["nested ids"])
    assert config.target_layer_ids == (2, 3, 4, 5, 6) and config.mask_token_id == 151670
    assert any("dflash_config.target_layer_ids is taken" in note for note in notes)
    _, notes = read_config(PUBLIC["aux ids"])
    assert not any("differently" in note for note in notes)  # the same layers in both conventions


@pytest.mark.parametrize("scaling", [{"factor": 4.0}, {"rope_type": "default", "partial_rotary_factor": 0.5}])
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_rotary_positions_that_are_not_plain_are_refused(scaling, where):
    """Without a type, too: a factor scales something, whatever it was meant for."""
    with pytest.raises(ValueError, match="factor = (4.0|0.5) of the rotary positions is not supported, only 1"):
        read_config(DEEPSEEK | {"rope_parameters": None, where: {"rope_theta": 1e6} | scaling})
    for raw, read in ((DEEPSEEK, read_config), (EAGLES["its authors'"], read_eagle3)):
        with pytest.raises(ValueError, match="partial_rotary_factor = 0.25 is not supported, only 1.0"):
            read(raw | {"partial_rotary_factor": 0.25})
    plain = {"rope_theta": 1e6, "factor": 1.0, "partial_rotary_factor": 1.0}
    assert read_config(DEEPSEEK | {"rope_parameters": plain, "partial_rotary_factor": 1})[0].rope_theta == 1e6


def test_the_target_fills_in_its_name_and_depth(toy, tmp_path, caplog):
    drafter = tiny_drafter(toy)
    checkpoint.save(drafter, tmp_path / "drafter", torch.float32)
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    for key in ("target_model", "num_target_layers", "sample_from_anchor"):
        del raw[key]
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(raw))
    back = checkpoint.load(tmp_path / "drafter", toy)
    assert back.config == drafter.config
    assert [record.message for record in caplog.records] == [f"drafter: {note}" for note in back.notes]  # said aloud
    assert any("depth is not stated: 4" in note for note in back.notes)
    checkpoint.save(back, tmp_path / "again", torch.float32)  # and recorded
    assert json.loads((tmp_path / "again" / "config.json").read_text())["decided_on_reading"] == back.notes
    assert [fact for fact in inspect(tmp_path / "again").odd if "decided when it was read: sample_from" in fact]
    assert checkpoint.load(tmp_path / "again", toy).notes == []  # nothing is open any more


def test_only_a_rising_order_and_block_outputs_can_be_tapped():
    for ids in ([29, 1, 57], [0, 29, 57]):  # 0 is the embedding's output
        with pytest.raises(ValueError, match="target_layer_ids = "):
            read_config(KIMI | {"aux_hidden_state_layer_ids": ids})


def test_what_the_speculators_format_cannot_say_is_refused():
    causal = PRESETS["kimi-k2.6"].replace(is_causal=True)
    with pytest.raises(ValueError, match="no full attention that is causal"):
        formats.to_speculators(causal)
    sliding = causal.replace(sliding_layers=(0, 1, 2), sliding_window=64)
    assert read_config(formats.to_speculators(sliding))[0] == sliding
    rnn = PRESETS["kimi-k2.6"].replace(markov_head_type="rnn")
    with pytest.raises(ValueError, match="rnn head in the fill-in layout"):
        formats.to_speculators(rnn)
    with pytest.raises(ValueError, match="cannot be read from speculators"):
        read_config(KIMI | {"markov_head_type": "rnn"})


# ---- tensors that files have or have not


def test_own_embedding_and_head_travel_and_copies_of_the_targets_do_not(toy, tmp_path):
    """Pitfalls 17 and 42, through load and save."""
    drafter, folder = tiny_drafter(toy), tmp_path / "drafter"
    checkpoint.save(drafter, folder, torch.float32)
    tensors, head = load_file(folder / "model.safetensors"), torch.randn(VOCAB, 32)
    shared = {"embed_tokens.weight": toy.embed_tokens.clone(), "lm_head.weight": head}
    aside = {"verifier_lm_head.weight": torch.randn(VOCAB, 32), "verifier_norm.weight": torch.ones(32)}
    identity = {"d2t": torch.zeros(VOCAB, dtype=torch.long), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    save_file(tensors | shared | aside | identity, folder / "model.safetensors")
    back = checkpoint.load(folder, toy)
    assert back.own == {"lm_head.weight"} and sum("verifier" in note for note in back.notes) == 2
    checkpoint.save(back, tmp_path / "again", torch.float32)
    assert set(load_file(tmp_path / "again" / "model.safetensors")) == set(tensors) | {"lm_head.weight"}
    assert torch.equal(checkpoint.load(tmp_path / "again", toy).lm_head.weight, head)
    with pytest.raises(ValueError, match="speculators takes the embedding and a whole LM head from the target"):
        checkpoint.save(back, tmp_path / "third", format="speculators")
    save_file(tensors | {"d2t": identity["d2t"] + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="prune the vocabulary, config.json does not"):
        checkpoint.load(folder, toy)


def test_padding_for_vllm_must_be_zero(toy, tmp_path):
    drafter, folder = tiny_drafter(toy, markov_rank=0, confidence_head=False), tmp_path / "drafter"
    checkpoint.save(drafter, folder, torch.float32, format="vllm")
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert raw["markov_rank"] == formats.PADDING_RANK > 0
    assert not tensors["markov_head.markov_w2.weight"].any()
    assert checkpoint.load(folder, toy).config == drafter.config
    assert "its Markov head is all zero: padding, which vLLM needs" in inspect(folder).odd
    tensors["markov_head.markov_w2.weight"][3, 1] = 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="markov_w2.weight is called padding, but is not zero"):
        checkpoint.load(folder, toy)
    gated = tiny_drafter(toy, markov_rank=0, confidence_head=False, markov_head_type="gated")  # a type without a head
    checkpoint.save(gated, folder, torch.float32, format="vllm")
    assert checkpoint.load(folder, toy).config.markov_rank == 0


# ---- Eagle3 heads, for the baselines

_EAGLE = {
    "attention_bias": False, "head_dim": 8, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256,
    "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "vocab_size": VOCAB,
}  # fmt: skip
EAGLES = {
    "its authors'": _EAGLE | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 13},
    "eagle_config": _EAGLE | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 13,
                              "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
    "DeepSpec's": _EAGLE | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2],
                            "target_model_name_or_path": "tiny"},
    "speculators'": {"speculators_model_type": "eagle3", "draft_vocab_size": 13, "transformer_layer_config": _EAGLE,
                     "eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}  # fmt: skip


@pytest.mark.parametrize("raw", EAGLES.values(), ids=EAGLES)
def test_an_eagle3_head_is_read_in_each_format(raw, toy, tmp_path):
    shape = read_eagle3(raw, toy)
    assert (shape.num_attention_heads, shape.rope_theta, shape.num_hidden_layers) == (4, 1e4, 1)
    assert shape.draft_vocab_size == (13 if "draft_vocab_size" in raw else VOCAB)
    assert shape.aux_hidden_state_layer_ids == ((2, 2, 1) if raw is EAGLES["its authors'"] else (1, 2, 3))
    with pytest.raises(ValueError, match="Eagle3 head's, not a block drafter's"):
        read_config(raw)
    for changes, message in (({"head_dim": "8"}, "head_dim = '8' must be int"), ({"vocab_size": None}, "lacks")):
        layer = raw.get("transformer_layer_config")
        broken = raw | ({"transformer_layer_config": layer | changes} if layer else changes)
        with pytest.raises(ValueError, match=message):
            read_eagle3(broken)


# ---- anatomy


def test_a_broken_checkpoint_still_shows_its_anatomy(toy, tmp_path):
    folder = tmp_path / "drafter"
    checkpoint.save(tiny_drafter(toy, markov_head_type="gated", sample_from_anchor=False), folder, torch.float32)
    text = str(inspect(folder))
    assert "nothing odd" not in text and "float32" in text and "vanilla Markov heads" in text
    assert "num_speculative_tokens = 3" in text and "fill-in" in text
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, folder / "model.safetensors")
    assert any("missing tensors ['fc.weight']" in fact for fact in inspect(folder).odd)
    (folder / "model.safetensors").write_bytes(b"damaged")
    broken = inspect(folder)
    assert any("is damaged" in fact for fact in broken.odd) and not broken.tensors
    assert dict(broken.rows)["Markov head"] == "rank 8, gated"
    raw = json.loads((folder / "config.json").read_text())
    for decided in (5, "no list"):
        (folder / "config.json").write_text(json.dumps(raw | {"decided_on_reading": decided}))
        assert f"decided_on_reading = {decided!r} is no list of notes" in inspect(folder).odd
    (folder / "config.json").write_text(json.dumps(raw | {"block_size": "four"}))
    assert any("block_size = 'four' must be int" in fact for fact in inspect(folder).odd)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is no drafter's"):
        inspect(folder)


def test_a_kimi_shaped_drafter_is_inspected_without_weights():
    anatomy = inspect("kimi-k2.6")
    assert sum(count for _, count, _, _ in anatomy.parts) == len(anatomy.tensors) == 44
    assert sum(size for *_, size in anatomy.parts) == pytest.approx(6.3e9, rel=0.01)
    assert dict(anatomy.rows)["the same as aux ids"] == "1, 29, 57"
    assert anatomy.odd == ["vLLM drafts block_size = 8 tokens unless told num_speculative_tokens = 7"]


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as `inspect` asks for: one repository with the committed drafter's files."""

    sent = []

    def do_GET(self, body=True):
        name = self.path.removeprefix("/owner/drafter/resolve/main/")
        if name.startswith("/api/models/owner/drafter/tree/main?recursive=true"):
            return self.list_files()
        file = COMMITTED_DRAFTER / name
        if "/" in name or not file.is_file():
            return self.send_error(404)
        content, span = file.read_bytes(), self.headers.get("range")
        self.send_response(206 if span else 200)
        if span:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if body:
            self.sent.append(len(content))
            self.wfile.write(content)

    def list_files(self):
        files = [{"type": "file", "path": file.name, "size": 0, "oid": ""} for file in COMMITTED_DRAFTER.iterdir()]
        content = json.dumps(files).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET(body=False)

    def log_message(self, *_):
        pass


def test_a_checkpoint_is_inspected_by_its_hub_name_without_its_weights(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        code = "from dspark import inspect_checkpoint; inspect_checkpoint.main(['owner/drafter', '--tensors'])"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    here = str(inspect(COMMITTED_DRAFTER)).split("\n", 1)[1]
    assert done.stdout.startswith("owner/drafter" + "\n" + here) and "fc.weight" in done.stdout
    assert sum(Hub.sent) < 200_000  # of 30 million bytes


@pytest.fixture
def hub(monkeypatch):
    """Set what a call of huggingface_hub answers, or raises; its arguments must be those of the real one."""
    calls = ("hf_hub_download", "list_repo_files", "parse_safetensors_file_metadata", "snapshot_download")
    real = {call: getattr(huggingface_hub, call) for call in calls}

    def answer(call: str, answer):
        effect = {"side_effect": answer} if isinstance(answer, Exception) else {"return_value": answer}
        monkeypatch.setattr(huggingface_hub, call, create_autospec(real[call], **effect))

    answer("hf_hub_download", str(COMMITTED_DRAFTER / "config.json"))
    answer("snapshot_download", str(COMMITTED_DRAFTER))
    return answer


PICKLES = {
    "of the mask": (["config.json", "model.safetensors", "mask_embedding.pt"], "mask_embedding.pt is a pickle"),
    "alone": (["config.json", "pytorch_model.bin"], r"owner/drafter holds a pickle \(pytorch_model.bin\)"),
}


@pytest.mark.parametrize("files, message", PICKLES.values(), ids=PICKLES)
def test_a_pickle_on_the_hub_is_refused_like_one_in_a_folder(hub, files, message):
    hub("list_repo_files", files)
    with pytest.raises(ValueError, match=message):
        exchange.find("owner/drafter")
    huggingface_hub.snapshot_download.assert_not_called()
    anatomy = inspect("owner/drafter")
    assert not anatomy.tensors and re.search(message, anatomy.odd[0])


def test_what_was_fetched_before_is_found_without_a_network(hub):
    hub("list_repo_files", OfflineModeIsEnabled("offline"))
    assert exchange.find("owner/drafter") == COMMITTED_DRAFTER


@pytest.mark.parametrize("reason", ["All connection attempts failed\nsee there", ""])
def test_a_hub_that_cannot_be_reached_is_told_in_a_line(hub, reason, capsys, tmp_path, no_set_up):
    """The error of a broken connection is no OSError, and may say nothing."""
    for call in ("hf_hub_download", "list_repo_files", "snapshot_download"):
        hub(call, HTTPError(reason))
    assert main(["inspect", "owner/drafter"]) == main(["export", "owner/drafter", "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(f"the hub ({reason[:30] or 'HTTPError'})" in line for line in errors)


BAD_HEADERS = {
    "no safetensors": SafetensorsParsingError("header is\nno JSON"),
    "no object": AttributeError("'list' object has no attribute 'get'"),
    "a shape of words": type("Metadata", (), {"tensors": {"a": type("Info", (), {"shape": ["x"], "dtype": "F32"})}}),
}


@pytest.mark.parametrize("parsed", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_damaged_header_on_the_hub_is_odd(hub, parsed):
    hub("list_repo_files", ["config.json", "model.safetensors"])
    hub("parse_safetensors_file_metadata", parsed)
    anatomy = inspect("owner/drafter")
    assert anatomy.odd[0].startswith("owner/drafter is damaged: model.safetensors: ") and "\n" not in anatomy.odd[0]
    assert dict(anatomy.rows)["target"] == "smollm2-135m"


# ---- the card and the command line


def test_a_card_has_front_matter_recipe_metrics_and_a_serve_command(toy, tmp_path):
    history = tmp_path / "run"
    history.mkdir()
    recipe = {"drafter": {"block_size": 4}, "training": {"steps": 700, "lr": 0.002}, "response_tokens": 140979}
    (history / "recipe.json").write_text(json.dumps(recipe))
    (history / "heldout.csv").write_text("step,draft_tokens,tau_n3\n700,2512641,1.6425233\n")
    checkpoint.save(tiny_drafter(toy), tmp_path / "mine", format="vllm", history=history)
    assert json.loads((tmp_path / "mine" / "recipe.json").read_text()) == recipe
    _, front, text = (tmp_path / "mine" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "tiny" and "dspark" in yaml.safe_load(front)["tags"]
    for line in ("| response tokens | 140,979 |", "| lr | 0.002 |", "| 700 | 2,512,641 | 1.643 |"):
        assert line in text
    spoken = text.split("--speculative-config '")[1].split("'")[0]
    assert json.loads(spoken) == {"method": "dspark", "model": "mine", "num_speculative_tokens": 4}
    bare = card.model_card(tiny_drafter(toy).config, "native", None, "mine", 10)
    assert "Not recorded" in bare and "Nothing was measured" in bare  # rather than a number from elsewhere


@pytest.mark.parametrize("name", ["org/model; rm -rf ~ #", "$(reboot)", "`reboot`", "it's", "two words"])
def test_a_name_in_the_serve_command_is_a_word_and_no_command(toy, name):
    """The target's is what a checkpoint of anybody says, the drafter's the name of a folder."""
    shape = tiny_drafter(toy).config.replace(target=name)
    command = shlex.split(card.serve(shape, name, "native").splitlines()[0])
    assert command[:4] == ["vllm", "serve", name, "--speculative-config"] and len(command) == 5
    assert json.loads(command[4])["model"] == name


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb", "a\u202eb", "\x00"])
def test_a_target_whose_name_is_not_printable_is_refused(name):
    """It would reach the terminal and the card as it is."""
    escaped = re.escape(repr(name))
    for raw, read in ((DEEPSEEK | {"target_model": name}, read_config),
                      (EAGLES["DeepSpec's"] | {"target_model_name_or_path": name}, read_eagle3)):  # fmt: skip
        with pytest.raises(ValueError, match=f"target(_model)? = {escaped} must be str of printable characters"):
            read(raw)
    assert read_config(DEEPSEEK | {"target_model": "Größe/模型 1"})[0].target == "Größe/模型 1"


def test_the_committed_drafter_goes_out_and_comes_back_bit_for_bit(tmp_path, capsys, no_set_up):
    """export to speculators' format in shards, inspect, load for the real target, and write natively again."""
    out, back = tmp_path / "out", tmp_path / "back"
    options = ["--format", "speculators", "--shard-size", "9MB"]
    assert main(["export", str(COMMITTED_DRAFTER), "--out", str(out), *options]) == 0
    assert len(list(out.glob("model-0000?-of-0000?.safetensors"))) > 2 and (out / "log.csv").is_file()
    assert main(["inspect", str(out)]) == 0
    assert "speculators" in capsys.readouterr().out
    assert main(["load", str(out), "--out", str(back)]) == 0
    assert "all checks passed" in capsys.readouterr().out
    kept = load_file(COMMITTED_DRAFTER / "model.safetensors")
    returned = load_file(back / "model.safetensors")
    assert set(kept) == set(returned) and all(torch.equal(kept[name], returned[name]) for name in kept)
    native = [json.loads((folder / "config.json").read_text()) for folder in (COMMITTED_DRAFTER, back)]
    assert read_config(native[0]) == read_config(native[1])


def test_a_missing_markov_head_is_stood_in_for_in_the_format_that_does_so(toy, tmp_path, capsys, no_set_up):
    checkpoint.save(tiny_drafter(toy, markov_rank=0, confidence_head=False), tmp_path / "drafter", torch.float32)
    lacking, padded = "there is none here: --format vllm writes", "its Markov head is all zero: padding"
    for format in formats.FORMATS:
        assert main(["export", str(tmp_path / "drafter"), "--out", str(tmp_path / format), "--format", format]) == 0
        text = (tmp_path / format / "README.md").read_text()
        assert (lacking in text, padded in text) == (format != "vllm", format == "vllm")
        assert (f"note: vLLM needs a Markov head and {lacking}" in capsys.readouterr().out) == (format != "vllm")


def test_wrong_requests_are_told_in_a_line(tmp_path, capsys, no_set_up):
    assert main(["load", str(tmp_path / "nowhere")]) == 2
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "no folder here and not reachable on the hub" in errors[0]
    assert f"no drafter in {tmp_path.name}: config.json is missing" in errors[1]
    assert not (tmp_path / "out").exists() and exchange.find(str(tmp_path)) == tmp_path
