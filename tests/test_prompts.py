"""The project's own prompts: promised form, enough of them, no near-duplicates, no leak into training."""

import itertools
import json
import re

import pytest

from dspark.paths import PROMPTS

SETS = ("gsm8k", "math500", "aime", "humaneval", "livecodebench", "speed-coding")
STYLES = {
    "school_maths",
    "competition_maths",
    "olympiad",
    "function_completion",
    "contest_programming",
    "coding_chat",
}
BOX_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def rows(name: str) -> list[dict]:
    text = (PROMPTS / f"own-{name}.jsonl").read_bytes().decode("utf-8")  # strict: bad bytes raise
    return [json.loads(line) for line in text.splitlines()]


def openers() -> dict[str, list[str]]:
    return json.loads((PROMPTS / "openers.json").read_bytes().decode("utf-8"))


def every_prompt() -> list[str]:
    return [row["turns"][0] for name in SETS for row in rows(name)]


def normalise(text: str) -> str:
    return " ".join(text.lower().split())


def trigrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def jaccard(a: set, b: set) -> float:
    return len(a & b) / len(a | b)


def test_exactly_the_six_sets_are_there():
    assert {path.name for path in PROMPTS.glob("own-*.jsonl")} == {f"own-{name}.jsonl" for name in SETS}


@pytest.mark.parametrize("name", SETS)
def test_rows_have_the_promised_form(name):
    found = rows(name)
    assert len(found) >= 32
    assert [row["id"] for row in found] == [f"own-{name}-{i:02d}" for i in range(1, len(found) + 1)]
    for row in found:
        assert set(row) == {"id", "turns"}
        (turn,) = row["turns"]
        assert isinstance(turn, str) and turn == turn.strip() and len(turn.split()) >= 12, row["id"]
        assert "\ufffd" not in turn and turn.replace("\n", "").isprintable(), row["id"]


def test_no_text_occurs_twice():
    texts = [normalise(prompt) for prompt in every_prompt()]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", SETS)
def test_no_near_duplicates(name):
    grams = {row["id"]: trigrams(row["turns"][0].removesuffix(BOX_INSTRUCTION)) for row in rows(name)}
    close = [(a, b) for a, b in itertools.combinations(grams, 2) if jaccard(grams[a], grams[b]) >= 0.3]
    assert not close


def test_near_duplicates_would_be_found():
    prompt = rows("gsm8k")[0]["turns"][0]
    other_numbers = re.sub(r"\d+", "77", prompt)
    assert other_numbers != prompt
    assert jaccard(trigrams(prompt), trigrams(other_numbers)) >= 0.3


@pytest.mark.parametrize("name", ("gsm8k", "math500", "aime"))
def test_maths_ends_with_the_box_instruction_once(name):
    for row in rows(name):
        assert row["turns"][0].endswith(BOX_INSTRUCTION), row["id"]
        assert row["turns"][0].count("\\boxed") == 1, row["id"]


def test_functions_to_complete_are_python_with_an_example():
    for row in rows("humaneval"):
        code = re.search(r'^(from|def) .*"""', row["turns"][0], re.DOTALL | re.MULTILINE)
        assert code, row["id"]
        compile(code[0], row["id"], "exec")  # a function whose body is its docstring
        assert ">>> " in code[0], row["id"]


def test_openers_are_many_varied_and_short():
    styles = openers()
    assert set(styles) == STYLES
    for style, starts in styles.items():
        assert len(starts) >= 60, style
        assert len({normalise(start) for start in starts}) == len(starts), style
        for start in starts:
            assert start == start.strip(), repr(start)  # a trailing space would spoil the next token
            assert 2 <= len(start.split()) <= 10, start
    everything = [start for starts in styles.values() for start in starts]
    assert len(set(everything)) == len(everything)


def test_no_opener_begins_a_held_out_prompt():
    held_out = [normalise(prompt) for prompt in every_prompt()]
    starts = [normalise(start) for style in openers().values() for start in style]
    assert not [(start, prompt) for start in starts for prompt in held_out if prompt.startswith(start)]


def test_readme_counts_are_true():
    readme = (PROMPTS / "README.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([\w.-]+)` \|[^|]*\| (\d+) \|", readme, re.MULTILINE))
    counts = {f"own-{name}.jsonl": len(rows(name)) for name in SETS}
    counts["openers.json"] = sum(len(starts) for starts in openers().values())
    assert {file: int(n) for file, n in table.items()} == counts
