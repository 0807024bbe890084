"""The search trains each trial once, with its change and nothing else changed."""

import dataclasses
import json

import pandas as pd
import pytest
import torch

import dspark.train
from dspark import search
from dspark.config import PRESETS
from dspark.decode import heldout_tau
from dspark.kernels import cpu
from dspark.train import TrainConfig

QUICK = {"steps": 1, "micro_batches": 1, "row_tokens": 96, "anchors": 4, "heldout_every": 1, "save_every": 1,
         "heldout_prompts": 1, "dtype": "float32"}  # fmt: skip


@pytest.fixture
def data(tmp_path):
    def row(split, text):
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes, of course it is."}]
        return json.dumps({"split": split, "messages": chat})

    path = tmp_path / "data.jsonl"
    path.write_text(row("train", "Is it so?") + "\n" + row("heldout", "Is this so?") + "\n")
    return [path]


def test_every_trial_changes_what_it_says():
    base, training = PRESETS["smollm2-135m"], TrainConfig(anchors=160, block_sizes=(3, 5, 7, 8))
    for name, (of_shape, of_training) in search.TRIALS.items():
        shape, config = base.replace(**of_shape), dataclasses.replace(training, **of_training)
        assert (shape == base and config == training) == (name == "base"), name


def test_no_trial_trains_on_longer_blocks_than_its_shape_drafts(data, tmp_path, monkeypatch):
    trained = []

    def trial(shape, training, data, folder):
        folder.mkdir(parents=True)
        trained.append(training.block_sizes)
        return {"tau_n3": 1.0}

    monkeypatch.setattr(search, "trial", trial)
    monkeypatch.setattr(search, "cache_dir", lambda: tmp_path)
    names = ["base", "whole blocks only"]
    for preset in ("smollm2-135m", "qwen3-0.6b"):
        search.main(["--preset", preset, "--data", str(data[0]), "--out", str(tmp_path / preset), "--trials", *names])
    assert trained == [(3, 5, 7, 8), (8,), (3, 5, 7), (7,)]  # the default's as ever: they are part of a run's name
    assert pd.read_csv(tmp_path / "qwen3-0.6b" / "trials.csv").changed.tolist() == ["{}", '{"block_sizes": [7]}']
    assert search.block_sizes(PRESETS["smollm2-135m"].replace(block_size=2)) == (2,)


def test_a_search_goes_on_where_it_stopped(data, tmp_path, monkeypatch):
    base = PRESETS["smollm2-135m"].replace(draft_vocab_size=64, intermediate_size=32)
    first = search.search(base, QUICK, ["base"], data, tmp_path / "out")
    trained, train = [], search.train

    def watch(target, shape, config, *rest):
        trained.append((shape.num_hidden_layers, config.matrix_optimizer))
        return train(target, shape, config, *rest)

    decoded, tau = set(), heldout_tau  # by the kernels, where they serve, though the training is in float32
    monkeypatch.setattr(search, "train", watch)
    monkeypatch.setattr(dspark.train, "heldout_tau", lambda *args: decoded.add(args[0].dtype) or tau(*args))
    names = ["base", "1 layer", "AdamW on the matrices"]
    table = search.search(base, QUICK, names, data, tmp_path / "out")
    assert trained == [(1, "muon"), (2, "adamw")] and table.trial.tolist() == names
    pd.testing.assert_frame_equal(table.iloc[:1], first)
    assert table.parameters[1] < table.parameters[0] == table.parameters[2]
    assert (table.draft_tokens > 0).all() and table[["tau_n3", "tau_n7"]].ge(1).all(axis=None)
    assert search.search(base, QUICK | {"seed": 1}, ["base"], data, tmp_path / "out").trial.tolist() == ["base"]
    assert decoded == {torch.bfloat16 if cpu.available() else torch.float32}
    assert len(trained) == 3 and len(pd.read_csv(tmp_path / "out" / "trials.csv")) == 4
