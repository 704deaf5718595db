"""Working set and time against the length: the paper's figure memory."""
from .page import Figure, Section
from .records import number
from .style import figure, legend_below, save

NAMES = {"naive": "naive LLA", "blockwise": "blockwise LLA", "softmax": "softmax attention"}
COLORS = {"naive": "mesanet", "blockwise": "lla", "softmax": "softmax"}


def draw(results, view):
    fig, axes = figure(view, 2 if view.narrow else 1, 1 if view.narrow else 2, panel=(4.6, 2.9) if view.narrow else (4.4, 3.2))
    memory, time = axes.flat
    for method, name in NAMES.items():
        color = view.theme.models[COLORS[method]]
        fits = sorted(results.select(method=method, fits=True), key=lambda r: r["n"])
        too_large = sorted(results.select(method=method, fits=False), key=lambda r: r["n"])
        if not fits:
            continue
        n = [r["n"] for r in fits]
        memory.loglog(n, [r["peak_bytes"] / 2**20 for r in fits], "o-", color=color, ms=4, label=name)
        time.loglog(n, [r["seconds"] for r in fits], "o-", color=color, ms=4)
        if too_large:
            memory.loglog([r["n"] for r in too_large], [r["peak_bytes"] / 2**20 for r in too_large], "x", color=color, ms=5,
                          label=f"{name}: would need, not run")
    lengths = results.values("n")
    for axis, label in ((memory, "peak memory above inputs, MiB"), (time, "seconds")):
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{m // 1024}k" if m >= 1024 else str(m) for m in lengths])
        axis.minorticks_off()
        axis.set_xlabel("length n")
        axis.set_ylabel(label)
    handles, labels = memory.get_legend_handles_labels()
    legend_below(fig, handles, labels, 2 if view.narrow else 4)
    return fig


def section(results):
    exponents = {e["method"]: e for e in results.summary["exponents"]}
    parts = [f"{NAMES[m]} memory n<sup>{e['memory']:.2f}</sup>, time n<sup>{e['time']:.2f}</sup>" for m, e in exponents.items()]
    naive = sorted(results.select(method="naive", fits=True), key=lambda r: r["n"])
    sentence = ("Fitted exponents: " + "; ".join(parts) + ". (Terms in n, a matrix per query and fixed buffers, still weigh at these lengths "
                "and pull the memory exponents down.)")
    if naive:
        last = naive[-1]
        block = results.select(method="blockwise", n=last["n"])[0]
        sentence += (f" At n = {last['n']:,} the naive form needs {number(last['peak_bytes'] / 2**20)} MiB and {number(last['seconds'])} s, the "
                     f"blockwise one {number(block['peak_bytes'] / 2**20)} MiB and {number(block['seconds'])} s.")
    where = results.machine.get("gpu", results.machine["processor"])
    intro = (f"One causal head with d = {results.settings['d']} in fp32 on {where}. The naive form stores the weights, every difference "
             "k<sub>j</sub> − q<sub>i</sub> and a matrix per query; the blockwise form is this library's. Softmax attention is the same "
             "kernel with an infinite ridge.")
    summary = "<strong>Memory:</strong> " + ", ".join(f"{NAMES[m]} grows as n<sup>{e['memory']:.2f}</sup>" for m, e in exponents.items()) + "."
    return Section("memory", "Memory and time", intro, summary, [
        Figure("memory", save(lambda v: draw(results, v), results.directory, "memory"), "Working set against the length",
               "The naive method grows quadratically and quickly runs out of memory; the blockwise algorithm reduces the working set to "
               "Θ(nd) (Figure “memory”, d = 128).", sentence, results.command)])
