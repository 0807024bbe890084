"""Conversations in, token ids and loss masks out; and the prompts of the benchmarks."""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.paths import PROMPTS
from dspark.selfwrite import split_of
from dspark.target import Target

BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_FUNCTION = "Complete this Python function so that its tests pass.\n```python\n{}\n```"
_CONTEST = "Solve this programming problem in Python. Answer with the whole program and nothing else.\n\n{}"
_STARTER = "\n\nBegin from this code:\n```python\n{}\n```"


class Benchmark(NamedTuple):
    """Where the hub has a benchmark, and how a row becomes a prompt. answer: the column of maths sets' results."""

    datasets: tuple[str, ...]
    config: str | None
    split: str
    text: str  # the column with the question
    template: str = "{}"
    answer: str | None = None


BENCHMARKS = {
    "GSM8K": Benchmark(("openai/gsm8k",), "main", "test", "question", BOXED, "answer"),
    "MATH500": Benchmark(("HuggingFaceH4/MATH-500",), None, "test", "problem", BOXED, "answer"),
    "AIME": Benchmark(("MathArena/aime_2025", "MathArena/aime_2026"), None, "train", "problem", BOXED, "answer"),
    "HumanEval": Benchmark(("openai/openai_humaneval",), None, "test", "prompt", _FUNCTION),
    "LiveCodeBench": Benchmark(("livecodebench/code_generation_lite",), None, "test", "question_content", _CONTEST),
    "SPEED-Bench Coding": Benchmark(("nvidia/SPEED-Bench",), "qualitative", "test", "turns"),
}
OWN_SETS = ("own-gsm8k", "own-math500", "own-aime", "own-humaneval", "own-livecodebench", "own-speed-coding")
_FILES = {"AIME": "aime25", "SPEED-Bench Coding": "speed-coding"}  # file names that are not the name in lower case
_MORE_FILES = {"AIME": ("aime26.jsonl",)}  # read after the first where they are there


@dataclass(frozen=True)
class Sample:
    """token_ids [T]; loss_mask [T] true on the assistant's own tokens, stop token included."""

    token_ids: Tensor
    loss_mask: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


def read_jsonl(path: Path) -> list[dict]:
    """Rows of a JSONL file; an unreadable line is a ValueError that names it."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path.name} line {number} is not JSON ({error}): mend or delete the line") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path.name} line {number} holds a {type(row).__name__}, want an object")
        rows.append(row)
    return rows


def _check_messages(messages) -> None:
    proper = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not proper or not messages or messages[0]["role"] == "assistant":
        wanted = "a list of {role, content} with text content that the assistant does not begin"
        raise ValueError(f"'messages' must be {wanted}, got {messages!r:.80}")


def _conversations(path: Path) -> Iterator[tuple[int, dict, str]]:
    """(number, row, split) of a JSONL file; rows that say no split are split by the hash of their first user text."""
    for number, row in enumerate(read_jsonl(path), 1):
        try:
            _check_messages(row.get("messages"))
        except ValueError as error:
            raise ValueError(f"{path.name} row {number}: {error}") from error
        yield number, row, row.get("split") or split_of(user_text(row["messages"]))


def user_text(messages: list[dict]) -> str:
    """What the user said first."""
    return next((m["content"] for m in messages if m["role"] == "user"), "")


def encode_messages(target: Target, messages: list[dict]) -> Sample:
    """Chat messages -> Sample. The mask covers what the assistant wrote, up to and including its stop token.

    Each assistant turn is located by rendering the conversation up to it with the target's own chat template; a
    template that rewrites history (so that the prefix no longer matches) is a ValueError.
    """
    _check_messages(messages)
    render = target.tokenizer.apply_chat_template
    text = render(messages, tokenize=False)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:i], tokenize=False, add_generation_prompt=True)
            after = render(messages[: i + 1], tokenize=False)
            if not text.startswith(before) or not text.startswith(after):
                raise ValueError(f"{target.name}'s chat template rewrites turn {i}: train on single-turn conversations")
            spans.append((len(before), len(after)))
    encoded = target.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ids, mask = encoded["input_ids"], []
    stopped = None  # the span whose stop token has been seen: template text after it is not the assistant's
    for token, (begin, _) in zip(ids, encoded["offset_mapping"], strict=True):
        span = next((s for s in spans if s[0] <= begin < s[1]), None)
        mask.append(span is not None and span != stopped)
        if span is not None and token in target.eos_token_ids:
            stopped = span
    return Sample(torch.tensor(ids), torch.tensor(mask))


def load_samples(path: Path, target: Target, split: str | None = "train", max_length: int = 2048) -> list[Sample]:
    """Conversations of a JSONL file as Samples, cut to max_length tokens.

    Rows that the target wrote carry their own ids and must name this target (off-policy data would train quietly and
    draft badly). Other rows hold `messages` and go through the chat template; their split is by prompt hash.
    """
    samples = []
    for number, row, belongs in _conversations(path):
        if row.get("target", target.name) != target.name:
            raise ValueError(f"{path.name} row {number} was written by {row['target']!r}, not by {target.name!r}")
        if split is not None and belongs != split:
            continue
        if "response_ids" in row:
            ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
            sample = Sample(ids, torch.arange(len(ids)) >= len(row["prompt_ids"]))
        else:
            try:
                sample = encode_messages(target, row["messages"])
            except ValueError as error:
                raise ValueError(f"{path.name} row {number}: {error}") from error
        samples.append(Sample(sample.token_ids[:max_length], sample.loss_mask[:max_length]))
    if not samples:
        raise ValueError(f"{path.name} holds no conversation of split {split!r}")
    return samples


def heldout_prompts(path: Path) -> list[str]:
    """User texts of the held-out split, in file order."""
    return [user_text(row["messages"]) for _, row, split in _conversations(path) if split == "heldout"]


def frequent_ids(samples: list[Sample], size: int, always: frozenset[int] = frozenset()) -> Tensor:
    """The `size` most frequent ids of the responses (ties and gaps by id), rising: the draft vocabulary [D]."""
    counts = Counter()
    for sample in samples:
        counts.update(sample.token_ids[sample.loss_mask].tolist())
    order = sorted(always) + [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    kept = list(dict.fromkeys(order))[:size]
    present = set(kept)
    filler = (token for token in range(10**9) if token not in present)
    return torch.tensor(sorted([*kept, *itertools.islice(filler, size - len(kept))]))


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one benchmark, with what is needed to say later exactly which they were.

    answers: the results that the maths sets state, one a prompt, where they are known.
    """

    benchmark: str
    prompts: tuple[str, ...]
    source: str  # "own", a folder's file names, or hub dataset@revision
    answers: tuple[str | None, ...] = ()

    @property
    def hash(self) -> str:
        return hashlib.sha256("\0".join(self.prompts).encode()).hexdigest()[:16]


def load_prompts(benchmark: str, count: int, folder: Path | None = None, revision: str | None = None) -> PromptSet:
    """The first `count` prompts of an own set, of a file in `folder` (JSONL rows with `turns`), or of the hub.

    A row of a file may have an `answer`. revision: of the hub datasets, one for all, or `dataset@revision,...`.
    """
    if benchmark in OWN_SETS:
        return _from_files(benchmark, [PROMPTS / f"{benchmark}.jsonl"], count, "own")
    if benchmark not in BENCHMARKS:
        raise ValueError(f"benchmark {benchmark!r} is unknown: one of {', '.join((*OWN_SETS, *BENCHMARKS))}")
    if folder is not None:
        path = Path(folder) / benchmark_file(benchmark)
        if not path.exists():
            raise FileNotFoundError(f"{benchmark}: no {path.name} in the benchmark folder")
        more = [path.parent / name for name in _MORE_FILES.get(benchmark, ())]
        paths = [path, *(file for file in more if file.exists())]
        return _from_files(benchmark, paths, count, "+".join(file.name for file in paths))
    return _from_hub(benchmark, count, revision)


def benchmark_file(benchmark: str) -> str:
    """Name of a benchmark's file in a folder of them."""
    return _FILES.get(benchmark, benchmark.lower()) + ".jsonl"


def _from_files(benchmark: str, paths: list[Path], count: int, source: str) -> PromptSet:
    rows = []
    for path in paths:
        for number, row in enumerate(read_jsonl(path), 1):
            if not _is_turns(row.get("turns")):
                raise ValueError(f"{path.name} row {number}: 'turns' must be a non-empty list of texts")
            rows.append(row)
    rows = rows[:count]
    answers = tuple(None if row.get("answer") is None else str(row["answer"]) for row in rows)
    return PromptSet(benchmark, tuple(row["turns"][0] for row in rows), source, answers if any(answers) else ())


def _is_turns(turns) -> bool:
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)


def _from_hub(benchmark: str, count: int, revision: str | None) -> PromptSet:
    from datasets import load_dataset
    from huggingface_hub import HfApi

    where, rows, sources = BENCHMARKS[benchmark], [], []
    for name in where.datasets:
        try:
            resolved = HfApi().dataset_info(name, revision=revision_of(name, revision)).sha
            if benchmark == "LiveCodeBench":  # a script dataset: read its files directly
                found = load_dataset("json", data_files=f"hf://datasets/{name}@{resolved}/test*.jsonl", split="train")
            else:
                found = load_dataset(name, where.config, split=where.split, revision=resolved)
        except Exception as error:  # the hub's client raises many kinds; all mean the same to the user
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise OSError(
                f"{benchmark}: {name} is not reachable on the hub ({reason}); use --benchmarks DIR"
            ) from error
        sources.append(f"{name}@{resolved}")
        if benchmark == "SPEED-Bench Coding":
            found = found.filter(lambda row: row["category"] == "coding")
        rows += found.select(range(min(count - len(rows), len(found))))
    prompts = tuple(render(benchmark, row) for row in rows)
    answers = tuple(str(row[where.answer]) for row in rows) if where.answer else ()
    return PromptSet(benchmark, prompts, "+".join(sources), answers)


def revision_of(dataset: str, revision: str | None) -> str | None:
    """What `revision` says of one dataset: the plain revision, or the one of its `dataset@revision`."""
    stated = dict(item.rsplit("@", 1) for item in (revision or "").split(",") if "@" in item)
    return stated.get(dataset) if stated else revision or None


def render(benchmark: str, row: dict) -> str:
    """The prompt of a row of a public benchmark, in our words where the field has no usual ones."""
    where = BENCHMARKS[benchmark]
    if benchmark == "SPEED-Bench Coding":
        return row["turns"][0]
    if benchmark == "LiveCodeBench":
        return _CONTEST.format(row[where.text]) + (_STARTER.format(code) if (code := row.get("starter_code")) else "")
    return where.template.format(row[where.text])
