"""Streaming from targets of other kinds, tiny and random, in vLLM: latent attention, sliding windows; and the ends."""

import json
import os
import subprocess
import sys

import pytest
import tiny_verifiers
import torch
import zmq

from dspark.paths import ROOT
from dspark.target import embedded_target
from dspark.target_ends import TargetEnds
from dspark.wire import decode


@pytest.mark.parametrize("kind", ["sliding", "mla"])
def test_every_row_is_right_for_targets_of_other_kinds(kind, tmp_path):
    """Chunks of 16 tokens, then the prefix cache, where vLLM has them; within 1e-5 of each layer's largest state, in
    float32."""
    model = tiny_verifiers.build(kind, tmp_path)
    with zmq.Context.instance().socket(zmq.PULL) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        command = [sys.executable, str(ROOT / "tests" / "tiny_verifiers.py"), kind, str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, f"tcp://127.0.0.1:{port}"], env=environment, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        got = {}
        while socket.poll(1000):
            sample = decode([part.buffer for part in socket.recv_multipart(copy=False)])
            assert sample.sample_id not in got
            got[sample.sample_id] = sample
    told = json.loads(next(line[5:] for line in done.stdout.splitlines() if line.startswith("TOLD ")))
    assert kind == "mla" or sum(told["cached"][4:]) > 0
    assert kind == "mla" or told["groups"][-1] == "HiddenStateCacheSpec"
    assert sorted(got) == [f"{10 * again + number:08d}" for again in range(2) for number in range(4)]
    for name, sample in got.items():
        ids = torch.tensor(tiny_verifiers.PROMPTS[int(name) % 10])
        assert torch.equal(sample.token_ids.long(), ids) and sample.layer_ids == tiny_verifiers.LAYERS
        with torch.inference_mode():
            states = model(ids[None], output_hidden_states=True).hidden_states
            mine = [sample.states[:, 0], sample.states[:, 1], model.model.norm(sample.states[:, 2])]
        for a, b in zip(mine, (states[1][0], states[3][0], states[-1][0]), strict=True):
            assert float((a - b).abs().max() / b.abs().max()) < 1e-5


# ---- the two ends of a target


def test_the_ends_of_the_real_target_are_its_own(target):
    ends = TargetEnds("smollm2-135m", torch.float32, "cpu", target.layer_ids)
    for name in ("embed_tokens", "lm_head", "final_norm"):
        assert torch.equal(getattr(ends, name), getattr(target, name))
    same = (
        "name",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "eps",
        "eos_token_ids",
        "layer_ids",
        "dtype",
        "device",
    )
    assert all(getattr(ends, name) == getattr(target, name) for name in same)
    assert ends.max_position_embeddings == target.max_position_embeddings
    chat = [{"role": "user", "content": "Hi"}]
    assert ends.encode_chat(chat) == target.encode_chat(chat)
    assert ends.lm_head.data_ptr() == ends.embed_tokens.data_ptr()  # tied: held once


def test_the_ends_are_found_in_shards_and_under_a_prefix(tmp_path):
    from safetensors.torch import save_file

    tensors = {name: torch.randn(*shape) for name, shape in (
        ("language_model.model.embed_tokens.weight", (8, 4)), ("language_model.model.norm.weight", (4,)),
        ("language_model.lm_head.weight", (8, 4)), ("language_model.model.layers.0.input_layernorm.weight", (4,)),
    )}  # fmt: skip
    shards = {name: f"model-{k}.safetensors" for k, name in enumerate(tensors)}
    for name, file in shards.items():
        save_file({name: tensors[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    text = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "eos_token_id": [3, 4],
            "max_position_embeddings": 16}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of its own", "text_config": text}))
    ends = TargetEnds(str(tmp_path), torch.float32)
    assert torch.equal(ends.lm_head, tensors["language_model.lm_head.weight"]) and ends.eos_token_ids == {3, 4}
    assert torch.equal(ends.final_norm, tensors["language_model.model.norm.weight"]) and ends.tokenizer is None
    del shards["language_model.model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match="has 0 tensors named .*norm.*: its ends cannot be told"):
        TargetEnds(str(tmp_path), torch.float32)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(OSError, match="has no config.json"):
        TargetEnds(str(tmp_path))
    assert (embedded_target() / "config.json").exists()
