"""Working set and time against the length: the paper's figure memory, and the same for a step of generation."""
from math import log

from matplotlib.lines import Line2D

from .page import Figure, Section, bullets, table
from .records import number
from .style import figure, legend_below, save

NAMES = {"naive": "naive LLA", "blockwise": "blockwise LLA", "softmax": "softmax attention"}
COLORS = {"naive": "mesanet", "blockwise": "lla", "softmax": "softmax"}
BATCH_LINES = ("-", "--", ":")


def line(results, **wanted):
    return sorted(results.select(**wanted), key=lambda r: r["n"])


def short(n):
    for size, unit in ((2**20, "M"), (2**10, "k")):
        if n >= size:
            return f"{n // size}{unit}"
    return str(n)


def length_axis(axis, lengths, every=1):
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths[::every], [short(n) for n in lengths[::every]])
    axis.minorticks_off()
    axis.set_xlabel("length n")


def draw_memory(axis, records, color, style, under=False):
    """Measured points; hollow where the memory was taken but the call not made; a cross where there was no room. A line
    that another will cover is drawn under it, as a broad band."""
    fits = [r for r in records if r["fits"]]
    look = {"lw": 5, "alpha": 0.4} if under else {"lw": 1.3}
    axis.loglog([r["n"] for r in fits], [r["peak_bytes"] / 2**20 for r in fits], "-" if under else style, color=color, **look)
    for ran, face in ((True, color), (False, "none")):
        some = [r for r in fits if r["ran"] == ran and not under]
        axis.loglog([r["n"] for r in some], [r["peak_bytes"] / 2**20 for r in some], "o", color=color, ms=3.5, mfc=face)
    for r in records:
        if not r["fits"] and r["peak_bytes"] is not None:
            axis.loglog([r["n"]], [r["peak_bytes"] / 2**20], "x", color=color, ms=6)
        elif not r["fits"] and fits:  # the inputs alone were too large
            axis.loglog([r["n"]], [2 * fits[-1]["peak_bytes"] / 2**20], "x", color=color, ms=6)


def draw_one(results, view):
    """One head: memory and time."""
    fig, axes = figure(view, 2 if view.narrow else 1, 1 if view.narrow else 2, panel=(4.6, 2.9) if view.narrow else (4.4, 3.2))
    memory, time = axes.flat
    for method in NAMES:
        color = view.theme.models[COLORS[method]]
        records = line(results, method=method)
        draw_memory(memory, records, color, "-")
        ran = [r for r in records if r["ran"]]
        time.loglog([r["n"] for r in ran], [r["seconds"] for r in ran], "o-", color=color, ms=4)
    for axis, label in ((memory, "peak memory above inputs, MiB"), (time, "seconds")):
        length_axis(axis, results.values("n"))
        axis.set_ylabel(label)
    handles = [Line2D([], [], color=view.theme.models[COLORS[m]], marker="o", ms=4) for m in NAMES] + [
        Line2D([], [], color=view.theme.text, marker="x", ls="")]
    legend_below(fig, handles, list(NAMES.values()) + ["would need, no room"], 2 if view.narrow else 4)
    return fig


def draw_many(results, view, names=NAMES, covered="softmax", above="inputs"):
    """A panel for each type and dimension, a line for each method and batch. covered: the method whose lines another's
    cover, if one's do."""
    panels = [(t, d) for t in sorted(results.values("dtype")) for d in results.values("d", dtype=t)]
    batches = results.values("batch")
    columns = 1 if view.narrow else 2
    fig, axes = figure(view, -(-len(panels) // columns), columns, panel=(4.8, 2.9) if view.narrow else (4.8, 2.9), sharex=True, sharey=True)
    for axis, (dtype, d) in zip(axes.flat, panels):
        for method in ("naive", "softmax", "blockwise"):
            for batch, style in zip(batches, BATCH_LINES):
                records = line(results, method=method, dtype=dtype, d=d, batch=batch)
                draw_memory(axis, records, view.theme.models[COLORS[method]], style, method == covered)
        length_axis(axis, results.values("n"), 2)
        axis.set_title(f"{dtype}, d = {d}")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"memory above {above}, MiB")
    handles = [Line2D([], [], color=view.theme.models[COLORS[m]], **({"lw": 5, "alpha": 0.4} if m == covered else {"lw": 2})) for m in NAMES]
    handles += [Line2D([], [], color=view.theme.text, ls=style) for _, style in zip(batches, BATCH_LINES)]
    handles += [Line2D([], [], color=view.theme.text, marker="o", ls="", mfc=face) for face in (view.theme.text, "none")]
    handles.append(Line2D([], [], color=view.theme.text, marker="x", ls=""))
    labels = list(names.values()) + [f"batch {b}" for b in batches] + ["ran", "memory taken, not run", "no room"]
    legend_below(fig, handles, labels, 2 if view.narrow else 5)
    return fig


def lines(results):
    return sorted({(r["dtype"], r["d"], r["batch"]) for r in results.records})


def ends(results):
    """Where each line ends: the longest that fitted, and its memory."""
    rows = []
    for dtype, d, batch in lines(results):
        row = [dtype, str(d), str(batch)]
        for method in NAMES:
            records = line(results, method=method, dtype=dtype, d=d, batch=batch)
            fits = [r for r in records if r["fits"]]
            last = fits[-1] if fits else None
            row += [short(last["n"]), number(last["peak_bytes"] / 2**30)] if last else ["", ""]
        rows.append(row)
    head = ["type", "d", "batch"] + [f"{name}: {what}" for name in NAMES.values() for what in ("longest n", "GiB there")]
    return table(head, rows, "The longest sequence (powers of two) with room for inputs, output and working set, and the working set there.")


def growth(results):
    """By method, each line's exponent of n over its last three doublings with room: at short lengths fixed buffers and caches
    hide it."""
    found = {}
    for dtype, d, batch in lines(results):
        for method in NAMES:
            last = [r for r in line(results, method=method, dtype=dtype, d=d, batch=batch) if r["fits"]][-4:]
            if len(last) > 1:
                found.setdefault(method, []).append(log(last[-1]["peak_bytes"] / last[0]["peak_bytes"]) / log(last[-1]["n"] / last[0]["n"]))
    return found


def found_many(results):
    sentences = []
    shown = [l for l in lines(results) if l[2] == min(results.values("batch"))]
    for dtype, d, batch in shown:
        naive = [r for r in line(results, method="naive", dtype=dtype, d=d, batch=batch) if r["fits"]]
        if not naive:
            continue
        last = naive[-1]
        block = results.select(method="blockwise", dtype=dtype, d=d, batch=batch, n=last["n"])[0]
        time = (f", {number(1e3 * last['seconds'])} and {number(1e3 * block['seconds'])} ms" if last["ran"] and block["ran"] else "")
        sentences.append(f"{dtype}, d = {d}, one head: the naive form's last length is n = {last['n']:,}, with {number(last['peak_bytes'] / 2**30)} GiB against the blockwise "
                         f"form's {number(block['peak_bytes'] / 2**20)} MiB{time}.")
    sentences.append("Exponents of n over the last three doublings that had room: "
                     + "; ".join(f"{NAMES[m]} {min(e):.2f} to {max(e):.2f}" for m, e in growth(results).items()) + ".")
    apart = [r["difference"] for r in results.records if r.get("difference") is not None and r["dtype"] == "f32"]
    if apart:
        sentences.append(f"The two forms computed the same: in f32 their outputs differ by {number(max(apart))} at most (relative, first 128 rows).")
    return bullets(sentences)


def section_one(results):
    exponents = {e["method"]: e for e in results.summary["exponents"]}
    parts = [f"{NAMES[m]} memory n<sup>{e['memory']:.2f}</sup>, time n<sup>{e['time']:.2f}</sup>" for m, e in exponents.items()]
    naive = [r for r in line(results, method="naive") if r["ran"]]
    sentence = ("Fitted exponents: " + "; ".join(parts) + ". (Terms in n, a matrix per query and fixed buffers, still weigh at these lengths "
                "and pull the memory exponents down.)")
    if naive:
        last = naive[-1]
        block = results.select(method="blockwise", n=last["n"])[0]
        sentence += (f" At n = {last['n']:,} the naive form needs {number(last['peak_bytes'] / 2**20)} MiB and {number(last['seconds'])} s, the "
                     f"blockwise one {number(block['peak_bytes'] / 2**20)} MiB and {number(block['seconds'])} s.")
    return sentence


def section(results):
    many = len(lines(results)) > 1
    found = found_many(results) if many else section_one(results)
    where = results.machine.get("gpu", results.machine["processor"])
    what = "Causal heads" if many else f"One causal head with d = {results.values('d')[0]} in {results.values('dtype')[0]}"
    intro = (f"{what} on {where}. The naive form stores the weights, every difference k<sub>j</sub> − q<sub>i</sub> and a matrix per query; the blockwise form is "
             "this library's. Softmax attention is the same kernel with an infinite ridge.")
    if many:
        intro += (" Memory is what the device itself says is gone between inputs and output alone and the call's end. Calls that would take long were not made: their memory was "
                  "taken from the device (the library allocates nothing in a call), hollow points.")
    exponents = growth(results) if many else {e["method"]: [e["memory"]] for e in results.summary["exponents"]}
    summary = "<strong>Memory:</strong> " + ", ".join(f"{NAMES[m]} grows as n<sup>{sum(e) / len(e):.2f}</sup>" for m, e in exponents.items()) + "."
    return Section("memory", "Memory and time", intro, summary, [
        Figure("memory", save(lambda v: (draw_many if many else draw_one)(results, v), results.directory, "memory"), "Working set against the length",
               "The naive method grows quadratically and quickly runs out of memory; the blockwise algorithm reduces the working set to "
               "Θ(nd) (Figure “memory”, d = 128, on an H200).", found, results.command)], [ends(results)] if many else [])


DECODE_NAMES = {"naive": "naive LLA", "blockwise": "LLA", "softmax": "softmax (x = 0)"}


def decode_ends(results):
    """The longest cache that all three had room for: what each needs beside it."""
    rows = []
    for dtype, d, batch in lines(results):
        fits = [{r["n"] for r in line(results, method=m, dtype=dtype, d=d, batch=batch) if r["fits"]} for m in NAMES]
        both = set.intersection(*fits)
        if not both:
            continue
        n = max(both)
        element = 2 if dtype == "bf16" else 4
        peaks = [results.select(method=m, dtype=dtype, d=d, batch=batch, n=n)[0]["peak_bytes"] / 2**20 for m in NAMES]
        rows.append([dtype, str(d), str(batch), f"{n:,}", number(2 * batch * n * d * element / 2**20), *map(number, peaks)])
    return rows


def decode_section(results):
    rows = decode_ends(results)
    where = results.machine.get("gpu", results.machine["processor"])
    intro = (f"One new query per head over a cache of n keys on {where}: memory above cache, query and output. The naive form stores the weights, every difference "
             "k<sub>j</sub> − q and the matrix, which for one query is as much as the keys again. LLA sums over the cache in parts: a matrix for each of at most so many "
             "parts, whatever n is (on the CPU also the row's logits). Softmax attention is the same kernel with x = 0, which needs no matrix.")
    found = bullets([f"{dtype}, d = {d}, batch {batch}, n = {n}: cache {cache} MiB; beside it naive {naive}, LLA {own}, softmax {softmax} MiB."
                     for dtype, d, batch, n, cache, naive, own, softmax in rows])
    naive, own = (max(float(row[column].replace(",", "")) for row in rows) for column in (5, 6))
    summary = f"<strong>Memory of a step:</strong> beside the cache at most {number(own)} MiB, the naive form up to {number(naive)} MiB."
    head = ["type", "d", "batch", "n", "cache, MiB"] + [f"{name}, MiB" for name in DECODE_NAMES.values()]
    return Section("memory-decode", "Memory of generation", intro, summary, [
        Figure("memory-decode", save(lambda v: draw_many(results, v, DECODE_NAMES, None, "the cache"), results.directory, "memory-decode"),
               "Working set of a step against the cache's length",
               "A kernel for inference that does not store what the naive form stores (the paper's text; it has no figure of it).", found, results.command)],
        [table(head, rows, "What a step needs beside the longest cache at which all three had room.")])
