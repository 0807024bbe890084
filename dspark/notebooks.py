"""Executes the notebooks with papermill: parameters from a profile, resuming, copies fit to commit.

A profile is one flat YAML file of notebooks/params whose names are parameters of some notebook; each notebook
gets those that its `parameters` cell declares, among them `out`, the folder for its results. The top of
this module needs the standard library only, so that a wrong request is told before anything is installed.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from dspark import UserError
from dspark.paths import NOTEBOOKS, ROOT

MAIN_JOB = "01,04"  # what runs without --only; the others train for longer than a first look should take
# Parameters that the runner sets itself.
RUNNERS_OWN = ("profile", "out", "fresh")
ARTEFACTS = (".ipynb", ".csv", ".json", ".pdf", ".png")


def found() -> dict[str, Path]:
    """{number: path} of the notebooks, in order."""
    return {path.name[:2]: path for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))}


def profiles() -> list[str]:
    return sorted(path.stem for path in (NOTEBOOKS / "params").glob("*.yaml"))


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    """The cells of one kind, their source as one string, without the one that papermill injects."""
    every = json.loads(path.read_text(encoding="utf-8"))["cells"]
    every = [{**cell, "source": "".join(cell["source"])} for cell in every if cell["cell_type"] == kind]
    return [cell for cell in every if "injected-parameters" not in tags(cell)]


def tags(cell: dict[str, Any]) -> list[str]:
    return cell["metadata"].get("tags", [])


def title(path: Path) -> str:
    """The first heading of a notebook, without its number."""
    lines = "\n".join(cell["source"] for cell in cells(path, "markdown")).splitlines()
    return next((line.lstrip("#0123456789·.: ") for line in lines if line.startswith("#")), path.stem)


def declared(path: Path) -> dict[str, Any]:
    """{parameter: default} of the `parameters` cell, which holds assignments of literals only."""
    sources = [cell["source"] for cell in cells(path) if "parameters" in tags(cell)]
    if len(sources) != 1:
        raise UserError(f"{path.name} has {len(sources)} cells tagged `parameters`: it must have one")
    return {
        ast.unparse(line.target if isinstance(line, ast.AnnAssign) else line.targets[0]): ast.literal_eval(line.value)
        for line in ast.parse(sources[0]).body
    }


def code_hash(path: Path) -> str:
    """Tells whether a notebook's outputs belong to its code: a hash of its code cells."""
    return digest(cell["source"] for cell in cells(path))


def digest(texts) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def summary() -> str:
    """The profiles and notebooks, for --help."""
    lines = [f"  {number}  {title(path)}" for number, path in found().items()]
    return "\n".join([f"profiles: {', '.join(profiles())}", "notebooks:", *lines])


def selected(only: str) -> dict[str, Path]:
    """The notebooks that `--only` names by number; `all` of them."""
    every = found()
    numbers = list(every) if only == "all" else sorted({n.strip().zfill(2) for n in only.split(",") if n.strip()})
    unknown = [number for number in numbers if number not in every]
    if unknown or not numbers:
        raise UserError(f"no notebook {', '.join(unknown) or 'selected'}: there are {', '.join(every) or 'none'}")
    return {number: every[number] for number in numbers}


def check(args: argparse.Namespace) -> None:
    """Raise UserError for what can be wrong with a request: profile, notebooks, parameter names, folders."""
    valid = {name for path in selected(args.only).values() for name in declared(path)} - set(RUNNERS_OWN)
    if args.profile not in profiles():
        raise UserError(f"no profile {args.profile!r}: there are {', '.join(profiles()) or 'none'}")
    for item in args.set:
        name, equals, _ = item.partition("=")
        if not equals:
            raise UserError(f"--set {item}: write it as NAME=VALUE")
        if name not in valid:
            close = difflib.get_close_matches(name, valid, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise UserError(f"unknown parameter {name!r}: {hint}The notebooks take {', '.join(sorted(valid))}")
    if args.benchmarks is not None:
        if "benchmarks" not in valid:
            raise UserError("--benchmarks: none of the chosen notebooks takes benchmarks")
        if not list(Path(args.benchmarks).glob("*.jsonl")):
            raise UserError(f"--benchmarks {args.benchmarks}: no such folder, or no .jsonl file in it")


def values_for(args: argparse.Namespace) -> dict[str, Any]:
    """What the profile, --set and --benchmarks set, the later over the earlier."""
    import yaml

    profile = f"{args.profile}.yaml"
    values = yaml.safe_load((NOTEBOOKS / "params" / profile).read_text(encoding="utf-8")) or {}
    known = {name for path in found().values() for name in declared(path)}
    if strangers := sorted(set(values) - known):
        raise UserError(f"notebooks/params/{profile}: no notebook has a parameter {', '.join(strangers)}")
    for item in args.set:
        name, _, text = item.partition("=")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise UserError(f"--set {item}: the value is no YAML; quote it") from None
    if args.benchmarks is not None:
        values["benchmarks"] = str(args.benchmarks)
    return values


def fitted(name: str, value: Any, default: Any) -> Any:
    """`value` as the type of the notebook's default; YAML reads 1e-3 as a text, and 1 where 1.0 is meant."""
    if default is None or value is None or type(value) is type(default):
        return value
    if isinstance(default, float) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise UserError(f"parameter {name}: {value!r} is not of the type of its default, {default!r}")


def run(args: argparse.Namespace) -> int:
    """Execute the selected notebooks into the results folder; 1 if one fails, else 0."""
    out = Path(args.out or ROOT / ".runs" / args.profile).resolve()
    out.mkdir(parents=True, exist_ok=True)
    # A python3 kernel that the user has installed elsewhere must not win over this environment's.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    # tqdm wants widgets in a notebook; its warning would leave a path of this machine in the executed copy.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not"]))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    values = values_for(args) | {"profile": args.profile, "out": str(out), "fresh": args.fresh}
    package = digest(path.read_text(encoding="utf-8") for path in sorted((ROOT / "dspark").rglob("*.py")))
    for source in selected(args.only).values():
        takes = declared(source)
        parameters = {name: fitted(name, values[name], takes[name]) for name in takes if name in values}
        recorded = {name: portable(name, value) for name, value in parameters.items() if name not in RUNNERS_OWN}
        record = {
            "code_hash": code_hash(source),
            "package_hash": package,
            "profile": args.profile,
            "parameters": recorded,
        }
        executed = out / source.name
        if not args.fresh and is_finished(executed, record):
            print(f"{source.stem}: done before, skipped (--fresh runs it again)", flush=True)
        elif problem := execute(source, executed, parameters, record):
            print(f"{source.stem}: {problem}; the executed copy is {executed}", flush=True)
            return 1
        if args.commit:
            commit_executed(executed)
    print(f"\nin {out}:")
    for path in sorted(path for path in out.rglob("*") if path.suffix in ARTEFACTS):
        print(f"  {path.relative_to(out)}")
    return 0


def portable(name: str, value: Any) -> Any:
    """A parameter as an executed notebook records it: of a folder of benchmarks the name, not the path to it."""
    return Path(value).name if name == "benchmarks" else value


def is_finished(executed: Path, record: dict[str, Any]) -> bool:
    """Whether the same code and parameters were run to the end; only then is papermill's metadata gone."""
    try:
        metadata = json.loads(executed.read_text(encoding="utf-8"))["metadata"]
    except (OSError, ValueError):
        return False
    return "papermill" not in metadata and metadata.get("dspark") == record


def execute(source: Path, executed: Path, parameters: dict[str, Any], record: dict[str, Any]) -> str | None:
    """Run one notebook by papermill, in this interpreter's kernel; None, or what went wrong in one line."""
    import papermill
    from nbclient.exceptions import DeadKernelError

    start = time.monotonic()
    print(f"{source.stem}: {title(source)}", flush=True)
    try:
        papermill.execute_notebook(
            source,
            executed,
            parameters,
            kernel_name="python3",
            language="python",
            extra_arguments=["--log-level=ERROR"],  # the kernel warns at each start that it uses local TCP
        )
    except papermill.PapermillExecutionError as error:
        return f"cell [{error.exec_count}] failed: {error.ename}: {' '.join(error.evalue.split())}"
    except DeadKernelError:
        return "the kernel died, perhaps for want of memory"
    clean(executed, record)
    print(f"{source.stem}: done in {(time.monotonic() - start) / 60:.1f} min", flush=True)
    return None


def clean(executed: Path, record: dict[str, Any]) -> None:
    """Replace papermill's metadata (times, paths of this machine) in an executed notebook by `record`, and progress
    bars by their last state."""
    import nbformat

    notebook = nbformat.read(executed, as_version=4)
    for part in [notebook, *notebook.cells]:
        part.metadata.pop("papermill", None)
        part.metadata.pop("execution", None)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = settled(cell.outputs)
    notebook.metadata["dspark"] = record
    partial = executed.with_suffix(".partial")
    nbformat.write(notebook, partial)
    os.replace(partial, executed)


def settled(outputs: list) -> list:
    """Outputs with the pieces of a stream joined, and of each line what a terminal shows in the end: a carriage return
    begins it anew."""
    joined = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream" and output.name == joined[-1].name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    for output in (output for output in joined if output.output_type == "stream"):
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in output.text.split("\n")]
        output.text = "\n".join(lines)
    return [output for output in joined if output.output_type != "stream" or output.text.strip()]


def commit_executed(executed: Path) -> None:
    """Copy an executed notebook over the one in notebooks/, without the injected cell, counted 1..n."""
    import nbformat

    notebook = nbformat.read(executed, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "injected-parameters" not in tags(cell)]
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for count, cell in enumerate(code, 1):
        cell.execution_count = count
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = count
    nbformat.write(notebook, NOTEBOOKS / executed.name)
