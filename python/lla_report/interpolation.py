"""One function of one variable: the paper's front figure, and the walk from linear to softmax attention."""
from .page import Figure, Section
from .style import figure, legend_below, save

FITS = (("global_linear", "global linear", "mesanet"), ("local_constant", "local constant (softmax)", "softmax"), ("local_linear", "local linear (LLA)", "lla"))


def points(axis, results, view):
    data = results.select(kind="data", name="observations")[0]
    axis.plot(data["x"], data["y"], "o", color=view.theme.models["random"], ms=3, mew=0, alpha=0.75, zorder=1)
    truth = results.select(kind="data", name="truth")[0]
    return axis.plot(truth["x"], truth["y"], "--", color=view.theme.text, lw=1, zorder=2)[0]


def draw_front(results, view):
    fig, axes = figure(view, 1, 1, panel=(4.6, 3.2) if view.narrow else (6.2, 3.0))
    axis = axes[0][0]
    handles = [points(axis, results, view)]
    for name, _, color in FITS:
        curve = results.select(kind="front", name=name)[0]
        handles += axis.plot(curve["x"], curve["y"], color=view.theme.models[color], lw=2, zorder=3)
    axis.set_xlabel("key")
    axis.set_ylabel("value")
    axis.set_xlim(-1.02, 1.02)
    legend_below(fig, handles, ["the function"] + [label for _, label, _ in FITS], 2)
    return fig


def setting(record):
    width = "all keys equally" if record["bandwidth"] == "infinite" else f"h = {record['bandwidth']:g}"
    ridge = "λ = ∞" if record["ridge"] == "infinite" else "λ → 0" if record["ridge"] < 1e-6 else f"λ = {record['ridge']:g}"
    return f"{width}, {ridge}"


def draw_walk(results, view):
    steps = results.select(kind="walk")
    columns = 2 if view.narrow else 4
    fig, axes = figure(view, -(-len(steps) // columns), columns, panel=(2.4, 1.8) if view.narrow else (2.6, 1.9), sharex=True, sharey=True)
    for axis, record in zip(axes.flat, steps):
        points(axis, results, view)
        end = record is steps[0] and "mesanet" or record is steps[-1] and "softmax" or "lla"
        axis.plot(record["x"], record["y"], color=view.theme.models[end], lw=2, zorder=3)
        axis.set_title(setting(record), fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("key")
    return fig


def section(results):
    error = {name: results.select(kind="front", name=name)[0]["rms_error"] for name, _, _ in FITS}
    truth = results.select(kind="data", name="truth")[0]["y"]
    ends = {name: max(abs(results.select(kind="front", name=name)[0]["y"][i] - truth[i]) for i in (0, -1)) for name, _, _ in FITS}
    found = (f"Root mean squared distance from the function: global linear {error['global_linear']:.2f}, local constant {error['local_constant']:.3f}, "
             f"local linear {error['local_linear']:.3f}; at the worse end of the data {ends['global_linear']:.2f}, {ends['local_constant']:.2f} and "
             f"{ends['local_linear']:.2f}. All three curves are calls of this library: scale 0, an infinite ridge, and neither.")
    steps = results.select(kind="walk")
    walk = ("Distances along the walk: " + ", ".join(f"{s['rms_error']:.3f}" for s in steps) + ". The first panel is one affine ridge regression for all queries "
            "(scale 0: a test holds it to the normal equations), the last is softmax attention (infinite ridge: a test holds it to that). In between the "
            "weights first become local, then the slope is taken away.")
    intro = (f"{results.settings['observations']} noisy observations of one function, weights exp(−(x−x′)²/2h²) with h = {results.settings['bandwidth']:g} "
             "where they are local.")
    return Section("interpolation", "Linear, constant, local linear", intro,
                   f"<strong>Three strategies:</strong> a global line misses the function by {error['global_linear']:.2f}, a local average bends away at the ends of the "
                   f"data ({ends['local_constant']:.2f} there), the local line follows it ({ends['local_linear']:.2f}).", [
        Figure("front-lla", save(lambda v: draw_front(results, v), results.directory, "front-lla"), "Three regression strategies",
               "Global linear models suffer from irreducible approximation error, local constant models exhibit boundary bias, local linear models achieve a superior "
               "trade-off (Figure 1).", found, results.command),
        Figure("walk", save(lambda v: draw_walk(results, v), results.directory, "walk"), "From linear to softmax attention",
               "LLA interpolates linear and softmax attention (section 2).", walk, results.command)])
