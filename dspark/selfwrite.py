"""The target writes its own training data: prompts first, then its responses. No download, on-policy by construction.

An aligned chat model that is given its chat prefix up to the user turn goes on as the user; a topic opener steers it
into one of six styles. It then answers its own prompts, greedily and sampled in turn.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from dspark.batched import serve
from dspark.kernels import cpu
from dspark.paths import PROMPTS, cache_dir
from dspark.schedule import Fixed
from dspark.setup import has_gpu
from dspark.target import EMBEDDED, Target, embedded_target, encode_chat, resolve_dtype, stop_ids

HELDOUT_ONE_IN = 32
MAX_PROMPT_TOKENS = 96  # that the target adds to an opener
CONCURRENCY = 96  # conversations at once, by the own engine


def normalise(prompt: str) -> str:
    return " ".join(prompt.lower().split())


def split_of(prompt: str) -> str:
    """`heldout` or `train`, decided by the prompt's own hash: the same prompt can never be in both."""
    digest = hashlib.sha256(normalise(prompt).encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0 else "train"


class VllmWriter:
    """The target in vLLM's own engine. Calling it continues prompts, lists of ids -> lists of ids, stop token included.

    On a CPU two writers of one thread each outrun one of two threads, hence `--workers`. vLLM has no per-request seed
    there, so the engine's generator is seeded once a call, which comes to the same: a call starts with an idle engine.
    """

    def __init__(self, target_name: str, dtype: str, max_model_len: int, max_num_seqs: int = 192):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: one thread, one generator
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig
        from vllm import LLM

        source = str(embedded_target()) if target_name == EMBEDDED else target_name
        self.llm = LLM(
            source, dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs, enforce_eager=not has_gpu(),
            gpu_memory_utilization=0.8 if has_gpu() else 0.3,
        )  # fmt: skip
        self.name, self.tokenizer = target_name, AutoTokenizer.from_pretrained(source)
        self.eos_token_ids = stop_ids(AutoConfig.from_pretrained(source), GenerationConfig.from_pretrained(source))

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, temperature: list[float], seed: int):
        from vllm import SamplingParams

        torch.manual_seed(seed)
        params = [SamplingParams(temperature=t, max_tokens=max_new_tokens, detokenize=False) for t in temperature]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class OwnWriter:
    """As VllmWriter, by this project's own batched engine: faster on a CPU that its kernels serve."""

    def __init__(self, target: Target):
        self.target, self.name = target, target.name
        self.tokenizer, self.eos_token_ids = target.tokenizer, target.eos_token_ids

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, temperature: list[float], seed: int):
        written = [[]] * len(prompts)
        for t in sorted(set(temperature)):
            turn = [i for i, mine in enumerate(temperature) if mine == t]
            asked = [prompts[i] for i in turn]
            answers = serve(self.target, None, asked, Fixed(0), CONCURRENCY, max_new_tokens, t, seed)
            for i, served in zip(turn, answers, strict=True):
                written[i] = served.tokens
        return written


def write_prompts(writer, openers: dict, styles: list[str], count: int, max_tokens: int, seed: int) -> list[dict]:
    """`count` prompts begun with random openers of random `styles` and finished by the target at temperature 1; unended
    ones dropped."""
    rng = random.Random(seed)
    styles = rng.choices(styles, k=count)
    starts = [rng.choice(openers[style]) for style in styles]
    marker = "\u241f"  # a symbol that no template contains: whatever follows it is the end of the user turn
    chat = [{"role": "user", "content": marker}]
    prefix = writer.tokenizer.apply_chat_template(chat, tokenize=False).split(marker)[0]
    ids = [writer.tokenizer.encode(prefix + start, add_special_tokens=False) for start in starts]
    written = writer(ids, max_tokens, [1.0] * count, seed)
    rows = []
    for style, start, tail in zip(styles, starts, written, strict=True):
        if tail[-1] in writer.eos_token_ids and len(tail) > 4:
            prompt = (start + writer.tokenizer.decode(tail[:-1])).strip()
            rows.append({"style": style, "prompt": prompt})
    return rows


def answer(
    writer, rows: list[dict], max_new_tokens: int, seed: int, temperatures: tuple[float, ...] = (0.0, 0.8)
) -> list[dict]:
    """Add the target's own response to each row; the rows take the temperatures in turn."""
    temperature = [temperatures[i % len(temperatures)] for i in range(len(rows))]
    ids = [encode_chat(writer.tokenizer, [{"role": "user", "content": row["prompt"]}]) for row in rows]
    responses = writer(ids, max_new_tokens, temperature, seed)
    done = []
    for row, t, prompt, response in zip(rows, temperature, ids, responses, strict=True):
        text = writer.tokenizer.decode([token for token in response if token not in writer.eos_token_ids])
        messages = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": text}]
        done.append(
            {
                "style": row["style"],
                "split": split_of(row["prompt"]),
                "temperature": t,
                "target": writer.name,
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


def self_write(
    writer, path: Path, response_tokens: int, batch: int = 768, seed: int = 0, max_new_tokens: int = 192,
    temperatures: tuple[float, ...] = (0.0, 0.8), styles: tuple[str, ...] = (),
):  # fmt: skip
    """Append rounds of self-written conversations to `path` until it holds `response_tokens`; resumes from the file.

    styles: of openers.json, drawn as often as named; empty: all alike.
    """
    openers = json.loads((PROMPTS / "openers.json").read_text())
    if unknown := set(styles) - set(openers):
        raise ValueError(f"styles {sorted(unknown)}: openers.json has {sorted(openers)}")
    styles = list(styles) or sorted(openers)
    held_out = {normalise(row["turns"][0]) for file in PROMPTS.glob("own-*.jsonl") for row in _jsonl(file)}
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rounds(path)
    seen = held_out | {normalise(row["messages"][0]["content"]) for row in rows}
    total = sum(len(row["response_ids"]) for row in rows)
    number = rows[-1]["round"] + 1 if rows else 0
    with tqdm(total=response_tokens, initial=total, unit="tok", desc=f"{writer.name} writes {path.name}") as bar:
        while total < response_tokens:
            round_seed = seed * 1_000_003 + number
            prompts = write_prompts(writer, openers, styles, batch * 3 // 2, MAX_PROMPT_TOKENS, round_seed)
            fresh = {normalise(row["prompt"]): row for row in prompts if normalise(row["prompt"]) not in seen}
            chosen = list(fresh.values())[:batch]
            if not chosen:
                raise RuntimeError(f"round {number} wrote no new prompt: the openers are exhausted, add some")
            seen |= set(fresh)
            done = answer(writer, chosen, max_new_tokens, round_seed, temperatures)
            with path.open("a") as file:
                file.write("".join(json.dumps({"round": number, **row}) + "\n" for row in done))
            written = sum(len(row["response_ids"]) for row in done)
            total, number = total + written, number + 1
            bar.update(written)


def _jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def data_folder() -> Path:
    return cache_dir() / "data"


def written_files(target_name: str, folder: Path) -> list[Path]:
    """What `data` has written for this target, one file a seed."""
    files = sorted(folder.glob(f"{target_name.replace('/', '--')}-seed*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no training data for {target_name!r} in {folder}: run `python3 -m dspark data` first")
    return files


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark data", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="embedded default, hub name or folder")
    parser.add_argument("--response-tokens", type=int, default=400_000, help="of all workers together")
    parser.add_argument("--batch", type=int, default=768, help="conversations a round")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="of the responses, in turn; 0: greedy"
    )
    parser.add_argument("--styles", nargs="+", default=[], help="of prompts, drawn as often as named (default: all)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0, help="of the first worker; the next has the next")
    parser.add_argument("--writer", choices=("own", "vllm"), help="engine (default: own where its CPU kernels serve)")
    parser.add_argument("--workers", type=int, help="processes (default: one; of vLLM on a CPU one a core)")
    parser.add_argument("--out", type=Path, help="folder of the JSONL files, one a worker (default: in the cache)")
    args = parser.parse_args(argv)
    dtype = resolve_dtype(args.dtype)
    served = not has_gpu() and dtype == torch.bfloat16 and cpu.available()
    chosen = args.writer or ("own" if served else "vllm")
    workers = args.workers or (1 if has_gpu() or chosen == "own" else os.cpu_count())
    share = -(-args.response_tokens // workers)
    if workers > 1:
        _run_workers(argv, workers, args.seed, share)
        return
    path = (args.out or data_folder()) / f"{args.target.replace('/', '--')}-seed{args.seed}.jsonl"
    if chosen == "own":
        writer = OwnWriter(Target.load(args.target, dtype))
    else:
        writer = VllmWriter(
            args.target, str(dtype).removeprefix("torch."), MAX_PROMPT_TOKENS + 128 + args.max_new_tokens
        )
    drawn = tuple(args.temperatures), tuple(args.styles)
    self_write(writer, path, share, args.batch, args.seed, args.max_new_tokens, *drawn)
    print(path)


def _run_workers(argv: list[str], workers: int, seed: int, share: int) -> None:
    """One process of one thread a seed, side by side; the first that fails stops the others."""
    command = [sys.executable, "-m", "dspark", "data", *argv, "--workers", "1", "--response-tokens", str(share)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([*command, "--seed", str(seed + i)], env=environment) for i in range(workers)]
    try:
        while None in (codes := [process.poll() for process in running]) and not any(codes):
            time.sleep(0.2)
        if failed := next(filter(None, codes), 0):
            raise SystemExit(f"a writer ended with status {failed}: its message is above")
    finally:
        for process in running:
            process.terminate()
