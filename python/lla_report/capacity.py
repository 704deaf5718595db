"""Retrieval error of stored pairs: the paper's measure of associative recall."""
from .page import Figure, Section, bullets, table
from .records import number
from .style import LABELS, figure, legend_below, save

KEYS = ((False, "Gaussian keys"), (True, "normalised keys"))


def draw(results, view):
    dims = results.values("d")
    columns = 2 if view.narrow else len(dims)
    rows = len(dims) if view.narrow else 2
    fig, axes = figure(view, rows, columns, panel=(2.5, 2.0) if view.narrow else (2.6, 2.2), sharex=True, sharey=True)
    for i, d in enumerate(dims):
        for k, (normalised, title) in enumerate(KEYS):
            axis = axes[i][k] if view.narrow else axes[k][i]
            records = sorted(results.select(d=d, normalised=normalised), key=lambda r: r["pairs"])
            pairs = [r["pairs"] for r in records]
            for model in ("lla", "softmax", "mesanet", "linear"):
                axis.loglog(pairs, [r[model] for r in records], "-", marker="o", ms=2.5, color=view.theme.models[model], label=LABELS[model])
            axis.loglog(pairs, [r["linear_interference"] for r in records], ":", color=view.theme.models["linear"], label="its interference")
            if not normalised:
                axis.loglog(pairs, [r["linear_bias"] for r in records], "--", color=view.theme.models["linear"], label="its signal bias")
            axis.axvline(d, color=view.theme.grid, lw=1.2, zorder=1)
            axis.axhline(1, color=view.theme.grid, lw=1.2, zorder=1)
            axis.set_ylim(1e-8, 1e6)
            axis.set_title(f"d = {d}, {title}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("pairs stored")
    for axis in axes[:, 0]:
        axis.set_ylabel("error / |v|²")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 2 if view.narrow else 6)
    return fig


def holds(results, d, normalised, model, limit=0.1):
    """The most pairs a model keeps with a relative error below the limit."""
    kept = [r["pairs"] for r in results.select(d=d, normalised=normalised) if r[model] < limit]
    return f"{max(kept):,}" if kept else "none"


def section(results):
    dims, most = results.values("d"), results.values("pairs")[-1]
    high = dims[-1]
    first = results.select(d=high, normalised=False, pairs=results.values("pairs")[0])[0]
    sentences = [f"Linear attention at d = {high} with Gaussian keys: already with {first['pairs']} pairs the signal bias is {number(first['linear_bias'])} times |v|² "
                 "(|k|² − 1 is about d); keys of length 1 remove it, as the paper says, and leave the interference, about (n − 1)/d."]
    for normalised, title in KEYS:
        sentences.append(f"Most pairs kept with an error below a tenth, {title}: " + "; ".join(
            f"d = {d}: LLA {holds(results, d, normalised, 'lla')}, softmax {holds(results, d, normalised, 'softmax')}, MesaNet "
            f"{holds(results, d, normalised, 'mesanet')}, linear {holds(results, d, normalised, 'linear')}" for d in dims) + f" (of at most {most:,}).")
    sentences.append("Values here are independent of the keys: nothing can be learned but the pairs themselves. MesaNet ends at as many pairs as dimensions; LLA reads a "
                     "stored pair back through its own key's weight, which grows with d.")
    rows = []
    for d in dims:
        for normalised, title in KEYS:
            for n in [p for p in results.values("pairs") if p in (16, 64, 256, 1024)]:
                r = results.select(d=d, normalised=normalised, pairs=n)[0]
                rows.append([str(d), "√d / 1" if normalised else "Gaussian", f"{n:,}"] + [number(r[m]) for m in (
                    "linear", "linear_bias", "linear_interference", "softmax", "mesanet", "lla")])
    capacity_table = table(["d", "keys", "pairs", "linear", "signal bias", "interference", "softmax", "MesaNet", "LLA"], rows,
                           "Squared error at a stored key, relative to |v|².")
    intro = (f"n pairs with Gaussian values are stored; each is asked for at its own key, q = k<sub>j</sub>, all pairs visible. LLA's ridge {results.settings['ridge']:g}, "
             f"MesaNet's {results.settings['mesa_ridge']:g}, scale 1/√d; {results.settings['repetitions']} repetitions. Normalised keys have length 1 for linear "
             "attention, whose error depends on it, and √d for the others.")
    return Section("capacity", "Associative recall", intro,
                   f"<strong>Recall:</strong> with d = {high} and {most:,} random pairs LLA reads back a stored value with "
                   f"{number(results.select(d=high, normalised=False, pairs=most)[0]['lla'])} of its squared norm as error, softmax with "
                   f"{number(results.select(d=high, normalised=False, pairs=most)[0]['softmax'])}, MesaNet with {number(results.select(d=high, normalised=False, pairs=most)[0]['mesanet'])}.",
                   [Figure("capacity", save(lambda v: draw(results, v), results.directory, "capacity"), "Retrieval error against the number of pairs",
                           "Vanilla linear attention has a signal bias, which QK normalization avoids, and interference from other pairs (section 2, the MSE of associative "
                           "recall). No numbers or figure are given.", bullets(sentences), results.command)], [capacity_table])
