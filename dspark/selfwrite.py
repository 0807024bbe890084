"""The target writes its own training data: prompts first, then its responses. No download, on-policy by construction.

An aligned chat model that is given its chat prefix up to the user turn goes on as the user; a topic opener steers it
into one of six styles. It then answers its own prompts, greedily and sampled in turn.
"""

import argparse
import hashlib
import json
import random
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dspark.paths import PROMPTS, cache_dir
from dspark.target import EMBEDDED, Target

HELDOUT_ONE_IN = 32


def normalise(prompt: str) -> str:
    return " ".join(prompt.lower().split())


def split_of(prompt: str) -> str:
    """`heldout` or `train`, decided by the prompt's own hash: the same prompt can never be in both."""
    digest = hashlib.sha256(normalise(prompt).encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0 else "train"


def sample_tokens(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """One token a row from logits [B, V] at temperature [B]: argmax where it is 0, else a draw by inverse CDF."""
    tokens = logits.argmax(-1)
    draw = (temperature > 0).nonzero().squeeze(-1)
    if len(draw):
        cdf = (logits[draw].float() / temperature[draw, None]).softmax(-1).cumsum(-1)
        uniform = torch.rand(len(draw), 1, generator=generator, device=logits.device)
        tokens[draw] = torch.searchsorted(cdf, uniform * cdf[:, -1:]).squeeze(-1).clamp_max(logits.shape[-1] - 1)
    return tokens


@torch.inference_mode()
def generate_batch(
    target: Target, prompts: list[list[int]], max_new_tokens: int, temperature: Tensor, generator: torch.Generator
) -> list[list[int]]:
    """Responses [list of ids, stop token included] to a batch of prompts of any lengths; temperature [B].

    The batch shrinks as rows finish, so a long straggler does not pay for the rest.
    """
    lengths = torch.tensor([len(p) for p in prompts], device=target.device)
    cache = target.new_cache(len(prompts), int(lengths.max()) + max_new_tokens)
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=target.device)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    hidden = target.forward(padded, cache, 0).hidden
    hidden = hidden[torch.arange(len(prompts)), lengths - 1]  # [B, H]
    out: list[list[int]] = [[] for _ in prompts]
    alive = torch.arange(len(prompts))  # which prompt each row of the shrinking batch belongs to
    for _ in range(max_new_tokens):
        tokens = sample_tokens(target.logits(hidden), temperature, generator)
        for row, token in zip(alive.tolist(), tokens.tolist(), strict=True):
            if not (out[row] and out[row][-1] in target.eos_token_ids):
                out[row].append(token)
        going = torch.tensor([out[row][-1] not in target.eos_token_ids for row in alive.tolist()])
        if not going.any():
            break
        if going.sum() <= 0.75 * len(going):
            alive, tokens, lengths, temperature = alive[going], tokens[going], lengths[going], temperature[going]
            cache.select(going)
        hidden = target.forward(tokens[:, None], cache, lengths).hidden[:, 0]
        lengths = lengths + 1
    return out


def write_prompts(target: Target, openers: dict, count: int, max_tokens: int, seed: int, generator) -> list[dict]:
    """`count` prompts begun with random openers and finished by the target at temperature 1; unended ones dropped."""
    rng = random.Random(seed)
    styles = rng.choices(sorted(openers), k=count)
    starts = [rng.choice(openers[style]) for style in styles]
    marker = "\u241f"  # a symbol that no template contains: whatever follows it is the end of the user turn
    chat = [{"role": "user", "content": marker}]
    prefix = target.tokenizer.apply_chat_template(chat, tokenize=False).split(marker)[0]
    encode = target.tokenizer.encode
    ids = [encode(prefix + start, add_special_tokens=False) for start in starts]
    written = generate_batch(target, ids, max_tokens, torch.ones(count, device=target.device), generator)
    rows = []
    for style, start, tail in zip(styles, starts, written, strict=True):
        if tail[-1] in target.eos_token_ids and len(tail) > 4:
            prompt = (start + target.tokenizer.decode(tail[:-1])).strip()
            rows.append({"style": style, "prompt": prompt})
    return rows


def answer(target: Target, rows: list[dict], max_new_tokens: int, generator) -> list[dict]:
    """Add the target's own response to each row: every other one greedy, the rest at temperature 0.8."""
    temperature = torch.tensor([0.0 if i % 2 == 0 else 0.8 for i in range(len(rows))], device=target.device)
    ids = [target.encode_chat([{"role": "user", "content": row["prompt"]}]) for row in rows]
    responses = generate_batch(target, ids, max_new_tokens, temperature, generator)
    done = []
    for i, (row, prompt, response) in enumerate(zip(rows, ids, responses, strict=True)):
        text = target.tokenizer.decode([t for t in response if t not in target.eos_token_ids])
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": text}]
        done.append(
            {
                "style": row["style"],
                "split": split_of(row["prompt"]),
                "temperature": round(float(temperature[i]), 2),
                "target": target.name,
                "messages": messages,
                "prompt_ids": prompt,
                "response_ids": response,
            }
        )
    return done


def read_rounds(path: Path) -> list[dict]:
    """Rows written so far; a last line cut by a kill is dropped from the file with the rest of its round."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("}\n")]
    if len(rows) < len(lines):
        rows = [row for row in rows if row["round"] < rows[-1]["round"]]
        _write_atomically(path, rows)
    return rows


def _write_atomically(path: Path, rows: list[dict]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(path)


def self_write(target: Target, path: Path, response_tokens: int, batch: int = 96, seed: int = 0, max_new_tokens=192):
    """Append rounds of self-written conversations to `path` until it holds `response_tokens`; resumes from the file."""
    openers = json.loads((PROMPTS / "openers.json").read_text())
    held_out = {normalise(row["turns"][0]) for file in PROMPTS.glob("own-*.jsonl") for row in _jsonl(file)}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rounds(path)
    seen = held_out | {normalise(row["messages"][0]["content"]) for row in rows}
    total = sum(len(row["response_ids"]) for row in rows)
    number = rows[-1]["round"] + 1 if rows else 0
    with tqdm(total=response_tokens, initial=total, unit="tok", desc=f"{target.name} writes {path.name}") as bar:
        while total < response_tokens:
            generator = torch.Generator(target.device).manual_seed(seed * 1_000_003 + number)
            prompts = write_prompts(target, openers, batch * 3 // 2, 96, seed * 1_000_003 + number, generator)
            fresh = {normalise(row["prompt"]): row for row in prompts if normalise(row["prompt"]) not in seen}
            chosen = list(fresh.values())[:batch]
            if not chosen:
                raise RuntimeError(f"round {number} wrote no new prompt: the openers are exhausted, add some")
            seen |= set(fresh)
            done = answer(target, chosen, max_new_tokens, generator)
            with path.open("a") as file:
                file.write("".join(json.dumps({"round": number, **row}) + "\n" for row in done))
            written = sum(len(row["response_ids"]) for row in done)
            total, number = total + written, number + 1
            bar.update(written)


def _jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def default_path(target_name: str, seed: int = 0) -> Path:
    return cache_dir() / "data" / f"{target_name.replace('/', '--')}-seed{seed}.jsonl"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark data", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="embedded default, hub name or folder")
    parser.add_argument("--response-tokens", type=int, default=400_000, help="stop after this many")
    parser.add_argument("--batch", type=int, default=96, help="conversations a round")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSONL file (default: in the cache)")
    args = parser.parse_args(argv)
    target = Target.load(args.target, getattr(torch, args.dtype), "cuda" if torch.cuda.is_available() else "cpu")
    path = args.out or default_path(args.target, args.seed)
    self_write(target, path, args.response_tokens, args.batch, args.seed, args.max_new_tokens)
    print(path)
