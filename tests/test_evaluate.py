"""The sweep: every drafter lossless beside one baseline, only what is missing is measured, answers are checked."""

import json
import math
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark import baselines, evaluate
from dspark.answers import final_answer, is_correct
from dspark.config import PRESETS
from dspark.data import PromptSet, load_prompts, render, revision_of
from dspark.decode import Answer
from dspark.eagle3 import Eagle3Drafter
from dspark.evaluate import COMMITTED_BASELINES, COMMITTED_DRAFTER, SweepConfig, sweep
from dspark.records import record_of, tabulate

TALK = "Is 12 even?\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.fixture(scope="module")
def eagle3(target, tmp_path_factory):
    """A folder with an untrained Eagle3 drafter of other taps than the committed DSpark's."""
    torch.manual_seed(0)
    shape = PRESETS["smollm2-135m"].replace(draft_vocab_size=256, target_layer_ids=(3, 9))
    drafter = Eagle3Drafter(baselines.eagle3_config(shape, latent=True))
    drafter.adopt_target(target.embed_tokens, target.lm_head, torch.arange(100, 356))
    folder = tmp_path_factory.mktemp("drafters") / "eagle3-mla"
    baselines.save(drafter, folder)
    return folder


# ---- the sweep itself, on the embedded target


def test_several_drafters_share_a_sweep_which_resumes(eagle3, tmp_path):
    drafters = {"dspark": str(COMMITTED_DRAFTER), "prompt-lookup": "prompt-lookup", "eagle3-mla": str(eagle3)}
    config = SweepConfig(
        "test", drafters=drafters, benchmarks=("own-gsm8k",), prompts=1, n_values=(2, 3), max_new_tokens=10,
        dtype="float32", n_of={"eagle3-mla": (2,), "prompt-lookup": (3,)},
    )  # fmt: skip
    table = sweep(config, tmp_path)
    cells = [("autoregressive", 0), ("dspark", 2), ("dspark", 3), ("prompt-lookup", 3), ("eagle3-mla", 2)]
    assert list(zip(table.drafter, table.n, strict=True)) == cells
    assert (table.mismatches == 0).all() and (table.engine == "dspark").all()  # float32: token for token
    assert (table.output_tokens == 10).all() and (table.prompts == 1).all() and table.accuracy.isna().all()
    drafted = table[table.n > 0]
    positions = drafted.filter(like="accept_pos_").sum(axis=1)
    pd.testing.assert_series_equal(drafted.tau, 1 + positions, check_names=False)
    assert drafted.set_index("drafter").tau["dspark"].max() > 1
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 4 and {json.loads(line)["thinking"] for line in lines} == {None}
    assert len({json.loads(line)["rendered"] for line in lines}) == 1
    (tmp_path / "records.jsonl").write_text("".join(lines[1:]) + lines[0][:30])  # one lost, one cut by a kill
    again = sweep(config, tmp_path)
    assert (tmp_path / "records.jsonl").read_text().startswith("".join(lines[1:]))
    shown = ["drafter", "n", "tau", "drafted", "accepted"]
    pd.testing.assert_frame_equal(again[shown], table[shown])
    for other in ({"thinking": False}, {"max_new_tokens": 11}, {"seed": 1}):
        with pytest.raises(ValueError, match=f"another run .*{next(iter(other))}"):
            sweep(replace(config, **other), tmp_path)


def test_a_scheduled_drafter_verifies_what_pays_and_changes_no_answer(tmp_path):
    folder, scheduled = str(COMMITTED_DRAFTER), ["dspark-scheduled", "dspark-by-probability"]
    config = SweepConfig(
        "test", drafters=dict.fromkeys(["dspark", *scheduled], folder), benchmarks=("own-gsm8k",), prompts=1,
        n_values=(7,), max_new_tokens=16, dtype="float32", scheduled=(scheduled[0],),
        scheduled_by_probability=(scheduled[1],),
    )  # fmt: skip
    dear = [{"drafts": 7, "requests": 1, "tokens": 1 + j, "step_ms": 20 + 4 * j, "drafter": scheduled[0]}
            for j in range(8)]  # fmt: skip
    pd.DataFrame(dear).to_csv(tmp_path / "scheduler_costs.csv", index=False)  # measured before: of both, never again
    table = sweep(config, tmp_path).set_index("drafter")
    assert pd.read_csv(tmp_path / "scheduler_costs.csv").to_dict("records") == dear
    assert (table.mismatches == 0).all() and table.output_tokens.nunique() == 1
    assert table.drafted["dspark"] == 7 * table.steps["dspark"]
    assert all(table.drafted[name] < 7 * table.steps[name] for name in scheduled)
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    kinds = {"dspark": False, "dspark-scheduled": True, "dspark-by-probability": "by probability"}
    assert {r["drafter"]: r["scheduled"] for r in records} == kinds
    with pytest.raises(ValueError, match="another run .*scheduled"):
        sweep(replace(config, scheduled=()), tmp_path)
    with pytest.raises(ValueError, match="scheduled = .*nobody.*the drafters are dspark"):
        replace(config, scheduled=("nobody",))
    with pytest.raises(ValueError, match="vLLM verifies every draft"):
        replace(config, engine="vllm")
    bare = replace(config, drafters={"prompt-lookup": "prompt-lookup"}, scheduled=("prompt-lookup",),
                   scheduled_by_probability=())  # fmt: skip
    with pytest.raises(ValueError, match="scheduled drafter prompt-lookup tells no confidence"):
        sweep(bare, tmp_path / "bare")
    dflash = {"dflash": str(COMMITTED_BASELINES["dflash"])}
    bare = replace(config, drafters=dflash, scheduled=("dflash",), scheduled_by_probability=())
    with pytest.raises(ValueError, match="scheduled drafter dflash has no confidence head: .* by its probabilities"):
        sweep(bare, tmp_path / "bare")


def test_a_drafter_trained_on_is_another_drafter(tmp_path):
    """Its name and folder stay, its weights do not: what was measured of it before is not taken over."""
    folder = tmp_path / "drafter"
    shutil.copytree(COMMITTED_DRAFTER, folder)
    config = SweepConfig(
        "test", drafters={"mine": str(folder)}, benchmarks=("own-gsm8k",), prompts=1, n_values=(2,), max_new_tokens=4
    )
    before = sweep(config, tmp_path / "run")
    pd.testing.assert_frame_equal(sweep(config, tmp_path / "run"), before)  # resumed, nothing measured anew
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")
    evaluate.weights_digest.cache_clear()
    with pytest.raises(ValueError, match="another run .*weights"):
        sweep(config, tmp_path / "run")
    sweep(config, tmp_path / "run", fresh=True)


def test_a_sweep_shows_and_compares_its_own_cells_only(tmp_path, capsys):
    """A folder that holds more n and benchmarks than the sweep asks for: neither tables nor comparisons mix them in."""
    run = ["--profile", "test", "--drafter", "prompt-lookup", "--prompts", "1", "--max-new-tokens", "6", "--out"]
    run.append(str(tmp_path))
    evaluate.main([*run, "--n", "3", "--benchmark", "own-gsm8k", "own-aime"])
    evaluate.main([*run, "--n", "3", "7", "--benchmark", "own-gsm8k"])
    assert set(pd.read_csv(tmp_path / "n_sweep.csv").benchmark) == {"own-gsm8k"}
    (change,) = pd.read_csv(tmp_path / "paired_change.csv").to_dict("records")
    assert (change["drafter"], change["n_low"], change["n_high"]) == ("prompt-lookup", 3, 7)


def test_more_drafts_than_the_table_has_columns_are_refused_at_once():
    with pytest.raises(ValueError, match="n = 9: the tables have columns for the positions 1..8"):
        SweepConfig("test", drafters={"prompt-lookup": "prompt-lookup"}, n_of={"prompt-lookup": (3, 9)})


def test_step_costs_are_measured_once_a_sweep(tmp_path):
    folder = str(COMMITTED_DRAFTER)
    config = SweepConfig(
        "test", drafters={"dspark": folder}, benchmarks=("own-gsm8k",), prompts=1, n_values=(2,), max_new_tokens=4,
        dtype="float32", scheduled=("dspark",),
    )  # fmt: skip
    sweep(config, tmp_path)
    costs = pd.read_csv(tmp_path / "scheduler_costs.csv")
    assert costs[["drafter", "drafts", "tokens"]].to_numpy().tolist() == [["dspark", 2, 1 + j] for j in range(3)]
    assert (costs.step_ms > 0).all()
    sweep(replace(config, n_values=(2, 3)), tmp_path)  # resumed with another n: only that one is measured
    more = pd.read_csv(tmp_path / "scheduler_costs.csv")
    pd.testing.assert_frame_equal(more[:3], costs)
    assert more.drafts.tolist() == [2] * 3 + [3] * 4


def test_a_drafter_that_is_not_there_or_too_short_is_named(tmp_path):
    shutil.copytree(COMMITTED_DRAFTER, tmp_path / "short")
    file = tmp_path / "short" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block_size": 7}))
    drafters = {"dspark": str(tmp_path / "short")}
    config = SweepConfig("test", "smollm2-135m", drafters, ("own-gsm8k",), 1, (8,), dtype="float32")
    with pytest.raises(ValueError, match="num_speculative_tokens = 8"):
        sweep(config, tmp_path)
    with pytest.raises(FileNotFoundError, match="no drafter in nowhere"):
        sweep(replace(config, drafters={"dspark": str(tmp_path / "nowhere")}), tmp_path / "other")
    with pytest.raises(ValueError, match="engine = 'sglang': one of dspark, vllm"):
        SweepConfig("test", engine="sglang")


def test_thinking_goes_to_the_chat_template(target):
    assert SweepConfig("test").template == {}
    assert SweepConfig("test", thinking=False).template == {"enable_thinking": False, "thinking": False}
    tokenizer, hello = target.tokenizer, [{"role": "user", "content": "Hi"}]
    before, tokenizer.chat_template = tokenizer.chat_template, "{{ 'on' if enable_thinking else 'off' }}"
    try:
        for thinking, word in ((True, "on"), (False, "off")):
            template = SweepConfig("test", thinking=thinking).template
            assert target.encode_chat(hello, **template) == tokenizer(word)["input_ids"]
    finally:
        tokenizer.chat_template = before


# ---- tables


def record(target, config, said: str, plain: str, seconds: float, stated="12", n=3):
    encode = target.tokenizer.encode
    prompts = PromptSet("GSM8K", (TALK,), "test", (stated,) if stated else ())
    got, base = Answer(encode(said), [n, n], [1, 0], seconds), Answer(encode(plain), seconds=2 * seconds)
    return record_of(config, "dspark", n, prompts, 0, [1, 2], base, got, target, target.tokenizer)


def test_answers_are_checked_for_both_and_reported_side_by_side(target):
    config = SweepConfig("test", benchmarks=("GSM8K",), n_values=(3,), dtype="float32")
    right, wrong = r"so it is \boxed{12}.", r"so it is \boxed{21}."
    same, other = record(target, config, right, right, 1.0), record(target, config, wrong, right, 1.0)
    assert (same["correct"], same["baseline_correct"], same["mismatch"]) == (True, True, False)
    assert (other["correct"], other["baseline_correct"], other["mismatch"]) == (False, True, True)
    table = tabulate([same, other | {"prompt": 1}], config).set_index("drafter")
    assert table.accuracy.to_dict() == {"autoregressive": 1.0, "dspark": 0.5}
    assert table.baseline_accuracy.to_dict() == {"autoregressive": 1.0, "dspark": 1.0}
    assert table.mismatches["dspark"] == 1
    unknown = record(target, config, right, right, 1.0, stated=None)
    assert unknown["correct"] is None and tabulate([unknown], config).accuracy.isna().all()


def test_an_engine_whose_speed_means_nothing_leaves_the_speed_columns_empty(target, tmp_path):
    config = SweepConfig("test", engine="vllm", benchmarks=("GSM8K",), n_values=(3,), dtype="float32")
    kept = json.loads(json.dumps(record(target, config, "twelve", "twelve", math.nan)))
    table = tabulate([kept], config)
    speeds = ["seconds", "tokens_per_s", "baseline_tokens_per_s", "speedup", "speedup_low", "speedup_high"]
    assert table[speeds].isna().all(axis=None) and (table.engine == "vllm").all()
    assert table.set_index("drafter").tau["dspark"] == 1.5
    table.to_csv(tmp_path / "t.csv", index=False)
    assert pd.read_csv(tmp_path / "t.csv")[speeds].isna().all(axis=None)


def test_latencies_are_percentiles_over_prompts(target):
    config = SweepConfig("test", engine="vllm", benchmarks=("GSM8K",), n_values=(3,), dtype="float32")
    one = record(target, config, "twelve", "twelve", 1.0)
    records = [one | {"prompt": i, "ttft_ms": 10.0 * i, "itl_ms": 1.0, "e2e_ms": 5.0} for i in range(11)]
    row = tabulate(records, config).set_index("drafter").loc["dspark"]
    assert (row.ttft_ms_p50, row.ttft_ms_p90, row.ttft_ms_p99) == (50, 90, 99) and row.itl_ms_p50 == 1


# ---- answers


@pytest.mark.parametrize("text, stated, right", [
    (r"\boxed{18}", "Janet sells 16 - 3 - 4 = 9 eggs.\n#### 18", True),
    (r"first \boxed{3}, no: \boxed{1{,}234}", "1234", False),  # an unusual spelling is not guessed at
    (r"\boxed{1,234}", "#### 1,234", True),
    (r"\boxed{\dfrac{14}{3}}", r"\frac{14}{3}", True),
    (r"\boxed{\frac{1}{2}}", "0.5", True),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", True),
    (r"\boxed{204}", "204", True),
    (r"\boxed{ $20\%$ }", "20", True),
    (r"\boxed{\text{Evelyn}}", "Evelyn", True),
    (r"\boxed{12", "12", False),  # cut off
    ("the answer is 12", "12", False),
    (r"\boxed{-3}", "3", False),
    (r"\boxed{}", "0", False),
])  # fmt: skip
def test_exact_match(text, stated, right):
    assert is_correct(text, stated) is right


def test_the_last_box_counts_with_its_braces():
    assert final_answer(r"\boxed{1} then \boxed{\frac{a}{b}} end") == r"\frac{a}{b}"
    assert final_answer("none") is None


# ---- public benchmarks


def test_rows_of_public_benchmarks_become_prompts():
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert render("GSM8K", {"question": "1 {x}?"}) == "1 {x}?" + boxed
    assert render("AIME", {"problem": "Find."}) == render("MATH500", {"problem": "Find."}) == "Find." + boxed
    code = "def f():\n"
    assert render("HumanEval", {"prompt": code}).endswith(f"tests pass.\n```python\n{code}\n```")
    assert render("LiveCodeBench", {"question_content": "Sum.", "starter_code": ""}).endswith("else.\n\nSum.")
    contest = render("LiveCodeBench", {"question_content": "Sum.", "starter_code": "class S:"})
    assert contest.endswith("Sum.\n\nBegin from this code:\n```python\nclass S:\n```")
    assert render("SPEED-Bench Coding", {"turns": ["first", "second"]}) == "first"


def test_a_revision_is_for_all_or_for_one():
    assert revision_of("a/b", None) is None and revision_of("a/b", "v1") == "v1"
    named = "a/b@v1,c/d@v2"
    assert [revision_of(name, named) for name in ("a/b", "c/d", "e/f")] == ["v1", "v2", None]


def test_aime_is_both_years_where_both_are_there(tmp_path):
    for year in (25, 26):
        rows = [{"turns": [f"{year}-{i}"], "answer": 100 * year + i} for i in range(3)]
        (tmp_path / f"aime{year}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts = load_prompts("AIME", 5, tmp_path)
        if year == 25:
            assert prompts.prompts == ("25-0", "25-1", "25-2") and prompts.source == "aime25.jsonl"
    assert prompts.prompts[2:] == ("25-2", "26-0", "26-1") and prompts.source == "aime25.jsonl+aime26.jsonl"
    assert prompts.answers[2:] == ("2502", "2600", "2601")


def test_the_command_takes_drafters_by_name(monkeypatch, tmp_path, capsys):
    asked = []

    def stop(config, out, fresh):
        asked.append((config, out))
        record = {"benchmark": "own-aime", "prompt": 0, "n": 3, "output_tokens": 8, "seconds": None, "accepted": [1, 1]}
        records = [record | {"drafter": "mine"}, record | {"drafter": "prompt-lookup", "accepted": [1, 0]}]
        (out / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        columns = ["drafter", "benchmark", "n", "tau", "speedup", "speedup_low", "speedup_high", "mismatches"]
        return pd.DataFrame(columns=[*columns, "near_ties"])

    monkeypatch.setattr(evaluate, "sweep", stop)
    evaluate.main([
        "--engine", "vllm", "--drafter", "mine=some/folder", "prompt-lookup", "--thinking", "off", "--dtype", "float32",
        "--revision", "main", "--vllm-args", "--tensor-parallel-size 8", "--n", "3", "7", "--out", str(tmp_path),
    ])  # fmt: skip
    config, out = asked[0]
    assert config.drafters == {"mine": "some/folder", "prompt-lookup": "prompt-lookup"} and out == tmp_path
    assert (config.engine, config.thinking, config.revision, config.n_values) == ("vllm", False, "main", (3, 7))
    assert config.cells == [("mine", 3), ("mine", 7), ("prompt-lookup", 3), ("prompt-lookup", 7)]
    (compared,) = pd.read_csv(tmp_path / "paired.csv").to_dict("records")  # without a GPU vLLM's speed is left empty
    assert compared["against"] == "prompt-lookup" and compared["tau_difference"] == 0.5
    assert math.isnan(compared["speed_ratio"])
