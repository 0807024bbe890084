"""The head ablation: arms differ in what they are meant to differ in, tables say what was decoded, reruns resume."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import ttest_rel
from tiny import tiny_config, tiny_drafter, tiny_target

from dspark import ablation, ablation_plots, batched, schedule
from dspark.ablation import HEADS, AblationConfig, Arm
from dspark.batched import Contestant, Served
from dspark.config import PRESETS
from dspark.data import load_prompts
from dspark.evaluate import COMMITTED_BASELINES, COMMITTED_DRAFTER
from dspark.initial import new_drafter
from dspark.paths import cache_dir
from dspark.schedule import Fixed, Threshold
from dspark.train import TrainConfig

SHAPE = PRESETS["smollm2-135m"]


def config(**changes):
    training = TrainConfig(steps=1, micro_batches=1, row_tokens=128, anchors=4, save_every=1, heldout_prompts=0)
    fields = {"profile": "test", "target": "smollm2-135m", "shape": SHAPE.replace(draft_vocab_size=512),
              "backbone": None, "training": training, "response_tokens": 60, "benchmarks": ("own-gsm8k",), "prompts": 1,
              "max_new_tokens": 6, "concurrency": 2, "dtype": "float32"}  # fmt: skip
    return AblationConfig(**fields | changes)


def served(*accepted, drafted=4, confidence=None):
    steps = [confidence] * len(accepted) if confidence is not None else []
    return Served([7] * (1 + sum(accepted) + len(accepted)), [drafted] * len(accepted), list(accepted), 2.0, steps)


# ---- arms


def test_arms_take_away_what_their_names_say():
    shapes = {heads: config().shape_of(Arm(heads, 2, 7, 0)) for heads in HEADS}
    has = {heads: (shape.markov_rank > 0, shape.confidence_head) for heads, shape in shapes.items()}
    assert has == {
        "none": (False, False), "markov": (True, False), "confidence": (False, True), "both": (True, True),
        "joint": (True, True), "gated": (True, True), "rnn": (True, True),
    }  # fmt: skip
    assert [shapes[heads].markov_head_type for heads in ("both", "gated", "rnn")] == ["vanilla", "gated", "rnn"]
    assert all(shape.block_size == shape.max_draft_tokens == 7 for shape in shapes.values())
    assert config().training_of(Arm("both", 1, 4, 3)) == TrainConfig(
        steps=1, micro_batches=1, row_tokens=128, anchors=4, save_every=1, heldout_prompts=0, seed=3, block_sizes=(4,)
    )
    assert config().training_of(Arm("both", 2, 7, 0)).detach_confidence
    assert not config().training_of(Arm("joint", 2, 7, 0)).detach_confidence
    with pytest.raises(ValueError, match="heads = 'sparkling'"):
        Arm("sparkling", 2, 7, 0)


def test_arms_of_a_seed_begin_with_one_backbone():
    target = tiny_target()

    def backbone(heads, seed):
        drafter = new_drafter(tiny_config(**HEADS[heads]), target, [], seed)
        return {name: p for name, p in drafter.named_parameters() if "head" not in name and p.requires_grad}

    first = backbone("none", 0)
    assert any(name.startswith("layers.1") for name in first) and "fc.weight" in first
    for heads in HEADS:
        mine = backbone(heads, 0)
        assert mine.keys() == first.keys() and all(torch.equal(mine[name], p) for name, p in first.items())
    assert not torch.equal(backbone("none", 1)["fc.weight"], first["fc.weight"])


# ---- what is measured


def test_acceptance_by_hand():
    row = ablation.acceptance([served(2, 0, 1), served(4)], 4)
    assert row["tau"] == 1 + 7 / 4 and (row["prompts"], row["steps"], row["output_tokens"]) == (2, 4, 13)
    assert [row[f"accept_pos_{k}"] for k in (1, 2, 3, 4)] == [3 / 4, 2 / 4, 1 / 4, 1 / 4]
    assert [row[f"cond_pos_{k}"] for k in (1, 2, 3, 4)] == [3 / 4, 2 / 3, 1 / 2, 1]
    assert np.isnan(row["confidence_ece"])
    with_head = ablation.acceptance([served(2, 2, confidence=np.array([1.0, 1.0, 0.0, 0.0]))], 4)
    assert with_head["confidence_ece"] == pytest.approx(0)
    assert np.isnan(ablation.acceptance([served(0)], 4)["cond_pos_2"])  # never reached


def cell(heads, seed, benchmark, tau, accept, steps=100, layers=2):
    n = len(accept)
    return {"heads": heads, "num_hidden_layers": layers, "block_size": n, "seed": seed, "benchmark": benchmark,
            "tau": tau, "steps": steps, "draft_ms": 1.0, "parameters": 9,
            **{f"accept_pos_{k}": a for k, a in enumerate(accept, 1)}}  # fmt: skip


def test_positions_are_pooled_over_blocks_and_the_slope_follows():
    table = pd.DataFrame([cell("both", 0, "a", 2.0, (0.8, 0.4)), cell("both", 0, "b", 3.0, (0.5, 0.4), steps=300)])
    positions = ablation.by_position(table)
    assert positions.reached.tolist() == [400, 230]
    assert positions.conditional.tolist() == pytest.approx([230 / 400, 160 / 230])
    assert positions.unconditional.tolist() == pytest.approx([230 / 400, 160 / 400])
    (seed,) = ablation.by_seed(table).itertuples()
    assert seed.tau == 2.5  # the plain mean over benchmarks
    assert seed.conditional_slope == pytest.approx(160 / 230 - 230 / 400)  # two points: the line through them


def test_the_slope_weighs_positions_by_their_blocks():
    table = pd.DataFrame([cell("both", 0, "a", 2.0, (0.9, 0.81, 0.0), steps=1000)])
    flat, level = ablation.by_seed(table).conditional_slope[0], np.polyfit([1, 2, 3], [0.9, 0.9, 0.0], 1)[0]
    assert level < flat < 0  # position 3 was reached least


def test_paired_differences_are_within_seeds():
    taus = {"none": (1.2, 1.5, 1.3), "markov": (1.3, 1.58, 1.45)}
    seeds = pd.DataFrame([{"heads": h, "seed": s, "tau": t} for h, ts in taus.items() for s, t in enumerate(ts)])
    (row,) = ablation.paired(seeds, [("markov", "none")], ("tau",)).itertuples()
    wanted = ttest_rel(taus["markov"], taus["none"]).confidence_interval()
    assert (row.difference, row.low, row.high) == pytest.approx((0.11, wanted.low, wanted.high))
    (row,) = ablation.paired(seeds[seeds.seed == 0], [("markov", "none")], ("tau",)).itertuples()
    assert row.difference == pytest.approx(0.1) and np.isnan(row.low)


def test_load_test_counts_what_was_verified():
    target = tiny_target()
    drafter = tiny_drafter(target, draft_ids=torch.tensor([14, 23, 25, 31, 36]))
    prompts = [[5, 6, 7], [3, 4], [9]]
    contestants = [
        Contestant("plain", lambda: Fixed(0)),
        Contestant("three", lambda: Fixed(3), drafter),
        Contestant("confident", lambda: Threshold(3, 0.4), drafter, np.ones(3)),
    ]
    table = batched.load_test(target, contestants, prompts, 2, rounds=2, max_new_tokens=12)
    assert table.policy.tolist() == ["plain", "three", "confident", "three", "confident", "plain"]  # in turn
    assert (table.requests == 3).all() and table.output_tokens.nunique() == 1
    plain, three, confident = (table[table.policy == one.name].iloc[0] for one in contestants)
    assert plain.verified_per_token == pytest.approx((plain.output_tokens - 3) / plain.output_tokens)
    assert three.verified == 3 * three.steps and confident.verified < 3 * confident.steps
    assert np.allclose(table.tau, 1 + table.accepted / table.steps)
    assert np.allclose(table.tokens_per_s, table.output_tokens / table.seconds)
    assert (table.decode_tokens_per_s > 0).all()  # of three requests, one waited


def test_a_drafters_own_probability_takes_the_confidence_heads_place(target):
    """Its confidence is the softmax of the very logits that the draft is the argmax of."""
    drafter = ablation.checkpoint.load(ablation.COMMITTED_DRAFTER, target)
    drafter.confidence_source = "probability"
    target.layer_ids = drafter.config.target_layer_ids
    tokens = torch.tensor(target.encode_chat([{"role": "user", "content": "Count to ten."}]))
    out = target.forward(tokens[None], target.new_cache(1, len(tokens)), 0)
    context = drafter.new_cache(len(tokens) + 8)
    drafter.extend(context, out.features[0])
    anchor = target.logits(out.hidden[0, -1:]).argmax(-1)
    greedy = drafter.draft(anchor, context, 3)
    q = drafter.draft(anchor, context, 3, temperature=1.0, generator=torch.Generator().manual_seed(0)).q
    assert greedy.confidence[0] == pytest.approx(float(q[0].max()), rel=1e-3)
    assert ((greedy.confidence > 0) & (greedy.confidence < 1)).all()


def test_a_rate_under_load_leaves_out_filling_and_draining():
    def one(admitted, *at):
        return Served(tokens=[7] * len(at), admitted=admitted, at=list(at))

    two_places = [one(1.0, 1.0, 2.5, 4.0), one(2.0, 2.0, 3.0), one(3.5, 3.5, 9.0), one(5.0, 5.0, 6.0, 7.0)]
    assert batched.saturated(two_places, 2) == (3, 3.0)  # from 2.0 to 5.0: 2.5 and 4.0, 3.0; 3.5 and 5.0 are prefills'
    assert batched.saturated(two_places, 4) == (0, 0.0)


def test_calibration_is_judged_on_other_prompts_than_it_was_fitted_on(target, monkeypatch):
    asked = []
    serve = ablation.serve

    def watch(target, drafter, prompts, *options):
        asked.append(prompts)
        return serve(target, drafter, prompts, *options)

    monkeypatch.setattr(ablation, "serve", watch)
    drafter = ablation.checkpoint.load(ablation.COMMITTED_DRAFTER, target)
    blocks = ablation.calibration_blocks(target, drafter, ("own-gsm8k", "own-aime"), 1, 8, 2)
    table, bins = ablation.calibrate(blocks)
    n = drafter.config.max_draft_tokens
    assert len(asked[0]) == len(asked[1]) == 2 and not [chat for chat in asked[0] if chat in asked[1]]
    assert table.position.tolist() == list(range(1, n + 1)) and (table.temperature > 0).all()
    assert set(bins.calibration) == {"before STS", "after STS"}
    assert bins.groupby(["calibration", "position"]).blocks.sum().eq(table.blocks[0]).all()
    observed = bins[bins.position == 1].groupby("calibration").apply(lambda b: np.average(b.observed, weights=b.blocks))
    assert observed.tolist() == pytest.approx([table.observed[0]] * 2)


def test_calibration_refuses_to_judge_by_prompts_that_it_was_fitted_on():
    there = len(load_prompts("own-gsm8k", 10**6).prompts)
    for prompts in (0, there // 2 + 1, there):
        named = f"prompts = {prompts}: own-gsm8k has {there}, half of them to judge by: 1 to {there // 2}"
        with pytest.raises(ValueError, match=named):
            ablation.calibration_blocks(None, None, ("own-gsm8k",), prompts, 8, 2)
    with pytest.raises(AttributeError):  # as many as there may be: it goes on to the drafter, of which there is none
        ablation.calibration_blocks(None, None, ("own-gsm8k",), there // 2, 8, 2)


@pytest.mark.parametrize("source", [COMMITTED_DRAFTER, COMMITTED_BASELINES["dflash"]], ids=["dspark", "dflash"])
def test_calibrate_fits_every_source_of_confidences_that_the_drafter_has(tmp_path, source):
    folder = tmp_path / "drafter"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("calibration.json"))
    ablation.main(["--drafter", str(folder), "--prompts", "1", "--max-new-tokens", "8", "--concurrency", "6"])
    assert len(schedule.load_temperatures(folder, 7, "probability")) == 7
    if source == COMMITTED_DRAFTER:
        assert len(schedule.load_temperatures(folder, 7)) == 7
    else:
        with pytest.raises(ValueError, match="temperatures = 'None' must be a list"):
            schedule.load_temperatures(folder, 7)


# ---- resuming


def test_kept_measures_a_key_once(tmp_path):
    made = []

    def measure():
        made.append(1)
        return pd.DataFrame({"value": [len(made), 10 * len(made)]})

    path = tmp_path / "results" / "table.csv"
    one = {"drafter": "a", "temperature": 0.0, "concurrency": 4}
    assert ablation.kept(path, one, measure).value.tolist() == [1, 10]
    assert ablation.kept(path, one, measure).value.tolist() == [1, 10] and len(made) == 1
    assert ablation.kept(path, one | {"concurrency": 8}, measure).value.tolist() == [2, 20]
    assert ablation.kept(path, one, measure, fresh=True).value.tolist() == [3, 30]
    assert sorted(pd.read_csv(path).value) == [2, 3, 20, 30]


@pytest.fixture
def own_cache(tmp_path, monkeypatch, target):
    """A cache with the embedded target and a few conversations of its, four supervised tokens each."""
    (tmp_path / "smollm2-135m").symlink_to(cache_dir() / "smollm2-135m")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    (tmp_path / "data").mkdir()
    for seed in (0, 1):
        rows = [
            {"round": 0, "style": "maths", "split": "heldout" if i == 1 else "train", "target": target.name,
             "messages": [{"role": "user", "content": f"{seed} {i}"}, {"role": "assistant", "content": "yes"}],
             "prompt_ids": target.encode_chat([{"role": "user", "content": f"{seed} {i}"}]),
             "response_ids": [100 + i] * 24}
            for i in range(4)
        ]  # fmt: skip
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"smollm2-135m-seed{seed}.jsonl").write_text(text)
    return tmp_path


def test_training_data_is_as_much_as_asked_for(own_cache):
    path = ablation.training_data("smollm2-135m", 100)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["messages"][0]["content"] for row in rows] == ["0 0", "0 1", "0 2", "0 3", "1 0", "1 1", "1 2"]
    written = path.read_text()
    (own_cache / "data" / "smollm2-135m-seed0.jsonl").unlink()
    assert ablation.training_data("smollm2-135m", 100).read_text() == written  # the arms of a later run share it


def test_a_study_trains_and_measures_only_what_is_missing(own_cache, tmp_path, monkeypatch):
    arms = [Arm("none", 1, 3, 0), Arm("both", 1, 3, 0), Arm("markov", 1, 3, 0)]
    table = ablation.study(config(), arms, tmp_path / "out")
    assert table.heads.tolist() == ["none", "both", "markov"] and (table.n == 3).all() and (table.draft_ms > 0).all()
    assert table.confidence_ece.isna().tolist() == [True, False, True]
    assert len(ablation.by_position(table)) == 9 and (ablation.by_seed(table).tau == table.tau).all()
    assert (table.parameters[1] - table.parameters[0]) == 49152 * 64 + 512 * 64 + 576 + 64 + 1
    assert np.allclose(table.tau, 1 + table[[f"accept_pos_{k}" for k in (1, 2, 3)]].sum(axis=1))
    assert not list(own_cache.glob("ablation/*/step-*"))  # optimiser states are gone, drafters stay
    assert len(list(own_cache.glob("ablation/*/recipe.json"))) == 2  # two trainings, three arms
    both, markov = (load_file(next(own_cache.glob(f"ablation/{heads}-*/drafter/model.safetensors")))
                    for heads in ("both", "markov"))  # fmt: skip
    assert set(both) - set(markov) == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert all(torch.equal(both[name], tensor) for name, tensor in markov.items())
    alone = ablation.study(config(), arms[2:], tmp_path / "alone").drop(columns="draft_ms")  # without the arm it copies
    twin = table[table.heads == "markov"].drop(columns="draft_ms").reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, twin, check_dtype=False)

    trained = []
    monkeypatch.setattr(ablation, "train", lambda *args: trained.append(args))
    again = ablation.study(config(), arms, tmp_path / "out")
    pd.testing.assert_frame_equal(again, table, check_dtype=False)
    assert not trained
    fresh = ablation.study(config(), arms[:1], tmp_path / "out", fresh=True)
    assert fresh.heads.tolist() == ["none"]
    monkeypatch.setattr(ablation, "serve", lambda *args: pytest.fail("measured again"))
    assert ablation.study(config(), arms[1:2], tmp_path / "out").heads.tolist() == ["both"]
    found = pd.read_csv(tmp_path / "out" / "head_ablation.csv")
    assert sorted(found.heads) == ["both", "markov", "none"] and found.draft_ms.notna().all()  # others' rows stay
    assert ablation.study(config(), arms, tmp_path / "out").heads.tolist() == ["none", "both", "markov"]


# ---- figures


def lines(ax):
    """{label: (x, y)} of what is drawn and named."""
    return {
        line.get_label(): [list(axis) for axis in line.get_data()] for line in ax.lines if line.get_label()[0] != "_"
    }


def test_figures_of_the_arms_show_means_and_ranges_over_seeds():
    table = pd.DataFrame([
        cell("none", 0, "a", 1.5, (0.5, 0.2)), cell("none", 1, "a", 1.9, (0.7, 0.3)),
        cell("both", 0, "a", 2.0, (0.8, 0.6)), cell("both", 1, "a", 2.4, (0.8, 0.4)),
    ])  # fmt: skip
    plot = ablation_plots.acceptance_of_arms(ablation.by_position(table))
    right = lines(plot.figure.axes[1])
    assert list(right) == ["no head (DFlash)", "both (DSpark)"]
    assert right["no head (DFlash)"] == [[1, 2], pytest.approx([0.6, 0.25])]
    first = plot.data.iloc[0]
    assert (first.unconditional_low, first.unconditional_high) == pytest.approx((0.5, 0.7))
    plot = ablation_plots.block_sizes(ablation.by_seed(table))
    assert lines(plot.figure.axes[0])["both (DSpark), 2 layers"] == [[2], pytest.approx([2.2])]


def test_figures_of_calibration_cost_and_load_draw_their_tables():
    bins = pd.DataFrame({"position": [1, 1, 2, 2], "calibration": ["before STS", "after STS"] * 2,
                         "predicted": [0.9, 0.6, 0.8, 0.4], "observed": [0.6, 0.6, 0.3, 0.4],
                         "blocks": 20})  # fmt: skip
    plot = ablation_plots.reliability_diagrams(bins)
    assert [lines(ax)["after STS"] for ax in plot.figure.axes[:2]] == [[[0.6], [0.6]], [[0.4], [0.4]]]
    assert len(ablation_plots.reliability_diagrams(bins.assign(blocks=[20, 20, 19, 20])).data) == 3  # 19 are too few
    ranked = pd.DataFrame({"confidence": ["head", "own probability"] * 2, "position": [1, 1, 2, 2],
                           "auroc_after": [0.6, 0.8, 0.7, 0.9]})  # fmt: skip
    assert lines(ablation_plots.ranking_of_confidences(ranked).figure.axes[0])["head"] == [[1, 2], [0.6, 0.7]]
    costs = pd.DataFrame({"requests": [1, 1, 4, 4], "tokens": [1, 2, 4, 8], "step_ms": [10.0, 20, 30, 50]})
    plot = ablation_plots.step_costs(costs.assign(sps=1e3 / costs.step_ms))
    assert lines(plot.figure.axes[0])["R = 4"] == [[4, 8], [30, 50]]
    load = pd.DataFrame({"policy": ["fixed n=3", "scheduler (early stop)"] * 2, "concurrency": [1, 1, 4, 4],
                         "drafter": "d", "threshold": [0.0, 0.5, 0.0, 0.5], "tau": 2.0, "verified_per_token": 1.5,
                         "decode_tokens_per_s": [20.0, 21, 60, 66]})  # fmt: skip
    rounds = pd.concat([load, load.assign(decode_tokens_per_s=load.decode_tokens_per_s + 2)])
    plot = ablation_plots.load_curves(rounds)
    left, right = plot.figure.axes
    assert lines(left)["scheduler (early stop)"] == [[1, 4], [22, 67]]
    assert lines(right)["scheduler (early stop)"] == [[22, 16.75], [22, 67]]
    assert plot.data.decode_tokens_per_s_high.max() == 68
    sweep = ablation_plots.threshold_sweep(load[load.concurrency == 4][::-1], 70.0)
    assert lines(sweep.figure.axes[2])["no drafts"][1] == [70.0, 70.0]
    assert lines(sweep.figure.axes[2])["d"] == [[0.0, 0.5], [60, 66]]
    assert "concurrency 4" in sweep.caption
