"""A small search over what decides a drafter: each trial changes one thing of the preset's recipe, all else the same.

Every trial begins at random, sees the same data in the same order and makes the same number of steps. The rows of
`trials.csv` say what was changed, what it cost and what real decoding of held-out prompts gave. Resumes.
"""

import argparse
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from dspark.config import PRESETS, DSparkConfig
from dspark.paths import cache_dir
from dspark.selfwrite import data_folder, written_files
from dspark.target import EMBEDDED
from dspark.train import TrainConfig, train

TRIALS = {  # name -> changes of the drafter's shape, changes of the training
    "base": ({}, {}),
    "AdamW on the matrices": ({}, {"matrix_optimizer": "adamw", "muon_lr": 1e-3}),
    "rates halved": ({}, {"lr": 1e-3, "muon_lr": 2e-3}),
    "rates doubled": ({}, {"lr": 4e-3, "muon_lr": 8e-3}),
    "CE alone": ({}, {"ce_weight": 1.0, "kl_weight": 0.0}),
    "KL alone": ({}, {"ce_weight": 0.0, "kl_weight": 1.0}),
    "0.1 CE + 0.9 L1": ({}, {"ce_weight": 0.1, "kl_weight": 0.0, "l1_weight": 0.9}),
    "position decay 8": ({}, {"gamma_decay": 8.0}),
    "whole blocks only": ({}, {"block_sizes": None}),  # the longest of the shape
    "half the anchors": ({}, {"anchors": 80}),
    "1 layer": ({"num_hidden_layers": 1}, {}),
    "3 layers": ({"num_hidden_layers": 3}, {}),
    "FFN 768": ({"intermediate_size": 768}, {}),
    "rank 16": ({"markov_rank": 16}, {}),
    "rank 256": ({"markov_rank": 256}, {}),
    "gated head": ({"markov_head_type": "gated"}, {}),
    "rnn head": ({"markov_head_type": "rnn"}, {}),
    "draft vocabulary 4096": ({"draft_vocab_size": 4096}, {}),
    "draft vocabulary 12288": ({"draft_vocab_size": 12288}, {}),
    "5 taps": ({"target_layer_ids": (1, 8, 14, 20, 26)}, {}),
}


def trial(shape: DSparkConfig, training: TrainConfig, data: list[Path], folder: Path) -> dict:
    """Train in `folder` and say what came of it: draft tokens, wall time, parameters, held-out tau by n."""
    drafter = train(shape.target, shape, training, data, folder)
    recipe = json.loads((folder / "recipe.json").read_text())
    row = {name: recipe[name] for name in ("response_tokens", "draft_tokens", "seconds")}
    row["parameters"] = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    last = pd.read_csv(folder / "heldout.csv").iloc[-1]
    return row | {name: last[name] for name in last.index if name.startswith("tau_")}


def search(base: DSparkConfig, training: dict, names: list[str], data: list[Path], out: Path) -> pd.DataFrame:
    """Run the named trials that out/trials.csv lacks for these data and settings, and return the rows of all."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "trials.csv"
    table = pd.read_csv(path) if path.exists() else pd.DataFrame({"trial": [], "run": []})
    run = _run(base, training, data)
    for name in tqdm(names, desc="trials", unit="trial"):
        if ((table.trial == name) & (table.run == run)).any():
            continue
        of_shape, of_training = TRIALS[name]
        shape = base.replace(**of_shape)
        config = TrainConfig(**training | of_training).fitted(shape)
        changed = json.dumps(of_shape | {field: getattr(config, field) for field in of_training})
        folder = cache_dir() / "search" / run / name.replace(" ", "-")
        row = trial(shape, config, data, folder)
        row = {"trial": name, "run": run, "changed": changed, "steps": config.steps, "seed": config.seed, **row}
        table = pd.concat([table, pd.DataFrame([row])], ignore_index=True) if len(table) else pd.DataFrame([row])
        table.to_csv(path, index=False)
        shutil.rmtree(folder)
    return table[table.run == run]


def block_sizes(shape: DSparkConfig) -> tuple[int, ...]:
    """Drafts a block that trials train on, none longer than the shape's."""
    return tuple(sorted({min(n, shape.max_draft_tokens) for n in (3, 5, 7, 8)}))


def _run(base: DSparkConfig, training: dict, data: list[Path]) -> str:
    """Names what all trials of a search share."""
    digest = hashlib.sha256(json.dumps([dataclasses.asdict(base), training]).encode())
    for path in data:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark search", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="smollm2-135m", choices=PRESETS, help="the shape that trials change")
    parser.add_argument("--target", default=EMBEDDED, help="embedded default, hub name or folder")
    parser.add_argument("--data", type=Path, nargs="+", help="JSONL of conversations (default: what `data` wrote)")
    parser.add_argument("--trials", nargs="+", default=list(TRIALS), choices=TRIALS, metavar="NAME",
                        help=f"of: {', '.join(TRIALS)}")  # fmt: skip
    parser.add_argument("--steps", type=int, default=200, help="of each trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heldout-prompts", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path(".runs/search"), help="folder of trials.csv")
    args = parser.parse_args(argv)
    shape = PRESETS[args.preset].replace(target=args.target)
    training = {
        "steps": args.steps, "heldout_every": args.steps, "save_every": args.steps, "seed": args.seed,
        "heldout_prompts": args.heldout_prompts, "anchors": 160, "block_sizes": block_sizes(shape), "decay": 0.4,
    }  # fmt: skip
    data = args.data or written_files(args.target, data_folder())
    table = search(shape, training, args.trials, data, args.out)
    print(table.drop(columns=["run", "changed"]).round(3).to_string(index=False))
