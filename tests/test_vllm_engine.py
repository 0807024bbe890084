"""vLLM as an engine of the sweep: the command it is given, how its faults are told, and, slow, a whole sweep."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark import vllm_engine
from dspark.evaluate import COMMITTED_DRAFTER, SweepConfig, sweep
from dspark.serve import Command

CONFIG = SweepConfig("test", engine="vllm", max_new_tokens=24, dtype="float32", benchmarks=("own-gsm8k",), prompts=1)


def test_every_drafter_names_its_method(tmp_path):
    assert vllm_engine.speculative_config(None, 0) is None
    lookup = vllm_engine.speculative_config("prompt-lookup", 3)
    assert (lookup["method"], lookup["num_speculative_tokens"], lookup["prompt_lookup_max"]) == ("ngram", 3, 3)
    dspark = vllm_engine.speculative_config(str(COMMITTED_DRAFTER), 4)
    assert dspark == {"method": "dspark", "model": str(COMMITTED_DRAFTER), "num_speculative_tokens": 4}
    for raw, method in (
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "eagle3"),
        ({"speculators_model_type": "dspark"}, "dspark"),
        ({"speculators_model_type": "dflash"}, "dflash"),
        ({"architectures": ["DFlashDraftModel"]}, "dflash"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert vllm_engine.speculative_config(str(tmp_path), 3)["method"] == method
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"], "markov_rank": 0}))
    with pytest.raises(ValueError, match="has no Markov head, which vLLM needs: export it in the format `vllm`"):
        vllm_engine.speculative_config(str(tmp_path), 3)


def test_the_command_states_what_is_measured():
    argv = vllm_engine.server_command(CONFIG, str(COMMITTED_DRAFTER), 4, 100, 8123).argv
    given = dict(zip(argv[3::1], argv[4::1], strict=False))
    assert argv[1:3] == ["-m", "dspark.vllm_engine"] and given["--port"] == "8123" and given["--dtype"] == "float32"
    assert (
        given["--max-model-len"] == str(100 + 24 + 4 + 1) and given["--per-request-spec-decode-metrics"] == "detailed"
    )
    assert json.loads(given["--speculative-config"])["num_speculative_tokens"] == 4
    plain = vllm_engine.server_command(CONFIG, None, 0, 100, 8123).argv
    assert "--speculative-config" not in plain and "--per-request-spec-decode-metrics" not in plain
    more = SweepConfig("test", vllm_args="--tensor-parallel-size 8 --trust-remote-code")
    assert vllm_engine.server_command(more, None, 0, 9, 1).argv[-3:] == more.vllm_args.split()
    assert vllm_engine._judge(more) is None  # a target on eight GPUs is not loaded a second time


@pytest.mark.parametrize("log, wanted", [
    ("INFO hello\n(EngineCore pid=1) ERROR [core.py:1] ValueError: no Triton.\nRuntimeError: see above\n",
     "ValueError: no Triton."),
    ("WARNING limits like `OSError: too many`\nValidationError: 1 error for VllmConfig\n  Value error, no method\n",
     "ValidationError: 1 error for VllmConfig: Value error, no method"),
    ("Killed\n", "Killed"),
    ("", "its log is empty"),
])  # fmt: skip
def test_a_log_tells_its_cause(tmp_path, log, wanted):
    (tmp_path / "vllm.log").write_text(log)
    assert vllm_engine.cause(tmp_path / "vllm.log") == wanted
    assert vllm_engine.cause(tmp_path / "none.log") == "its log is empty"


def test_a_server_that_does_not_start_is_an_error_with_its_cause(tmp_path, monkeypatch):
    """A real process that says why and ends."""
    says = "import sys; print('ERROR ValueError: no such model'); sys.exit(1)"
    monkeypatch.setattr(vllm_engine, "server_command", lambda *_: Command([vllm_engine.sys.executable, "-c", says], {}))
    with pytest.raises(RuntimeError, match=r"vLLM did not start \(vllm-plain\): ValueError: no such model"):
        sweep(CONFIG, tmp_path)
    assert not (tmp_path / "n_sweep.csv").exists() and (tmp_path / "records.jsonl").read_text() == ""


def test_counters_are_read_as_vllm_writes_them(monkeypatch, tmp_path):
    """Through vLLM's own metrics library: names, totals, and positions in order."""
    from prometheus_client import CollectorRegistry, Counter, generate_latest

    registry = CollectorRegistry()
    for name, value in (("drafts", 5), ("draft_tokens", 20), ("accepted_tokens", 7)):
        Counter(f"vllm:spec_decode_num_{name}", "", ["engine"], registry=registry).labels("0").inc(value)
    place = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "", ["engine", "position"], registry=registry)
    for position, value in ((10, 1), (0, 4), (2, 2)):
        place.labels("0", str(position)).inc(value)
    (tmp_path / "metrics").write_bytes(generate_latest(registry))
    assert vllm_engine.counters(tmp_path.as_uri()) == {
        "drafts": 5, "draft_tokens": 20, "accepted_tokens": 7, "accepted_tokens_per_pos": [4, 2, 1],
    }  # fmt: skip


@pytest.mark.parametrize("counted, fault", [(0, "drafted nothing"), (99, "is another client there")])
def test_silent_or_foreign_drafts_are_errors(monkeypatch, tmp_path, counted, fault):
    from contextlib import nullcontext

    from dspark.decode import Answer

    totals = iter([dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), k) for k in (0, counted)])
    monkeypatch.setattr(vllm_engine, "server", lambda *_: nullcontext("url"))
    monkeypatch.setattr(vllm_engine, "counters", lambda url: next(totals))
    monkeypatch.setattr(vllm_engine, "ask", lambda *_: (Answer([1, 2], [0], [0]), {}))
    with pytest.raises(RuntimeError, match=fault):
        vllm_engine.answers(CONFIG, "prompt-lookup", 3, {("own-gsm8k", 0): [1]}, [2], tmp_path)


def test_steps_without_a_draft_count_as_steps(monkeypatch):
    said = {"choices": [{"token_ids": list(range(10))}],
            "metrics": {"speculative_decoding": {"per_step_accepted": [2, 0], "per_step_drafted": [3, 1]},
                        "time_to_first_token_ms": 5.0, "mean_itl_ms": 1.0}}  # fmt: skip
    reply = SimpleNamespace(read=lambda: json.dumps(said), __enter__=None)

    class Reply:
        def __enter__(self):
            return reply

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(vllm_engine.urllib.request, "urlopen", lambda *_, **__: Reply())
    answer, _ = vllm_engine.ask("http://nowhere", CONFIG, [1], [2])
    assert answer.drafted == [3, 1, 0, 0, 0, 0, 0] and answer.accepted == [2, 0, 0, 0, 0, 0, 0]
    assert 1 + sum(answer.accepted) + answer.steps == len(answer.tokens)


@pytest.mark.slow
def test_both_engines_agree_on_every_step(tmp_path):
    """On one prompt of two sets: the same texts, the same accepted drafts; without a GPU no speed."""
    config = SweepConfig(
        "test", engine="vllm", benchmarks=("own-gsm8k", "own-humaneval"), prompts=1, n_values=(4,), max_new_tokens=24,
        dtype="float32", drafters={"dspark": str(COMMITTED_DRAFTER), "prompt-lookup": "prompt-lookup"},
    )  # fmt: skip
    theirs = sweep(config, tmp_path / "vllm").set_index(["drafter", "benchmark"])
    ours = sweep(SweepConfig(**{**vars(config), "engine": "dspark"}), tmp_path / "own").set_index(theirs.index.names)
    assert (theirs.mismatches == 0).all() and (theirs.output_tokens == ours.output_tokens).all()
    assert theirs.tau["dspark"].tolist() == ours.tau["dspark"].tolist()
    assert theirs.accepted["dspark"].tolist() == ours.accepted["dspark"].tolist()
    assert not vllm_engine.has_gpu() and theirs.speedup.isna().all() or theirs.speedup.notna().all()
    assert Path(tmp_path / "vllm" / "vllm-plain.log").exists()
