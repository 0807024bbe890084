"""Many requests at once: each answer is the one that its prompt gets alone, whatever the policy verifies."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from test_decode import LIKED, NEVER, SMALL, joint_of_the_target, small  # noqa: F401
from tiny import VOCAB, tiny_config, tiny_drafter, tiny_model, tiny_target

from dspark import baselines, batched, checkpoint, schedule
from dspark.batched import Engine, profile_steps, serve
from dspark.data import OWN_SETS, load_prompts
from dspark.decode import answer
from dspark.evaluate import COMMITTED_DRAFTER
from dspark.schedule import Fixed, Scheduler, StepCost, Threshold
from dspark.transformers_target import TransformersTarget

PROMPTS = [[5, 6, 7], [3, 4], [30, 8, 21, 17, 12, 25, 39], [9], [14, 23, 25], [36, 31, 5, 6], [7, 7, 3]]
# One request's step grows slowly dearer, that of eight steeply: lengths differ from row to row and from step to step.
COST = StepCost(np.array([1, 8]), np.array([[1.0, 1.1, 1.3, 1.6], [1.0, 1.2, 1.5, 2.0]]))


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(toy):
    return tiny_drafter(toy, draft_ids=LIKED)


def policies():
    return [Fixed(3), Threshold(3, 0.4), Scheduler(3, COST), Scheduler(3, COST, "global")]


def texts(answers):
    return [served.tokens for served in answers]


# ---- the ragged forward


def test_a_padded_row_is_as_if_alone(toy):
    """Rows at different lengths with 1, 4 and 2 real tokens: hidden states, features and cache are those of one row."""
    prompts, tails = PROMPTS[:3], ([8], [9, 10, 11, 12], [13, 14])
    cache = toy.new_cache(3, 24)
    for i, prompt in enumerate(prompts):
        view = object.__new__(type(cache))
        view.k, view.v = ([layer[i : i + 1] for layer in part] for part in (cache.k, cache.v))
        toy.forward(torch.tensor([prompt]), view, 0)
    tokens = torch.tensor([tail + [0] * (4 - len(tail)) for tail in tails])
    real = torch.arange(4) < torch.tensor([[len(tail)] for tail in tails])
    start = torch.tensor([len(prompt) for prompt in prompts])
    out = toy.forward(tokens, cache, start, real.flatten().nonzero()[:, 0])
    assert out.hidden.shape[:2] == out.features.shape[:2] == (1, 7)
    first = 0
    for i, (prompt, tail) in enumerate(zip(prompts, tails, strict=True)):
        alone = toy.new_cache(1, 24)
        wanted = toy.forward(torch.tensor([prompt + tail]), alone, 0)
        rows, end = slice(first, first + len(tail)), len(prompt) + len(tail)
        assert torch.allclose(out.hidden[0, rows], wanted.hidden[0, len(prompt) :], atol=1e-5)
        assert torch.allclose(out.features[0, rows], wanted.features[0, len(prompt) :], atol=1e-4)
        for mine, single in zip(cache.k + cache.v, alone.k + alone.v, strict=True):
            assert torch.allclose(mine[i, :, :end], single[0, :, :end], atol=1e-5)
        first += len(tail)


# ---- greedy: token for token


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_each_answer_is_that_of_its_prompt_alone(toy, drafter, concurrency):
    """Seven prompts, answers of unequal length (a stop token ends some): rows join and leave in the middle."""
    plain = [answer(toy, None, prompt, 0, 20, stop_token_ids=frozenset({14})).tokens for prompt in PROMPTS]
    assert len({len(tokens) for tokens in plain}) > 2
    options = {"stop_token_ids": frozenset({14})}
    for policy in policies():
        assert texts(serve(toy, drafter, PROMPTS, policy, concurrency, 20, **options)) == plain, policy.name
    assert texts(serve(toy, None, PROMPTS, Fixed(0), concurrency, 20, **options)) == plain


@pytest.mark.parametrize("changes", [{"markov_head_type": "gated"}, {"markov_head_type": "rnn"},
                                     {"markov_rank": 0, "confidence_head": False},
                                     {"sliding_layers": (1,), "sliding_window": 7, "is_causal": True}])  # fmt: skip
def test_every_step_is_that_of_decode(toy, changes):
    """Not only the tokens: as many drafts are accepted at each step, so every row drafted from its own context."""
    drafter = tiny_drafter(toy, draft_ids=LIKED, **changes)
    alone = [answer(toy, drafter, prompt, 3, 16, stop_token_ids=NEVER) for prompt in PROMPTS]
    together = serve(toy, drafter, PROMPTS, Fixed(3), 3, 16, stop_token_ids=NEVER)
    assert [got.accepted for got in together] == [got.accepted for got in alone]
    assert [got.drafted for got in together] == [got.drafted for got in alone]
    assert sum(sum(got.accepted) for got in alone) > 0


@pytest.mark.parametrize("temperatures", [None, [0.5, 2.0, 3.0]])
def test_one_request_verifies_what_decode_verifies(toy, drafter, temperatures):
    options, verified = {"stop_token_ids": NEVER, "temperatures": temperatures}, set()
    for policy in (Threshold(3, 0.0), Threshold(3, 0.3), Threshold(3, 0.6), Scheduler(3, COST)):
        alone = answer(toy, drafter, PROMPTS[2], 3, 20, policy=policy, **options)
        (served,) = serve(toy, drafter, PROMPTS[2:3], policy, 1, 20, **options)
        assert (served.tokens, served.drafted, served.accepted) == (alone.tokens, alone.drafted, alone.accepted)
        verified |= set(alone.drafted)
    assert len(verified) > 2


def test_threshold_zero_is_fixed_n(toy, drafter):
    runs = [serve(toy, drafter, PROMPTS, policy, 4, 20) for policy in (Fixed(3), Threshold(3, 0.0))]
    for fixed, threshold in zip(*runs, strict=True):
        assert (fixed.tokens, fixed.drafted, fixed.accepted) == (
            threshold.tokens,
            threshold.drafted,
            threshold.accepted,
        )


def test_rows_of_one_step_differ_in_length_and_a_higher_threshold_verifies_less(toy, drafter, monkeypatch):
    shapes = []
    forward = toy.forward

    def watch(tokens, cache, start, packed=None):
        shapes.append((tokens.numel(), None if packed is None else len(packed)))
        return forward(tokens, cache, start, packed)

    monkeypatch.setattr(toy, "forward", watch)
    verified = []
    for threshold in (0.0, 0.3, 0.6):
        shapes.clear()
        answers = serve(toy, drafter, PROMPTS, Threshold(3, threshold), 4, 20, stop_token_ids=NEVER)
        verified.append(sum(sum(served.drafted) for served in answers))
        computed = sum(n if packed is None else packed for n, packed in shapes) - sum(map(len, PROMPTS))
        assert computed == verified[-1] + sum(served.steps for served in answers)  # the padding is not computed
        assert any(packed is not None for _, packed in shapes) == (threshold > 0)
    assert verified == sorted(verified, reverse=True) and verified[0] > verified[1] > verified[2]


def test_what_lies_behind_a_rows_committed_tokens_is_never_read(toy, drafter, monkeypatch):
    plain = texts(serve(toy, drafter, PROMPTS, Scheduler(3, COST), 3, 20))
    step = Engine.step

    def spoiled(engine):
        for i, row in enumerate(engine.rows):
            for layer in (*engine.cache.k, *engine.cache.v):
                layer[i, :, row.length :] = 1e3
        return step(engine)

    monkeypatch.setattr(Engine, "step", spoiled)
    assert texts(serve(toy, drafter, PROMPTS, Scheduler(3, COST), 3, 20)) == plain


def test_calibration_reaches_the_policy(toy, drafter):
    raw, scaled = (
        serve(toy, drafter, PROMPTS, Threshold(3, 0.4), 2, 20, temperatures=t) for t in (None, np.full(3, 1e6))
    )  # such a temperature makes every confidence 1/2, so that one draft has survival 1/2 and two have 1/4
    assert {length for served in scaled for length in served.drafted} == {1}
    assert {length for served in raw for length in served.drafted} > {1}
    assert texts(raw) == texts(scaled)
    assert raw[0].confidence[0].shape == (3,)


def test_the_real_target(target):
    """Three prompts of the own sets in float32, two at a time, with the committed drafter and the scheduler."""
    drafter = checkpoint.load(COMMITTED_DRAFTER, target)
    prompts = [target.encode_chat([{"role": "user", "content": load_prompts(name, 1).prompts[0]}]) for name in OWN_SETS]
    prompts = sorted(prompts, key=len)[:3]
    cost = StepCost(np.array([1, 2]), np.array([[1.0, 1.05, 1.1, 1.2], [1.0, 1.1, 1.3, 1.6]]))
    together = serve(target, drafter, prompts, Scheduler(3, cost), 2, 12)
    assert texts(together) == [answer(target, None, prompt, 0, 12).tokens for prompt in prompts]
    assert len({length for served in together for length in served.drafted}) > 1


# ---- sampling


def p_value(target, drafter, policy, runs, concurrency, tokens=2, temperatures=None) -> float:
    """Chi-square of what follows the first token of `runs` answers to one prompt at temperature 1: one token or two."""
    joint = joint_of_the_target(target, [3, 1], 1.0)
    joint = (joint if tokens == 2 else joint.sum(1)).flatten().numpy()
    options = {"temperature": 1.0, "seed": 1, "stop_token_ids": NEVER, "temperatures": temperatures}
    answers = serve(target, drafter, [[3, 1]] * runs, policy, concurrency, 1 + tokens, **options)
    assert len({length for served in answers for length in served.drafted}) > 2
    counts = Counter(np.dot(served.tokens[1:], [SMALL, 1][-tokens:]) for served in answers)
    observed, expected = np.array([counts[k] for k in range(len(joint))]), joint * runs
    common = expected >= 5
    cells, wanted = observed[common], expected[common]
    if not common.all():
        cells, wanted = (np.append(part[common], part[~common].sum()) for part in (observed, expected))
    wanted = wanted * cells.sum() / wanted.sum()  # float32 probabilities sum to one but for rounding
    return float(chisquare(cells, wanted).pvalue)


SHARPENED = np.full(3, 0.2)  # an untrained drafter's probabilities are much alike


@pytest.mark.parametrize("search", ["early stop", "global"])
def test_scheduled_answers_have_the_targets_distribution(small, search):  # noqa: F811
    """Eight requests a step share one budget."""
    target, drafter = small
    assert p_value(target, drafter, Scheduler(3, COST, search), 900, 8) > 0.01


def test_answers_scheduled_by_the_drafters_probabilities_have_the_targets_distribution(small, monkeypatch):  # noqa: F811
    target, drafter = small
    monkeypatch.setattr(drafter, "confidence_source", "probability")
    assert p_value(target, drafter, Scheduler(3, COST), 900, 8, temperatures=SHARPENED) > 0.01


def test_the_probability_of_the_drawn_token_itself_would_bias_the_answers(small, monkeypatch):  # noqa: F811
    """Why a drafter tells the highest of its probabilities: a negative control for the test above."""
    target, drafter = small

    def of_the_drawn(base, hidden, anchors, drafted):
        return drafted.logits.softmax(-1).gather(-1, drafter.to_draft_ids(drafted.tokens)[..., None])[..., 0]

    monkeypatch.setattr(drafter, "confidence_source", "probability")
    monkeypatch.setattr(drafter, "_highest_probability", of_the_drawn)
    assert p_value(target, drafter, Scheduler(3, COST), 900, 8, temperatures=SHARPENED) < 1e-4


class Swinging(torch.nn.Module):
    """A confidence head that is sure after tokens 1, 4 and 5 and doubts after the others."""

    def __init__(self, w1):
        super().__init__()
        self.w1, self.logits = w1, torch.tensor([0.0, 4, 0, 0, 4, 4])

    def forward(self, hidden, w1):
        return self.logits[(w1[..., None, :] == self.w1).all(-1).int().argmax(-1)]


class EachAlone(Scheduler):
    """Each request searches for itself, as in the paper's example: whether its first draft is verified hangs on it."""

    def lengths(self, survival):
        rate = self.cost.steps_per_second(1)
        return [type(self).find(row[None], rate) for row in survival]


class Retrospective(EachAlone):
    find = staticmethod(schedule.global_search)  # on the confidences of the very drafts that it admits


class Causal(EachAlone):
    find = staticmethod(schedule.early_stop)


@pytest.mark.parametrize("policy, lossless", [(Causal, True), (Retrospective, False)])
def test_a_retrospective_search_is_found_out(small, policy, lossless):  # noqa: F811
    """The negative control. On this staircase the first draft after a doubtful anchor pays only if the second is sure,
    which the second's confidence knows from the first draft itself."""
    target, drafter = copy.deepcopy(small)
    drafter.confidence_head = Swinging(drafter.markov_head.markov_w1.weight)
    stairs = StepCost(np.array([1, 8]), np.array([[1.0, 1.7, 1.9, 2.1]] * 2))
    p = p_value(target, drafter, policy(3, stairs), 1500, 16, tokens=1)
    assert p > 0.01 if lossless else p < 1e-6


# ---- the rest


def test_misfits_are_named(toy, drafter):
    bare = tiny_drafter(toy, draft_ids=LIKED, markov_rank=0, confidence_head=False)
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        serve(toy, bare, PROMPTS, Threshold(3, 0.5), 2, 8)
    with pytest.raises(ValueError, match="give a drafter"):
        serve(toy, None, PROMPTS, Fixed(3), 2, 8)
    with pytest.raises(ValueError, match="at least one token"):
        serve(toy, drafter, [[5], []], Fixed(3), 2, 8)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature = {temperature}: give 0"):
            serve(toy, drafter, PROMPTS, Fixed(3), 2, 8, temperature)


def test_what_answers_one_request_at_a_time_is_named_before_it_runs(toy, drafter):
    """Drafters without contexts of a batch, and a target whose cache cannot hold rows of different lengths."""
    eagle = baselines.build(baselines.eagle3_config(tiny_config(), False))
    for alone in (eagle, baselines.PromptLookup(VOCAB)):
        name = type(alone).__name__
        with pytest.raises(ValueError, match=f"drafter {name} cannot draft for a batch: decode one request at a time"):
            serve(toy, alone, PROMPTS, Fixed(3), 2, 8)
    other = TransformersTarget(tiny_model(), None, "other", (0, 2))
    for policy in (Fixed(3), Fixed(0)):
        with pytest.raises(ValueError, match="target 'other' cannot hold requests of different lengths: decode one"):
            serve(other, drafter, PROMPTS, policy, 2, 8)


@pytest.mark.parametrize("search", ["early stop", "global"])
def test_a_scheduler_that_makes_no_drafts_is_the_target_alone(toy, drafter, search):
    none = Scheduler(0, StepCost(np.array([1]), np.array([[0.03]])), search)
    served = serve(toy, drafter, PROMPTS, none, 2, 8)
    assert texts(served) == texts(serve(toy, None, PROMPTS, Fixed(0), 2, 8))
    assert not any(sum(answer.drafted) for answer in served)


def test_profile_times_every_number_of_verified_drafts(toy, drafter, monkeypatch):
    widths = []
    step = batched.Engine.step

    def watch(engine):
        widths.append((len(engine.rows), engine.policy.drafts))
        return step(engine)

    monkeypatch.setattr(batched.Engine, "step", watch)
    table = profile_steps(toy, drafter, PROMPTS, [0, 1, 3], (1, 4), 2)
    verified = [(n, R, R * (1 + j)) for R in (1, 4) for n in (0, 1, 3) for j in range(n + 1)]
    assert [tuple(row) for row in table[["drafts", "requests", "tokens"]].values.tolist()] == verified
    assert widths == [(R, j) for R in (1, 4) for _ in range(3) for n in (0, 1, 3) for j in range(n + 1)]  # all in turn
    assert (table.step_ms > 0).all() and np.allclose(table.sps * table.step_ms, 1e3)
    assert {n: cost.seconds.shape for n, cost in schedule.by_drafts(table).items()} == {0: (2, 1), 1: (2, 2), 3: (2, 4)}
