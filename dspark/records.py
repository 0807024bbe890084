"""What the n-sweep keeps of an answer, and the table that it makes of these records (design, section 8).

A record is a flat dict, one a (drafter, n, prompt), with the autoregressive answer that ran beside it. A row of the
table pools the records of one (drafter, benchmark, n). `config` is the evaluate.SweepConfig.
"""

import hashlib
import json
import math

import numpy as np
import pandas as pd
import torch

from dspark.answers import is_correct
from dspark.target import Target

MAX_POSITIONS = 8  # accept_pos columns
# A difference is a near-tie if the two tokens' target logits are closer than this share of the largest logit's size.
# bfloat16 keeps 8 bits: logits near 24 are 1/8 apart, and rounding on the way through SmolLM2's 30 layers moved the gap
# of its two top logits by up to 4 such spacings against float32. Hence 1/32, 6 spacings. Measured on one answer of 67
# tokens, after 1/64 had refused one of 336 answers by a hair (gap 0.375, limit 0.369).
NEAR_TIE = {"float32": 1e-4, "bfloat16": 2**-5}


def record_of(config, drafter: str, n: int, prompts, i: int, chat, plain, got, target, tokenizer, **extra) -> dict:
    """What is kept of one answer `got` to prompt i, beside the baseline's `plain`; target judges near-ties (None: no
    difference can be excused). seconds are NaN where the engine's speed means nothing."""
    differs = config.temperature == 0 and got.tokens != plain.tokens
    gap = 0.0
    if differs:
        gap = tie_gap(target, chat, plain.tokens, got.tokens) if target else math.inf
    stated = prompts.answers[i] if prompts.answers else None
    correct = [None if stated is None else is_correct(tokenizer.decode(a.tokens), stated) for a in (got, plain)]
    return {
        **config.cell(drafter, prompts.benchmark, n), "prompt": i, "prompt_set": prompts.hash,
        "rendered": hashlib.sha256(json.dumps(chat).encode()).hexdigest()[:16], "thinking": config.thinking,
        "max_new_tokens": config.max_new_tokens, "prompt_tokens": len(chat), "output_tokens": len(got.tokens),
        "output": hashlib.sha256(json.dumps(got.tokens).encode()).hexdigest()[:16], "seconds": got.seconds,
        **config.origin(drafter), "drafted": got.drafted, "accepted": got.accepted, "mismatch": differs,
        "tie_gap": gap,
        "baseline_tokens": len(plain.tokens), "baseline_seconds": plain.seconds,
        "correct": correct[0], "baseline_correct": correct[1], **extra,
    }  # fmt: skip


def tie_gap(target: Target, prompt: list[int], plain: list[int], got: list[int]) -> float:
    """How clearly the target chose where two outputs part: the gap of its logits of the two tokens there, as a share of
    its largest logit's size. A near-tie if at most NEAR_TIE. Infinite if one output is a prefix of the other, which no
    rounding explains."""
    at = next((k for k, (a, b) in enumerate(zip(plain, got, strict=False)) if a != b), None)
    if at is None:
        return math.inf
    prefix = prompt + plain[:at]
    hidden = target.forward(torch.tensor([prefix], device=target.device), target.new_cache(1, len(prefix)), 0).hidden
    logits = target.logits(hidden[0, -1]).float()
    return float((logits[plain[at]] - logits[got[at]]).abs() / logits.abs().max())


def tabulate(records: list[dict], config) -> pd.DataFrame:
    """One row a (drafter, benchmark, n), and one autoregressive row a benchmark (n = 0), as design section 8 says."""
    rows = []
    for benchmark in config.benchmarks:
        of_set = [r for r in records if r["benchmark"] == benchmark]
        first = {r["prompt"]: r for r in reversed(of_set)}
        if first:
            rows.append(_baseline_row(list(first.values()), config.cell("autoregressive", benchmark, 0)))
        for drafter, n in config.cells:
            cell = [r for r in of_set if r["drafter"] == drafter and r["n"] == n]
            if cell:
                rows.append(_row(cell, config.cell(drafter, benchmark, n)))
    return pd.DataFrame(rows)


def _baseline_row(records: list[dict], key: dict) -> dict:
    tokens, seconds = (sum(r[f"baseline_{name}"] for r in records) for name in ("tokens", "seconds"))
    speed = tokens / seconds
    one = speed / speed  # NaN where the engine's speed means nothing
    return key | {
        "prompts": len(records), "output_tokens": tokens, "steps": tokens - len(records), "drafted": 0, "accepted": 0,
        "tau": 1.0, **{f"accept_pos_{k}": math.nan for k in range(1, MAX_POSITIONS + 1)}, "seconds": round(seconds, 3),
        "tokens_per_s": round(speed, 3), "baseline_tokens_per_s": round(speed, 3), "speedup": one, "speedup_low": one,
        "speedup_high": one, "mismatches": 0, "near_ties": 0, "widest_tie": 0.0,
        "accuracy": _share(records, "baseline_correct"), "baseline_accuracy": _share(records, "baseline_correct"),
    }  # fmt: skip


def _share(records: list[dict], name: str) -> float:
    """How often a check holds; NaN where it was made for none."""
    known = [r[name] for r in records if r.get(name) is not None]
    return sum(known) / len(known) if known else math.nan


def _latency(records: list[dict]) -> dict:
    """Percentiles over prompts, where vLLM reports them: time to first token, between tokens, to the end; in ms."""
    columns = [name for name in ("ttft_ms", "itl_ms", "e2e_ms") if name in records[0]]
    return {
        f"{name}_p{p}": float(np.percentile([r[name] for r in records], p)) for name in columns for p in (50, 90, 99)
    }


def _row(records: list[dict], key: dict) -> dict:
    accepted = np.array([a for r in records for a in r["accepted"]])
    steps, n = len(accepted), key["n"]
    positions = {
        f"accept_pos_{k}": float((accepted >= k).mean()) if k <= n and steps else math.nan
        for k in range(1, MAX_POSITIONS + 1)
    }
    tau = 1 + accepted.sum() / steps if steps else math.nan
    if steps and abs(tau - 1 - sum(p for p in positions.values() if not math.isnan(p))) > 1e-6:
        raise AssertionError(f"tau {tau} is not 1 + the sum of the acceptance per position: {key}")
    seconds, tokens = sum(r["seconds"] for r in records), sum(r["output_tokens"] for r in records)
    low, high = bootstrap_speedup(records, key["seed"])
    baseline = sum(r["baseline_tokens"] for r in records) / sum(r["baseline_seconds"] for r in records)
    return key | {
        "prompts": len(records), "output_tokens": tokens, "steps": steps,
        "drafted": sum(sum(r["drafted"]) for r in records), "accepted": int(accepted.sum()), "tau": tau, **positions,
        "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 3),
        "baseline_tokens_per_s": round(baseline, 3), "speedup": tokens / seconds / baseline, "speedup_low": low,
        "speedup_high": high, "mismatches": sum(r["mismatch"] for r in records),
        "near_ties": sum(r["mismatch"] and r["tie_gap"] <= NEAR_TIE[key["dtype"]] for r in records),
        "widest_tie": max(r["tie_gap"] for r in records), "accuracy": _share(records, "correct"),
        "baseline_accuracy": _share(records, "baseline_correct"), **_latency(records),
    }  # fmt: skip


def bootstrap_speedup(records: list[dict], seed: int, draws: int = 2000) -> tuple[float, float]:
    """95% percentile interval of the speedup, resampling prompts (never tokens)."""
    columns = ("output_tokens", "seconds", "baseline_tokens", "baseline_seconds")
    data = np.array([[r[c] for c in columns] for r in records], dtype=float)  # [prompts, 4]
    picks = np.random.default_rng(seed).integers(len(data), size=(draws, len(data)))
    tokens, seconds, base_tokens, base_seconds = data[picks].sum(1).T
    low, high = np.percentile(tokens / seconds / (base_tokens / base_seconds), [2.5, 97.5])
    return float(low), float(high)
