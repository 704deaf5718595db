"""What a fixed number of iterations gives."""
import math

from matplotlib.lines import Line2D

from .page import Figure, Section, bullets, table
from .solver import KINDS, power
from .style import figure, legend_below, save

NAMES = dict(KINDS, layer="trained layers")
METHODS = (("cg", "conjugate gradients", "-"), ("diagonal", "with diagonal preconditioner", "--"), ("chebyshev", "Chebyshev", ":"))


def ridge_name(ridge):
    return "own λ" if ridge is None else f"λ = {ridge:g}"


def draw(results, view, d):
    kinds = [k for k in NAMES if results.select(kind=k, d=d)]
    columns = 2 if view.narrow else 4
    fig, axes = figure(view, math.ceil(len(kinds) / columns), columns, panel=(2.5, 2.0) if view.narrow else (2.6, 2.1), sharex=True, sharey=True)
    steps = results.settings["steps"]
    handles = {}
    for axis in axes.flat[len(kinds):]:
        axis.set_visible(False)
    for axis, kind in zip(axes.flat, kinds):
        ridges = results.settings["ridges"] + ([None] if results.select(kind=kind, ridge=None) else [])
        for color, ridge in zip(view.theme.cycle, ridges):
            for method, name, line in METHODS:
                if ridge is None and method != "cg":
                    continue
                record = results.select(kind=kind, d=d, ridge=ridge, method=method)[0]
                lines = axis.loglog(steps, [max(e, 1e-9) for e in record["worst"]], line, color=color, lw=1.3)
                if method == "cg":
                    handles[ridge_name(ridge)] = lines[0]
        axis.axhline(1e-3, color=view.theme.grid, lw=1.5, zorder=1)
        axis.set_xscale("log", base=2)
        axis.set_ylim(1e-7, 30)
        axis.set_xticks(steps, [str(t) for t in steps])
        axis.minorticks_off()
        axis.set_title(NAMES[kind], fontsize=9.5)
    for axis in axes[-1]:
        axis.set_xlabel("iterations T")
    for axis in axes[:, 0]:
        axis.set_ylabel("worst error of a row")
    styles = [Line2D([], [], color=view.theme.text, ls=line) for _, _, line in METHODS]
    legend_below(fig, list(handles.values()) + styles, list(handles) + [name for _, name, _ in METHODS], 2 if view.narrow else 4)
    return fig


def section(results):
    dims, steps = results.values("d"), results.settings["steps"]
    ridges = results.settings["ridges"]

    def worst(t, **wanted):
        return max(r["worst"][steps.index(t)] for r in results.select(**wanted))

    sentences = []
    for t in (8, 32):
        sentences.append(f"T = {t}, worst row over all data: " + "; ".join(
            f"d = {d}: " + ", ".join(f"{power(worst(t, d=d, ridge=r, method='cg'))} at λ = {r:g}" for r in ridges) for d in dims) + ".")
    enough = []
    for d in dims:
        for r in ridges:
            # The smallest T after which every row of every kind is below 1e-3.
            t = next((t for t in steps if worst(t, d=d, ridge=r, method="cg") < 1e-3), None)
            enough.append(f"d = {d}, λ = {r:g}: " + (str(t) if t else f"more than {steps[-1]}"))
    sentences.append("Iterations (of 1, 2, 4, …) until every row is below 10<sup>−3</sup>: " + "; ".join(enough) + ".")
    layers = results.select(kind="layer", ridge=None, method="cg")
    if layers:
        r = layers[0]
        sentences.append(f"The layers of a trained language model with their own λ: worst row {power(r['worst'][steps.index(8)])} after 8 iterations, "
                         f"{power(r['worst'][steps.index(16)])} after 16, {power(r['worst'][steps.index(32)])} after 32.")
    better = sum(results.select(kind=r["kind"], d=r["d"], ridge=r["ridge"], method="diagonal")[0]["worst"][steps.index(16)] < r["worst"][steps.index(16)]
                 for r in results.select(method="cg"))
    chebyshev = sum(results.select(kind=r["kind"], d=r["d"], ridge=r["ridge"], method="chebyshev")[0]["worst"][steps.index(16)] < r["worst"][steps.index(16)]
                    for r in results.select(method="cg"))
    sentences.append(f"After 16 iterations the diagonal as preconditioner has the smaller worst error in {better} of {len(results.select(method='cg'))} cases, Chebyshev's iteration, "
                     f"given the exact largest eigenvalue, in {chebyshev}. (In the first steps, where none is useful yet, Chebyshev's is often the smallest.)")
    rows = []
    for r in results.records:
        rows.append([NAMES[r["kind"]], str(r["d"]), ridge_name(r["ridge"]), dict((m, n) for m, n, _ in METHODS)[r["method"]]]
                    + [power(max(e, 1e-16)) for e in r["worst"]])
    errors = table(["data", "d", "ridge", "method"] + [f"T = {t}" for t in steps], rows, "Worst relative error of the output over rows, after T iterations, in fp64.")
    intro = (f"Rows that see {', '.join(f'{p:,}' for p in results.settings['positions'])} keys, in fp64, so that only the number of steps counts; x starts at 0. "
             "The relative error is that of the output, against the direct solve.")
    small, large = ridges[-1], ridges[0]
    figures = [Figure(f"iterations-{d}", save(lambda v, d=d: draw(results, v, d), results.directory, f"iterations-{d}"), f"Error after T iterations, d = {d}",
                      "“The number of CG iterations is set as a constant (which is sufficient in practice)” (section 5).",
                      bullets(sentences) if d == dims[0] else "As above, for this dimension: see the table.", results.command) for d in dims]
    enough = [r for r in ridges if max(worst(32, d=d, ridge=r, method="cg") for d in dims) < 1e-3]
    verdict = ("32 bring every row below 10<sup>−3</sup> at " + ", ".join(f"λ = {r:g}" for r in enough) if enough else "32 bring every row below 10<sup>−3</sup> at none of the ridges")
    return Section("iterations", "A fixed number of iterations", intro,
                   f"<strong>Iterations:</strong> 8 iterations leave errors of up to {power(max(worst(8, d=d, ridge=large, method='cg') for d in dims))} at λ = {large:g} and of "
                   f"{power(max(worst(8, d=d, ridge=small, method='cg') for d in dims))} at λ = {small:g}; {verdict}"
                   + ("" if len(enough) == len(ridges) else ", and not below: a constant number suffices only where the ridge is bounded from below") + ".",
                   figures, [errors])
