"""What speculative decoding looks like: an answer streamed in the terminal, and the same as HTML for a notebook."""

import dataclasses
import html
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspark import UserError, checkpoint, schedule
from dspark.decode import Answer, Step, answer, decode
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.records import NEAR_TIE, tie_gap
from dspark.target import EMBEDDED, Target, resolve_dtype

DEFAULT_N = 4  # drafts a step: the best mean speedup of the committed drafter (data/results/reference)
WARM_UP = 8  # tokens decoded before the clock runs: a process's first steps are slow
# Blue and vermilion of medium lightness: told apart by colour-blind readers, legible on black and on white.
ACCEPTED, OWN, PLAIN = "\x1b[38;5;33m", "\x1b[1;38;5;166m", "\x1b[0m"


@dataclass
class Detokenizer:
    """Turns a stream of tokens into a stream of text that joins up to the text of the whole.

    A token may end inside a character: its text is held back until the character is complete.
    """

    tokenizer: object
    skip_special_tokens: bool = True
    ids: list[int] = field(default_factory=list)
    shown: str = ""

    def push(self, token: int) -> str:
        """The text that `token` completes, possibly none."""
        self.ids.append(token)
        return "" if self._text().endswith("\ufffd") else self.rest()

    def rest(self) -> str:
        """What was held back. A character that stays incomplete is U+FFFD."""
        text = self._text()
        new, self.shown = text[len(self.shown) :], text
        return new

    def peek(self, token: int) -> str:
        """The text that `token` would add here; the stream stays as it is."""
        fork = dataclasses.replace(self, ids=[*self.ids, token])
        return fork.rest()

    def _text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens)


def generate(args) -> int:
    """`python3 -m dspark generate`: stream an answer, then run the baseline and compare. Raises UserError."""
    try:
        if args.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {args.max_new_tokens}: ask for at least 1")
        target, drafter = load(args.target or EMBEDDED, args.drafter, args.dtype)
        n = min(DEFAULT_N, drafter.config.max_draft_tokens) if args.n is None else args.n
        prompt = encode(target, args.prompt)
        options = {"temperature": args.temperature, "seed": args.seed}
        length = min(WARM_UP, args.max_new_tokens)
        limit = {}
        if args.threshold > 0:
            fitted = schedule.load_temperatures(Path(args.drafter or COMMITTED_DRAFTER), n)
            limit = {"policy": schedule.Threshold(n, args.threshold), "temperatures": fitted}
        answer(target, drafter, prompt, n, length, **limit, **options)
        got = stream(target, drafter, prompt, n, args.max_new_tokens, **limit, **options)
        target.layer_ids = ()  # the baseline pays for no hidden state
        answer(target, None, prompt, 0, length, **options)
        plain = answer(target, None, prompt, 0, args.max_new_tokens, **options)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    report(target, prompt, n, got, plain, args.temperature)
    return 0


def load(target_name: str, folder: str | None, dtype: str | None):
    """(target, drafter) on the GPU if there is one. The committed drafter is the embedded target's."""
    if folder is None and target_name != EMBEDDED:
        raise ValueError(f"no drafter for target {target_name!r}: name one with --drafter")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(target_name, resolve_dtype(dtype), device)
    drafter = checkpoint.load(Path(folder or COMMITTED_DRAFTER), target)
    target.layer_ids = drafter.config.target_layer_ids
    return target, drafter


def encode(target: Target, prompt: str) -> list[int]:
    """Prompt ids: a user's turn, or the bare text where the target has no chat template (a base model)."""
    if target.tokenizer.chat_template is None:
        return target.tokenizer(prompt)["input_ids"]
    return target.encode_chat([{"role": "user", "content": prompt}])


def stream(target, drafter, prompt: list[int], n: int, max_new_tokens: int, **options) -> Answer:
    """Print the answer while it is verified. The time of printing and detokenising does not count."""
    accepted, own = "\u2039{}\u203a", "{}"
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        accepted, own = f"{ACCEPTED}{{}}{PLAIN}", f"{OWN}{{}}{PLAIN}"
    print(accepted.format("drafted and accepted") + ", " + own.format("the target's own") + ":\n")
    result, text = Answer(), Detokenizer(target.tokenizer)
    for index, (step, seconds) in enumerate(_timed(decode(target, drafter, prompt, n, max_new_tokens, **options))):
        result.seconds += seconds
        result.tokens += step.emitted
        if index:  # the first is the prefill
            result.drafted.append(len(step.drafts))
            result.accepted.append(step.accepted)
        kept, rest = step.emitted[: step.accepted], step.emitted[step.accepted :]
        for form, tokens in ((accepted, kept), (own, rest)):
            if new := "".join(map(text.push, tokens)):
                print(form.format(new), end="", flush=True)
    print(text.rest() + "\n")
    return result


def _timed(steps: Iterator[Step]) -> Iterator[tuple[Step, float]]:
    """Each step with the seconds that it took."""
    while True:
        begun = time.perf_counter()
        step = next(steps, None)
        if step is None:
            return
        yield step, time.perf_counter() - begun


def report(target, prompt: list[int], n: int, got: Answer, plain: Answer, temperature: float) -> None:
    """tau, both speeds, the speedup, and whether the outputs are the same."""
    speed, base = len(got.tokens) / got.seconds, len(plain.tokens) / plain.seconds
    print(f"accepted length tau   {got.tau:.2f}  ({len(got.tokens)} tokens, {got.steps} steps of n = {n} drafts)")
    print(f"speculative        {speed:7.1f} tokens/s")
    print(f"autoregressive     {base:7.1f} tokens/s")
    print(f"speedup            {speed / base:7.2f}x, {str(target.dtype).removeprefix('torch.')}, prompt included")
    if temperature > 0:
        print("Both are samples of the target's distribution, drawn with different random numbers.")
    elif got.tokens == plain.tokens:
        print("The outputs are identical.")
    else:
        at = next((i for i, (a, b) in enumerate(zip(got.tokens, plain.tokens, strict=False)) if a != b), None)
        limit = NEAR_TIE[str(target.dtype).split(".")[1]]
        near = tie_gap(target, prompt, plain.tokens, got.tokens) <= limit
        why = "a near-tie of the target's own logits, decided by rounding" if near else "NOT a near-tie: a fault"
        print(f"The outputs differ from token {at} on: {why}.")


# for notebooks

# Tags as well as colours: viewers that drop styles (GitHub) still show strike-through, bold and underline.
# kind -> (tag, background as R, G, B, further style, what it means); Okabe and Ito's colour-blind-safe colours
KINDS = {
    "accepted": ("span", "0,114,178", "", "drafted and accepted"),
    "rejected": ("del", "128,128,128", "font-size:75%;opacity:.75", "drafted and rejected"),
    "corrected": ("b", "213,94,0", "", "the target's correction"),
    "bonus": ("ins", "0,158,115", "", "the target's bonus after a full accept"),
    "prefill": ("i", "204,121,167", "", "the target's, nothing drafted"),
}


def coloured_html(tokenizer, steps: Iterable[Step]) -> str:
    """A whole answer as HTML: what was drafted, kept, thrown away and added, drafts shaded by their confidence."""
    text = Detokenizer(tokenizer, skip_special_tokens=False)
    spans = []
    for step in steps:
        confidence = step.confidence or [None] * len(step.drafts)
        kept = min(step.accepted, len(step.emitted))
        spans += [_span("accepted", text.push(t), confidence[k]) for k, t in enumerate(step.emitted[:kept])]
        if len(step.emitted) <= step.accepted:  # cut inside the accepted drafts: the answer ends here
            break
        rejected = list(enumerate(step.drafts))[step.accepted :]
        spans += [_span("rejected", text.peek(t).replace("\n", "\u21b5"), confidence[k]) for k, t in rejected]
        kind = "prefill" if not step.drafts else "corrected" if rejected else "bonus"
        spans.append(_span(kind, text.push(step.emitted[-1])))
    spans.append(html.escape(text.rest()))
    legend = " \u00b7 ".join(_span(kind, meaning) for kind, (*_, meaning) in KINDS.items())
    legend += " \u00b7 the darker a draft, the more confident the drafter"
    return f'<div><p>{legend}</p><pre style="white-space:pre-wrap;line-height:1.6">{"".join(spans)}</pre></div>'


def _span(kind: str, text: str, confidence: float | None = None) -> str:
    tag, colour, style, meaning = KINDS[kind]
    known = confidence is not None
    alpha = 0.08 + 0.5 * confidence if known else 0.3
    title = f"{meaning}, confidence {confidence:.2f}" if known else meaning
    style = ";".join(filter(None, (f"background:rgba({colour},{alpha:.2f})", style)))
    return f'<{tag} style="{style}" title="{html.escape(title)}">{html.escape(text)}</{tag}>' if text else ""
