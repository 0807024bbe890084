"""Decoding: greedy output is the target's token for token, sampled output has the target's distribution."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from tiny import VOCAB, tiny_config, tiny_drafter, tiny_model, tiny_target
from transformers import LlamaConfig, LlamaForCausalLM

from dspark import baselines
from dspark.config import DSparkConfig
from dspark.decode import Answer, answer, decode, draft_ids, pooled_tau, step_parts, verify_greedy
from dspark.drafter import Draft, DSparkDrafter
from dspark.kernels import verify
from dspark.schedule import Scheduler, StepCost, Threshold
from dspark.target import Target

LIKED = torch.tensor([14, 23, 25, 31, 36])  # what the toy target says most: a random drafter is right now and then
HEADS = {
    "vanilla": {"draft_ids": LIKED},
    "gated": {"draft_ids": LIKED, "markov_head_type": "gated"},
    "rnn": {"draft_ids": LIKED, "markov_head_type": "rnn"},
    "no heads": {"draft_ids": LIKED, "markov_rank": 0, "confidence_head": False},
    "sliding causal": {"draft_ids": LIKED, "sliding_layers": (1,), "sliding_window": 7, "is_causal": True},
    "whole vocabulary": {},
}
PROMPTS = ([5, 6, 7], [3, 4], [30, 8, 21, 17, 12, 25, 39])
NEVER = frozenset()


@pytest.fixture(scope="module")
def toy():
    return tiny_target()


@pytest.fixture(scope="module")
def lively():
    """A target whose greedy text does not repeat itself."""
    return tiny_target(scale=12.0)


class Script:
    """Drafts what it is told, to reach every acceptance pattern on purpose: `truth` is the target's own greedy text
    after the prompt, and the first of step s's drafts that is wrong is number wrong[s] (0-based; None: all right)."""

    config = tiny_config()

    def __init__(self, prompt_length: int, truth: list[int], wrong: list[int | None]):
        self.at, self.truth, self.wrong = prompt_length, truth, iter(wrong)
        self.contexts = []

    def new_cache(self, capacity):
        return []

    def extend(self, cache, features, tokens):
        assert len(tokens) == len(features)
        cache.extend(features)

    def draft(self, anchor, cache, n, temperature, generator):
        self.contexts.append(len(cache))
        done = len(cache) - self.at  # tokens of the answer before the anchor
        assert int(anchor) == self.truth[done]
        drafts = (self.truth[done + 1 :] + [0] * n)[:n]
        wrong = next(self.wrong, None)
        if wrong is not None and wrong < n:
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        return Draft(torch.tensor(drafts), None, None)


# ---- greedy: identical to the target alone


@pytest.mark.parametrize("layout", [True, False])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_greedy_output_is_the_targets_at_every_n(toy, layout, heads):
    drafter = tiny_drafter(toy, seed=7, sample_from_anchor=layout, **heads)
    answers = []
    for prompt in PROMPTS:
        plain = answer(toy, None, prompt, 0, 20)
        for n in range(1, drafter.config.max_draft_tokens + 1):
            got = answer(toy, drafter, prompt, n, 20)
            assert got.tokens == plain.tokens
            assert set(got.drafted) <= {n} and all(0 <= a <= n for a in got.accepted)
            answers.append(got)
    if "draft_ids" in heads:  # some drafts were accepted and some rejected, or nothing was tested
        assert 1.05 < pooled_tau(answers) < 3


def test_own_forward_decodes_as_transformers_generates(lively):
    model = tiny_model(scale=12.0)
    for prompt in PROMPTS:
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        assert answer(lively, None, prompt, 0, 40).tokens == wanted[len(prompt) :].tolist()


# ---- stop tokens and budgets (pitfall 47)


def test_stop_token_at_every_slot_and_every_budget(lively):
    prompt, K = [5, 6, 7], 4
    truth = answer(lively, None, prompt, 0, 40, stop_token_ids=NEVER).tokens
    for stop_at, budget in itertools.product(range(K + 2), range(1, K + 3)):
        # wrong[0] = None: one step commits truth[1..5], so truth[stop_at] sits at each slot of it
        stop = frozenset({truth[stop_at], 1})
        first = min(truth.index(token) for token in stop if token in truth)
        wanted = truth[: min(first + 1, budget)]
        for wrong in (None, 0, 1, 3):
            drafter = Script(len(prompt), truth, [wrong])
            got = answer(lively, drafter, prompt, K, budget, stop_token_ids=stop)
            assert got.tokens == wanted
            assert answer(lively, None, prompt, 0, budget, stop_token_ids=stop).tokens == wanted


def test_stop_token_accepted_in_the_middle_ends_the_answer_there(lively):
    """Several stop ids, one of them accepted as a draft with more accepted behind it."""
    prompt = [5, 6, 7]
    truth = answer(lively, None, prompt, 0, 20, stop_token_ids=NEVER).tokens
    stop = frozenset({truth[3], 0})
    end = truth.index(truth[3]) + 1
    steps = list(decode(lively, Script(3, truth, []), prompt, 4, 20, stop_token_ids=stop))
    assert [token for step in steps for token in step.emitted] == truth[:end]
    assert steps[-1].accepted == 4 and len(steps[-1].emitted) < 5  # `accepted` counts before the cut


def test_default_stop_tokens_are_the_targets(toy):
    prompt = next(p for p in ([k] for k in range(3, VOCAB)) if 2 in answer(toy, None, p, 0, 30).tokens)
    tokens = answer(toy, tiny_drafter(toy), prompt, 4, 30).tokens
    assert tokens[-1] == 2 and 2 not in tokens[:-1]
    assert len(answer(toy, tiny_drafter(toy), prompt, 4, 30, stop_token_ids=NEVER).tokens) == 30


# ---- what is refused


def test_missing_or_unfit_drafters_are_named(toy):
    with pytest.raises(ValueError, match="num_speculative_tokens = 3 needs a drafter"):
        answer(toy, None, [5], 3, 4)
    with pytest.raises(ValueError, match="num_speculative_tokens = 5"):
        answer(toy, tiny_drafter(toy), [5], 5, 4)
    with pytest.raises(ValueError, match="threshold 0.5 needs a drafter with a confidence head"):
        answer(toy, tiny_drafter(toy, confidence_head=False), [5], 3, 4, policy=Threshold(3, 0.5))
    with pytest.raises(ValueError, match="256"):
        answer(toy, None, [5] * 250, 0, 20)


@pytest.mark.parametrize("temperature", [-0.5, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(toy, temperature):
    """A negative one or NaN is neither greedy nor drawn from; at an infinite one every token would be as likely."""
    for n, drafter in ((0, None), (3, tiny_drafter(toy))):
        with pytest.raises(ValueError, match=f"temperature = {temperature}: give 0"):
            answer(toy, drafter, [5], n, 4, temperature=temperature)


def test_other_taps_than_the_drafters_are_refused():
    """Same number of taps, other layers: it would run, and draft badly."""
    other = tiny_target(layer_ids=(1, 2))
    with pytest.raises(ValueError, match=r"taps layers \(1, 2\), the drafter reads \(0, 2\)"):
        answer(other, tiny_drafter(other), [5], 3, 4)
    assert len(answer(other, None, [5], 0, 4).tokens) == 4  # the baseline needs none


# ---- counting (pitfalls 22, 25, 27, 56)


def test_tau_counts_the_bonus_and_agrees_with_tokens_per_step(lively):
    prompt, K = [5, 6, 7], 4
    truth = answer(lively, None, prompt, 0, 41, stop_token_ids=NEVER).tokens
    wrong = [None, 0, 2, 3, 1, 0]
    got = answer(lively, Script(3, truth, wrong), prompt, K, 1 + 5 + 1 + 3 + 4 + 2 + 1, stop_token_ids=NEVER)
    assert got.accepted == [4, 0, 2, 3, 1, 0] and got.drafted == [4] * 6 and got.steps == 6
    assert got.tau == 1 + 10 / 6 == pytest.approx((len(got.tokens) - 1) / got.steps)  # the prefill's token is no step's
    prefix = [sum(a >= k for a in got.accepted) / got.steps for k in range(1, K + 1)]
    assert got.tau == pytest.approx(1 + sum(prefix))


def test_tau_of_a_corpus_is_pooled():
    short, long = Answer(accepted=[3]), Answer(accepted=[0] * 9)
    assert short.tau == 4 and long.tau == 1
    assert pooled_tau([short, long]) == pytest.approx(1.3)  # not 2.5
    assert pooled_tau([Answer(accepted=[0])]) == 1
    assert pooled_tau([]) != pooled_tau([])  # NaN


def test_the_first_step_is_the_prefill(toy):
    steps = list(decode(toy, tiny_drafter(toy), [5, 6, 7], 3, 10))
    assert steps[0].drafts == [] and len(steps[0].emitted) == 1 and steps[0].confidence is None
    for step in steps[1:-1]:
        assert len(step.drafts) == 3 and len(step.confidence) == 3
        assert step.emitted[:-1] == step.drafts[: step.accepted] and len(step.emitted) == step.accepted + 1


# ---- the context cache (pitfalls 50, 52)


@pytest.mark.parametrize("layout", [True, False])
def test_context_is_the_committed_tokens_and_nothing_else(toy, layout, monkeypatch):
    drafter, prompt = tiny_drafter(toy, seed=7, sample_from_anchor=layout, draft_ids=LIKED), [5, 6, 7]
    plain = answer(toy, None, prompt, 0, 24, stop_token_ids=NEVER).tokens
    text = prompt + plain
    features = toy.forward(torch.tensor([text]), toy.new_cache(1, len(text)), 0).features[0]
    draft, committed, lengths = drafter.draft, [len(prompt) + 1], []

    def checked(anchor, cache, *args):
        assert cache.length == committed[0] - 1 and int(anchor) == text[cache.length]
        fresh = drafter.new_cache(cache.length)
        drafter.extend(fresh, features[: cache.length])
        torch.testing.assert_close(cache.k[:, : cache.length], fresh.k[:, : cache.length], rtol=0, atol=1e-4)
        torch.testing.assert_close(cache.v[:, : cache.length], fresh.v[:, : cache.length], rtol=0, atol=1e-4)
        cache.k[:, cache.length :] = cache.v[:, cache.length :] = torch.nan  # stale rows must never be read
        lengths.append(cache.length)
        return draft(anchor, cache, *args)

    monkeypatch.setattr(drafter, "draft", checked)
    got = []
    for step in decode(toy, drafter, prompt, 3, 24, stop_token_ids=NEVER):
        got += step.emitted
        committed[0] = len(prompt) + len(got)
    assert got == plain
    grown = {b - a for a, b in itertools.pairwise(lengths)}
    assert {1, 2} <= grown  # rejections and partial acceptance both happened


def test_rejected_drafts_leave_no_trace_in_the_targets_cache(lively):
    prompt = [5, 6, 7]
    truth = answer(lively, None, prompt, 0, 40, stop_token_ids=NEVER).tokens
    for wrong in ([0] * 40, [1, 3, 0, 2] * 10, [None, 2] * 20):
        script = Script(3, truth, wrong)
        assert answer(lively, script, prompt, 4, 40, stop_token_ids=NEVER).tokens == truth
        assert script.contexts[0] == 3 and script.contexts == sorted(set(script.contexts))


# ---- confidence threshold (pitfall 56)


def test_threshold_narrows_the_verification_and_keeps_the_output(toy, monkeypatch):
    drafter = tiny_drafter(toy, seed=3)
    forward, widths = toy.forward, []
    monkeypatch.setattr(toy, "forward", lambda t, *args: widths.append(t.shape[1]) or forward(t, *args))
    total, fixed = [], [answer(toy, drafter, list(p), 4, 24) for p in PROMPTS]
    for threshold in (0.0, 0.1, 0.3, 0.6, 1.0):
        widths.clear()
        answers = [answer(toy, drafter, list(p), 4, 24, policy=Threshold(4, threshold)) for p in PROMPTS]
        assert [a.tokens for a in answers] == [a.tokens for a in fixed]
        verified = widths[:]
        for prompt, got in zip(PROMPTS, answers, strict=True):
            assert verified.pop(0) == len(prompt)
            for drafted, accepted in zip(got.drafted, got.accepted, strict=True):
                assert verified.pop(0) == drafted + 1  # what was not admitted was not paid for
                assert accepted <= drafted
        assert not verified
        steps = sum(a.steps for a in answers)
        total.append(sum(sum(a.drafted) for a in answers) / steps)
        if threshold == 0.0:
            assert [a.accepted for a in answers] == [a.accepted for a in fixed]
    assert total[0] == 4 and total[-1] < 0.5
    assert total == sorted(total, reverse=True) and len(set(total)) >= 4


# ---- verification alone


def test_verify_greedy_takes_the_longest_matching_prefix():
    logits = torch.eye(6)[[3, 1, 4, 5]]  # the target wants 3, 1, 4, then 5
    for drafts, wanted in (([3, 1, 4], (3, 5)), ([3, 1, 0], (2, 4)), ([3, 0, 4], (1, 1)), ([0, 1, 4], (0, 3))):
        assert verify_greedy(logits, torch.tensor(drafts)) == wanted
    assert verify_greedy(logits[:1], torch.tensor([], dtype=torch.long)) == (0, 3)


GRID = 64  # every p / q below is a multiple of 1 / GRID, so that GRID uniforms measure the acceptance exactly
EXACT = {  # p, q over four tokens
    "ordinary": ([10, 30, 20, 4], [32, 16, 8, 8]),
    "equal": ([32, 16, 8, 8], [32, 16, 8, 8]),
    "target certain": ([0, 64, 0, 0], [32, 16, 8, 8]),
    "drafter certain": ([10, 30, 20, 4], [0, 0, 64, 0]),
    "disjoint": ([0, 0, 32, 32], [32, 32, 0, 0]),
    "outside the draft vocabulary": ([10, 30, 20, 4], [32, 0, 32, 0]),
    "zero where drafted": ([0, 40, 20, 4], [32, 16, 8, 8]),
}


@pytest.fixture
def drawn(monkeypatch):
    """The distributions [V] that following tokens are drawn from, in the order of the draws."""
    monkeypatch.setenv("DSPARK_KERNELS", "reference")  # which asks searchsorted about the cumulative weights
    found, search = [], torch.searchsorted

    def recorded(cumulative, at, right):
        found.extend(cumulative.diff(prepend=torch.zeros_like(cumulative[:, :1])) / cumulative[:, -1:])
        return search(cumulative, at, right=right)

    monkeypatch.setattr(torch, "searchsorted", recorded)
    return found


def accepted_of(p, q, drafts, uniforms) -> int:
    """One request: p [n+1, V], q [n, V], drafts [n], a uniform for each draft."""
    uniforms = torch.tensor([[*uniforms, 0.5]], dtype=torch.float64)
    return int(verify(p.log()[None], torch.tensor([drafts]), None, 1.0, uniforms, q[None]).accepted)


@pytest.mark.parametrize("p, q", EXACT.values(), ids=EXACT)
def test_accept_plus_residual_is_exactly_the_target(p, q, drawn):
    """Sum over drafts (weight q), over the acceptance uniform and over the residual draw: p to rounding."""
    p, q = torch.tensor(p, dtype=torch.float64) / 64, torch.tensor(q, dtype=torch.float64) / 64
    bonus = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    emitted, after = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for token in q.nonzero().flatten().tolist():
        for i in range(GRID):
            accepted = accepted_of(torch.stack([p, bonus]), q[None], [token], [(i + 0.5) / GRID])
            weight = q[token] / GRID
            if accepted:
                emitted[token] += weight
                after += weight * drawn[-1]
            else:
                emitted += weight * drawn[-1]
    torch.testing.assert_close(emitted, p, rtol=0, atol=1e-12)
    overlap = torch.minimum(p, q).sum()
    torch.testing.assert_close(after, overlap * bonus, rtol=0, atol=1e-12)  # the bonus is drawn from p's own last row


def test_two_drafts_are_exactly_the_targets_joint(drawn):
    """Both slots at once, q conditional on the sampled first draft: the joint of two tokens is p's own."""
    f64 = torch.float64
    p1, q1 = torch.tensor([10, 30, 20, 4], dtype=f64) / 64, torch.tensor([32, 16, 8, 8], dtype=f64) / 64
    p2 = torch.tensor([[8, 8, 16, 32], [32, 16, 8, 8], [0, 64, 0, 0], [16, 16, 16, 16]], dtype=f64) / 64
    q2 = torch.tensor([[16, 16, 16, 16], [32, 16, 16, 0], [32, 32, 0, 0], [0, 0, 32, 32]], dtype=f64) / 64
    joint = torch.zeros(4, 4, dtype=f64)
    steps = [(i + 0.5) / 16 for i in range(16)]  # p / q are multiples of 1 / 16 here
    for a, b in itertools.product(range(4), repeat=2):
        if not q2[a, b]:
            continue
        for uniforms in itertools.product(steps, repeat=2):
            rows = torch.stack([p1, p2[a], torch.ones(4, dtype=f64)])
            accepted = accepted_of(rows, torch.stack([q1, q2[a]]), [a, b], uniforms)
            weight = q1[a] * q2[a, b] / 256
            if accepted == 0:
                joint += weight * drawn[-1][:, None] * p2  # the target goes on by itself
            elif accepted == 1:
                joint[a] += weight * drawn[-1]
            else:
                joint[a, b] += weight
    torch.testing.assert_close(joint, p1[:, None] * p2, rtol=0, atol=1e-12)


def test_a_pruned_q_is_read_by_target_ids(toy):
    """Pitfall 43: V = 10, D = 4, much of the target's mass outside the kept ids; draws within 3 sigma."""
    ids = torch.tensor([1, 4, 5, 9])
    drafter = tiny_drafter(toy, draft_ids=ids)
    q = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    to_draft = draft_ids(q, drafter, VOCAB)
    assert to_draft[ids].tolist() == [0, 1, 2, 3] and (to_draft >= 0).sum() == 4
    p = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(0)).pow(3)
    p[:, 10:] = 0
    p = p / p.sum(-1, keepdim=True)
    draws, generator = 8_000, torch.Generator().manual_seed(1)
    drafts = ids[torch.multinomial(q[0], draws, True, generator=generator)][:, None]
    uniforms = torch.rand(draws, 2, generator=generator)
    many = p.log().expand(draws, 2, VOCAB), drafts, None, 1.0, uniforms, q.expand(draws, 1, 4), to_draft
    accepted, following = verify(*many)
    emitted = torch.where(accepted == 1, drafts[:, 0], following)
    counts = torch.bincount(emitted, minlength=VOCAB)
    sigma = (draws * p[0] * (1 - p[0])).sqrt()
    assert ((counts - draws * p[0]).abs() <= 3 * sigma).all()
    assert counts.sum() - counts[ids].sum() > 0.3 * draws  # the residual emitted tokens that no draft could be


# ---- sampling: the distribution of real decoding is the target's (pitfalls 32, 45)

SMALL = 6  # vocabulary


@pytest.fixture(scope="module")
def small():
    """(target, drafter) of one layer each over six tokens, the drafter far from the target."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": SMALL, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "head_dim": 8,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **shape)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(12)
    target = Target(model, None, "small", (0,))
    config = DSparkConfig(
        target="small", target_num_hidden_layers=1, target_layer_ids=(0,), mask_token_id=0, num_hidden_layers=1,
        rope_theta=1e4, block_size=3, markov_rank=4, draft_vocab_size=5, **shape,
    )  # fmt: skip
    drafter = DSparkDrafter(config)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter.data, std=0.7)
    return target, drafter.adopt_target(target.embed_tokens, target.lm_head, torch.tensor([0, 1, 2, 4, 5])).eval()


def joint_of_the_target(target, prompt: list[int], temperature: float) -> torch.Tensor:
    """Exact joint of the two tokens after the answer's first: [V, V] by enumeration, marginal over the first."""
    ways = list(itertools.product(range(SMALL), repeat=2))
    tokens = torch.tensor([[*prompt, *way] for way in ways])
    hidden = target.forward(tokens, target.new_cache(len(ways), tokens.shape[1]), 0).hidden
    p = (target.logits(hidden).double() / temperature).softmax(-1)[:, len(prompt) - 1 :]  # [36, 3, V]
    joint = torch.zeros(SMALL, SMALL, dtype=torch.float64)
    for way, rows in zip(ways, p, strict=True):
        joint[way[1]] += rows[0, way[0]] * rows[1, way[1]] * rows[2]
    return joint


def p_value(target, drafter, prompt, temperature, runs, policy=None) -> float:
    """Chi-square of `runs` decoded answers against the exact joint; rare cells are merged."""
    joint = joint_of_the_target(target, prompt, temperature).flatten()
    assert float(joint.sum()) == pytest.approx(1)
    counts, accepted = Counter(), Counter()
    for seed in range(runs):
        got = answer(
            target, drafter, prompt, 3, 3, temperature=temperature, policy=policy, seed=seed, stop_token_ids=NEVER
        )
        counts[got.tokens[1] * SMALL + got.tokens[2]] += 1
        accepted[got.accepted[0]] += 1
    assert len(accepted) >= 3  # rejections at several slots happened, or the residual was never used
    observed = torch.tensor([counts[k] for k in range(SMALL**2)], dtype=torch.float64)
    common, expected = joint * runs >= 5, joint * runs
    cells, wanted = observed[common], expected[common]
    if not common.all():
        cells = torch.cat([cells, observed[~common].sum()[None]])
        wanted = torch.cat([wanted, expected[~common].sum()[None]])
    assert len(cells) > 12
    wanted *= cells.sum() / wanted.sum()  # float32 probabilities sum to one but for rounding, and scipy minds that
    return float(chisquare(cells.numpy(), wanted.numpy()).pvalue)


RISING = StepCost(np.array([1]), np.array([[1.0, 1.2, 1.5, 2.0]]))


@pytest.mark.parametrize("temperature, policy", [(0.8, None), (1.0, None), (1.0, Threshold(3, 0.3)),
                                                 (1.0, Scheduler(3, RISING))])  # fmt: skip
def test_sampled_answers_have_the_targets_distribution(small, temperature, policy):
    assert p_value(*small, [3, 1], temperature, 600, policy) > 0.01


@pytest.mark.parametrize("fault", ["q of another temperature", "q uniform"])
def test_a_wrong_q_is_found_out(small, fault, monkeypatch):
    """Negative control: the same test must fail if q is not what the drafts were drawn from."""
    target, drafter = small
    draft = drafter.draft

    def lying(*args):
        tokens, q, confidence = draft(*args)
        wrong = q.pow(3) if fault == "q of another temperature" else torch.ones_like(q)
        return Draft(tokens, wrong / wrong.sum(-1, keepdim=True), confidence)

    monkeypatch.setattr(drafter, "draft", lying)
    assert p_value(target, drafter, [3, 1], 1.0, 600) < 1e-6


def test_sampling_repeats_with_its_seed(toy):
    drafter = tiny_drafter(toy)
    texts = [answer(toy, drafter, [5, 6], 3, 20, temperature=1.0, seed=seed).tokens for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_a_steps_parts_are_timed_for_every_drafter_and_leave_its_context_as_it_was(monkeypatch):
    target = tiny_target()
    drafters = {
        "dspark": tiny_drafter(target),
        "eagle3": baselines.build(baselines.eagle3_config(tiny_config(), False)),
    }
    drafters["eagle3"].adopt_target(target.embed_tokens, target.lm_head)
    made = []

    def watch(draft):
        return lambda anchor, cache, n: made.append((cache.length, n)) or draft(anchor, cache, n)

    for drafter in drafters.values():
        monkeypatch.setattr(drafter, "draft", watch(drafter.draft))
    parts = step_parts(target, drafters, [("dspark", 3), ("eagle3", 2)], [5, 6, 7], repeats=2)
    assert list(parts) == [("autoregressive", 0), ("dspark", 3), ("eagle3", 2)]
    assert made == [(3, 3), (3, 2)] * 3
    for (name, _), part in parts.items():
        assert part["verify_ms"] > 0 and (part["draft_ms"] > 0.01) == (name != "autoregressive")
