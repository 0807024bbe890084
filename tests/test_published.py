"""Published numbers: sourced, and the release's derived figures follow from its table but for rounding."""

import csv

import numpy as np
import pandas as pd
import pytest
from pytest import approx

from dspark import tables

SHOWN = {"kimi_speedup": 20, "kimi_change": 4, "kimi_acceptance": 18, "paper_table1_tau": 108}  # rows


@pytest.mark.parametrize("name", SHOWN)
def test_every_number_has_a_source(name):
    table = tables.published(name)
    assert len(table) == SHOWN[name] and table.notna().all(axis=None)
    assert table["source"].str.len().min() > 5
    assert not table.duplicated([c for c in table if c not in ("value", "speedup", "tau", "source")]).any()
    assert {path.stem for path in tables.PUBLISHED.glob("*.csv")} == set(SHOWN)


def test_the_releases_changes_are_those_of_its_table_within_rounding():
    """Stated +17.8, +11.7, +0.2, +0.3 against +17.5, +11.3, +0.0, +0.5 from speedups rounded to a hundredth: each
    stated figure lies within what speedups half a hundredth away allow, and none is the recomputed one exactly."""
    stated = tables.published("kimi_change").set_index(["target", "drafter"])
    ours = tables.change_table(tables.published_speedup()).query("benchmark == 'mean of 6'")
    ours = ours.set_index(["target", "drafter"])
    assert set(ours.index) == set(stated.index) and len(ours) == 4
    recomputed = {
        ("Kimi-K2.6", "dspark"): 17.5, ("Kimi-K2.7-Code", "dspark"): 11.3,
        ("Kimi-K2.6", "eagle3-mla"): 0.0, ("Kimi-K2.7-Code", "eagle3-mla"): 0.5,
    }  # fmt: skip
    for key, row in ours.iterrows():
        assert row.change_percent == approx(recomputed[key], abs=0.05)
        least = 100 * ((row.speedup_n7 - 0.005) / (row.speedup_n3 + 0.005) - 1)
        most = 100 * ((row.speedup_n7 + 0.005) / (row.speedup_n3 - 0.005) - 1)
        assert least < stated.change_percent[key] < most
        assert 0.05 < abs(stated.change_percent[key] - row.change_percent) < 0.5


def test_the_readme_of_the_published_numbers_states_them():
    text = (tables.PUBLISHED / "README.md").read_text()
    for row in tables.published("kimi_change").itertuples():
        assert f"+{row.change_percent}%" in text
    card = tables.published("kimi_acceptance")
    rates = card[card["quantity"].str.startswith("acceptance pos")]["value"]
    assert f"{1 + rates.cumprod().sum():.2f}" in text and f"{1 + rates.sum():.2f}" in text  # not 3.97, so not drawn


def test_the_mean_of_six_is_theirs():
    tau = tables.published_tau().query("benchmark == 'mean of 6'")
    assert tau[["target", "drafter", "n"]].values.tolist() == [["Kimi-K2.6", "eagle3-mla", 3]]
    assert tau["tau"].item() == approx((2.987 + 3.241 + 3.245 + 2.982 + 2.706 + 3.006) / 6)


def sweep_rows(speedups):
    return pd.DataFrame([
        {"target": "toy", "drafter": d, "benchmark": b, "n": n, "speedup": s, "tau": s + 1}
        for (d, b, n), s in speedups.items()
    ])  # fmt: skip


def test_measured_changes_take_the_same_form():
    table = sweep_rows({
        ("autoregressive", "own-aime", 0): 1.0, ("autoregressive", "own-gsm8k", 0): 1.0,
        ("dspark", "own-aime", 3): 2.0, ("dspark", "own-gsm8k", 3): 1.0,
        ("dspark", "own-aime", 7): 2.5, ("dspark", "own-gsm8k", 7): 1.1,
        ("eagle3", "own-aime", 3): 1.5, ("eagle3", "own-aime", 7): 1.2, ("eagle3", "own-gsm8k", 3): 1.2,
    })  # fmt: skip
    change = tables.change_table(tables.with_mean(table)).set_index(["drafter", "benchmark"])
    assert change.change_percent["dspark", "mean of 2"] == approx(100 * (1.8 / 1.5 - 1))
    assert change.change_percent["eagle3", "own-aime"] == approx(-20)
    assert ("eagle3", "own-gsm8k") not in change.index  # n = 7 is missing
    assert ("eagle3", "mean of 2") not in change.index  # so its mean at n = 7 would be of one benchmark


def test_tables_are_written_as_csv_and_latex(tmp_path):
    change = tables.change_table(tables.published_speedup())
    change.loc[0, "change_percent"] = float("nan")
    csv_file, tex = tables.save(change, "change", tmp_path / "new", "Change from n=3 to n=7")
    with csv_file.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(change) and float(rows[1]["change_percent"]) == change.change_percent[1]
    text = tex.read_text()
    assert r"\toprule" in text and r"\label{tab:change}" in text and "change, \\%" in text and "& -- \\\\" in text
    assert "_" not in text.replace("tab:change", "")


def test_accepted_length_by_context_by_hand():
    """A step's context is the prompt and all tokens before; steps and taus are pooled within doubling buckets."""
    records = [
        {"drafter": "dspark", "n": 3, "prompt_tokens": 60, "accepted": [3, 0, 1]},  # at 60, 64, 65 tokens
        {"drafter": "dspark", "n": 3, "prompt_tokens": 128, "accepted": [2, 2]},  # at 128, 131
    ]
    table = tables.by_context(records, trained=130)
    assert table.up_to.tolist() == [64, 128, 256] and table.longest.tolist() == [64, 128, 131]
    assert table.steps.tolist() == [2, 2, 1]
    assert table.tau.tolist() == [1 + 3 / 2, 1 + 3 / 2, 3.0] and table.trained.tolist() == [True, True, False]
    assert tables.by_context(records).trained.all()


def test_engines_are_compared_answer_by_answer():
    key = {"target": "t", "dtype": "float32", "temperature": 0.0, "drafter": "dspark", "n": 3, "benchmark": "own-aime",
           "max_new_tokens": 8}  # fmt: skip

    def sweep(engine, *answers):
        return [
            key | {"engine": engine, "prompt": i, "rendered": f"r{i}", "output": output, "drafted": [3] * len(accepted),
                   "accepted": accepted}
            for i, (output, accepted) in enumerate(answers)
        ]  # fmt: skip

    ours = sweep("dspark", ("a", [2, 0]), ("b", [1, 1]), ("c", [0]), ("alone", [3]))
    theirs = sweep("vllm", ("a", [2, 0]), ("b", [2, 0]), ("other", [3]))
    row = tables.agreement(ours, theirs).iloc[0]
    assert (row.prompts, row.steps, row.same_answers, row.same_steps) == (3, 5, 2, 1)
    assert row.tau == 1 + 4 / 5 and row.tau_other == 1 + 7 / 5 and row.difference == row.tau / row.tau_other - 1
    with pytest.raises(ValueError, match="no answer in common"):
        tables.agreement(ours, [theirs[0] | {"n": 4}])


def test_paired_comparisons_draw_the_same_prompts_for_both():
    """A drafter that is 1.25 times as fast and accepts half a token more on every prompt is so in every draw, however
    unlike the prompts are; the intervals of a real difference are wider."""
    generator = np.random.default_rng(0)
    records = []
    for benchmark in ("own-gsm8k", "own-aime"):
        for prompt in range(5):
            seconds, steps = generator.uniform(1, 9), [int(k) for k in generator.integers(1, 3, 20)]
            shared = {"benchmark": benchmark, "prompt": prompt, "n": 3, "output_tokens": 64}
            records.append(shared | {"drafter": "dflash", "seconds": seconds, "accepted": steps})
            more = [k + (i % 2) for i, k in enumerate(steps)]
            records.append(shared | {"drafter": "dspark", "seconds": seconds / 1.25, "accepted": more})
            records.append(shared | {"drafter": "eagle3", "seconds": generator.uniform(1, 9), "accepted": steps})
    table = tables.paired(records, "dspark").set_index("against")
    assert table.loc["dflash", ["speed_ratio", "speed_ratio_low", "speed_ratio_high"]].tolist() == pytest.approx(
        [1.25] * 3
    )
    assert table.loc["dflash", "tau_difference_low"] == pytest.approx(0.5) == table.loc["dflash", "tau_difference_high"]
    low, whole, high = table.loc["eagle3", ["speed_ratio_low", "speed_ratio", "speed_ratio_high"]]
    assert low + 0.1 < whole < high - 0.1 and set(table.n) == {3} and "dspark" not in table.index


def test_the_change_between_two_n_is_paired_too():
    """Three quarters of the time for the same tokens on every prompt is 4/3 of the speed, in every draw."""
    generator, records = np.random.default_rng(1), []
    for prompt, seconds in enumerate(generator.uniform(1, 9, 6)):
        shared = {"benchmark": "own-aime", "prompt": prompt, "output_tokens": 48, "drafter": "dspark"}
        records.append(shared | {"n": 3, "seconds": seconds, "accepted": [1, 2]})
        records.append(shared | {"n": 7, "seconds": seconds * 0.75, "accepted": [1, 4]})
        records.append(shared | {"n": 5, "seconds": 1.0, "accepted": [0]})
        records.append(shared | {"n": 3, "seconds": 1.0, "accepted": [0], "drafter": "dflash"})  # never with n = 7
    (row,) = tables.paired_change(records).to_dict("records")
    assert (row["drafter"], row["n_low"], row["n_high"]) == ("dspark", 3, 7)
    assert [row["speed_ratio"], row["speed_ratio_low"], row["speed_ratio_high"]] == pytest.approx([4 / 3] * 3)
    assert [row["tau_difference"], row["tau_difference_low"], row["tau_difference_high"]] == pytest.approx([1.0] * 3)
    assert tables.paired_change(records[:1]).empty
