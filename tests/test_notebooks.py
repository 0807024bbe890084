"""The committed notebooks: their form, and each of them run with the parameters of the smoke profile."""

import ast
import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from dspark import notebooks
from dspark.__main__ import parser
from dspark.paths import ROOT

NOTEBOOKS = list(notebooks.found().values())
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(home|root|work|tmp|Users|usr|var|mnt|opt|srv|data)/\w|[A-Z]:\\\\")
LONGEST_HELPER = 2  # lines: `def` and one statement
# Columns that a reader's pandas may count on; a drafter that stops at n has no acceptance beyond position n.
COLUMNS = {
    "n_sweep.csv": "profile engine target drafter benchmark n temperature concurrency seed prompts "
    "output_tokens steps drafted accepted tau accept_pos_1 seconds tokens_per_s baseline_tokens_per_s "
    "speedup mismatches near_ties speedup_low speedup_high",
    "head_ablation.csv": "profile target heads num_hidden_layers block_size seed benchmark n tau accept_pos_1 "
    "cond_pos_1 confidence_ece auroc_pos_1 draft_ms parameters",
    "calibration.csv": "profile target drafter confidence position temperature ece_before ece_after auroc_before "
    "auroc_after blocks",
    "scheduling.csv": "profile target drafter policy concurrency output_tokens steps verified accepted tau "
    "verified_per_token seconds tokens_per_s per_user_tokens_per_s decode_tokens_per_s round",
    "03_timeline.csv": "what stage begin end",
    "03_starvation.csv": "phase steps seconds waited share_waited tokens_per_s",
    "03_training.csv": "states step epoch loss greedy_acceptance draft_tokens seconds waited",
    "03_heldout.csv": "states step draft_tokens seconds tau_n3 tau_n7",
    "03_plan_memory.csv": "profile role part gb",
    "03_plan_rates.csv": "profile fits",
}
# Positions beyond n or never reached, arms without a head or an accepted draft, one class only, one seed only, prompts
# without a known answer, loads in which nobody waits.
MAY_BE_EMPTY = re.compile(
    r"(accept|cond)_pos_\d|confidence_ece|decode_tokens|.*auroc|(low|high|difference)$|(baseline_)?accuracy$"
)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    return notebooks.cells(path)


def test_the_readme_lists_the_notebooks():
    listed = set(re.findall(r"notebooks/(\d\d_\w+\.ipynb)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert listed and listed == {path.name for path in NOTEBOOKS}


@every_notebook
def test_parameters_are_literals_with_a_comment_each(path):
    (cell,) = [cell for cell in code_cells(path) if "parameters" in notebooks.tags(cell)]
    lines = cell["source"].splitlines()
    assert all(re.fullmatch(r"\w+: [\w |\[\], ]+ = [^=]+  # [^=]+", line) for line in lines), lines
    assert len(notebooks.declared(path)) == len(lines) and "out" in notebooks.declared(path)


@every_notebook
def test_outputs_belong_to_the_code(path):
    """Executed once from top to bottom without an error, by the cpu profile, and unchanged since."""
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    assert metadata["dspark"]["profile"] == "cpu" and "papermill" not in metadata
    assert metadata["dspark"]["code_hash"] == notebooks.code_hash(path), f"run it again with --commit: {path.name}"
    assert [cell["execution_count"] for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]


@every_notebook
def test_small_and_without_machine_paths(path):
    assert path.stat().st_size < 1_000_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            pictures = [kind for kind in output.get("data", {}) if kind in ("image/png", "image/jpeg")]
            for kind in pictures:  # base64, in which anything may occur by chance
                del output["data"][kind]
    found = MACHINE_PATH.search(json.dumps(notebook, ensure_ascii=False))
    assert not found, found and found.string[max(found.start() - 80, 0) : found.end() + 80]


@every_notebook
def test_no_definitions_beyond_a_one_line_helper(path):
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell["source"])):
            assert not isinstance(node, ast.ClassDef | ast.AsyncFunctionDef), f"move {node.name} into dspark/"
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < LONGEST_HELPER, f"move {node.name}() into dspark/"


@pytest.mark.parametrize("profile", notebooks.profiles())
def test_every_profile_fits_the_notebooks(profile):
    """Each value has its parameter's type; what was not run says so."""
    args = parser().parse_args(["run", "--profile", profile, "--only", "all"])
    notebooks.check(args)
    values = notebooks.values_for(args)
    for path in NOTEBOOKS:
        for name, default in notebooks.declared(path).items():
            notebooks.fitted(name, values.get(name, default), default)
    text = (notebooks.NOTEBOOKS / "params" / f"{profile}.yaml").read_text(encoding="utf-8")
    assert values["profile"] == profile
    assert profile in ("smoke", "cpu", "reference") or text.startswith("# Unrun")


@every_notebook
def test_smoke_run_keeps_the_notebooks_promises(path, tmp_path, monkeypatch):
    """A notebook ends by writing NN_summary.json: {numbers: {...}, tables: [csv...], figures: [file...]}."""
    monkeypatch.chdir(tmp_path)  # from anywhere
    number, out = path.name[:2], tmp_path / "out"
    args = parser().parse_args(["run", "--profile", "smoke", "--only", number, "--out", str(out)])
    notebooks.check(args)
    assert notebooks.run(args) == 0
    summary = json.loads((out / f"{number}_summary.json").read_text(encoding="utf-8"))
    assert summary["numbers"] and all(map(math.isfinite, flat(summary["numbers"]))), summary["numbers"]
    assert summary["tables"] and summary["figures"]
    for name in summary["tables"]:
        table = pd.read_csv(out / name)
        assert len(table) and set(COLUMNS.get(Path(name).name, "").split()) <= set(table.columns), name
        for column in table.select_dtypes("number"):
            values = table[column].dropna() if MAY_BE_EMPTY.match(column) else table[column]
            assert values.map(math.isfinite).all(), f"{name}: {column}"
    for name in summary["figures"]:
        pictured = name.endswith((".pdf", ".png"))  # the CSV and JSON beside a picture may be short
        assert (out / name).stat().st_size > (1000 if pictured else 0), name


def flat(numbers):
    """The leaves of nested lists and dicts."""
    if isinstance(numbers, dict | list):
        for value in numbers.values() if isinstance(numbers, dict) else numbers:
            yield from flat(value)
    else:
        yield numbers
