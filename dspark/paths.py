"""Where things are, whatever the working directory: the caller's in papermill,
the notebook's in JupyterLab.

How a notebook's kernel finds `dspark`: the set-up writes a `.pth` file into `.venv`, and `python3 -m dspark
run` sets PYTHONPATH. In an environment of one's own (conda) neither need be so, hence every notebook begins

    import importlib.util
    import sys
    from pathlib import Path

    if importlib.util.find_spec("dspark") is None:  # neither .venv nor PYTHONPATH: look upwards from here
        sys.path.insert(0, str(next(p for p in (Path.cwd() / "_").parents if (p / "dspark").is_dir())))

which covers JupyterLab and papermill started anywhere inside the repository. Papermill started outside it in
an environment of one's own needs `PYTHONPATH=<repository>`.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "data"
PROMPTS = DATA / "prompts"
NOTEBOOKS = ROOT / "notebooks"


def cache_dir() -> Path:
    """The folder for what can be made again (converted weights): $DSPARK_CACHE or ~/.cache/dspark."""
    folder = Path(os.environ.get("DSPARK_CACHE") or "~/.cache/dspark").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
