"""python -m lla_report DIR: figures beside each results.json, and DIR/index.html over all of them.

DIR holds a results.json, or folders that do. Figures and page are rebuilt from the results alone."""
import os
import pathlib
import sys

from . import capacity, interpolation, iterations, language, lemmas, memory, rates, regression, solver, studies, trained
from .page import render
from .records import Damaged, Results
from .style import write

# By task, in the page's order.
SECTIONS = {"interpolation": interpolation.section, "regression": regression.section, "regression-ridges": studies.ridges,
            "regression-kernels": studies.kernels, "regression-queries": studies.queries, "capacity": capacity.section, "rates": rates.section,
            "lemmas": lemmas.section, "memory": memory.section, "memory-decode": memory.decode_section, "solver": solver.section, "iterations": iterations.section,
            "in-context": trained.in_context, "recall": trained.recall, "state-tracking": trained.state_tracking, "language-model": language.section}


SUMMARISED = ("rates", "lemmas", "memory", "memory-decode", "regression-ridges", "regression-kernels", "regression-queries")  # at the end of a run


def finished(results):
    return bool(results.records) and (bool(results.summary) or results.task not in SUMMARISED)


def find(directory):
    """The results in a directory or right below it, in the page's order."""
    places = [directory] + sorted(p for p in directory.iterdir() if p.is_dir())
    found = [Results(p) for p in places if (p / "results.json").is_file()]
    for r in found:
        if r.task not in SECTIONS:
            raise Damaged(f'{r.path} has the task "{r.task}", of which this program has no figures')
    return sorted((r for r in found if finished(r)), key=lambda r: list(SECTIONS).index(r.task))


def draw(results):
    """A task's section and the machine it ran on. What a record lacks shows up as one of these errors, somewhere inside."""
    try:
        machine = results.machine.get("gpu") or f"{results.machine['processor']} ({results.machine['simd']})"
        return SECTIONS[results.task](results), machine
    except KeyError as error:
        raise Damaged(f"{results.path} is damaged: there is no field {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise Damaged(f"{results.path} is damaged, or holds too little to draw: {error}") from error


def main():
    directory = pathlib.Path(sys.argv[1])
    try:
        results = find(directory)
        if not results:
            sys.exit(f"lla report: no finished results in {directory}")
        drawn = [draw(r) for r in results]
        write(directory / "index.html", render([section for section, _ in drawn], {machine for _, machine in drawn}).encode())
    except Damaged as error:
        if "LLA_TRACEBACK" in os.environ:  # for whoever works on the figures
            raise
        sys.exit(f"lla report: {error}")
    except OSError as error:
        sys.exit(f"lla report: {error.filename or directory} could not be written: {error.strerror}")


if __name__ == "__main__":
    main()
