"""`python3 -m dspark bench train`: this trainer against speculators' DSpark trainer, alternating in one run.

The same drafter, documents, number of anchors, draft vocabulary, threads and dtype for both, one optimiser step at a
time, each trainer in a fresh process a round. speculators packs a step's documents into one sequence, as its trainer
does; it is driven directly because its command line wants a GPU, by the mode that runs without Triton: sdpa, eager
losses, its default AdamW. Ours makes the extra step of Muon.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib as mpl
import pandas as pd
import seaborn as sns
import torch
from matplotlib.figure import Figure
from torch import nn

from dspark import checkpoint, plots
from dspark.anchors import MicroBatch, micro_batches
from dspark.config import PRESETS
from dspark.data import load_samples
from dspark.evaluate import hardware
from dspark.initial import new_drafter
from dspark.losses import drafter_loss
from dspark.optim import optimizers
from dspark.paths import cache_dir
from dspark.selfwrite import data_folder, written_files
from dspark.source import LocalSource
from dspark.target import EMBEDDED, Target, embedded_target
from dspark.train import TrainConfig

TRAINERS = ("dspark", "speculators")
STAGES = ("forward_s", "backward_s", "optimizer_s")


class Ours:
    def __init__(self, drafter, target: Target, config: TrainConfig):
        self.drafter, self.config = drafter, config
        self.head = target.lm_head if drafter.t2d is None else target.lm_head[drafter.t2d]
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizers = optimizers(drafter, config)

    def step(self, batch: list[MicroBatch], stage) -> int:
        """One optimiser step; returns its draft tokens. `stage(name)` books the time since the last call."""
        normaliser, tokens = float(sum(micro.weights.sum() for micro in batch)), 0
        for micro in batch:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
                loss, log = drafter_loss(self.drafter, self.head, micro, normaliser, self.config)
            stage("forward_s")
            loss.backward()
            tokens += log["draft_tokens"]
            stage("backward_s")
        nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stage("optimizer_s")
        return tokens


class Speculators:
    def __init__(self, drafter, target: Target, config: TrainConfig):
        from speculators.losses import resolve_loss_config
        from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
        from speculators.train.optimizers import build_optimizers
        from speculators.train.trainer import TrainerConfig

        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(drafter, Path(folder) / "drafter", format="speculators")
            shape = DSparkSpeculatorConfig.from_pretrained(Path(folder) / "drafter")
            shape.speculators_config.verifier.name_or_path = None
            shape.transformer_layer_config._attn_implementation = "sdpa"
            self.model = DSparkDraftModel(shape)
        state = {k: v.float() if v.is_floating_point() else v for k, v in drafter.state_dict().items()}
        self.model.load_state_dict(state, strict=False)
        ids = slice(None) if drafter.t2d is None else drafter.t2d
        self.model.verifier_lm_head.weight.data = target.lm_head[ids].float()
        self.model.verifier_norm.weight.data = target.final_norm.float()
        mix = json.dumps({"ce": config.ce_weight, "kl_div": config.kl_weight})
        self.arguments = {
            "loss_config": resolve_loss_config(mix, "eager"), "tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0],
            "gamma": config.gamma_decay, "max_anchors": config.anchors * config.micro_batches,
        }  # fmt: skip
        self.dtype = getattr(torch, config.dtype)
        self.optimizers = build_optimizers(self.model, TrainerConfig(lr=config.lr, num_epochs=1, save_path=""))

    def step(self, batch: list[MicroBatch], stage) -> int:
        rows = [micro.row for micro in batch]
        documents = torch.cat([row.starts + sum(len(r.tokens) for r in rows[:i]) for i, row in enumerate(rows)])
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            _, loss, metrics = self.model(
                hidden_states=torch.cat([row.features for row in rows])[None].to(self.dtype),
                input_ids=torch.cat([row.tokens for row in rows])[None],
                loss_mask=torch.cat([row.loss_mask for row in rows])[None],
                verifier_last_hidden_states=torch.cat([row.hidden for row in rows])[None].to(self.dtype),
                document_ids=documents[None],
                position_ids=torch.cat([row.positions for row in rows])[None],
                **self.arguments,
            )
        stage("forward_s")
        loss.backward()
        stage("backward_s")
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        stage("optimizer_s")
        return int(metrics["accept_rate_total"])


def measure(trainer: str, data: Path, steps: int) -> dict:
    """Warm up with one step, time `steps`: draft tokens, seconds a stage, and peak memory above the loaded weights."""
    torch.set_flush_denormal(True)
    shape = PRESETS[EMBEDDED]
    config = TrainConfig(steps=steps + 1).fitted(shape)
    target = Target.load(EMBEDDED, getattr(torch, config.dtype), "cpu", shape.target_layer_ids)
    samples = load_samples(data, target)[:400]
    source = LocalSource(target, samples, cache_dir() / "hidden")
    batches = [batch for _, batch in micro_batches(source, config, 0)]
    runner = {"dspark": Ours, "speculators": Speculators}[trainer](
        new_drafter(shape, target, samples, config.seed), target, config
    )
    before, spent = _status("VmRSS"), dict.fromkeys(STAGES, 0.0)
    last = time.perf_counter()

    def stage(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        spent[name], last = spent[name] + now - last, now

    runner.step(batches[0], stage)
    spent.update(dict.fromkeys(STAGES, 0.0))
    last = time.perf_counter()
    tokens = sum(runner.step(batch, stage) for batch in batches[1:])
    return {"trainer": trainer, "draft_tokens": tokens, "steps": steps, **{k: round(v, 3) for k, v in spent.items()},
            "peak_memory_mb": _status("VmHWM") - before}  # fmt: skip


def _status(field: str) -> int:
    """MB of this process, from the kernel: VmRSS now, VmHWM at most so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) // 1024


@mpl.rc_context(plots.STYLE)
def figure(table: pd.DataFrame) -> plots.Plot:
    """Draft tokens/s and where the time goes, a bar a trainer; the dots are the rounds."""
    colours = {"dspark": plots.DRAFTER_STYLE["dspark"]["color"], "speculators": "0.6"}
    drawn = Figure((plots.PAGE, 2.0))
    left, right = drawn.subplots(1, 2)
    mean = table.groupby("trainer")[["draft_tokens_per_s", *STAGES]].mean().loc[list(TRAINERS)]
    left.bar(TRAINERS, mean.draft_tokens_per_s, 0.6, color=[colours[name] for name in TRAINERS])
    left.plot(table.trainer, table.draft_tokens_per_s, "o", color="0.15", markersize=2.5)
    left.set(ylabel="Draft tokens/s")
    share, bottom = mean[list(STAGES)].div(mean[list(STAGES)].sum(axis=1), axis=0), 0
    for stage, colour in zip(STAGES, sns.color_palette("colorblind").as_hex()[::3], strict=False):
        right.bar(TRAINERS, share[stage], 0.6, bottom=bottom, color=colour, label=stage.removesuffix("_s"))
        bottom = bottom + share[stage]
    right.set(ylabel="Share of a step", ylim=(0, 1))
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    caption = (
        f"Training speed of this trainer and of speculators' on {table.hardware[0]}, {table.threads[0]} threads: the "
        "same drafter, documents and anchors, alternating. Dots: the rounds of each. Ours takes the gradient of its "
        "loss in the forward pass, and its optimiser step is Muon's."
    )
    return plots.Plot(drawn, table, caption, {"error_bars": "none: every round is drawn", "rounds": len(table) // 2})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark bench train", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="JSONL of conversations (default: the first that `data` wrote)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of bench_train.csv and its figure")
    parser.add_argument("--only", choices=TRAINERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    embedded_target()  # whatever must be downloaded, before a clock runs
    data = args.data or written_files(EMBEDDED, data_folder())[0]
    if args.only:
        print(json.dumps(measure(args.only, data, args.steps)))
        return
    rows = []
    for number in range(args.rounds):
        for trainer in TRAINERS:
            command = [sys.executable, "-m", "dspark", "bench", "train", "--only", trainer]
            command += ["--data", str(data), "--steps", str(args.steps)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"round": number, **json.loads(done.stdout.splitlines()[-1])})
            print(rows[-1])
    table = pd.DataFrame(rows)
    table["draft_tokens_per_s"] = (table.draft_tokens / table[list(STAGES)].sum(axis=1)).round(1)
    table["threads"], table["hardware"] = torch.get_num_threads(), hardware()
    args.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(args.out / "bench_train.csv", index=False)
    mean = table.groupby("trainer")[["draft_tokens_per_s", "peak_memory_mb"]].mean().loc[list(TRAINERS)]
    print(mean.round(1).to_string())
    speed, memory = (mean.loc["dspark"] / mean.loc["speculators"]).tolist()
    print(f"dspark: {speed:.2f} times speculators' draft tokens/s, {memory:.2f} of its peak memory above the weights")
    plots.save(figure(table), "bench_train", args.out, {"hardware": hardware()})
