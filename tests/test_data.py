"""Training data: what is supervised, whose words they are, which split they are in; and the benchmarks' prompts."""

import copy
import json
import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from tiny import packed_row, tiny_target
from transformers import LlamaConfig, LlamaForCausalLM

from dspark import selfwrite
from dspark.data import (
    BENCHMARKS,
    OWN_SETS,
    Sample,
    benchmark_file,
    encode_messages,
    frequent_ids,
    heldout_prompts,
    load_prompts,
    load_samples,
    read_jsonl,
)
from dspark.decode import answer
from dspark.paths import PROMPTS
from dspark.selfwrite import OwnWriter, normalise, read_rounds, self_write, split_of, written_files
from dspark.source import LocalSource, data_digest, pack
from dspark.target import Target, encode_chat


def chat(*contents: str, system: str | None = None) -> list[dict]:
    """User and assistant in turn."""
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# ---- the loss mask, read back by decoding it

CONVERSATIONS = {
    "one turn": (chat("Hi", "Hello there."), ["Hello there.<|im_end|>"]),
    "two turns": (chat("Hi", "Hello.", "And?", "Nothing."), ["Hello.<|im_end|>", "Nothing.<|im_end|>"]),
    "a system prompt": (chat("Hi", "Hello.", system="Be brief."), ["Hello.<|im_end|>"]),
    "code": (
        chat("Write f", "```python\ndef f(x):\n    return x\n```"),
        ["```python\ndef f(x):\n    return x\n```<|im_end|>"],
    ),
    "many bytes a character": (chat("Wie?", "Füße 🦙 行"), ["Füße 🦙 行<|im_end|>"]),
    "an empty answer": (chat("Hi", ""), ["<|im_end|>"]),
    "the user quotes the assistant": (chat("Say Hello.", "Hello."), ["Hello.<|im_end|>"]),
    "the user talks last": (chat("Hi", "Hello.", "And?"), ["Hello.<|im_end|>"]),
    "nobody answers": (chat("Hi"), []),
}


def supervised_texts(target, sample: Sample) -> list[str]:
    """Each contiguous run of supervised tokens, decoded."""
    runs, before = [], False
    for token, on in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token)
        before = on
    return [target.tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("messages, wanted", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_mask_covers_the_assistants_words_and_its_stop_token(target, messages, wanted):
    sample = encode_messages(target, messages)
    assert supervised_texts(target, sample) == wanted
    assert sample.token_ids.tolist() == target.encode_chat(messages, add_generation_prompt=False)
    assert len(sample) == len(sample.loss_mask) and sample.loss_mask.dtype == torch.bool


def test_the_first_supervised_token_follows_the_generation_prompt(target):
    messages = chat("Hi", "Hello.")
    prompt = target.encode_chat(messages[:1])
    sample = encode_messages(target, messages)
    assert sample.token_ids[: len(prompt)].tolist() == prompt
    assert sample.loss_mask.tolist().index(True) == len(prompt)


def test_a_template_that_rewrites_history_is_refused(target):
    forgetful = copy.copy(target)
    forgetful.tokenizer = copy.deepcopy(target.tokenizer)
    forgetful.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert supervised_texts(target, encode_messages(forgetful, chat("Hi", "Hello."))) == ["Hello.<|im_end|>"]
    with pytest.raises(ValueError, match="chat template rewrites turn 1: train on single-turn"):
        encode_messages(forgetful, chat("Hi", "Hello.", "And?", "No."))


# ---- the user's JSONL

BAD_MESSAGES = {
    "none": None,
    "empty": [],
    "text": "Hi",
    "a text in the list": ["Hi"],
    "no role": [{"content": "Hi"}],
    "no content": [{"role": "user", "text": "Hi"}],
    "content in parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "the assistant begins": [{"role": "assistant", "content": "Hi"}],
}


@pytest.mark.parametrize("messages", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_bad_messages_are_refused_with_their_row(target, tmp_path, messages):
    path = write(tmp_path / "mine.jsonl", [{"messages": chat("Hi", "Hello.")}, {"messages": messages}])
    for read in (lambda: load_samples(path, target), lambda: heldout_prompts(path)):
        with pytest.raises(ValueError, match="mine.jsonl row 2: 'messages' must be a list of {role, content}"):
            read()
    with pytest.raises(ValueError, match="'messages' must be"):
        encode_messages(target, messages)


def test_a_row_without_messages_is_refused(target, tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"prompt": "Hi"}])
    with pytest.raises(ValueError, match="mine.jsonl row 1: 'messages' must be"):
        load_samples(path, target)


@pytest.mark.parametrize("line, message", [('{"messages": [', "line 3 is not JSON"), ("[1, 2]", "line 3 holds a list")])
def test_a_bad_line_is_named_by_its_number_in_the_file(tmp_path, line, message):
    path = write(tmp_path / "mine.jsonl", [{"a": 1}, "", line, {"b": 2}])
    with pytest.raises(ValueError, match=f"mine.jsonl {message}"):
        read_jsonl(path)


def test_samples_are_cut_to_the_trained_context(target, tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"messages": chat("Hi", "word " * 100), "split": "train"}])
    (sample,) = load_samples(path, target, max_length=50)
    assert len(sample) == len(sample.loss_mask) == 50 and sample.loss_mask[-1]


# ---- splits (pitfall 38)


def test_splits_are_decided_by_the_prompt_and_never_overlap(target, tmp_path):
    prompts = [f"Question {i}" for i in range(200)]
    rows = [{"messages": chat(prompt, f"Answer to {prompt}")} for prompt in prompts]
    path = write(tmp_path / "mine.jsonl", rows)
    train, heldout, everything = (load_samples(path, target, split) for split in ("train", "heldout", None))
    texts = [{target.tokenizer.decode(s.token_ids) for s in part} for part in (train, heldout, everything)]
    assert len(texts[0]) + len(texts[1]) == len(texts[2]) == 200 and not texts[0] & texts[1]
    assert heldout_prompts(path) == [prompt for prompt in prompts if split_of(prompt) == "heldout"]
    assert len(heldout_prompts(path)) == len(heldout) > 0


def test_one_prompt_in_32_is_held_out_however_it_is_spelled():
    share = sum(split_of(f"prompt number {i}") == "heldout" for i in range(8000)) / 8000
    assert share == pytest.approx(1 / 32, rel=0.25)
    heldout = next(f"Prompt {i} here" for i in range(999) if split_of(f"Prompt {i} here") == "heldout")
    assert split_of(f"  {heldout.upper()}\n".replace(" HERE", "  HERE")) == "heldout"


def test_a_file_without_the_split_says_so(target, tmp_path):
    path = write(tmp_path / "mine.jsonl", [{"messages": chat("Hi", "Hello."), "split": "train"}])
    with pytest.raises(ValueError, match="mine.jsonl holds no conversation of split 'heldout'"):
        load_samples(path, target, "heldout")


def own_row(name: str, **changes) -> dict:
    ids = {"prompt_ids": [1, 2, 3], "response_ids": [40, 41, 2]}
    return {"target": name, "split": "train", "messages": chat("Hi", "Hello."), **ids, **changes}


def test_own_rows_keep_their_ids_and_their_split(target, tmp_path):
    rows = [own_row(target.name), own_row(target.name, split="heldout", response_ids=[50])]
    path = write(tmp_path / "own.jsonl", rows)
    (train,), (heldout,) = load_samples(path, target), load_samples(path, target, "heldout")
    assert train.token_ids.tolist() == [1, 2, 3, 40, 41, 2] and heldout.token_ids.tolist() == [1, 2, 3, 50]
    assert train.loss_mask.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("split", ["train", "heldout", None])
def test_data_that_another_target_wrote_is_refused(target, tmp_path, split):
    path = write(tmp_path / "own.jsonl", [own_row(target.name), own_row("Qwen/Qwen3-4B")])
    with pytest.raises(ValueError, match="own.jsonl row 2 was written by 'Qwen/Qwen3-4B', not by 'smollm2-135m'"):
        load_samples(path, target, split)


# ---- the draft vocabulary


def counted(*ids: int) -> list[Sample]:
    tokens = torch.tensor([9, 9, 9, 9, *ids])  # the prompt's tokens do not count
    return [Sample(tokens, torch.arange(len(tokens)) >= 4)]


def test_frequent_ids_are_the_responses_most_frequent():
    samples = counted(7, 7, 7, 5, 5, 3, 3, 1)
    assert frequent_ids(samples, 2).tolist() == [3, 7]  # 5 and 3 tie: the smaller id
    assert frequent_ids(samples, 3).tolist() == [3, 5, 7]
    assert frequent_ids(samples, 6).tolist() == [0, 1, 2, 3, 5, 7]  # filled up with unused ids from below


def test_stop_tokens_are_always_kept_and_cost_one_place():
    samples = counted(7, 7, 7, 5, 5, 3)
    assert frequent_ids(samples, 2, frozenset({8})).tolist() == [7, 8]
    assert frequent_ids(samples, 3, frozenset({7})).tolist() == [3, 5, 7]  # frequent and a stop token: once
    assert frequent_ids(samples, 3, frozenset({3})).tolist() == [3, 5, 7]


# ---- benchmarks


@pytest.mark.parametrize("name", OWN_SETS)
def test_own_sets_load_in_order(name):
    rows = read_jsonl(PROMPTS / f"{name}.jsonl")
    prompts = load_prompts(name, 5)
    assert prompts.prompts == tuple(row["turns"][0] for row in rows[:5])
    assert (prompts.benchmark, prompts.source) == (name, "own")
    assert prompts.hash == load_prompts(name, 5).hash != load_prompts(name, 4).hash
    assert len(load_prompts(name, 10**6).prompts) == len(rows) >= 32


def test_a_folder_of_benchmarks_loads_by_file_name(tmp_path):
    names = {"GSM8K": "gsm8k", "MATH500": "math500", "AIME": "aime25", "HumanEval": "humaneval",
             "LiveCodeBench": "livecodebench", "SPEED-Bench Coding": "speed-coding"}  # fmt: skip
    assert {name: benchmark_file(name) for name in BENCHMARKS} == {k: f"{v}.jsonl" for k, v in names.items()}
    for name, stem in names.items():
        write(tmp_path / f"{stem}.jsonl", [{"turns": [f"{name} {i}", "second turn"]} for i in range(3)])
        prompts = load_prompts(name, 2, tmp_path)
        assert prompts.prompts == (f"{name} 0", f"{name} 1") and prompts.source == f"{stem}.jsonl"


def test_unknown_and_missing_benchmarks_are_named(tmp_path):
    with pytest.raises(ValueError, match="benchmark 'gsm8k' is unknown: one of own-gsm8k, .*GSM8K"):
        load_prompts("gsm8k", 1)
    with pytest.raises(FileNotFoundError, match="AIME: no aime25.jsonl in the benchmark folder"):
        load_prompts("AIME", 1, tmp_path)


@pytest.mark.parametrize("row", [{}, {"turns": []}, {"turns": "text"}, {"turns": [1]}, {"prompt": "text"}])
def test_a_benchmark_row_without_turns_is_named(tmp_path, row):
    write(tmp_path / "gsm8k.jsonl", [{"turns": ["fine"]}, row])
    with pytest.raises(ValueError, match="gsm8k.jsonl row 2: 'turns' must be a non-empty list of texts"):
        load_prompts("GSM8K", 1, tmp_path)


def test_an_unreachable_hub_points_to_the_folder():
    with pytest.raises(OSError, match="GSM8K: openai/gsm8k is not reachable on the hub .*; use --benchmarks DIR"):
        load_prompts("GSM8K", 1)


# ---- self-written data: a small random model behind the real tokenizer, which stops after 20 tokens or so. The last
# test has vLLM and the real target write.


@pytest.fixture(scope="module")
def babbler(target):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=target.vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.weight.data[:, 0] = 1  # one constant feature, and the stop token's logit hangs on it
    model.lm_head.weight.data[2] = 0
    model.lm_head.weight.data[2, 0] = math.log(0.05 * target.vocab_size) / 4
    return OwnWriter(Target(model, target.tokenizer, "babbler", ()))


SMALL = {"batch": 6, "seed": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def written(babbler, tmp_path_factory):
    """A file written without interruption, and its rows."""
    path = tmp_path_factory.mktemp("written") / "data.jsonl"
    self_write(babbler, path, 90, **SMALL)
    return path, read_jsonl(path)


def test_rows_hold_the_targets_own_words(babbler, written):
    rows = written[1]
    assert sum(len(row["response_ids"]) for row in rows) >= 90 and rows[-1]["round"] >= 2
    for row in rows:
        prompt = row["messages"][0]["content"]
        assert row["prompt_ids"] == encode_chat(babbler.tokenizer, [{"role": "user", "content": prompt}])
        assert 1 <= len(row["response_ids"]) <= 12 and 2 not in row["response_ids"][:-1]
        assert row["messages"][1]["content"] == babbler.tokenizer.decode([t for t in row["response_ids"] if t != 2])
        assert row["split"] == split_of(prompt) and row["target"] == "babbler"
    assert {row["temperature"] for row in rows} == {0.0, 0.8}
    assert {row["style"] for row in rows} <= set(json.loads((PROMPTS / "openers.json").read_text()))
    prompts = [normalise(row["messages"][0]["content"]) for row in rows]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("cut", ["between rounds", "inside the last line", "inside the last round"])
def test_resumed_writing_equals_uninterrupted(babbler, written, tmp_path, cut):
    path, whole = tmp_path / "data.jsonl", written[0].read_bytes()
    lines = whole.splitlines(keepends=True)
    first = [line for line, row in zip(lines, written[1], strict=True) if row["round"] == 0]
    if cut == "between rounds":
        kept = b"".join(first)
    elif cut == "inside the last line":
        kept = whole[: len(b"".join(first)) + len(lines[len(first)]) // 2]
    else:
        kept = b"".join(lines[: len(first) + 2]) + lines[len(first) + 2][:10]
    path.write_bytes(kept)
    self_write(babbler, path, 90, **SMALL)
    assert path.read_bytes() == whole


def test_the_own_writer_gives_each_prompt_its_own_answer(babbler):
    """Greedy ones between sampled ones, each where its prompt stands."""
    prompts, temperature = [[5, 6, 7], [9], [4, 4], [8, 3, 11, 12]], [0.0, 0.8, 0.0, 0.8]
    written = babbler(prompts, 12, temperature, 3)
    for prompt, t, tokens in zip(prompts, temperature, written, strict=True):
        assert t or tokens == answer(babbler.target, None, prompt, 0, 12).tokens
    assert written == babbler(prompts, 12, temperature, 3) and written[1] != babbler(prompts, 12, temperature, 4)[1]


def test_a_file_that_holds_enough_is_left_alone(babbler, written, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(written[0].read_bytes())
    self_write(babbler, path, 90, **SMALL)
    assert path.read_bytes() == written[0].read_bytes()


def test_another_seed_writes_other_prompts(babbler, written, tmp_path):
    self_write(babbler, tmp_path / "other.jsonl", 20, **{**SMALL, "seed": 4})
    other = {row["messages"][0]["content"] for row in read_jsonl(tmp_path / "other.jsonl")}
    assert other and not other & {row["messages"][0]["content"] for row in written[1]}


def test_prompts_of_the_evaluation_never_enter_the_data(babbler, tmp_path, monkeypatch):
    own = read_jsonl(PROMPTS / "own-gsm8k.jsonl")[0]["turns"][0]
    forced = [{"style": "olympiad", "prompt": own.upper()}, {"style": "olympiad", "prompt": "Something else entirely"}]
    monkeypatch.setattr(selfwrite, "write_prompts", lambda *_: forced)
    self_write(babbler, tmp_path / "data.jsonl", 1, **SMALL)
    assert [row["messages"][0]["content"] for row in read_jsonl(tmp_path / "data.jsonl")] == ["Something else entirely"]
    with pytest.raises(RuntimeError, match="round 1 wrote no new prompt"):
        self_write(babbler, tmp_path / "data.jsonl", 10**6, **SMALL)


def test_workers_write_with_vllm_what_the_target_says(target, tmp_path):
    """The command itself, two workers: greedy responses are the target's own but for near-ties of another kernel."""
    command = [sys.executable, "-m", "dspark", "data", "--workers", "2", "--batch", "6", "--dtype", "float32"]
    command += ["--response-tokens", "100", "--max-new-tokens", "24", "--out", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    files = written_files("smollm2-135m", tmp_path)
    assert [file.name[-11:] for file in files] == ["seed0.jsonl", "seed1.jsonl"]
    rows = [row for file in files for row in read_jsonl(file)]
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) > 4
    greedy = [row for row in rows if row["temperature"] == 0]
    same = [answer(target, None, row["prompt_ids"], 0, 24).tokens == row["response_ids"] for row in greedy]
    assert sum(same) >= 0.8 * len(same) > 1


def test_a_writer_that_dies_stops_the_others(monkeypatch):
    """Whichever it is: the first one would write on for a minute."""
    started, popen = [], subprocess.Popen

    def run(*codes: str) -> None:
        started.clear()
        monkeypatch.setattr(selfwrite.subprocess, "Popen", lambda command, env: started.append(
            popen([sys.executable, "-c", codes[len(started)]], env=env)) or started[-1])  # fmt: skip
        selfwrite._run_workers([], len(codes), seed=0, share=100)

    with pytest.raises(SystemExit, match="a writer ended with status 3"):
        run("import time; time.sleep(60)", "raise SystemExit(3)")
    assert started[0].wait(60) == -signal.SIGTERM  # 0 if it had been waited for
    run("pass", "pass")
    assert [process.returncode for process in started] == [0, 0]


def test_read_rounds_drops_the_round_that_a_kill_cut(tmp_path):
    path = tmp_path / "data.jsonl"
    assert read_rounds(path) == []
    rows = [{"round": r, "n": n} for r in (0, 1) for n in (0, 1)]
    whole = write(path, rows).read_text()
    assert read_rounds(path) == rows and path.read_text() == whole
    path.write_text(whole[:-3])
    assert read_rounds(path) == rows[:2] and path.read_text() == "".join(json.dumps(row) + "\n" for row in rows[:2])
    path.write_text(whole[:8])  # cut in the very first line
    assert read_rounds(path) == [] and path.read_text() == ""


# ---- hidden states on disk


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


def toy_samples(*lengths: int) -> list[Sample]:
    return [Sample(packed_row([n], seed=n).tokens, torch.arange(n) >= 2) for n in lengths]


def test_a_packed_row_holds_what_the_target_says_of_each_document_alone(toy, tmp_path):
    samples = toy_samples(10, 6, 8)
    row = LocalSource(toy, samples, tmp_path).row([2, 0])
    assert row.tokens.tolist() == [*samples[2].token_ids.tolist(), *samples[0].token_ids.tolist()]
    assert row.loss_mask.tolist() == [*samples[2].loss_mask.tolist(), *samples[0].loss_mask.tolist()]
    assert row.positions.tolist() == [*range(8), *range(10)]
    assert row.starts.tolist() == [0] * 8 + [8] * 10 and row.ends.tolist() == [8] * 8 + [18] * 10
    for i, rows in ((2, slice(0, 8)), (0, slice(8, 18))):
        alone = toy.forward(samples[i].token_ids[None], toy.new_cache(1, 16), 0)
        torch.testing.assert_close(row.features[rows].float(), alone.features[0], rtol=2**-8, atol=1e-3)
        torch.testing.assert_close(row.hidden[rows].float(), alone.hidden[0], rtol=2**-8, atol=1e-3)


def test_hidden_states_are_computed_once_and_found_again(toy, tmp_path, monkeypatch):
    samples, calls, forward = toy_samples(10, 6), [], toy.forward
    monkeypatch.setattr(toy, "forward", lambda tokens, *args: calls.append(len(tokens)) or forward(tokens, *args))
    first = LocalSource(toy, samples, tmp_path).row([0])
    source = LocalSource(toy, samples, tmp_path)
    assert torch.equal(source.row([0, 1]).features[:10], first.features) and calls == [1, 1]
    source.row([1, 0])
    assert calls == [1, 1]
    LocalSource(toy, toy_samples(10, 7), tmp_path).row([0])  # other data, another file
    assert calls == [1, 1, 1] and len(list(tmp_path.glob("*.bf16"))) == 2


def test_other_cuts_and_other_weights_give_states_another_name(toy, tmp_path):
    """The same tokens cut elsewhere are other texts; a local target may have been trained on since."""
    ids, local = torch.arange(3, 9), copy.copy(toy)

    def name(target, cut: int) -> str:
        return data_digest(target, [Sample(part, torch.ones(len(part)).bool()) for part in (ids[:cut], ids[cut:])])

    assert name(toy, 2) == name(toy, 2) != name(toy, 4)
    local.name = str(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    names = [name(local, 2)]
    assert name(local, 2) == names[0]
    weights.write_bytes(b"larger weights")
    names.append(name(local, 2))
    os.utime(weights, ns=(1, 1))  # of the same size, at another time
    names.append(name(local, 2))
    assert len(set(names)) == 3


def test_states_whose_marks_are_lost_are_computed_again(toy, tmp_path):
    samples = toy_samples(10, 6)
    wanted = LocalSource(toy, samples, tmp_path).row([0, 1])
    (filled,) = tmp_path.glob("*.filled")
    filled.unlink()
    assert torch.equal(LocalSource(toy, samples, tmp_path).row([0, 1]).features, wanted.features)
    (states,) = tmp_path.glob("*.bf16")
    states.write_bytes(states.read_bytes()[:-100])  # a full disk
    assert torch.equal(LocalSource(toy, samples, tmp_path).row([0, 1]).hidden, wanted.hidden)


def test_pack_uses_every_sample_once_and_keeps_to_the_row():
    lengths = [5, 3, 9, 30, 1, 4, 4]
    rows = pack(lengths, 10, [3, 6, 0, 1, 2, 4, 5])
    assert [i for row in rows for i in row] == [3, 6, 0, 1, 2, 4, 5]
    assert rows == [[3], [6, 0], [1], [2, 4], [5]]  # 30 is longer than a row and goes alone
