"""What conjugate gradients need, and what the arithmetic costs."""
import math

from .page import Figure, Section, table
from .style import figure, legend_below, save

KINDS = {"randn": "Gaussian", "aniso": "anisotropic", "self": "query near its key", "cluster": "clustered", "pw": "piecewise linear",
         "mean": "large common mean"}
ARITHMETIC = ("fp32", "fp16", "bf16")


def draw_iterations(results, view):
    kinds = [k for k in KINDS if results.select(kind=k)]
    columns = 2 if view.narrow else 3
    fig, axes = figure(view, math.ceil(len(kinds) / columns), columns, panel=(2.5, 2.0) if view.narrow else (3.0, 2.2), sharex=True,
                       sharey=True)
    ridges = [r for r in reversed(results.values("ridge")) if r >= 1e-4]
    for axis, kind in zip(axes.flat, kinds):
        for color, ridge in zip(view.theme.cycle, ridges):
            records = sorted(results.select(kind=kind, ridge=ridge, form="centered", arithmetic="fp32",
                                            tolerance=max(results.settings["tolerances"])), key=lambda r: r["position"])
            axis.loglog([r["position"] for r in records], [max(r["iterations"], 0.8) for r in records], "o-", ms=3, color=color,
                        label=f"λ = {ridge:g}")
        axis.set_title(KINDS[kind])
    for axis in axes[-1]:
        axis.set_xlabel("keys the row sees")
    for axis in axes[:, 0]:
        axis.set_ylabel("iterations")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 3 if view.narrow else 5)
    return fig


def worst(results, **wanted):
    errors = [r["error"] for r in results.select(**wanted)]
    return math.inf if any(e is None for e in errors) else max(errors)


def draw_forms(results, view):
    tolerances = sorted(results.settings["tolerances"], reverse=True)
    fig, axes = figure(view, len(tolerances) if view.narrow else 1, 1 if view.narrow else len(tolerances),
                       panel=(4.6, 2.9) if view.narrow else (4.4, 3.2), sharey=True)
    ridges = results.values("ridge")
    for axis, tolerance in zip(axes.flat, tolerances):
        for color, arithmetic in zip(view.theme.cycle, ARITHMETIC):
            for form, line in (("centered", "-"), ("z", "--")):
                errors = [min(worst(results, ridge=r, form=form, arithmetic=arithmetic, tolerance=tolerance), 1e4) for r in ridges]
                label = f"{arithmetic}, " + ("centered (this library)" if form == "centered" else "the paper's z-form")
                axis.loglog(ridges, errors, line, marker="o", ms=3, color=color, label=label)
        axis.set_title(f"solve stopped at residual {tolerance:g}")
        axis.set_xlabel("ridge λ")
        axis.axhline(1, color=view.theme.grid, lw=1.5, zorder=1)
    for axis in axes[:, 0]:
        axis.set_ylabel("worst relative error of the output")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 1 if view.narrow else 3)
    return fig


def draw_positions(results, view):
    """Error by position at the default tolerance, per ridge, for the two forms in fp32 and the centered one in bf16."""
    ridges = [r for r in (1, 0.01, 0.0001) if r in results.values("ridge")] or results.values("ridge")[-3:]
    fig, axes = figure(view, len(ridges) if view.narrow else 1, 1 if view.narrow else len(ridges),
                       panel=(4.6, 2.3) if view.narrow else (3.1, 2.8), sharex=True, sharey=True)
    positions = results.values("position")
    shown = (("centered", "fp32", "-"), ("centered", "fp16", "-"), ("centered", "bf16", "-"), ("z", "fp32", "--"))
    for axis, ridge in zip(axes.flat, ridges):
        for color, (form, arithmetic, line) in zip((*view.theme.cycle[:3], view.theme.cycle[0]), shown):
            errors = [min(worst(results, ridge=ridge, form=form, arithmetic=arithmetic, position=p,
                                tolerance=max(results.settings["tolerances"])), 1e4) for p in positions]
            axis.loglog(positions, errors, line, marker="o", ms=3, color=color,
                        label=f"{arithmetic}, " + ("centered" if form == "centered" else "z-form"))
        axis.set_title(f"λ = {ridge:g}")
        axis.axvline(results.settings["d"], color=view.theme.grid, lw=1)
    for axis in axes[-1]:
        axis.set_xlabel("keys the row sees")
    for axis in axes[:, 0]:
        axis.set_ylabel("worst relative error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 2 if view.narrow else 4)
    return fig


def power(x):
    if not math.isfinite(x) or x > 1e4:
        return "diverged"
    mantissa, exponent = f"{x:.0e}".split("e")
    return f"{mantissa}·10<sup>{int(exponent)}</sup>"


def section(results):
    d = results.settings["d"]
    loose, tight = max(results.settings["tolerances"]), min(results.settings["tolerances"])
    late = results.values("position")[-1]

    def iterations(kind, ridge, position):
        return results.select(kind=kind, ridge=ridge, position=position, form="centered", arithmetic="fp32", tolerance=loose)[0]["iterations"]

    ridge = 0.1 if 0.1 in results.values("ridge") else results.values("ridge")[-1]
    late_counts = {k: iterations(k, ridge, late) for k in KINDS if results.select(kind=k)}
    hard = max(late_counts, key=late_counts.get)
    others = [v for k, v in late_counts.items() if k != hard]
    found_iterations = (f"At λ = {ridge:g} and {late:,} keys most data needs {min(others):.0f} to {max(others):.0f} iterations for a relative residual "
                        f"of {loose:g}; {KINDS[hard]} data needs {late_counts[hard]:.0f}. Rows with about as many keys as dimensions "
                        f"(d = {d}) need the most, and smaller ridges need more: a constant number is enough only away from both.")
    small = 0.01 if 0.01 in results.values("ridge") else results.values("ridge")[0]
    found_forms = (f"At λ = {small:g} and a residual of {loose:g} the worst error over six kinds of data is "
                   f"{power(worst(results, ridge=small, form='centered', arithmetic='fp32', tolerance=loose))} centered and "
                   f"{power(worst(results, ridge=small, form='z', arithmetic='fp32', tolerance=loose))} in the z-form, in the same fp32 arithmetic. "
                   f"Even solved to {tight:g} the z-form's is {power(worst(results, ridge=small, form='z', arithmetic='fp32', tolerance=tight))}: its "
                   "numerator and denominator cancel. 16-bit operands cost the centered form "
                   f"{power(worst(results, ridge=small, form='centered', arithmetic='fp16', tolerance=loose))} (fp16) and "
                   f"{power(worst(results, ridge=small, form='centered', arithmetic='bf16', tolerance=loose))} (bf16). Below λ = 10<sup>−3</sup> rows "
                   "with fewer keys than dimensions defeat conjugate gradients in any form; this library solves those directly.")
    found_positions = (f"Early rows are the hard ones: left of the grey line (d = {d}) there are fewer keys than dimensions. Rows with many keys stay "
                       "near the solver's tolerance in fp32 and fp16.")
    rows = []
    for r in reversed(results.values("ridge")):
        rows.append([f"{r:g}"] + [power(worst(results, ridge=r, form=f, arithmetic=a, tolerance=loose))
                                  for f in ("centered", "z") for a in ("fp64",) + ARITHMETIC])
    errors = table(["λ"] + [f"{f} {a}" for f in ("centered", "z") for a in ("fp64",) + ARITHMETIC], rows,
                   f"Worst relative output error over data kinds and positions, residual {loose:g}, against the fp64 direct solve.")
    intro = (f"One query at a time, d = {d}, inputs rounded to bf16 so that only the arithmetic differs; products round their operands to the "
             f"named type and add in fp32. {results.settings['rows']} rows per case, at most {results.settings['max_iterations']} iterations.")
    claim = "A constant number of CG iterations is sufficient in practice (section 5)."
    summary = (f"<strong>Solver:</strong> a few iterations are enough for most rows, but not for early rows, anisotropic keys or small ridges; the "
               f"paper's z-form loses all accuracy at λ = {small:g} where the centered form keeps "
               f"{power(worst(results, ridge=small, form='centered', arithmetic='fp32', tolerance=loose))}.")
    return Section("solver", "The solver", intro, summary, [
        Figure("solver_iterations", save(lambda v: draw_iterations(results, v), results.directory, "solver_iterations"),
               "Iterations of conjugate gradients", claim, found_iterations, results.command),
        Figure("solver_forms", save(lambda v: draw_forms(results, v), results.directory, "solver_forms"), "Two forms of the same formula",
               "The numerical sensitivity of the matrix inversion poses a challenge for low-precision kernels (section 5); its formulas use "
               "keys relative to the query (z-form).", found_forms, results.command),
        Figure("solver_positions", save(lambda v: draw_positions(results, v), results.directory, "solver_positions"), "Error by position",
               "Not examined in the paper.", found_positions, results.command)], [errors])
