"""The terminal's answer and the notebook's HTML, on the embedded target's real tokenizer and on tiny models."""

import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from tiny import EOS, VOCAB, tiny_drafter, tiny_target

from dspark import UserError, checkpoint, terminal
from dspark.decode import Step, answer
from dspark.drafter import Draft
from dspark.target import Target, embedded_target

TEXT = "The café's naïve 🎉 plan:\n\tif a < b && c > 'd': 東京 👩‍🚀\n"


class Characters:
    """A tokenizer for tiny models: one character an id, no chat template."""

    chat_template = bos_token_id = pad_token_id = None

    def __call__(self, text):
        return {"input_ids": [3 + ord(c) % (VOCAB - 3) for c in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(ord("A") + i) for i in ids if not (skip_special_tokens and i == EOS))


class Parsed(HTMLParser):
    """Text by tag; fails on tags that are left open or closed twice."""

    def __init__(self, page):
        super().__init__()
        self.open, self.pieces = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert all(value is not None for _, value in attrs)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "pre" in self.open:  # not the legend
            self.pieces.append((self.open[-1], data))

    def text(self, *tags):
        return "".join(data for tag, data in self.pieces if tag in tags)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_target())


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """(target, drafter), which `generate` loads in place of the embedded target and from a real folder."""
    target = tiny_target()
    target.tokenizer = Characters()
    checkpoint.save(tiny_drafter(target), tmp_path / "drafter", torch.float32)
    monkeypatch.setattr(Target, "load", lambda name, dtype, device: target)
    return target, str(tmp_path / "drafter")


def request(folder, **changes):
    defaults = {"prompt": "speculate", "target": "tiny", "drafter": folder, "n": 3, "temperature": 0.0}
    more = {"max_new_tokens": 24, "dtype": "float32", "threshold": 0.0, "seed": 0}
    return SimpleNamespace(**defaults | more | changes)


def test_stream_of_tokens_joins_up_and_never_shows_half_a_character(tokenizer):
    ids = tokenizer.encode(TEXT)
    stream = terminal.Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.rest() == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces  # some token did end inside a character, or this test shows nothing


def test_peek_leaves_the_stream_as_it_is(tokenizer):
    stream = terminal.Detokenizer(tokenizer)
    first, second = tokenizer.encode(" good morning")
    assert stream.push(first) == " good"
    assert stream.peek(second) == " morning" and stream.push(second) == " morning"


def test_a_character_that_never_ends_is_shown_at_last(tokenizer):
    half = tokenizer.encode("🎉")[0]
    stream = terminal.Detokenizer(tokenizer)
    assert stream.push(half) == "" and stream.rest() == "\ufffd"


def test_html_is_valid_and_says_what_became_of_each_draft(tokenizer):
    a, b, c, d = (tokenizer.encode(text)[0] for text in ("</", "&", "\n", " word"))
    steps = [
        Step([], 0, [a], None),
        Step([b, c, d], 1, [b, d], [0.9, 0.5, 0.1]),
        Step([c, d], 2, [c, d, a], [0.0, 1.0]),
        Step([b, b], 2, [b], [0.7, 0.7]),  # cut by the budget inside the accepted drafts
    ]
    page = terminal.coloured_html(tokenizer, steps)
    parsed = Parsed(page)
    show = [tokenizer.decode([token]) for token in (a, b, c, d)]
    assert parsed.text("i") == show[0]
    assert parsed.text("span") == show[1] + show[2] + show[3] + show[1]
    assert parsed.text("del") == "\u21b5" + show[3]  # a rejected line feed must not break the line
    assert parsed.text("b") == show[3] and parsed.text("ins") == show[0]
    emitted = [token for step in steps for token in step.emitted]
    assert parsed.text("i", "span", "b", "ins") == tokenizer.decode(emitted)
    shades = [float(x) for x in re.findall(r"rgba\(0,114,178,([.\d]+)\)[^>]*confidence", page)]
    assert shades[2] > shades[0] > shades[1]  # confidence 1.0, 0.9, 0.0


@pytest.mark.parametrize("colour", [True, False])
def test_generate_streams_the_answer_and_compares(saved, capsys, monkeypatch, colour):
    target, folder = saved
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: colour, raising=False)
    assert terminal.generate(request(folder)) == 0
    shown = capsys.readouterr().out
    assert ("\x1b[" in shown) == colour
    target.layer_ids = ()
    plain = answer(target, None, target.tokenizer("speculate")["input_ids"], 0, 24)
    body = re.sub(r"\x1b\[[\d;]*m|[\u2039\u203a]", "", shown).split(":\n\n", 1)[1]
    assert body.split("\n")[0] == target.tokenizer.decode(plain.tokens, True)
    assert "identical" in body and re.search(r"speedup +\d+\.\d\dx", body) and "tau" in body


def test_no_color_is_obeyed_on_a_terminal(saved, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    terminal.generate(request(saved[1], temperature=0.7))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "identical" not in shown  # samples are not compared


def test_accepted_drafts_are_marked_apart_from_the_targets_own(saved, capsys, monkeypatch):
    """A drafter that always knows the answer: all but every fourth token is marked as drafted."""
    target, folder = saved
    drafter = checkpoint.load(folder, target)
    plain = answer(target, None, [5, 6, 7], 0, 13).tokens

    def draft(anchor, cache, n, *_):
        begin = cache.length - 3 + 1  # the context is the prompt's 3 tokens and all before the anchor
        return Draft(torch.tensor((plain + [0] * n)[begin : begin + n]), None, torch.ones(n))

    monkeypatch.setattr(drafter, "draft", draft)
    got = terminal.stream(target, drafter, [5, 6, 7], 3, 13)
    shown = capsys.readouterr().out.split(":\n\n", 1)[1]
    text = target.tokenizer.decode(plain)
    parts = [text[0], *(f"\u2039{text[i : i + 3]}\u203a{text[i + 3]}" for i in range(1, 13, 4))]
    assert shown.strip() == "".join(parts)
    assert got.accepted == [3, 3, 3] and got.tau == 4.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"drafter": None}, "--drafter"),
        ({"drafter": "nowhere"}, "nowhere"),
        ({"n": 9}, "num_speculative_tokens = 9"),
        ({"max_new_tokens": 1000}, "holds 256"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
    ],
)
def test_a_wrong_request_is_one_line(saved, changes, named):
    with pytest.raises(UserError) as error:
        terminal.generate(request(saved[1], **changes))
    assert named in str(error.value) and "\n" not in str(error.value)
