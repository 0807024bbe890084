"""Tables for readers: published numbers, the change from n = 3 to n = 7 in the release's form, accepted length by
context; as CSV and LaTeX."""

from pathlib import Path

import numpy as np
import pandas as pd

from dspark.paths import DATA
from dspark.plots import BENCHMARK_LABELS, DRAFTER_STYLE

PUBLISHED = DATA / "published"
_NAMES = {style["label"]: name for name, style in DRAFTER_STYLE.items()}
_SIX = list(BENCHMARK_LABELS)[:6]


def published(name: str) -> pd.DataFrame:
    """A file of data/published, its drafters named as in the project's own tables. FileNotFoundError if absent."""
    table = pd.read_csv(PUBLISHED / f"{name}.csv")
    if unknown := set(table["drafter"]) - set(_NAMES):
        raise ValueError(f"{name}.csv: drafter {min(unknown)!r} is none of {', '.join(_NAMES)}")
    return table.assign(drafter=table["drafter"].map(_NAMES))


def published_speedup(targets: tuple[str, ...] = ("Kimi-K2.6", "Kimi-K2.7-Code")) -> pd.DataFrame:
    """Speedups of the Kimi release: target, drafter, benchmark ("mean of 6" among them), n, speedup, source."""
    table = published("kimi_speedup")
    return table[table["target"].isin(targets)]


def published_tau() -> pd.DataFrame:
    """Accepted lengths of the model cards, one row a benchmark, and "mean of 6" where all six are known."""
    table = published("kimi_acceptance").query("quantity == 'tau'").rename(columns={"value": "tau"})
    table = table[table["benchmark"].isin(_SIX)].drop(columns="quantity")
    cells = table.groupby(["target", "drafter", "n", "source"], as_index=False)
    means = cells.agg(tau=("tau", "mean"), benchmarks=("benchmark", "nunique")).query("benchmarks == 6")
    means = means.drop(columns="benchmarks").assign(benchmark="mean of 6")
    return pd.concat([table, means], ignore_index=True)


def with_mean(table: pd.DataFrame) -> pd.DataFrame:
    """A sweep's rows and, for each drafter and n, the plain mean of speedup and tau over its benchmarks.

    A mean over fewer benchmarks than the table has is left out: it would compare what is not comparable.
    """
    drafted = table[table["drafter"] != "autoregressive"]
    count = drafted["benchmark"].nunique()
    cells = drafted.groupby(["target", "drafter", "n"], as_index=False)
    means = cells.agg(speedup=("speedup", "mean"), tau=("tau", "mean"), benchmarks=("benchmark", "nunique"))
    means = means[means["benchmarks"] == count].drop(columns="benchmarks").assign(benchmark=f"mean of {count}")
    return pd.concat([drafted, means], ignore_index=True)


def change_table(points: pd.DataFrame, low: int = 3, high: int = 7) -> pd.DataFrame:
    """Speedup at n = low and high and its change in per cent, a row for each (target, benchmark, drafter).

    points: target, drafter, benchmark, n, speedup. A row needs both n.
    """
    keys = ["target", "benchmark", "drafter"]
    wide = points[points["n"].isin((low, high))].pivot(index=keys, columns="n", values="speedup")
    wide = wide.reindex(columns=[low, high]).dropna()
    wide.columns = [f"speedup_n{low}", f"speedup_n{high}"]
    wide["change_percent"] = 100 * (wide[f"speedup_n{high}"] / wide[f"speedup_n{low}"] - 1)
    return wide.reset_index()


def by_context(records: list[dict], trained: int = 0) -> pd.DataFrame:
    """Accepted length by the context that a step's drafts looked at, of a sweep's records: drafter, n, up_to (tokens,
    doubling from 64), steps, tau, longest (context seen there), and whether that is within `trained`, the longest text
    of the drafter's training (0: unknown, within)."""
    steps = []
    for r in records:
        context = r["prompt_tokens"]
        for accepted in r["accepted"]:
            steps.append((r["drafter"], r["n"], context, accepted))
            context += accepted + 1
    table = pd.DataFrame(steps, columns=["drafter", "n", "context", "accepted"])
    table["up_to"] = 64 * 2 ** np.ceil(np.log2(table["context"] / 64)).clip(lower=0).astype(int)
    cells = table.groupby(["drafter", "n", "up_to"], as_index=False)
    table = cells.agg(steps=("accepted", "size"), tau=("accepted", "mean"), longest=("context", "max"))
    return table.assign(tau=1 + table["tau"], trained=(table["longest"] <= trained) | (trained == 0))


def save(table: pd.DataFrame, name: str, folder: Path, caption: str, decimals: int = 2) -> list[Path]:
    """Write NAME.csv, every digit, and NAME.tex, a booktabs table of rounded numbers; a missing number is a dash."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    csv, tex = folder / f"{name}.csv", folder / f"{name}.tex"
    table.to_csv(csv, index=False, lineterminator="\n")
    shown = table.rename(columns=lambda column: column.replace("_percent", ", %").replace("_", " "))
    latex = shown.to_latex(
        index=False, escape=True, na_rep="--", float_format=f"%.{decimals}f", caption=caption, label=f"tab:{name}"
    )
    tex.write_text(latex, encoding="utf-8")
    return [csv, tex]
