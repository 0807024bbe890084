"""Confidence-scheduled verification (DSpark paper, arXiv 2607.05147, sections 3.2 and 5.2, appendix A).

Calibration first: Sequential Temperature Scaling (STS) makes the product of confidences the share of prefixes that
really survive. Then the policies: how many drafts of each request go to verification. Plain numpy; R requests,
n drafts, N observed blocks. survival [R, n]: the chance that drafts 1..k are all accepted, never rising in k.
"""

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import isotonic_regression
from scipy.stats import rankdata

from dspark.formats import CALIBRATION, TEMPERATURES, read_temperatures

BINS = 10  # of a reliability diagram, equal in width
GRID = 2.0 ** np.arange(-4, 4.001, 0.05)  # temperatures that the search tries

# ---- calibration


def survival(confidence: np.ndarray, temperatures=None) -> np.ndarray:
    """Confidences [..., n] -> chance that drafts 1..k are all accepted: prod_{i<=k} sigmoid(logit(c_i) / T_i)."""
    if temperatures is not None:
        clipped = np.clip(np.asarray(confidence, dtype=np.float64), 1e-7, 1 - 1e-7)
        scaled = (np.log(clipped) - np.log1p(-clipped)) / np.asarray(temperatures)[: clipped.shape[-1]]
        confidence = 1 / (1 + np.exp(-scaled))
    return np.cumprod(confidence, -1)


def reliability(predicted: np.ndarray, observed: np.ndarray) -> pd.DataFrame:
    """predicted [N] chances, observed [N] 0 or 1 -> a row for each bin that holds any: their means and its count."""
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    table = pd.DataFrame({"bin": bins, "predicted": predicted, "observed": np.asarray(observed, dtype=float)})
    grouped = table.groupby("bin")
    return grouped.mean().assign(blocks=grouped.size()).reset_index()


def ece(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Expected calibration error: mean over blocks of a bin's |mean predicted - mean observed|. NaN without a block."""
    if not len(predicted):
        return float("nan")
    bins = np.minimum((predicted * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, predicted - observed, BINS)).sum() / len(predicted))


def auroc(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Chance that an accepted one is rated above a rejected one, ties counting half; NaN where either is absent."""
    observed = np.asarray(observed, dtype=bool)
    yes, no = int(observed.sum()), int((~observed).sum())
    if not yes or not no:
        return float("nan")
    return float((rankdata(predicted)[observed].sum() - yes * (yes + 1) / 2) / (yes * no))


def fit_temperatures(confidence: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """STS (paper, section 3.2.1): confidence [N, n] of fully verified blocks, accepted [N] drafts kept -> T [n].

    Left to right, each T_k minimises the ECE of the product up to k against "at least k were accepted", the earlier
    ones fixed. Of equally good temperatures the one nearest to 1 is taken.
    """
    if confidence.ndim != 2 or not len(confidence) or len(confidence) != len(accepted):
        raise ValueError(f"confidence {confidence.shape} and accepted {np.shape(accepted)}: want [N, n] and [N], N > 0")
    by_change = GRID[np.argsort(np.abs(np.log(GRID)), kind="stable")]
    temperatures, before = [], np.ones(len(confidence))
    for k in range(confidence.shape[1]):
        products = [before * survival(confidence[:, k : k + 1], [t])[:, 0] for t in by_change]
        best = int(np.argmin([ece(product, accepted > k) for product in products]))
        temperatures.append(float(by_change[best]))
        before = products[best]
    return np.array(temperatures)


def calibration_table(confidence: np.ndarray, accepted: np.ndarray, temperatures: np.ndarray) -> pd.DataFrame:
    """One row a position of blocks [N, n] that the fit has not seen: ECE and AUROC before and after STS.

    ece, auroc: prefix survival against prefix acceptance over all blocks, as in the paper. conditional_auroc: the
    bare confidence over the blocks whose earlier drafts were all accepted, which earlier confidences cannot help.
    """
    raw, scaled = survival(confidence), survival(confidence, temperatures)
    rows = []
    for k in range(confidence.shape[1]):
        kept, reached = accepted > k, accepted >= k
        rows.append({
            "position": k + 1, "temperature": temperatures[k], "blocks": len(kept), "accepted": int(kept.sum()),
            "observed": kept.mean(), "predicted_before": raw[:, k].mean(), "predicted_after": scaled[:, k].mean(),
            "ece_before": ece(raw[:, k], kept), "ece_after": ece(scaled[:, k], kept),
            "auroc_before": auroc(raw[:, k], kept), "auroc_after": auroc(scaled[:, k], kept),
            "conditional_auroc": auroc(confidence[reached, k], kept[reached]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def save_temperatures(folder: Path, temperatures: dict[str, np.ndarray], **how) -> None:
    """Write calibration.json beside a checkpoint: T [n] of each confidence_source, and how they were fitted (decoding
    temperature, prompts, ...)."""
    record = {TEMPERATURES[source]: [round(float(t), 6) for t in fitted] for source, fitted in temperatures.items()}
    (Path(folder) / CALIBRATION).write_text(json.dumps(record | how, indent=2) + "\n")


def load_temperatures(folder: Path, n: int, source: str = "head") -> np.ndarray | None:
    """T [n] of a checkpoint's confidence_source, None where nothing was calibrated. ValueError as of
    formats.read_temperatures."""
    path = Path(folder) / CALIBRATION
    return np.array(read_temperatures(path, n, source)[:n], dtype=float) if path.exists() else None


# ---- the cost of a step


@dataclass(frozen=True)
class StepCost:
    """Measured seconds of a whole step (draft, verify, commit): seconds[i, j] with requests[i] requests and j drafts of
    each verified. Verifying more never costs less, so noise that says otherwise is evened out (isotonic regression).
    """

    requests: np.ndarray  # [I], rising
    seconds: np.ndarray  # [I, n + 1]
    rates: dict[int, list[float]] = field(default_factory=dict, init=False, repr=False, compare=False)  # by R

    @classmethod
    def from_table(cls, table: pd.DataFrame) -> "StepCost":
        """table: columns requests, tokens (R * (1 + j)), step_ms."""
        drafts = table.tokens // table.requests - 1
        grid = table.assign(drafts=drafts).pivot(index="requests", columns="drafts", values="step_ms").sort_index()
        if grid.isna().any(axis=None):
            raise ValueError("the table of step costs has gaps: profile the same drafts for every number of requests")
        seconds = np.stack([isotonic_regression(row).x for row in grid.to_numpy() / 1e3])
        return cls(grid.index.to_numpy(), seconds)

    def steps_per_second(self, requests: int) -> Callable[[int], float]:
        """SPS(B) for R requests, R <= B <= R * (n + 1): linear between measured points, in R and in B."""
        if requests not in self.rates:  # a search asks for many B at every step
            drafts = np.arange(self.seconds.shape[1])
            at = [np.interp(requests, self.requests, self.seconds[:, j]) for j in drafts]
            tokens = np.arange(requests, requests * len(drafts) + 1)
            self.rates[requests] = (1 / np.interp(tokens / requests - 1, drafts, at)).tolist()
        rates = self.rates[requests]
        return lambda tokens: rates[tokens - requests]


def by_drafts(table: pd.DataFrame) -> dict[int, StepCost]:
    """{n: cost of a step in which n drafts are made}: rows of a step-cost table with a column `drafts`."""
    return {int(n): StepCost.from_table(part) for n, part in table.groupby("drafts")}


def drafts_to_make(costs: dict[int, StepCost], survival: np.ndarray, accepted: np.ndarray, requests: int) -> int:
    """The n to draft under a load of R requests: which of `costs` would have let the early-stopping scheduler emit most
    tokens a second on observed blocks, survival [N, n] with accepted [N], R of them (drawn, seeded) a step.

    Making drafts is not free on every machine, and the scheduler decides only what becomes of those that were made.
    n = 0, the target alone, is for loads that fill the machine without drafts. Decided once, before any of the drafts
    exist, so lossless.
    """
    groups = np.random.default_rng(0).integers(len(accepted), size=(200, requests))

    def tokens_per_second(n: int) -> float:
        rate, tokens, seconds = costs[n].steps_per_second(requests), 0, 0.0
        for group in groups:
            seen = survival[group, :n]
            lengths = prefixes(seen, early_stop(seen, rate))
            tokens += requests + int(np.minimum(accepted[group], lengths).sum())
            seconds += 1 / rate(requests + sum(lengths))
        return tokens / seconds

    return max(costs, key=tokens_per_second)


# ---- searches


def ranking(survival: np.ndarray) -> list[tuple[float, int, int]]:
    """Candidates (-survival, draft, request), best first. Ties go by place, never by value, so that no draft precedes
    an earlier one of its request: every cut of the list is a set of prefixes."""
    return sorted((-chance, k, r) for r, row in enumerate(survival.tolist()) for k, chance in enumerate(row))


def _expected_rates(survival: np.ndarray, steps_per_second: Callable[[int], float]):
    """Expected tokens/s, (R + sum of admitted survival) * SPS(B), with 0, 1, 2, ... candidates admitted."""
    tokens = expected = len(survival)
    yield expected * steps_per_second(tokens)
    for chance, *_ in ranking(survival):
        tokens, expected = tokens + 1, expected - chance
        yield expected * steps_per_second(tokens)


def early_stop(survival: np.ndarray, steps_per_second: Callable[[int], float]) -> int:
    """Candidates to admit: as long as the expected rate rises, none after the first that does not raise it.

    Whether draft k is admitted depends on the tokens before it only (paper, algorithm 1), so that the confidences
    may be those of the very drafts in question: lossless.
    """
    best, budget = -np.inf, -1
    for rate in _expected_rates(survival, steps_per_second):
        if rate <= best:
            break
        best, budget = rate, budget + 1
    return budget


def global_search(survival: np.ndarray, steps_per_second: Callable[[int], float]) -> int:
    """Candidates to admit for the best expected rate of all, beyond drops as well.

    It looks at confidences of drafts after the ones it admits, and these know the drafts themselves. NOT lossless on
    the drafts in question (paper, appendix A); fine on confidences of earlier steps.
    """
    return int(np.argmax(list(_expected_rates(survival, steps_per_second))))


def prefixes(survival: np.ndarray, budget: int) -> list[int]:
    """How many drafts of each request the best `budget` candidates are."""
    lengths = [0] * len(survival)
    for *_, r in ranking(survival)[:budget]:
        lengths[r] += 1
    return lengths


# ---- policies: `n` drafts are made a step; `lengths(survival)` of each request's are verified


@dataclass
class Fixed:
    """All n drafts are verified, whatever the confidence; n = 0 decodes without a drafter."""

    n: int
    needs_confidence = False

    @property
    def name(self) -> str:
        return f"fixed n={self.n}"

    def lengths(self, survival: np.ndarray) -> list[int]:
        return [self.n] * len(survival)


@dataclass
class Threshold:
    """The prefix whose survival is at least `threshold`; 0 verifies all."""

    n: int
    threshold: float
    needs_confidence = True

    @property
    def name(self) -> str:
        return f"threshold {self.threshold:g}"

    def lengths(self, survival: np.ndarray) -> list[int]:
        return (survival >= self.threshold).sum(1).tolist()  # survival never rises: a count is a prefix


@dataclass
class Scheduler:
    """The hardware-aware prefix scheduler: the budget of a step by a search on measured step costs, spent on the best
    candidates of the step.

    search "early stop" sets the budget by the current confidences. "global" finds the best budget even where the cost
    is a staircase; as it must not look at the current drafts, a step gets the budget that was best two steps before
    (paper, section 5.2), and the first two steps stop early.
    """

    n: int
    cost: StepCost
    search: str = "early stop"
    needs_confidence = True
    budgets: deque = field(default_factory=lambda: deque(maxlen=2), repr=False)

    def __post_init__(self):
        if self.search not in ("early stop", "global"):
            raise ValueError(f"search = {self.search!r}: 'early stop' or 'global'")

    @property
    def name(self) -> str:
        barrier = ", confidences two steps old" if self.search == "global" else ""
        return f"scheduler ({self.search}{barrier})"

    def lengths(self, survival: np.ndarray) -> list[int]:
        rate = self.cost.steps_per_second(len(survival))
        if self.search == "early stop" or len(self.budgets) < 2:
            budget = early_stop(survival, rate)
        else:
            budget = self.budgets[0]
        if self.search == "global":
            self.budgets.append(global_search(survival, rate))
        return prefixes(survival, budget)
