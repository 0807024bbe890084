"""The training benchmark: both trainers take a real step on the same documents and book their time."""

import importlib.util
import json

import pytest

from dspark import bench_train

PEER = pytest.mark.skipif(importlib.util.find_spec("speculators") is None, reason="speculators is not installed")


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "data.jsonl"
    rows = []
    for i in range(6):
        words = " ".join(f"{k} times {i} is {k * i}." for k in range(1, 13))
        talk = [{"role": "user", "content": f"Recite the table of {i}."}, {"role": "assistant", "content": words}]
        rows.append(json.dumps({"messages": talk, "split": "train"}))
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("trainer", ["dspark", pytest.param("speculators", marks=PEER)])
def test_a_trainer_steps_and_books_its_time(trainer, conversations, tmp_path, monkeypatch):
    monkeypatch.setattr(bench_train, "cache_dir", lambda: tmp_path)
    row = bench_train.measure(trainer, conversations, 1)
    assert row["draft_tokens"] > 500 and row["peak_memory_mb"] > 0
    assert all(row[stage] > 0 for stage in bench_train.STAGES)
