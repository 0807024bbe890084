"""Training one drafter on one target's hidden states (design: 0.1 CE + 0.9 L1 + 1.0 BCE, mix open over time).

Everything random at step s is a function of (seed, s) alone, so a resumed run repeats an uninterrupted one exactly:
nothing but weights, optimiser state and the step number needs saving. The exception is what a live verifier samples
on-policy: it draws responses anew whenever it is asked.
"""

import argparse
import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm import tqdm

from dspark import baselines, checkpoint, ranks, stream
from dspark.anchors import micro_batches
from dspark.config import PRESETS, DSparkConfig
from dspark.csv_log import append, keep_until
from dspark.data import heldout_prompts, load_samples
from dspark.decode import heldout_tau
from dspark.drafter import DSparkDrafter
from dspark.eagle3 import Eagle3Config
from dspark.initial import draft_vocabulary, new_drafter, trained_drafter, weights_digest
from dspark.losses import drafter_loss
from dspark.optim import lr_scale, optimizers
from dspark.paths import cache_dir
from dspark.selfwrite import data_folder, written_files
from dspark.source import LocalSource, digest_of
from dspark.target import EMBEDDED, Target, resolve_dtype
from dspark.target_ends import TargetEnds

CHAIN = 8  # drafts a block of a drafter that chains any number


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run besides the drafter's shape. Units are in the names or beside them."""

    steps: int = 2000
    micro_batches: int = 4  # packed rows a step (gradient accumulation)
    row_tokens: int = 1024
    anchors: int = 96  # blocks a packed row, drawn anew each step
    block_sizes: tuple[int, ...] | None = None  # drafts a block, each micro-batch draws one; None: the shape's most
    lr: float = 2e-3  # AdamW: norms, heads
    muon_lr: float = 4e-3  # matrices of fc and layers
    matrix_optimizer: str = "muon"  # or adamw
    warmup_steps: int = 40
    decay: float = 1.0  # share of the steps, the last ones, over which the rate falls; less than 1 can be prolonged
    clip: float = 1.0
    gamma_decay: float = 4.0
    ce_weight: float = 0.5
    l1_weight: float = 0.0
    kl_weight: float = 0.5
    confidence_weight: float = 1.0
    detach_confidence: bool = True  # whether the confidence loss may train the backbone is unsettled in the field
    dtype: str = "auto"  # of the products (auto: the faster here); weights and optimiser state are float32
    seed: int = 0
    save_every: int = 100
    heldout_every: int = 500
    heldout_prompts: int = 16

    def __post_init__(self):
        for name in ("steps", "micro_batches", "row_tokens", "anchors", "save_every", "heldout_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"TrainConfig.{name} = {getattr(self, name)}: must be at least 1")
        if self.matrix_optimizer not in ("muon", "adamw"):
            raise ValueError(f"TrainConfig.matrix_optimizer = {self.matrix_optimizer!r}: muon or adamw")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"TrainConfig.dtype = {self.dtype!r}: auto, float32 or bfloat16")
        object.__setattr__(self, "dtype", str(resolve_dtype(self.dtype, training=True)).removeprefix("torch."))
        for name in ("clip", "gamma_decay"):
            if not getattr(self, name) > 0:
                raise ValueError(f"TrainConfig.{name} = {getattr(self, name)}: must be positive")

    def fitted(self, shape: DSparkConfig | Eagle3Config) -> "TrainConfig":
        """The same for a drafter of `shape`: without block sizes, one of the most tokens that it drafts. ValueError
        where it cannot draft as many as are given."""
        most = shape.max_draft_tokens if isinstance(shape, DSparkConfig) else CHAIN
        sizes = tuple(self.block_sizes or (most,))
        for n in sizes:
            try:
                shape.block_length(n)
            except ValueError as error:
                raise ValueError(f"TrainConfig.block_sizes = {sizes}: {error}") from error
        return dataclasses.replace(self, block_sizes=sizes)


class Trainer:
    """One process, or each of torchrun's (dspark/ranks.py), of which rank 0 writes. Resumes from the newest complete
    checkpoint in `folder`; a killed save leaves none half-written.

    init: names the weights that the drafter begins with, None where they were drawn. decoder: the target that answers
    the held-out prompts, if another than the one that is trained on. ValueError where the run in `folder` began with
    others, or has other settings or data, and where the drafter cannot draft config.block_sizes.
    """

    def __init__(
        self, drafter: DSparkDrafter, target: Target, source, heldout: list[str], config: TrainConfig, folder,
        init: str | None = None, decoder: Target | None = None,
    ):  # fmt: skip
        drafter.config.check_taps(target)
        config = config.fitted(drafter.config)
        self.drafter, self.target, self.source, self.heldout = drafter, target, source, heldout
        self.config, self.folder, self.decoder = config, Path(folder), decoder or target
        self.folder.mkdir(parents=True, exist_ok=True)
        self.step, self.draft_tokens, self.seconds, self.waited = 0, 0, 0.0, 0.0
        self.rank = ranks.rank()
        columns = (column for sample in source.samples for column in (sample.token_ids, sample.loss_mask))
        self.origin = {"init": init, "data": digest_of(columns)}
        found = self._resume()
        ranks.shard(drafter)
        # A detached confidence head changes nothing about what is drafted, not even by its share of the gradient norm.
        alone = config.detach_confidence and getattr(drafter, "confidence_head", None)
        self.judges = list(drafter.confidence_head.parameters()) if alone else []
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizers = optimizers(drafter, config)
        if found:
            # Not onto the device that they were saved on, rank 0's: loading them moves them to the parameters'.
            saved = torch.load(found / "optimizers.pt", map_location="cpu", weights_only=True)
            for optimizer, state in zip(self.optimizers, saved, strict=True):
                ranks.load_optimizer_state(optimizer, state)
        ids = None if drafter.t2d is None else drafter.t2d.nonzero().squeeze(1)
        self.target_head = target.lm_head if ids is None else target.lm_head[ids]

    def run(self) -> None:
        config, device = self.config, self.target.device.type
        autocast = torch.autocast(device, torch.bfloat16, enabled=config.dtype == "bfloat16")
        batches = micro_batches(self.source, config, self.step, self.rank, ranks.count())
        bar = tqdm(batches, initial=self.step, total=config.steps, desc="training", unit="step", disable=self.rank > 0)
        asked = time.perf_counter()
        begun = asked - self.seconds
        for epoch, batch in bar:
            weight = float(sum(micro.weights.sum() for micro in batch))
            normaliser = ranks.total([weight], self.target.device)[0] or 1.0
            self.waited += time.perf_counter() - asked  # until every rank has its batch
            logs = []
            for micro in ranks.shared(self.drafter, [m for m in batch if len(m.anchors)]):
                with autocast:
                    loss, log = drafter_loss(self.drafter, self.target_head, micro, normaliser, config)
                loss.backward()
                logs.append(log)
            scale = lr_scale(self.step, config.steps, config.warmup_steps, config.decay)
            norm = self._update(scale)
            self.step += 1
            self.seconds = time.perf_counter() - begun
            self._log(epoch, logs, scale, norm, bar)
            if self.heldout and (self.step % config.heldout_every == 0 or self.step == config.steps):
                self._measure_heldout()
            if self.step % config.save_every == 0 or self.step == config.steps:
                self._save()
            asked = time.perf_counter()

    def _update(self, scale: float) -> float:
        judges = {id(p) for p in self.judges}
        drafting = [p for p in self.parameters if id(p) not in judges]
        norm, apart = (ranks.whole(nn.utils.clip_grad_norm_(of, self.config.clip)) for of in (drafting, self.judges))
        if not torch.isfinite(norm + apart):
            raise FloatingPointError(f"gradient norm {float(norm + apart)} at step {self.step}: lower lr or muon_lr")
        for optimizer, lr in zip(self.optimizers, (self.config.muon_lr, self.config.lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def _log(self, epoch: int, logs: list[dict], scale: float, norm: float, bar) -> None:
        names = ("loss", "ce", "l1", "bce", "draft_tokens", "greedy_hits", "covered", "whole_blocks")
        sums = [sum(log[name] for log in logs) for name in names]
        taus = sum(log["tau_teacher"] * log["whole_blocks"] for log in logs if log["whole_blocks"])
        *sums, taus = ranks.total([*sums, taus], self.target.device)
        pooled = dict(zip(names, sums, strict=True))
        tokens = max(1, pooled["draft_tokens"])
        self.draft_tokens += int(pooled["draft_tokens"])
        if self.rank:
            return
        row = {
            "step": self.step,
            "epoch": epoch,
            **{name: round(pooled[name], 5) for name in ("loss", "ce", "l1", "bce")},
            "greedy_acceptance": round(pooled["greedy_hits"] / tokens, 4),  # none where the data's token is not covered
            "tau_teacher": round(taus / pooled["whole_blocks"], 4) if pooled["whole_blocks"] else "",
            "coverage": round(pooled["covered"] / tokens, 4),  # share of the data's tokens in the draft vocabulary
            "lr_scale": round(scale, 5),
            "grad_norm": round(norm, 4),
            "draft_tokens": self.draft_tokens,
            "seconds": round(self.seconds, 1),
            "waited": round(self.waited, 1),  # of them, for hidden states
        }
        append(self.folder / "log.csv", row)
        bar.set_postfix(loss=row["loss"], acc=row["greedy_acceptance"], tau=row["tau_teacher"])

    def _measure_heldout(self) -> None:
        frozen = self.inference_drafter(self.decoder.dtype)
        if self.rank:
            return
        taus = {f"tau_n{n}": heldout_tau(self.decoder, frozen, self.heldout, n) for n in self._heldout_n()}
        row = {"step": self.step, "draft_tokens": self.draft_tokens, "seconds": round(self.seconds, 1), **taus}
        append(self.folder / "heldout.csv", row)
        tqdm.write(f"held-out at step {self.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in taus.items()))

    def _heldout_n(self) -> list[int]:
        return sorted({min(3, self.drafter.config.max_draft_tokens), min(7, self.drafter.config.max_draft_tokens)})

    def inference_drafter(self, dtype: torch.dtype | None = None) -> DSparkDrafter:
        """A copy in `dtype` (None: the target's), for decoding and export; every rank must ask for it."""
        copy = baselines.build(self.drafter.config)
        copy.load_state_dict({name: ranks.whole(tensor) for name, tensor in self.drafter.state_dict().items()})
        copy.notes, copy.own = self.drafter.notes, self.drafter.own  # an own embedding or LM head is exported too
        return copy.to(dtype or self.target.dtype).to(self.target.device).eval()

    def _save(self) -> None:
        named = self.drafter.named_parameters()
        trained = {k: ranks.whole(v.detach()).contiguous() for k, v in named if v.requires_grad}
        states = [ranks.optimizer_state(optimizer) for optimizer in self.optimizers]
        if self.rank:
            return
        final = self.folder / f"step-{self.step:06d}"
        temporary = self.folder / f".saving-{self.step:06d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(trained, temporary / "trained.safetensors")
        torch.save(states, temporary / "optimizers.pt")
        state = {name: getattr(self, name) for name in ("step", "draft_tokens", "seconds", "waited")}
        (temporary / "state.json").write_text(json.dumps({**state, "config": self._identity()}))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)  # the directory's name appears only once everything is in it
        for old in sorted(self.folder.glob("step-*"))[:-2]:
            shutil.rmtree(old)

    def _identity(self) -> dict:
        """What a resumed run must share with the one that it goes on from, as JSON gives it back."""
        kept = None if self.drafter.t2d is None else self.drafter.t2d.nonzero().squeeze(1).tolist()
        data = {"draft_ids": kept, "sample_lengths": [len(sample) for sample in self.source.samples]}
        settings = dataclasses.asdict(self.config) | dataclasses.asdict(self.drafter.config)
        return json.loads(json.dumps(settings | data | self.origin))

    def _same_rates_so_far(self, before: dict, step: int) -> bool:
        def rates(steps, decay):
            return [lr_scale(k, steps, self.config.warmup_steps, decay) for k in range(step)]

        now = (self.config.steps, self.config.decay)
        return step <= now[0] and rates(*now) == rates(before["steps"], before["decay"])

    def _resume(self) -> Path | None:
        """Take weights and counts from the newest checkpoint, and return its folder."""
        checkpoints = sorted(self.folder.glob("step-*"))
        if not checkpoints:
            self._forget_later_rows()
            return None
        state = json.loads((checkpoints[-1] / "state.json").read_text())
        before = state["config"]
        changed = {k for k, v in self._identity().items() if before.get(k, v) != v}  # older runs lack some
        if self._same_rates_so_far(before, state["step"]):
            changed -= {"steps", "decay"}  # the end may be moved while it has not begun to tell
        if changed:
            raise ValueError(
                f"{self.folder.name} was trained with other {sorted(changed)}: use another --out to start anew"
            )
        trained = load_file(checkpoints[-1] / "trained.safetensors")
        missing, unexpected = self.drafter.load_state_dict(trained, strict=False)
        wrong = set(unexpected) | ({k for k, v in self.drafter.named_parameters() if v.requires_grad} & set(missing))
        if wrong:
            raise ValueError(f"{checkpoints[-1].name} does not fit this drafter: {sorted(wrong)[:4]}")
        self.step, self.draft_tokens, self.seconds = state["step"], state["draft_tokens"], state["seconds"]
        self.waited = state.get("waited", 0.0)  # older runs did not keep it
        self._forget_later_rows()
        return checkpoints[-1]

    def _forget_later_rows(self) -> None:
        for name in ("log.csv", "heldout.csv") if self.rank == 0 else ():
            keep_until(self.folder / name, self.step)


def _boolean(text: str) -> bool:
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r}: true or false")
    return values[text.lower()]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark train", description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED, help="embedded default, hub name or folder")
    parser.add_argument("--preset", default="smollm2-135m", choices=PRESETS, help="the drafter's shape")
    parser.add_argument("--data", type=Path, nargs="+", help="JSONL of conversations (default: what `data` wrote)")
    parser.add_argument("--out", type=Path, required=True, help="run folder: checkpoints, logs, and the drafter")
    parser.add_argument("--drafter", default="dspark", choices=baselines.KINDS, help="a baseline takes the same size")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of DSparkConfig fields to change")
    parser.add_argument("--init", type=Path, help="begin from this drafter; --config may add heads")
    parser.add_argument(
        "--choose-vocabulary", action="store_true", help="with --init: a new draft vocabulary, by --data"
    )
    stream.add_arguments(parser)
    for field in dataclasses.fields(TrainConfig):
        kind = {"bool": _boolean, "int": int, "float": float, "str": str}
        name = "--" + field.name.replace("_", "-")
        if field.name == "block_sizes":
            parser.add_argument(name, type=int, nargs="+", help="drafts a block (default: the most that the shape can)")
        else:
            parser.add_argument(name, type=kind[field.type.__name__], default=field.default, help=f"{field.default}")
    args = vars(parser.parse_args(argv))
    if args["init"]:
        if args["drafter"] != "dspark":
            parser.error("--init begins from a DSpark or DFlash drafter: leave out --drafter")
        shape = checkpoint.read(args["init"]).config.replace(**args["config"])
    else:
        shape = PRESETS[args["preset"]].replace(target=args["target"], **args["config"])
        shape = baselines.shape_of(args["drafter"], shape)
    sizes = args["block_sizes"] and tuple(args["block_sizes"])
    config = TrainConfig(**{f.name: args[f.name] for f in dataclasses.fields(TrainConfig)} | {"block_sizes": sizes})
    data = args["data"] or written_files(args["target"], data_folder())
    streamed, choose = args if args["verifier"] else None, args["choose_vocabulary"]
    train(args["target"], shape, config, data, args["out"], streamed, args["init"], choose)


def train(
    target_name: str,
    shape: DSparkConfig,
    config: TrainConfig,
    data: list[Path],
    out: Path,
    streamed: dict | None = None,
    init: Path | None = None,
    choose_vocabulary: bool = False,
) -> DSparkDrafter:
    """Train (or resume) in `out`; at the end out/drafter holds the drafter in the native format.

    init: folder of the drafter to begin from; None begins at random. It keeps its draft vocabulary unless
    choose_vocabulary, which takes as many ids as `shape` says by their frequency in these data.
    streamed: what stream.add_arguments parsed, to read the states from a live verifier. Under torchrun, every rank
    calls this. ValueError, before anything is loaded, where the shape cannot draft blocks of these sizes.
    """
    config = config.fitted(shape)
    # Probabilities of a trained drafter underflow; on a CPU, products with denormals are a hundred times slower.
    torch.set_flush_denormal(True)
    rank, world, device = ranks.start()
    load = TargetEnds if streamed and not config.heldout_prompts else Target.load  # nothing but drafting needs it whole
    target = load(target_name, getattr(torch, config.dtype), device, shape.target_layer_ids)
    samples = [
        sample for path in data for sample in load_samples(path, target, max_length=shape.max_position_embeddings)
    ]
    heldout = [prompt for path in data for prompt in heldout_prompts(path)][: config.heldout_prompts]
    if streamed:
        source = stream.open_source(streamed, target, samples, rank, world)
    else:
        with ranks.first_alone():  # it makes the file that the others find
            source = LocalSource(target, samples, cache_dir() / "hidden")
    if init:
        ids = draft_vocabulary(shape, target, samples) if choose_vocabulary else None
        drafter = trained_drafter(init, target, shape, config.seed, ids)
    else:
        drafter = new_drafter(shape, target, samples, config.seed)
    decoder = _decoder(target, target_name) if heldout and rank == 0 else None
    trainer = Trainer(drafter, target, source, heldout, config, out, weights_digest(init) if init else None, decoder)
    trainer.run()
    drafter = trainer.inference_drafter()
    if rank == 0:
        recipe = {
            "drafter": dataclasses.asdict(shape),
            "init": Path(init).name if init else "random",
            "training": dataclasses.asdict(config),
            "conversations": len(samples),
            "longest_conversation": max(map(len, samples)),
            "response_tokens": int(sum(sample.loss_mask.sum() for sample in samples)),
            "draft_tokens": trainer.draft_tokens,
            "seconds": round(trainer.seconds),
        }
        (Path(out) / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
        baselines.save(drafter, Path(out) / "drafter", history=out)
    source.close()
    ranks.finish()
    return drafter


def _decoder(target: Target, name: str) -> Target:
    """The target in the dtype that decodes fastest here: a CPU may train in float32 and decode in bfloat16, by this
    package's kernels."""
    dtype = resolve_dtype("auto")
    if target.device.type != "cpu" or target.dtype == dtype:
        return target
    decoder = Target.load(name, dtype, layer_ids=target.layer_ids)
    return decoder if getattr(decoder, "row_invariant", False) else target
