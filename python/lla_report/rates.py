"""Convergence rates: Propositions 1 and 2."""
import math

import matplotlib.ticker

from .page import Figure, Section, table
from .style import figure, legend_below, save

NAMES = {"global_linear": "global linear", "local_constant": "local constant", "local_linear": "local linear"}
COLORS = {"global_linear": "mesanet", "local_constant": "softmax", "local_linear": "lla"}


def draw_rates(results, view):
    dims = results.values("d")
    columns = min(2, len(dims)) if view.narrow else len(dims)
    fig, axes = figure(view, math.ceil(len(dims) / columns), columns, panel=(2.5, 2.4), sharex=True)
    for axis, d in zip(axes.flat, dims):
        for estimator, name in NAMES.items():
            records = sorted(results.select(d=d, estimator=estimator), key=lambda r: r["n"])
            n, error = [r["n"] for r in records], [r["ise_mean"] for r in records]
            color = view.theme.models[COLORS[estimator]]
            axis.loglog(n, error, "o", color=color, ms=3.5, label=name)
            theory = next(s["theory"] for s in results.summary["slopes"] if s["d"] == d and s["estimator"] == estimator)
            level = sum(math.log(e) - theory * math.log(m) for e, m in zip(error, n)) / len(n)
            axis.loglog(n, [math.exp(level + theory * math.log(m)) for m in n], "-", color=color, lw=1, alpha=0.8)
        axis.set_title(f"d = {d}")
    for axis in axes.flat[len(dims):]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("observations n")
    for axis in axes[:, 0]:
        axis.set_ylabel("integrated squared error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 1 if view.narrow else 3)
    return fig


def draw_boundary(results, view):
    dims = results.values("d")
    columns = min(2, len(dims)) if view.narrow else len(dims)
    fig, axes = figure(view, math.ceil(len(dims) / columns), columns, panel=(2.5, 2.3), sharex=True)
    n = results.values("n")[-1]
    for axis, d in zip(axes.flat, dims):
        for estimator in ("local_constant", "local_linear"):
            record = results.select(d=d, n=n, estimator=estimator)[0]
            profile = record["squared_error_by_distance"]
            points = [((i + 0.5) / len(profile), e) for i, e in enumerate(profile) if e is not None]
            color = view.theme.models[COLORS[estimator]]
            axis.semilogy(*zip(*points), "o-", ms=2.5, color=color, label=NAMES[estimator])
            axis.axvline(record["bandwidth"], color=color, lw=0.8, ls=":")
        axis.set_title(f"d = {d}")
        axis.set_xlim(0, 1)
        low, high = axis.get_ylim()
        axis.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
        axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    for axis in axes.flat[len(dims):]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("distance to the boundary")
    for axis in axes[:, 0]:
        axis.set_ylabel("squared error")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 1 if view.narrow else 2)
    return fig


def section(results):
    slopes = results.summary["slopes"]
    inside = [s for s in slopes if s["estimator"] != "global_linear" and s["low"] <= s["theory"] <= s["high"]]
    local = [s for s in slopes if s["estimator"] != "global_linear"]
    flat = max(abs(s["slope"]) for s in slopes if s["estimator"] == "global_linear")
    dims, n = results.values("d"), results.values("n")
    found = (f"The global fit does not improve (its exponent is {flat:.3f} at most). The fitted exponents of the local estimators contain the "
             f"theoretical ones in their joint 95 % intervals in {len(inside)} of {len(local)} cases (table below); local linear is below local "
             "constant in every panel and falls faster.")
    shares = []
    for d in dims:
        record = results.select(d=d, n=n[-1], estimator="local_constant")[0]
        shares.append(f"{100 * record['ise_boundary_mean'] / record['ise_mean']:.0f} % (d = {d})")
    boundary = ("At the largest n the layer within one bandwidth of the boundary (dotted) holds this share of the local constant's error: "
                + ", ".join(shares) + ". At its edge the local constant's error rises by orders of magnitude; the local linear one's does not rise at all. Inside, "
                "with these bandwidths, the local constant has the smaller error of the two.")
    rows = []
    for s in slopes:
        interval = f"[{s['low']:.3f}, {s['high']:.3f}]"
        plain = f"{s['plain_slope']:.3f} [{s['plain_low']:.3f}, {s['plain_high']:.3f}]"
        rows.append([str(s["d"]), NAMES[s["estimator"]], f"{s['theory']:.3f}", f"{s['slope']:.3f}", interval, plain])
    slope_table = table(["d", "estimator", "theory", "fitted", "95 % interval", "plain line"], rows,
                        "Exponents of n. “Fitted” allows for the first finite-n term, proportional to the bandwidth (the boundary layer's "
                        "share of the ball); “plain line” is the straight line through the points. Intervals hold jointly with 95 % confidence, from the scatter of the repetitions.")
    intro = (f"Regression of {html_target(results)} from n noisy observations in the unit ball, n from {n[0]:,} to {n[-1]:,}, noise "
             f"{results.settings['noise']:g}, {results.settings['repetitions']} repetitions each. Bandwidths follow their theoretical order, "
             "n<sup>−1/(d+3)</sup> and n<sup>−1/(d+4)</sup>, with the constant "
             f"{results.settings['bandwidth']:g}; the kernel is 1 − |u|² on the unit ball, compact as in the proofs, and so not "
             "the library's: the estimators are written out for it. (With the library's own call: the lemmas.)")
    summary = (f"<strong>Rates:</strong> the exponents of Propositions 1 and 2 lie in the fitted intervals in {len(inside)} of {len(local)} cases; "
               "a global linear fit does not improve with n.")
    return Section("rates", "Convergence rates", intro, summary, [
        Figure("rates", save(lambda v: draw_rates(results, v), results.directory, "rates"), "Error against the number of observations",
               "A global linear fit keeps an irreducible error; local constant regression converges as n^(−3/(d+3)), local linear as "
               "n^(−4/(d+4)) (Propositions 1 and 2). Lines: those slopes.", found, results.command),
        Figure("boundary", save(lambda v: draw_boundary(results, v), results.directory, "boundary"), "Error near the boundary",
               "Local constant models exhibit boundary bias; local linear models correct it (Figure 1, Proposition 2).", boundary,
               results.command)], [slope_table])


def html_target(results):
    return "f(x) = " + results.settings["target"].split(" on ")[0].replace("x1", "x<sub>1</sub>").replace("^2", "²")
