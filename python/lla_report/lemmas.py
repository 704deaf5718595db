"""Bias and variance behind the propositions, by the library's own call."""
import math

from .page import Figure, Section, table
from .style import figure, legend_below, save, sparse_ticks

QUANTITIES = {"bias": "integrated squared bias", "boundary_bias": "squared bias at the boundary", "variance": "integrated variance"}
NAMES = {"local_constant": "local constant (softmax)", "local_linear": "local linear (LLA)"}
COLORS = {"local_constant": "softmax", "local_linear": "lla"}


def place(record):
    """The abscissa: h, or 1/(n h^d) for the variance."""
    h = record["bandwidth"]
    return h if record["quantity"] != "variance" else 1 / (record["n"] * h ** record["d"])


def draw(results, view):
    dims = results.values("d")
    columns = len(dims) if view.narrow else len(QUANTITIES)
    rows = len(QUANTITIES) if view.narrow else len(dims)
    fig, axes = figure(view, rows, columns, panel=(2.5, 2.1) if view.narrow else (3.2, 2.3))
    for i, d in enumerate(dims):
        for j, (quantity, title) in enumerate(QUANTITIES.items()):
            axis = axes[j][i] if view.narrow else axes[i][j]
            for estimator, name in NAMES.items():
                records = sorted(results.select(d=d, quantity=quantity, estimator=estimator), key=place)
                x, y = [place(r) for r in records], [r["value"] for r in records]
                color = view.theme.models[COLORS[estimator]]
                axis.loglog(x, y, "o", ms=3.5, color=color, label=name)
                theory = next(s["theory"] for s in results.summary["slopes"] if s["d"] == d and s["quantity"] == quantity and s["estimator"] == estimator)
                # The theory's line through the smallest h (largest 1/(n h^d)), where it applies best.
                at = -1 if quantity == "variance" else 0
                axis.loglog(x, [y[at] * (v / x[at]) ** theory for v in x], "-", lw=1, color=color, alpha=0.8)
            axis.set_title(f"d = {d}: {title}", fontsize=9)
            axis.set_xlabel("1/(n hᵈ)" if quantity == "variance" else "bandwidth h")
            sparse_ticks(axis.xaxis)
            sparse_ticks(axis.yaxis)
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 1 if view.narrow else 2)
    return fig


def section(results):
    slopes = results.summary["slopes"]
    rows = [[str(s["d"]), QUANTITIES[s["quantity"]], NAMES[s["estimator"]], f"{s['theory']:g}", f"{s['slope']:.2f}", f"[{s['low']:.2f}, {s['high']:.2f}]",
             f"{s['plain_slope']:.2f}"] for s in slopes]
    inside = sum(s["low"] <= s["theory"] <= s["high"] for s in slopes)
    off = max(slopes, key=lambda s: abs(s["slope"] - s["theory"]))
    distance = f"{math.ceil(100 * abs(off['slope'] - off['theory'])) / 100:.2f}"  # upwards: all are within it
    found = (f"The theory's exponent lies in the fitted joint 95 % interval in {inside} of {len(slopes)} cases; the largest distance is {distance} "
             f"({QUANTITIES[off['quantity']]}, {NAMES[off['estimator']]}, d = {off['d']}). Intervals come from the scatter of the repetitions alone: where that is tiny (the local linear "
             "bias hardly depends on the sample) even a small remainder of the next order in h lies outside. Lines have the theory's slopes.")
    slope_table = table(["d", "quantity", "estimator", "theory", "fitted", "95 % interval", "plain line"], rows,
                        "Exponents of h (bias) and of 1/(n h<sup>d</sup>) (variance). “Fitted” allows for a factor exp(c h), the next order; intervals hold jointly.")
    n = results.values("n")
    intro = ("Local constant and local linear estimates of f(x) = " + results.settings["target"].split(" on ")[0].replace("x1", "x<sub>1</sub>").replace("^2", "²")
             + f" in the unit ball by one call of this library each (fp64, ridge {results.settings['ridge']:g}), with its Gaussian kernel exp(−|u|²/2h²); the proofs take a compact one. "
             f"Bias: values without noise, n = {n[-1]:,}. Variance: values that are noise alone, n = {', '.join(f'{v:,}' for v in n)}. {results.settings['repetitions']} repetitions.")
    return Section("lemmas", "Bias and variance", intro,
                   f"<strong>Lemmas:</strong> squared bias falls as h³ for softmax's local average and h⁴ for LLA, h² and h⁴ at the boundary, and variance as 1/(n h<sup>d</sup>): "
                   f"measured exponents within {distance} of these.", [
        Figure("lemmas", save(lambda v: draw(results, v), results.directory, "lemmas"), "Bias against the bandwidth, variance against 1/(n hᵈ)",
               "Squared bias is O(h³) for local constant and O(h⁴) for local linear regression, h² and h⁴ at the boundary; variance is of order 1/(n h^d) for both (lemmas of the "
               "appendix).", found, results.command)], [slope_table])
