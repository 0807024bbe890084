"""What each head is worth (notebook 02): drafters that differ in heads, depth or block size only, trained alike and
measured in real decoding.

All arms of a seed see the same data in the same order, as many steps and anchors, and begin with the same backbone.
Rows of `head_ablation.csv` carry the hash of their run; a rerun trains and measures only what is missing.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import t as student

from dspark import baselines, checkpoint, schedule
from dspark.batched import Served, observed_blocks, serve
from dspark.config import DSparkConfig
from dspark.data import OWN_SETS, load_prompts, read_jsonl
from dspark.decode import pooled_tau, step_parts
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.paths import ROOT, cache_dir
from dspark.schedule import Fixed
from dspark.selfwrite import data_folder
from dspark.target import EMBEDDED, Target, resolve_dtype
from dspark.train import TrainConfig, train

HEADS = {
    "none": {"markov_rank": 0, "confidence_head": False},  # plain DFlash
    "markov": {"confidence_head": False},
    "confidence": {"markov_rank": 0, "confidence_head_with_markov": False},
    "both": {},
    "joint": {},  # both, and the confidence loss trains the backbone as well
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
}
MAIN_ARMS = ("none", "markov", "confidence", "both")
# A detached confidence head leaves no trace in the rest, nor in what is drafted: one training and one measurement give
# the arm with it and the arm without.
WITHOUT_CONFIDENCE = {"none": "confidence", "markov": "both"}


@dataclass(frozen=True)
class Arm:
    """One drafter to train. It drafts whole blocks: n = block_size."""

    heads: str
    num_hidden_layers: int
    block_size: int
    seed: int

    def __post_init__(self):
        if self.heads not in HEADS:
            raise ValueError(f"heads = {self.heads!r}: one of {', '.join(HEADS)}")

    @property
    def name(self) -> str:
        return f"{self.heads}-{self.num_hidden_layers}x{self.block_size}-seed{self.seed}"


@dataclass(frozen=True)
class AblationConfig:
    """What all arms share. `shape` is a whole DSpark drafter, from which arms take away or change."""

    profile: str
    target: str
    shape: DSparkConfig
    backbone: Path | None  # a drafter without heads that all arms begin from; None: a random one a seed
    training: TrainConfig
    response_tokens: int  # of training data, written by the target
    benchmarks: tuple[str, ...]
    prompts: int  # a benchmark
    max_new_tokens: int
    concurrency: int = 8  # requests decoded at once while measuring
    dtype: str = "bfloat16"  # of the target while measuring

    def shape_of(self, arm: Arm) -> DSparkConfig:
        size = {"num_hidden_layers": arm.num_hidden_layers, "block_size": arm.block_size, "sample_from_anchor": True}
        return self.shape.replace(**size, **HEADS[arm.heads])

    def training_of(self, arm: Arm) -> TrainConfig:
        detach = self.training.detach_confidence and arm.heads != "joint"
        sizes = (arm.block_size,)
        return dataclasses.replace(self.training, seed=arm.seed, block_sizes=sizes, detach_confidence=detach)

    def twin_of(self, arm: Arm) -> Arm | None:
        """The arm with a confidence head that is this one otherwise, where training makes them so."""
        if arm.heads in WITHOUT_CONFIDENCE and self.training.detach_confidence:
            return dataclasses.replace(arm, heads=WITHOUT_CONFIDENCE[arm.heads])
        return None


def training_data(target: str, response_tokens: int) -> Path:
    """A file of the target's own conversations with `response_tokens` in the training split: the first ones that
    `python3 -m dspark data` has written, which is run for what is missing."""
    stem = target.replace("/", "--")
    path = cache_dir() / "ablation" / f"{stem}-{response_tokens}.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    wanted = response_tokens
    while (rows := _first_rows(stem, response_tokens)) is None:  # a part of what is written is held out
        wanted += response_tokens // 20
        size = ["--response-tokens", str(wanted), "--batch", str(min(768, response_tokens // 128 + 4))]
        command = [sys.executable, "-m", "dspark", "data", "--target", target, "--workers", "1", *size]
        subprocess.run(command, cwd=ROOT, check=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.rename(path)
    return path


def _first_rows(stem: str, response_tokens: int) -> list[dict] | None:
    rows, total = [], 0
    for file in sorted(data_folder().glob(f"{stem}-seed*.jsonl")):
        for row in read_jsonl(file):
            rows.append(row)
            total += len(row["response_ids"]) * (row["split"] == "train")
            if total >= response_tokens:
                return rows
    return None


def _digest(*parts) -> str:
    text = json.dumps([dataclasses.asdict(p) if dataclasses.is_dataclass(p) else p for p in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def trained(config: AblationConfig, arm: Arm, data: Path) -> Path:
    """Folder of the arm's drafter, trained (or gone on with) where it is not there yet."""
    shape, training = config.shape_of(arm), config.training_of(arm)
    begun = [file.read_bytes() for file in checkpoint.weight_files(config.backbone)] if config.backbone else []
    run = _digest(shape, training, *(hashlib.sha256(part).hexdigest() for part in (data.read_bytes(), *begun)))
    folder = cache_dir() / "ablation" / f"{arm.name}-{run}"
    if not (folder / "COMPLETE").exists():
        if twin := config.twin_of(arm):
            _, tensors, notes = checkpoint.read(trained(config, twin, data))
            kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
            checkpoint.write(checkpoint.Checkpoint(shape, kept, notes), folder / "drafter")
        else:
            train(config.target, shape, training, [data], folder, init=config.backbone)
        (folder / "COMPLETE").touch()
    for step in folder.glob("step-*"):  # optimiser states: large, and of no more use
        shutil.rmtree(step)
    return folder / "drafter"


def chats(target: Target, benchmark: str, prompts: slice) -> list[list[int]]:
    texts = load_prompts(benchmark, 10**6).prompts[prompts]
    return [target.encode_chat([{"role": "user", "content": text}]) for text in texts]


def measure(target: Target, drafter, config: AblationConfig, arm: Arm) -> list[dict]:
    """Greedy decoding of every benchmark with n = block_size drafts: one row each."""
    rows = []
    for benchmark in config.benchmarks:
        prompts = chats(target, benchmark, slice(config.prompts))
        answers = serve(target, drafter, prompts, Fixed(arm.block_size), config.concurrency, config.max_new_tokens)
        rows.append({"benchmark": benchmark, "n": arm.block_size, **acceptance(answers, arm.block_size)})
    return rows


def acceptance(answers: list[Served], n: int) -> dict:
    """tau, acceptance of positions 1..n (unconditional: with all before it; conditional: given all before it), and
    how good the raw confidences of whole prefixes are; NaN without a head or a case."""
    accepted = np.array([a for served in answers for a in served.accepted])
    kept = np.array([len(accepted), *((accepted >= k).sum() for k in range(1, n + 1))])
    row = {"prompts": len(answers), "output_tokens": sum(len(served.tokens) for served in answers),
           "steps": len(accepted), "tau": pooled_tau(answers)}  # fmt: skip
    for k in range(1, n + 1):
        row[f"accept_pos_{k}"] = kept[k] / kept[0] if kept[0] else np.nan
        row[f"cond_pos_{k}"] = kept[k] / kept[k - 1] if kept[k - 1] else np.nan
    row |= {"confidence_ece": np.nan, **{f"auroc_pos_{k}": np.nan for k in range(1, n + 1)}}
    if any(served.confidence for served in answers):
        table = schedule.calibration_table(*observed_blocks(answers, n), np.ones(n))
        row["confidence_ece"] = table.ece_before.mean()
        row |= {f"auroc_pos_{k}": value for k, value in enumerate(table.auroc_before, 1)}
    return row


def study(config: AblationConfig, arms: list[Arm], out: Path, fresh: bool = False) -> pd.DataFrame:
    """Train and measure the arms, resuming from out/head_ablation.csv, and return their rows, in their order: one an
    (arm, benchmark). Rows of other arms and settings stay in the file. fresh: measure these arms again."""
    out.mkdir(parents=True, exist_ok=True)
    path, data = out / "head_ablation.csv", training_data(config.target, config.response_tokens)
    target = Target.load(config.target, getattr(torch, config.dtype), _device(), config.shape.target_layer_ids)
    folders = {arm: trained(config, arm, data) for arm in arms}
    runs = {
        arm: _digest(folder.parent.name, config.benchmarks, config.prompts, config.max_new_tokens, config.dtype)
        for arm, folder in folders.items()
    }
    found = pd.read_csv(path) if path.exists() else pd.DataFrame({"run": []})
    mine = found.run.isin(runs.values())
    others, table = found[~mine], found[mine & (not fresh)]

    def save() -> None:
        (pd.concat([others, table]) if len(others) else table).to_csv(path, index=False)

    missing = [arm for arm in arms if runs[arm] not in set(table.run)]
    for arm in sorted(missing, key=lambda arm: config.twin_of(arm) is not None):  # twins after those they are twins of
        drafter, twin = checkpoint.load(folders[arm], target), config.twin_of(arm)
        with torch.device("meta"):
            parameters = baselines.trained_parameters(baselines.build(drafter.config))
        key = {"profile": config.profile, "target": config.target, **dataclasses.asdict(arm), "run": runs[arm]}
        if twin in runs:
            rows = table[table.run == runs[twin]].assign(**key, parameters=parameters, draft_ms=np.nan)
            rows.loc[:, ["confidence_ece", *rows.filter(like="auroc_pos_")]] = np.nan
        else:
            rows = [{**key, **row, "parameters": parameters, "draft_ms": np.nan} for row in
                    measure(target, drafter, config, arm)]  # fmt: skip
            rows = pd.DataFrame(rows)  # joined to an empty table, integers would become floats
        table = pd.concat([table, rows], ignore_index=True) if len(table) else rows
        save()
    order = {run: index for index, run in enumerate(runs.values())}
    table = table.sort_values("run", key=lambda run: run.map(order), kind="stable", ignore_index=True)
    if table.draft_ms.isna().any():
        drafters = {runs[arm]: checkpoint.load(folder, target) for arm, folder in folders.items()}
        cells = [(run, drafter.config.block_size) for run, drafter in drafters.items()]
        times = step_parts(target, drafters, cells, chats(target, config.benchmarks[0], slice(1))[0])
        table["draft_ms"] = table.run.map({run: parts["draft_ms"] for (run, _), parts in times.items()})
    save()
    return table


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- comparing arms


ARM = ["heads", "num_hidden_layers", "block_size", "seed"]


def by_position(table: pd.DataFrame) -> pd.DataFrame:
    """One row an arm, seed and position: blocks of all benchmarks that `reached` it (all earlier drafts accepted), the
    share of these accepted (conditional) and of all blocks (unconditional)."""
    rows = []
    for key, cells in table.groupby(ARM, sort=False):
        reached = blocks = cells.steps.sum()
        for k in range(1, key[2] + 1):
            kept = round((cells.steps * cells[f"accept_pos_{k}"]).sum())
            conditional = kept / reached if reached else np.nan
            row = {"position": k, "reached": reached, "conditional": conditional, "unconditional": kept / blocks}
            rows.append(dict(zip(ARM, key, strict=True)) | row)
            reached = kept
    return pd.DataFrame(rows)


def by_seed(table: pd.DataFrame) -> pd.DataFrame:
    """One row an arm and seed: tau as the plain mean over benchmarks, and the decay of conditional acceptance, the
    slope of a line through it with each position weighted by the blocks that reached it."""
    seeds = table.groupby(ARM, sort=False)[["tau", "draft_ms", "parameters"]].mean().reset_index()
    slopes = []
    for key, cells in by_position(table).groupby(ARM, sort=False):
        seen = cells[cells.reached > 0]
        enough = len(seen) > 1
        line = np.polyfit(seen.position, seen.conditional, 1, w=np.sqrt(seen.reached)) if enough else [np.nan]
        slopes.append({**dict(zip(ARM, key, strict=True)), "conditional_slope": line[0]})
    return seeds.merge(pd.DataFrame(slopes), on=ARM)


def paired(seeds: pd.DataFrame, pairs: list[tuple[str, str]], metrics=("tau", "conditional_slope")) -> pd.DataFrame:
    """Differences (first arm minus second) within each seed: mean and 95% t interval over seeds, NaN with one seed.

    seeds: rows of `by_seed`, of one depth and block size."""
    rows = []
    for metric in metrics:
        wide = seeds.pivot(index="seed", columns="heads", values=metric)
        for arm, other in pairs:
            difference = (wide[arm] - wide[other]).dropna()
            count = len(difference)
            half = student.ppf(0.975, count - 1) * difference.std() / np.sqrt(count) if count > 1 else np.nan
            mean = difference.mean()
            rows.append({"metric": metric, "arm": arm, "against": other, "seeds": count, "difference": mean,
                         "low": mean - half, "high": mean + half})  # fmt: skip
    return pd.DataFrame(rows)


# ---- calibration, and tables that resume


def calibration_blocks(
    target: Target, drafter, benchmarks: tuple[str, ...], prompts: int, max_new_tokens: int, concurrency: int,
    temperature: float = 0.0, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Real decoding with all n drafts verified, one row a block: `part` ("fit" on the last `prompts` of each set,
    "judge" on the first), drafts `accepted`, and confidence_1..n before any calibration, to four digits. ValueError
    where a set has fewer than twice as many prompts: no prompt may be in both parts."""
    for name in benchmarks:
        there = len(load_prompts(name, 10**6).prompts)
        if not 1 <= prompts <= there // 2:
            raise ValueError(f"prompts = {prompts}: {name} has {there}, half of them to judge by: 1 to {there // 2}")
    n, tables = drafter.config.max_draft_tokens, []
    for part, chosen in (("fit", slice(-prompts, None)), ("judge", slice(prompts))):
        every = [chat for name in benchmarks for chat in chats(target, name, chosen)]
        answers = serve(target, drafter, every, Fixed(n), concurrency, max_new_tokens, temperature, seed)
        confidence, accepted = observed_blocks(answers, n)
        table = pd.DataFrame(confidence.round(4), columns=[f"confidence_{k}" for k in range(1, n + 1)])
        tables.append(table.assign(part=part, accepted=accepted))
    return pd.concat(tables, ignore_index=True)


def observed(blocks: pd.DataFrame, part: str) -> tuple[np.ndarray, np.ndarray]:
    """confidence [N, n] and drafts accepted [N] of the blocks of one part."""
    rows = blocks[blocks.part == part]
    return rows.filter(like="confidence_").to_numpy(float), rows.accepted.to_numpy()


def calibrate(blocks: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """STS fitted on one part of calibration_blocks and judged on the other: (calibration_table, its reliability bins
    before and after, one row a position and bin)."""
    temperatures = schedule.fit_temperatures(*observed(blocks, "fit"))
    confidence, accepted = observed(blocks, "judge")
    bins = []
    for name, scale in (("before STS", None), ("after STS", temperatures)):
        predicted = schedule.survival(confidence, scale)
        for k in range(confidence.shape[1]):
            table = schedule.reliability(predicted[:, k], accepted > k)
            bins.append(table.assign(position=k + 1, calibration=name))
    return schedule.calibration_table(confidence, accepted, temperatures), pd.concat(bins, ignore_index=True)


def kept(path: Path, key: dict, measure: Callable[[], pd.DataFrame], fresh: bool = False) -> pd.DataFrame:
    """The rows of a CSV that carry `key` (column -> value), measured and appended where there are none."""
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=list(key))
    mine = np.ones(len(table), dtype=bool)
    for column, value in key.items():
        mine &= (table[column].astype(str) == str(value)).to_numpy()
    if mine.any() and not fresh:
        return table[mine].reset_index(drop=True)
    rows = measure()
    rows = rows.assign(**key)[[*key, *(column for column in rows if column not in key)]]
    path.parent.mkdir(parents=True, exist_ok=True)
    (pd.concat([table[~mine], rows]) if (~mine).any() else rows).to_csv(path, index=False)
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark calibrate", description="Write calibration.json into a checkpoint.")
    parser.add_argument("--drafter", type=Path, default=COMMITTED_DRAFTER, help="checkpoint folder")
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--prompts", type=int, default=12, help="a set to fit on, and as many others to judge by")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="of decoding: calibrate for the one in use")
    parser.add_argument("--concurrency", type=int, default=16, help="requests decoded at once")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args(argv)
    target = Target.load(args.target, resolve_dtype(args.dtype), _device())
    drafter = checkpoint.load(args.drafter, target)
    target.layer_ids = drafter.config.target_layer_ids
    size = (args.prompts, args.max_new_tokens, args.concurrency, args.temperature)
    fits = {}
    for source in ("head", "probability") if drafter.confidence_head else ("probability",):
        drafter.confidence_source = source
        fits[source], _ = calibrate(calibration_blocks(target, drafter, OWN_SETS, *size))
    table = pd.concat(fits, names=["confidence"]).reset_index("confidence")
    print(table.round(3).to_string(index=False))
    schedule.save_temperatures(
        args.drafter, {source: fit.temperature for source, fit in fits.items()}, decoding_temperature=args.temperature,
        ece_of_unseen_prompts={source: round(float(fit.ece_after.mean()), 4) for source, fit in fits.items()},
        fitted_on=f"the last {args.prompts} prompts of {', '.join(OWN_SETS)}",
    )  # fmt: skip
