"""vLLM as an engine of the sweep: the command it is given, how its faults are told, and, slow, a whole sweep."""

import io
import json
from contextlib import nullcontext
from dataclasses import replace

import pandas as pd
import pytest
import torch

from dspark import baselines, evaluate, vllm_engine
from dspark.baselines import eagle3_config
from dspark.config import PRESETS
from dspark.data import Sample, load_prompts
from dspark.decode import Answer, answer
from dspark.evaluate import COMMITTED_DRAFTER, SweepConfig, sweep
from dspark.initial import new_drafter
from dspark.serve import Command
from dspark.source import LocalSource
from dspark.train import TrainConfig, Trainer

SETS = ("own-gsm8k", "own-humaneval")
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
    environments = [vllm_engine.server_command(CONFIG, source, 4, 9, 1).environment
                    for source in (str(COMMITTED_DRAFTER), "prompt-lookup", None)]  # fmt: skip
    assert ["TRITON_INTERPRET" in e for e in environments] == [not vllm_engine.has_gpu(), False, False]
    assert given["--max-num-seqs"] == "1"
    many = vllm_engine.server_command(replace(CONFIG, concurrency=8), None, 0, 9, 1).argv
    assert many[many.index("--max-num-seqs") + 1] == "8"
    with pytest.raises(ValueError, match="concurrency = 8: .* more than 1 needs engine vllm"):
        SweepConfig("test", concurrency=8)
    more = SweepConfig("test", vllm_args="--tensor-parallel-size 8 --trust-remote-code")
    assert vllm_engine.server_command(more, None, 0, 9, 1).argv[-3:] == more.vllm_args.split()
    assert vllm_engine._judge(more) is None  # a target on eight GPUs is not loaded a second time


def test_the_record_names_vllms_version_whatever_its_wheel_is_called():
    packages = evaluate.run_metadata(CONFIG, "now", 1.0)["packages"]
    assert packages["vllm"].startswith("0.32") and packages["torch"]


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
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

    registry = CollectorRegistry()
    for name, value in (("drafts", 5), ("draft_tokens", 20), ("accepted_tokens", 7)):
        Counter(f"vllm:spec_decode_num_{name}", "", ["engine"], registry=registry).labels("0").inc(value)
    place = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "", ["engine", "position"], registry=registry)
    for position, value in ((10, 1), (0, 4), (2, 2)):
        place.labels("0", str(position)).inc(value)
    latency = Histogram("vllm:inter_token_latency_seconds", "", ["engine"], registry=registry).labels("0")
    for seconds in (0.1, 0.1, 60.0):
        latency.observe(seconds)
    (tmp_path / "metrics").write_bytes(generate_latest(registry))
    assert vllm_engine.counters(tmp_path.as_uri()) == {
        "steps": 3, "drafts": 5, "draft_tokens": 20, "accepted_tokens": 7, "accepted_tokens_per_pos": [4, 2, 1],
    }  # fmt: skip


@pytest.mark.parametrize("counted, fault", [(0, "drafted nothing"), (99, "is another client there")])
def test_silent_or_foreign_drafts_are_errors(monkeypatch, tmp_path, counted, fault):
    names = ("steps", "drafts", "draft_tokens", "accepted_tokens")
    totals = iter([dict.fromkeys(names, count) for count in (0, 0, 0, counted)])  # before and after all, and the one
    monkeypatch.setattr(vllm_engine, "server", lambda *_: nullcontext("url"))
    monkeypatch.setattr(vllm_engine, "counters", lambda url: next(totals))
    monkeypatch.setattr(vllm_engine, "ask", lambda *_: (Answer([1, 2], [0], [0]), {}))
    with pytest.raises(RuntimeError, match=fault):
        vllm_engine.answers(CONFIG, "prompt-lookup", 3, {("own-gsm8k", 0): [1]}, [2], tmp_path)


STEPS = {  # of an answer of 10 tokens: accepted and drafted of the steps with a draft, and how many there were in all
    "whole": ([2, 0], [3, 1], 7),
    "cut": ([2, 4], [3, 4], 5),  # 1 token of the prefill, 3 of a step, three steps of one, 3 of the last step's 5
}


@pytest.mark.parametrize("accepted, drafted, steps", STEPS.values(), ids=STEPS)
def test_steps_without_a_draft_count_as_steps(monkeypatch, tmp_path, accepted, drafted, steps):
    """Behind a last step that went beyond the answer's end too, where only vLLM's count of steps tells of them."""
    said = {"choices": [{"token_ids": list(range(10))}],
            "metrics": {"speculative_decoding": {"per_step_accepted": accepted, "per_step_drafted": drafted},
                        "time_to_first_token_ms": 5.0, "mean_itl_ms": 1.0}}  # fmt: skip
    total = {"steps": steps, "drafts": 2, "draft_tokens": sum(drafted), "accepted_tokens": sum(accepted)}
    counted = iter([dict.fromkeys(total, 0)] * 2 + [total] * 2)
    monkeypatch.setattr(vllm_engine, "open_url", lambda *_, **__: io.BytesIO(json.dumps(said).encode()))
    monkeypatch.setattr(vllm_engine, "server", lambda *_: nullcontext("http://nowhere"))
    monkeypatch.setattr(vllm_engine, "counters", lambda url: next(counted))
    got, _ = vllm_engine.answers(CONFIG, "prompt-lookup", 4, {"key": [1]}, [2], tmp_path)["key"]
    plain = [0] * (steps - 2)
    assert got.drafted == drafted + plain and got.accepted == accepted + plain
    cut = 2 if accepted == [2, 4] else 0
    assert 1 + sum(got.accepted) + got.steps - cut == len(got.tokens)


def test_of_answers_at_once_those_get_the_hidden_steps_that_can_have_them():
    """An answer whose last draft was refused was not cut; one can hide no more steps than its last accepted tokens."""
    whole, cut = Answer([1] * 3, [3, 0], [0, 0]), Answer([1] * 10, [3, 4, 0], [2, 4, 0])
    vllm_engine.settle([whole, cut], 7)
    assert (whole.steps, cut.steps) == (2, 5)
    vllm_engine.settle([whole, cut], 99)  # the rest is left to the caller, who compares
    assert (whole.steps, cut.steps) == (2, 7)


@pytest.fixture
def eagle3(target, tmp_path):
    """An Eagle3 head that has seen the answers for a minute, so that some of its drafts are accepted."""
    samples = []
    for name in SETS:
        chat = target.encode_chat([{"role": "user", "content": load_prompts(name, 1).prompts[0]}])
        ids = torch.tensor(chat + answer(target, None, chat, 0, 30).tokens)
        samples.append(Sample(ids, torch.arange(len(ids)) >= len(chat)))
    config = TrainConfig(
        steps=30, micro_batches=1, anchors=64, block_sizes=(4,), dtype="float32", warmup_steps=2, ce_weight=1.0,
        kl_weight=0.0, save_every=1000, heldout_every=1000,
    )  # fmt: skip
    drafter = new_drafter(eagle3_config(PRESETS["smollm2-135m"], latent=False), target, samples, 0)
    run = Trainer(drafter, target, LocalSource(target, samples, tmp_path), [], config, tmp_path / "run")
    run.run()
    baselines.save(run.inference_drafter(), tmp_path / "eagle3", torch.float32)
    return tmp_path / "eagle3"


@pytest.mark.slow
def test_requests_at_once_get_the_answers_that_they_get_alone(tmp_path, monkeypatch):
    """Prompt lookup, which runs natively: three prompts by three at once, the counters still their sum."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # of the tests' own kernels; the server would inherit it
    config = replace(CONFIG, prompts=3, n_values=(3,), drafters={"prompt-lookup": "prompt-lookup"})
    alone, together = (sweep(replace(config, concurrency=c), tmp_path / str(c)) for c in (1, 3))
    counts = ["drafter", "n", "output_tokens", "mismatches"]
    pd.testing.assert_frame_equal(alone[counts], together[counts])
    assert (together.concurrency == 3).all() and (together.mismatches == 0).all()


@pytest.mark.slow
def test_both_engines_agree_on_every_step(eagle3, tmp_path):
    """On one prompt of two sets: the same texts, the same accepted drafts at every step; without a GPU no speed."""
    drafters = {"dspark": str(COMMITTED_DRAFTER), "eagle3": str(eagle3)}  # prompt lookup matches by other rules there
    config = replace(CONFIG, benchmarks=SETS, n_values=(4,), drafters=drafters)
    theirs, ours = sweep(config, tmp_path / "vllm"), sweep(replace(config, engine="dspark"), tmp_path / "own")
    counts = ["drafter", "benchmark", "output_tokens", "steps", "drafted", "accepted", "tau", "mismatches"]
    pd.testing.assert_frame_equal(theirs[counts], ours[counts])
    assert (theirs.mismatches == 0).all() and (theirs[theirs.n > 0].tau > 1.3).all()
    steps = [[json.loads(line)["accepted"] for line in (tmp_path / engine / "records.jsonl").open()]
             for engine in ("vllm", "own")]  # fmt: skip
    assert sorted(steps[0]) == sorted(steps[1])
    assert theirs.speedup.notna().all() if vllm_engine.has_gpu() else theirs.speedup.isna().all()
