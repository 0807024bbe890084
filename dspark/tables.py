"""Tables for readers: published numbers, the change from n = 3 to n = 7 in the release's form, accepted length by
context, two engines compared; as CSV and LaTeX."""

import json
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


def cost_model(parts: dict, means: pd.DataFrame) -> pd.DataFrame:
    """decode.step_parts beside a sweep: drafter, n, the parts, autoregressive_ms, break_even_tau (step over plain
    token), tau, and the speedup `predicted` (tau over break_even_tau) and measured. means: one mean of `with_mean`."""
    plain = sum(parts["autoregressive", 0].values())
    rows = [{"drafter": name, "n": n, **part} for (name, n), part in parts.items() if n]
    table = pd.DataFrame(rows).assign(autoregressive_ms=plain)
    table["break_even_tau"] = table[["draft_ms", "verify_ms", "commit_ms"]].sum(axis=1) / plain
    table = table.merge(means[["drafter", "n", "tau", "speedup"]], on=["drafter", "n"])
    return table.assign(predicted=table["tau"] / table["break_even_tau"])


def recipes(folders: dict[str, str]) -> pd.DataFrame:
    """What trained drafters were made of, from the recipe.json beside their weights: one row a drafter."""
    rows = []
    for name, folder in folders.items():
        path = Path(folder) / "recipe.json"
        recipe = json.loads(path.read_text()) if path.exists() else {}
        whole = recipe.get("draft_tokens", 0) + recipe.get("init_draft_tokens", 0)
        rows.append({"drafter": name, "draft_tokens": whole or None, "response_tokens": recipe.get("response_tokens"),
                     "longest_conversation": recipe.get("longest_conversation")})  # fmt: skip
    return pd.DataFrame(rows)


def held_out(folders: dict[str, str]) -> pd.DataFrame:
    """Accepted length on unseen prompts as training went on, from the heldout.csv beside trained drafters: drafter,
    part (of a training in several, each with prompts of its own), draft_tokens seen so far, n, tau."""
    parts = [pd.DataFrame(columns=["drafter", "part", "draft_tokens", "n", "tau"])]
    for name, folder in folders.items():
        path = Path(folder) / "heldout.csv"
        if path.exists():
            table = pd.read_csv(path)
            table["part"] = table.get("part", 1)
            table = table.melt(["part", "draft_tokens"], [c for c in table if c.startswith("tau_n")], "n", "tau")
            parts.append(table.assign(drafter=name, n=table["n"].str.removeprefix("tau_n").astype(int)))
    return pd.concat(parts[1:] or parts, ignore_index=True)


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


def agreement(mine: list[dict], theirs: list[dict]) -> pd.DataFrame:
    """Records of two engines' sweeps, joined where both gave one drafter, n and prompt: one row a (drafter, n).

    same_answers: answers whose tokens are equal; same_steps: those of which every step drafted and accepted the same.
    ValueError if they have no answer in common."""
    key = ["target", "dtype", "temperature", "drafter", "n", "benchmark", "prompt", "rendered", "max_new_tokens"]
    kept = [*key, "engine", "output", "drafted", "accepted"]
    both = pd.DataFrame(mine)[kept].merge(pd.DataFrame(theirs)[kept], on=key, suffixes=("", "_other"))
    if both.empty:
        raise ValueError("the two sweeps have no answer in common: give both the same drafters, n, prompts and dtype")
    rows = []
    for (drafter, n), cell in both.groupby(["drafter", "n"], sort=False):
        tau, other = (1 + runs.map(sum).sum() / runs.map(len).sum() for runs in (cell.accepted, cell.accepted_other))
        steps = (cell.drafted == cell.drafted_other) & (cell.accepted == cell.accepted_other)
        rows.append({
            "drafter": drafter, "n": n, "engine": cell.engine.iloc[0], "other": cell.engine_other.iloc[0],
            "prompts": len(cell), "steps": cell.accepted.map(len).sum(), "tau": tau, "tau_other": other,
            "difference": tau / other - 1, "same_answers": int((cell.output == cell.output_other).sum()),
            "same_steps": int(steps.sum()),
        })  # fmt: skip
    return pd.DataFrame(rows)


def paired(records: list[dict], drafter, draws: int = 2000, seed: int = 0) -> pd.DataFrame:
    """`drafter` beside every other one of a sweep on the same prompts, a row each and n that both have: its speed over
    theirs and its accepted length minus theirs, plain means over benchmarks, with 95% percentile intervals over prompts
    drawn anew within each benchmark, the same ones for both."""
    data = pd.DataFrame(records)
    data["steps"], data["kept"] = data["accepted"].map(len), data["accepted"].map(sum)
    counts = ["output_tokens", "seconds", "steps", "kept"]
    rng, cells, rows = np.random.default_rng(seed), {}, []
    sizes = data.groupby("benchmark")["prompt"].nunique()
    picks = {b: np.vstack([np.arange(P), rng.integers(P, size=(draws, P))]) for b, P in sizes.items()}  # row 0: all
    for key, cell in data.sort_values("prompt").groupby(["drafter", "n"], sort=False):
        of_set = {b: part[counts].to_numpy(float) for b, part in cell.groupby("benchmark")}
        sums = np.stack([of_set[b][pick].sum(1) for b, pick in picks.items()])
        tokens, seconds, steps, kept = np.moveaxis(sums, -1, 0)  # [benchmarks, 1 + draws] each
        cells[key] = tokens / seconds, 1 + kept / steps
    for (other, n), (speed, tau) in cells.items():
        if other == drafter or (drafter, n) not in cells:
            continue
        mine, row = cells[drafter, n], {"drafter": drafter, "against": other, "n": n}
        compared = {"speed_ratio": mine[0] / speed, "tau_difference": mine[1] - tau}
        for name, values in compared.items():
            whole, *drawn = values.mean(0)
            row[name], (row[f"{name}_low"], row[f"{name}_high"]) = whole, np.percentile(drawn, [2.5, 97.5])
        rows.append(row)
    return pd.DataFrame(rows)


def paired_change(records: list[dict], low: int = 3, high: int = 7) -> pd.DataFrame:
    """`paired` of n = high with n = low, a row each drafter that drafted both: speed at n = high over that at n = low,
    accepted length minus that at n = low, with the same intervals."""
    rows = []
    for name in dict.fromkeys(r["drafter"] for r in records):
        mine = [r | {"drafter": r["n"], "n": 0} for r in records if r["drafter"] == name and r["n"] in (low, high)]
        if {r["drafter"] for r in mine} == {low, high}:
            compared = paired(mine, high).drop(columns=["drafter", "against", "n"])
            rows.append(compared.assign(drafter=name, n_low=low, n_high=high))
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()
