"""What the paper leaves open in the test-time regression, varied: ridges, kernels and keys' lengths, noise on the queries."""
from matplotlib.lines import Line2D

from .page import Figure, Section, bullets, table
from .records import geometric_mean, number
from .style import LABELS, figure, legend_below, save

FORMS = ((False, "as in the paper"), (True, "strict"))


def cells(results, fields):
    """{(value of each field...): mean error}."""
    return {tuple(r[f] for f in fields): r["mse_mean"] for r in results.records}


def bold_lowest(values):
    """Numbers as text, the lowest in bold."""
    return [f"<strong>{number(v)}</strong>" if v == min(values) else number(v) for v in values]


def whole_segment(results):
    """The segment size that is the whole sequence: no shift."""
    return results.settings["length"]


# --- Ridges ---------------------------------------------------------------------------------------------------------------

def ridge_lists(results):
    return [sorted(results.values("ridge", model=m), reverse=True) for m in ("lla", "mesanet")]


def dimension_axes(axes, dims, ylabel):
    """Panels over the dimension: a tick at each, labels at the outer panels only."""
    for axis in axes.flat:
        axis.set_xscale("log", base=2)
        axis.set_xticks(dims, [str(d) for d in dims])
        axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("dimension d")
    for axis in axes[:, 0]:
        axis.set_ylabel(ylabel)


def draw_ridges(results, view):
    """Error of LLA and MesaNet relative to softmax, against the dimension, a panel for each segment size and form."""
    values = cells(results, ("d", "segment", "strict", "model", "ridge"))
    dims, segments = results.values("d"), results.values("segment")
    lla, mesanet = ridge_lists(results)
    columns = 2 if view.narrow else len(segments)
    rows = len(segments) if view.narrow else 2
    fig, axes = figure(view, rows, columns, panel=(2.5, 2.0) if view.narrow else (3.0, 2.3), sharex=True, sharey="row" if not view.narrow else False)
    for i, s in enumerate(segments):
        for form, (strict, title) in enumerate(FORMS):
            axis = axes[i][form] if view.narrow else axes[form][i]
            for model, ridges in (("lla", lla), ("mesanet", mesanet)):
                for ridge, line in zip(ridges, ("-", "--", ":")):
                    ratio = [values[d, s, strict, model, ridge] / values[d, s, strict, "softmax", 0] for d in dims]
                    axis.loglog(dims, ratio, line, marker="o", ms=3, color=view.theme.models[model], label=f"{LABELS[model]}, ridge {ridge:g}")
            axis.axhline(1, color=view.theme.models["softmax"], lw=1.2, label="softmax (= 1)")
            axis.set_title(f"S = {s}, {title}", fontsize=9.5)
    dimension_axes(axes, dims, "error / softmax's")
    handles, labels = axes[0][0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 2 if view.narrow else 4)
    return fig


def ridge_tables(results):
    values = cells(results, ("d", "segment", "strict", "model", "ridge"))
    lla, mesanet = ridge_lists(results)
    tables = []
    for strict, title in FORMS:
        rows = []
        for d in results.values("d"):
            for s in results.values("segment", d=d):
                numbers = [values[d, s, strict, "lla", r] for r in lla] + [values[d, s, strict, "softmax", 0]]
                numbers += [values[d, s, strict, "mesanet", r] for r in mesanet]
                rows.append([str(d), str(s)] + bold_lowest(numbers))
        head = ["d", "segment"] + [f"LLA {r:g}" for r in lla] + ["softmax"] + [f"MesaNet {r:g}" for r in mesanet]
        tables.append(table(head, rows, f"Mean squared error by ridge, {title}; the lowest of each line in bold."))
    return tables


def found_ridges(results):
    values = cells(results, ("d", "segment", "strict", "model", "ridge"))
    lla, mesanet = ridge_lists(results)
    dims, whole = results.values("d"), whole_segment(results)
    sentences = []
    if whole in results.values("segment"):
        for strict, title in FORMS:
            parts = []
            for a in lla:
                groups = {}  # MesaNet's ridges that win -> dimensions
                for d in dims:
                    wins = tuple(b for b in mesanet if values[d, whole, strict, "mesanet", b] < values[d, whole, strict, "lla", a])
                    groups.setdefault(wins, []).append(d)
                texts = []
                for wins, where in groups.items():
                    which = "no ridge" if not wins else "any ridge" if len(wins) == len(mesanet) else "ridge " + " or ".join(f"{b:g}" for b in wins)
                    texts.append(f"with {which} at d = {', '.join(map(str, where))}")
                parts.append(f"below LLA's λ = {a:g} " + ", ".join(texts))
            sentences.append(f"Within one segment (S = {whole}), {title}, MesaNet is " + "; ".join(parts) + ".")
    for strict, title in FORMS:
        counts = []
        for a in lla:
            settings = [(d, s) for d in dims for s in results.values("segment", d=d) if s < whole]
            best = sum(values[d, s, strict, "lla", a] < min([values[d, s, strict, "softmax", 0]]
                                                            + [values[d, s, strict, "mesanet", b] for b in mesanet]) for d, s in settings)
            counts.append(f"{best} of {len(settings)} with ridge {a:g}")
        sentences.append(f"With shifts, {title}, LLA is below softmax and below MesaNet with any of its ridges in " + ", ".join(counts) + " settings.")
    return bullets(sentences)


def always_ahead(results):
    """After a shift, in the paper's form: LLA below softmax and MesaNet whatever the ridges."""
    values = cells(results, ("d", "segment", "strict", "model", "ridge"))
    lla, mesanet = ridge_lists(results)
    return all(values[d, s, False, "lla", a] < min(values[d, s, False, m, b] for m, b in [("softmax", 0)] + [("mesanet", b) for b in mesanet])
               for a in lla for d in results.values("d") for s in results.values("segment", d=d) if s < whole_segment(results))


def ridges(results):
    sequences = results.values("sequences")[-1]
    intro = ("The paper gives no ridge for this experiment (for its trained models λ = sigmoid(Wx), between 0 and 1). Two conventions meet here: LLA's ridge "
             "multiplies the identity beside weights that sum to one (λω in the paper's unnormalised form); MesaNet's is added to the plain sum of "
             f"k k<sup>T</sup>. Equal numbers are not equal amounts. {sequences:,} sequences a setting, noise 0.1, scale 1/√d.")
    found = found_ridges(results)
    return Section("regression-ridges", "Test-time regression: which ridge?", intro,
                   "<strong>Ridges:</strong> the order of LLA and MesaNet within one segment depends on the two ridges; after a shift, with the answer among "
                   f"the data, LLA is {'ahead for each of them' if always_ahead(results) else 'not ahead for all of them'}.", [
        Figure("ridges", save(lambda v: draw_ridges(results, v), results.directory, "ridges"), "Error by ridge, relative to softmax attention",
               "MesaNet excels only before the first shift (Figure “regression fit”); ridges are not stated.", found, results.command)],
        ridge_tables(results))


# --- Kernels --------------------------------------------------------------------------------------------------------------

VARIANTS = (("dot", False, "exp(q·k/√d), as elsewhere"), ("rbf", False, "RBF"), ("dot", True, "exp(q·k/√d), keys of length √d"),
            ("rbf", True, "RBF, keys of length √d"))


def draw_kernels(results, view):
    values = cells(results, ("d", "segment", "strict", "model", "kernel", "qk_norm"))
    dims, segments = results.values("d"), results.values("segment")
    columns = 2 if view.narrow else len(segments)
    rows = len(segments) if view.narrow else 2
    fig, axes = figure(view, rows, columns, panel=(2.5, 2.0) if view.narrow else (3.0, 2.3), sharex=True)
    lines = ("-", "--", "-.", ":")
    for i, s in enumerate(segments):
        for form, (strict, title) in enumerate(FORMS):
            axis = axes[i][form] if view.narrow else axes[form][i]
            for model in ("lla", "softmax"):
                for (kernel, norm, _), line in zip(VARIANTS[:3], lines):
                    axis.loglog(dims, [values[d, s, strict, model, kernel, norm] for d in dims], line, marker="o", ms=3,
                                color=view.theme.models[model])
            axis.set_title(f"S = {s}, {title}", fontsize=9.5)
    dimension_axes(axes, dims, "squared error")
    handles = [Line2D([], [], color=view.theme.models[m], lw=2) for m in ("lla", "softmax")]
    handles += [Line2D([], [], color=view.theme.text, ls=line) for line in lines[:3]]
    legend_below(fig, handles, ["LLA", "softmax"] + [v[2] for v in VARIANTS[:3]], 1 if view.narrow else 3)
    return fig


def kernels(results):
    values = cells(results, ("d", "segment", "strict", "model", "kernel", "qk_norm"))
    dims, segments = results.values("d"), results.values("segment")
    apart = max(abs(values[d, s, strict, m, "rbf", True] / values[d, s, strict, m, "dot", True] - 1)
                for d in dims for s in segments for strict in (False, True) for m in ("lla", "softmax"))
    sentences = [f"With keys of one length the two kernels are the same: their errors agree to {number(100 * apart)} % in every setting (rounding in fp32)."]
    for strict, title in FORMS:
        parts = []
        for kernel, norm, name in VARIANTS[:3]:
            ratios = {d: geometric_mean([values[d, s, strict, "softmax", kernel, norm] / values[d, s, strict, "lla", kernel, norm] for s in segments])
                      for d in (dims[0], dims[-1])}
            parts.append(f"{name}: " + ", ".join(f"{number(ratio)} at d = {d}" for d, ratio in ratios.items()))
        sentences.append(f"Softmax's error over LLA's, {title} (geometric mean over S = {', '.join(map(str, segments))}): " + "; ".join(parts) + ".")
    rows = []
    for d in dims:
        for s in segments:
            for strict, title in FORMS:
                rows.append([str(d), str(s), "strict" if strict else "paper"] + [
                    number(values[d, s, strict, m, kernel, norm]) for m in ("lla", "softmax") for kernel, norm, _ in VARIANTS[:3]])
    names = ("dot", "RBF", "keys of length √d")
    kernel_table = table(["d", "segment", "form"] + [f"{m}, {n}" for m in ("LLA", "softmax") for n in names], rows,
                         "Mean squared error by kernel. Keys of length √d make other data: compare across the columns of a variant, not across variants.")
    intro = ("Elsewhere on this page keys are Gaussian and not normalised, so that exp(q·k/√d) is not the RBF kernel exp(−|k−q|²/h), h = 2√d, of the "
             "paper's section 2: a long key draws weight from everyone. The paper notes that the two agree under QK normalisation. Here: the RBF itself "
             "(the library computes it with one more coordinate, |k|² for keys and −½ for queries, and an infinite ridge there), and keys "
             "normalised to length √d before the values are made from them.")
    return Section("regression-kernels", "Test-time regression: which kernel?", intro,
                   "<strong>Kernels:</strong> with the RBF kernel or with normalised keys the picture is the same, in numbers of its own: LLA ahead of softmax with the answer among the data.", [
        Figure("kernels", save(lambda v: draw_kernels(results, v), results.directory, "kernels"), "Error by kernel",
               "Kernel regression with an RBF kernel exactly recovers softmax attention when QK normalization is applied (section 2).",
               bullets(sentences), results.command)], [kernel_table])


# --- Noise on the queries -------------------------------------------------------------------------------------------------

def draw_queries(results, view):
    values = cells(results, ("d", "segment", "strict", "model", "query_noise"))
    dims, s, noises = results.values("d"), results.values("segment")[0], results.values("query_noise")
    columns = 2 if view.narrow else len(dims)
    rows = len(dims) if view.narrow else 2
    fig, axes = figure(view, rows, columns, panel=(2.5, 1.9) if view.narrow else (2.3, 2.1), sharex=True, sharey="row" if view.narrow else "col")
    for i, d in enumerate(dims):
        for form, (strict, title) in enumerate(FORMS):
            axis = axes[i][form] if view.narrow else axes[form][i]
            lines = []
            for model in ("lla", "softmax", "mesanet"):
                lines += axis.semilogy(noises, [values[d, s, strict, model, n] for n in noises], "o-", ms=3, color=view.theme.models[model])
            axis.set_title(f"d = {d}, {title}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("query noise ρ")
    for axis in axes[:, 0]:
        axis.set_ylabel("squared error")
    legend_below(fig, lines, [LABELS[m] for m in ("lla", "softmax", "mesanet")], 3)
    return fig


def queries(results):
    values = cells(results, ("d", "segment", "strict", "model", "query_noise"))
    dims, s, noises = results.values("d"), results.values("segment")[0], results.values("query_noise")
    ends = sorted({dims[0], dims[-1]})  # one, where one was run
    sentences = []
    for d in ends:
        parts = [f"ρ = {n:g}: {number(values[d, s, False, 'lla', n])}, {number(values[d, s, False, 'softmax', n])} and "
                 f"{number(values[d, s, False, 'mesanet', n])}" for n in noises if n in (noises[0], 0.1, 0.4, noises[-1])]
        sentences.append(f"d = {d}, as in the paper (own key visible), LLA, softmax and MesaNet: " + "; ".join(parts) + ".")
    lost = []
    for d in dims:
        better = [n for n in noises if values[d, s, False, "lla", n] < values[d, s, False, "softmax", n]]
        lost.append(f"d = {d} " + (f"up to ρ = {max(better):g}" if better and max(better) < noises[-1] else "for every ρ" if better else "for none"))
    sentences.append("LLA's error is below softmax's: " + ", ".join(lost) + ".")
    rows = []
    for d in dims:
        for n in noises:
            rows.append([str(d), f"{n:g}"] + [number(values[d, s, strict, m, n]) for strict in (False, True) for m in ("lla", "softmax", "mesanet")])
    noise_table = table(["d", "ρ"] + [f"{LABELS[m]}{t}" for t in ("", " strict") for m in ("lla", "softmax", "mesanet")], rows,
                        f"Mean squared distance from A<sub>c</sub>q, S = {s}.")
    ratios = []
    for d in ends:
        shown = ", ".join(f"{number(values[d, s, False, 'softmax', n] / values[d, s, False, 'lla', n])} at ρ = {n:g}" for n in noises if n in (noises[0], 0.1, noises[-1]))
        ratios.append(f"{shown} (d = {d})")
    intro = (f"Queries are no longer keys: q = √(1−ρ²) k<sub>i</sub> + ρ z with a fresh Gaussian z, mixed before the signs of the segment are folded in, and "
             f"the answer asked for is A<sub>c</sub>q, without noise. ρ = 1 is a new point of the segment. S = {s}, ridges "
             f"{results.values('ridge', model='lla')[0]:g} and {results.values('ridge', model='mesanet')[0]:g}, {results.values('sequences')[-1]:,} sequences a setting.")
    return Section("regression-queries", "Test-time regression: queries that are not keys", intro,
                   "<strong>Noisy queries:</strong> " + ("as the paper warns, a query that is not exactly a key costs most at high dimension: " if len(ends) > 1 else "")
                   + "softmax's error over LLA's is "
                   + "; ".join(ratios) + ".", [
        Figure("queries", save(lambda v: draw_queries(results, v), results.directory, "queries"), "Error against the noise on the query",
               "“As the dimensionality increases, it is less likely to do exact query q = k_j as in this synthetic experiment”, “limiting the potential advantages "
               "of both softmax attention and LLA”; “nevertheless, the overall performance trends remain consistent” (appendix).",
               bullets(sentences), results.command)], [noise_table])
