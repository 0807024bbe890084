"""The CSV logs of a training, whose first column is the step."""

import csv
from pathlib import Path


def append(path: Path, row: dict) -> None:
    """Add a row to a CSV log, under the columns that it has: an older run's may lack some."""
    columns = None
    if path.exists():
        with path.open(newline="") as file:
            columns = next(csv.reader(file), None)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns or list(row), extrasaction="ignore")
        if columns is None:
            writer.writeheader()
        writer.writerow(row)


def keep_until(path: Path, step: int) -> None:
    """Drop the rows of a CSV log that a resumed run will write again, and the file if none is left."""
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines[1:] if int(line.split(",")[0]) <= step]
    if kept:
        path.write_text("".join(lines[:1] + kept))
    else:
        path.unlink()
