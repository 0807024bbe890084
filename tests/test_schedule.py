"""Calibration and scheduling: numbers worked out by hand, and the paper's example of a search that is not lossless."""

import json
import re

import numpy as np
import pandas as pd
import pytest

from dspark import schedule
from dspark.schedule import Fixed, Scheduler, StepCost, Threshold, early_stop, global_search, prefixes

BLOCKS = 20_000


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rollouts(temperatures, blocks=BLOCKS, seed=0):
    """Confidences [N, n] that are off by these temperatures, and how many drafts were kept [N], each drawn by its true
    chance given that those before it were kept."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.5, (blocks, len(temperatures)))
    kept = (rng.random(logits.shape) < sigmoid(logits)).cumprod(1).sum(1)
    return sigmoid(logits * np.array(temperatures)), kept


# ---- calibration


def test_survival_is_the_running_product_of_scaled_confidences():
    assert schedule.survival(np.array([0.9, 0.5, 0.9])) == pytest.approx([0.9, 0.45, 0.405])
    assert schedule.survival(np.array([0.8, 0.8]), [1.0, 2.0]) == pytest.approx([0.8, 0.8 * 2 / 3])  # odds 4 -> 2
    assert schedule.survival(np.array([[1.0, 0.0]]), [1.0, 1.0])[0] == pytest.approx([1.0, 0.0], abs=1e-6)


def test_ece_by_hand():
    predicted = np.array([0.05, 0.05, 0.95, 0.95, 1.0])
    observed = np.array([0, 1, 1, 1, 0])
    # bins: 0.05 against 1/2 with weight 2; mean 0.9667 against 2/3 with weight 3
    assert schedule.ece(predicted, observed) == pytest.approx((2 * 0.45 + 3 * (2.9 / 3 - 2 / 3)) / 5)
    table = schedule.reliability(predicted, observed)
    assert table.blocks.tolist() == [2, 3] and table.bin.tolist() == [0, 9]
    assert table.observed.tolist() == pytest.approx([1 / 2, 2 / 3])
    assert np.isnan(schedule.ece(np.array([]), np.array([])))


def test_auroc_counts_ties_half():
    assert schedule.auroc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1])) == pytest.approx(3.5 / 4)
    assert schedule.auroc(np.full(6, 0.3), np.array([0, 1, 0, 1, 1, 0])) == 0.5
    assert np.isnan(schedule.auroc(np.array([0.2, 0.9]), np.array([1, 1])))


def test_a_calibrated_head_is_left_alone():
    confidence, kept = rollouts([1.0, 1.0, 1.0])
    temperatures = schedule.fit_temperatures(confidence, kept)
    assert temperatures == pytest.approx([1, 1, 1], rel=0.1)
    assert schedule.calibration_table(confidence, kept, np.ones(3)).ece_before.max() < 0.01


def test_sts_finds_the_temperatures_that_spoiled_the_confidences():
    wrong = [2.5, 0.5, 1.6]
    confidence, kept = rollouts(wrong)
    temperatures = schedule.fit_temperatures(confidence, kept)
    assert temperatures == pytest.approx(wrong, rel=0.15)
    unseen = schedule.calibration_table(*rollouts(wrong, seed=1), temperatures)
    assert unseen.ece_before.min() > 0.04 and unseen.ece_after.max() < 0.015
    assert unseen.auroc_before[0] == pytest.approx(unseen.auroc_after[0])  # one temperature cannot reorder


def test_sts_fixes_earlier_positions_before_later_ones():
    """The second position must not make good an error of the first: each is fitted with the earlier ones fixed."""
    confidence, kept = rollouts([3.0, 1.0])
    assert schedule.fit_temperatures(confidence, kept) == pytest.approx([3.0, 1.0], rel=0.15)
    assert schedule.fit_temperatures(confidence[:, :1], kept)[0] == schedule.fit_temperatures(confidence, kept)[0]


def test_conditional_auroc_counts_blocks_that_reached_the_position():
    confidence = np.array([[0.9, 0.1], [0.9, 0.9], [0.1, 0.2], [0.1, 0.8]])
    accepted = np.array([1, 2, 0, 0])
    table = schedule.calibration_table(confidence, accepted, np.ones(2))
    assert table.conditional_auroc.tolist() == [1.0, 1.0] and table.accepted.tolist() == [2, 1]
    table = schedule.calibration_table(confidence[:, ::-1], accepted, np.ones(2))
    assert table.conditional_auroc[1] == 0.5  # 0.9 and 0.9 of the two blocks that reached it


def test_temperatures_lie_beside_the_checkpoint(tmp_path):
    assert schedule.load_temperatures(tmp_path, 2) is None
    schedule.save_temperatures(tmp_path, {"head": np.array([1.5, 0.7, 2.0]), "probability": np.ones(2)}, blocks=12)
    assert schedule.load_temperatures(tmp_path, 2).tolist() == [1.5, 0.7]
    assert schedule.load_temperatures(tmp_path, 2, "probability").tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="holds 3 temperatures, want 4"):
        schedule.load_temperatures(tmp_path, 4)


BAD_CALIBRATIONS = {
    "no JSON": ("{", "is damaged: calibration.json is no JSON"),
    "no object": ("1", "is damaged: calibration.json holds no JSON object"),
    "a list": ("[1.0, 2.0]", "is damaged: calibration.json holds no JSON object"),
    "no temperatures": ("{}", "/calibration.json: temperatures = 'None' must be a list of numbers"),
    "a number": ({"temperatures": 1.5}, "/calibration.json: temperatures = '1.5' must be a list of numbers"),
    "nested": ({"temperatures": [[1.0], [2.0]]}, "/calibration.json holds the temperature '[1.0]'"),
    "text": ({"temperatures": ["1.0", 2.0]}, "/calibration.json holds the temperature '1.0'"),
    "a flag": ({"temperatures": [True, 2.0]}, "/calibration.json holds the temperature 'True'"),
    "infinite": ({"temperatures": [1.0, float("inf")]}, "/calibration.json holds the temperature 'inf'"),
    "NaN": ({"temperatures": [float("nan"), 1.0]}, "/calibration.json holds the temperature 'nan'"),
    "zero": ({"temperatures": [1.0, 0]}, "/calibration.json holds the temperature '0'"),
    "no float": ({"temperatures": [10**400, 1.0]}, "/calibration.json holds the temperature '1000"),
    "too few": ({"temperatures": [1.0]}, "/calibration.json holds 1 temperatures, want 2"),
}  # fmt: skip


@pytest.mark.parametrize("content, message", BAD_CALIBRATIONS.values(), ids=BAD_CALIBRATIONS)
def test_a_calibration_that_is_none_is_named(tmp_path, content, message):
    """The file comes with a checkpoint, which may be anybody's."""
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / schedule.CALIBRATION).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        schedule.load_temperatures(tmp_path, 2)
    assert tmp_path.name in str(refusal.value)


def test_fit_refuses_what_is_no_block():
    with pytest.raises(ValueError, match="want"):
        schedule.fit_temperatures(np.zeros((3, 2)), np.zeros(4))


# ---- searches


def test_ranking_gives_prefixes_and_breaks_ties_by_place():
    survival = np.array([[0.9, 0.45, 0.405], [0.9, 0.9, 0.9]])
    order = [(r, k) for _, k, r in schedule.ranking(survival)]
    assert order == [(0, 0), (1, 0), (1, 1), (1, 2), (0, 1), (0, 2)]
    for budget in range(7):
        assert sum(prefixes(survival, budget)) == budget
        assert all((r, k - 1) in order[:budget] for r, k in order[:budget] if k)


SPS = {1: 1.0, 2: 0.5, 3: 0.45}.__getitem__  # the paper's appendix A
TARGET, DRAFT = np.array([0.7, 0.3]), np.array([0.5, 0.5])


def output_distribution(search) -> np.ndarray:
    """Exact law of the first emitted token in the paper's example: a_1 = 0.8, c_2 = 0.9 after A and 0 after B.

    Draft 1 is verified where the search admits it: accepted with min(1, p/q), else p's residual; unverified, the
    target speaks for itself.
    """
    law = np.zeros(2)
    for draft, second in enumerate([0.9, 0.0]):
        budget = search(np.array([[0.8, 0.8 * second]]), SPS)
        if budget == 0:
            law += DRAFT[draft] * TARGET
        else:
            accept = min(1.0, TARGET[draft] / DRAFT[draft])
            residual = np.maximum(TARGET - DRAFT, 0)
            law[draft] += DRAFT[draft] * accept
            law += DRAFT[draft] * (1 - accept) * residual / residual.sum()
    return law


def test_the_papers_counterexample():
    assert early_stop(np.array([[0.8, 0.72]]), SPS) == early_stop(np.array([[0.8, 0.0]]), SPS) == 0
    assert output_distribution(early_stop) == pytest.approx([0.7, 0.3])


def test_the_retrospective_search_is_the_negative_control():
    """The search that early_stop must not be: it reads the confidence of the draft after the one that it admits."""
    assert global_search(np.array([[0.8, 0.72]]), SPS) == 2 and global_search(np.array([[0.8, 0.0]]), SPS) == 0
    assert output_distribution(global_search) == pytest.approx([0.85, 0.15])


def test_early_stop_by_hand():
    """R = 2: rates 2, 2.9, 3.36 and 3.31 with SPS 1, 1, 0.96, 0.86: two are admitted."""
    rate = {2: 1.0, 3: 1.0, 4: 0.96, 5: 0.86, 6: 0.86}.__getitem__
    survival = np.array([[0.9, 0.35], [0.6, 0.3]])
    assert early_stop(survival, rate) == 2
    assert prefixes(survival, 2) == [1, 1]


def test_admission_never_depends_on_the_draft_itself_or_later_ones():
    """Change what only drafts k.. decide (survival beyond k): whether draft k is admitted must stay the same."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        survival = rng.random((3, 4)).cumprod(1)
        rate = dict(zip(range(3, 16), np.sort(rng.random(13))[::-1], strict=True)).__getitem__
        row, k = rng.integers(3), rng.integers(4)
        other = survival.copy()
        other[row, k + 1 :] = survival[row, k] * rng.random(3 - k).cumprod()
        admitted = [prefixes(s, early_stop(s, rate))[row] > k for s in (survival, other)]
        assert admitted[0] == admitted[1]


STAIRCASE = StepCost(np.array([1, 4]), np.array([[1.0, 1.2, 1.2, 1.2], [1.0, 2.0, 2.0, 2.0]]))


def test_on_a_staircase_the_searches_part():
    """Four requests: the first draft doubles the cost of a step and eight more are free, which only a search that
    looks beyond the drop can see."""
    survival = np.array([[0.9, 0.8, 0.7]] * 4)
    rate = STAIRCASE.steps_per_second(4)
    assert early_stop(survival, lambda tokens: 1.0 if tokens == 4 else 0.5) == 0
    assert global_search(survival, lambda tokens: 1.0 if tokens == 4 else 0.5) == 12
    assert early_stop(survival, rate) < global_search(survival, rate) == 12


# ---- policies


def test_step_cost_interpolates_between_measured_points_and_never_falls():
    table = pd.DataFrame({
        "requests": [1, 1, 1, 4, 4, 4], "tokens": [1, 2, 3, 4, 8, 12], "step_ms": [10, 30, 20, 20, 40, 80],
    })  # fmt: skip
    cost = StepCost.from_table(table)
    assert cost.seconds[0] == pytest.approx([0.01, 0.025, 0.025])  # 30 and 20 are one noisy stair
    assert 1 / cost.steps_per_second(4)(6) == pytest.approx(0.03)
    assert 1 / cost.steps_per_second(4)(12) == pytest.approx(0.08)
    assert 1 / cost.steps_per_second(2)(2) == pytest.approx(0.01 + (0.02 - 0.01) / 3)
    with pytest.raises(ValueError, match="gaps"):
        StepCost.from_table(table[:-1])


def test_policies_name_themselves_and_choose_lengths():
    survival = np.array([[0.9, 0.45, 0.405], [0.3, 0.2, 0.1]])
    assert Fixed(3).lengths(survival) == [3, 3]
    assert Threshold(3, 0.0).lengths(survival) == [3, 3]
    assert Threshold(3, 0.41).lengths(survival) == [2, 0]
    free = StepCost(np.array([1, 2]), np.ones((2, 4)))
    dear = StepCost(np.array([1, 2]), np.array([[1.0, 2, 3, 4], [1.0, 2, 3, 4]]))
    assert Scheduler(3, free).lengths(survival) == [3, 3]
    assert Scheduler(3, dear).lengths(survival) == [0, 0]
    assert Scheduler(3, free, "global").name == "scheduler (global, confidences two steps old)"
    with pytest.raises(ValueError, match="'early stop' or 'global'"):
        Scheduler(3, free, "retrospective")


def test_global_spends_the_budget_of_two_steps_before_on_the_best_of_now():
    policy = Scheduler(3, STAIRCASE, "global")
    high, low = np.array([[0.9, 0.8, 0.7]] * 4), np.array([[0.01, 0.01, 0.01]] * 4)
    assert policy.lengths(high) == prefixes(high, early_stop(high, STAIRCASE.steps_per_second(4)))  # no budget yet
    policy.lengths(low)
    assert policy.lengths(low) == [3, 3, 3, 3]  # what `high` deserved two steps before
    assert policy.lengths(high) == [0, 0, 0, 0]  # what `low` deserved


def test_drafting_less_where_drafts_are_dear_or_seldom_kept():
    rng = np.random.default_rng(0)

    def observed(chance):
        kept = (rng.random((4000, 3)) < chance).cumprod(1).sum(1)
        return np.tile(chance ** np.arange(1, 4), (4000, 1)), kept

    free = {n: StepCost(np.array([1, 8]), np.ones((2, n + 1))) for n in (1, 3)}
    dear = free | {3: StepCost(np.array([1, 8]), np.array([[1.0] * 4, [2.0] * 4]))}  # nothing at R = 1, twice at R = 8
    likely, seldom = observed(0.9), observed(0.3)
    for R in (1, 8):
        assert schedule.drafts_to_make(free, *likely, R) == 3
    assert schedule.drafts_to_make(dear, *likely, 1) == 3 and schedule.drafts_to_make(dear, *likely, 8) == 1
    assert schedule.drafts_to_make(dear, *seldom, 8) == 1
    none = dear | {0: StepCost(np.array([1, 8]), np.array([[1.0], [0.5]]))}  # half the price of any draft at R = 8
    assert schedule.drafts_to_make(none, *likely, 1) == 3 and schedule.drafts_to_make(none, *seldom, 8) == 0


def test_step_costs_are_told_apart_by_the_drafts_made():
    rows = {"requests": [1, 1, 1, 1, 1], "tokens": [1, 2, 1, 2, 3], "step_ms": [10, 12, 14, 16, 18]}
    costs = schedule.by_drafts(pd.DataFrame(rows | {"drafts": [1, 1, 2, 2, 2]}))
    assert list(costs) == [1, 2] and costs[2].seconds[0] == pytest.approx([0.014, 0.016, 0.018])
    assert costs[1].seconds.shape == (1, 2)
