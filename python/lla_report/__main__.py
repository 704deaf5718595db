"""python -m lla_report DIR: figures beside each results.json, and DIR/index.html over all of them.

DIR holds a results.json, or folders that do. Figures and page are rebuilt from the results alone."""
import pathlib
import sys

from . import capacity, interpolation, iterations, lemmas, memory, rates, regression, solver, studies
from .page import render
from .records import Results
from .style import write

# By task, in the page's order.
SECTIONS = {"interpolation": interpolation.section, "regression": regression.section, "regression-ridges": studies.ridges,
            "regression-kernels": studies.kernels, "regression-queries": studies.queries, "capacity": capacity.section, "rates": rates.section,
            "lemmas": lemmas.section, "memory": memory.section, "solver": solver.section, "iterations": iterations.section}


SUMMARISED = ("rates", "lemmas", "memory", "regression-ridges", "regression-kernels", "regression-queries")  # at the end of a run


def finished(results):
    return bool(results.records) and (bool(results.summary) or results.task not in SUMMARISED)


def find(directory):
    """The results in a directory or right below it, in the page's order."""
    places = [directory] + sorted(p for p in directory.iterdir() if p.is_dir())
    found = [Results(p) for p in places if (p / "results.json").is_file()]
    return sorted((r for r in found if finished(r)), key=lambda r: list(SECTIONS).index(r.task))


def main():
    directory = pathlib.Path(sys.argv[1])
    try:
        results = find(directory)
        if not results:
            sys.exit(f"lla report: no finished results in {directory}")
        sections = [SECTIONS[r.task](r) for r in results]
        machines = {r.machine.get("gpu", f"{r.machine['processor']} ({r.machine['simd']})") for r in results}
        write(directory / "index.html", render(sections, machines).encode())
    except OSError as error:
        sys.exit(f"lla report: {error.filename or directory} could not be written: {error.strerror}")


if __name__ == "__main__":
    main()
