"""Test-time regression: the paper's figures regression_fit, scaling and exp_all1, each in both forms."""
import itertools

import matplotlib.ticker

from .page import Figure, Section, bullets, table
from .records import geometric_mean, number
from .style import LABELS, MODELS, figure, legend_below, save

FORMS = ((False, "position sees itself (paper)"), (True, "strict: only earlier positions"))
MAIN_DIM = 64
MAIN_SEGMENTS = (64, 256, 512, 1024)


class Regression:
    """The records of one run; where ridge, scale, noise or the number of sequences were swept, the first of each."""

    def __init__(self, results):
        self.results = results
        self.length = results.settings["length"]
        first = results.select(model="lla")[0]
        self.noise, self.sequences, self.ridge = first["noise"], first["sequences"], first["ridge"]
        self.cells = {}
        for r in results.records:
            self.cells.setdefault((r["d"], r["segment"], r["strict"], r["model"]), r)
        self.settings = sorted({(d, s) for d, s, _, _ in self.cells})
        dims = sorted({d for d, _ in self.settings})
        self.dims = dims
        self.main_dim = MAIN_DIM if MAIN_DIM in dims else dims[-1]
        here = [s for d, s in self.settings if d == self.main_dim]
        self.main_segments = [s for s in MAIN_SEGMENTS if s in here] or here[-4:]
        # Segment sizes every dimension was run with: what a comparison across dimensions may use.
        self.common = [s for s in sorted({s for _, s in self.settings}) if all((d, s) in self.settings for d in dims)]

    def ratio(self, d, strict, model):
        """How many times LLA's error a model has: geometric mean over the common segment sizes."""
        return geometric_mean([self.mean(d, s, strict, model) / self.mean(d, s, strict, "lla") for s in self.common])

    def curve(self, d, segment, strict, model):
        return self.cells[d, segment, strict, model]["mse"]

    def mean(self, d, segment, strict, model, first=0, last=None):
        part = self.curve(d, segment, strict, model)[first:last]
        return sum(part) / len(part)

    def best(self, d, segment, strict, first=0, last=None):
        return min(MODELS, key=lambda m: self.mean(d, segment, strict, m, first, last))


def draw_curves(axis, data, theme, d, segment, strict, thin=False):
    """Position-wise error. Linear attention is orders of magnitude above the rest and would flatten them: it is said in words."""
    lines = []
    for model in MODELS:
        if model == "linear":
            continue
        curve = data.curve(d, segment, strict, model)
        lines += axis.plot(range(1, len(curve) + 1), curve, color=theme.models[model], lw=0.8 if thin else 1.3,
                           zorder=3 if model == "lla" else 2)
    shifts = range(segment, data.length, segment)
    for shift in shifts if len(shifts) < 32 else ():  # more of them would be a grey area
        axis.axvline(shift, color=theme.grid, lw=0.8 if not thin else 0.5, zorder=1)
    axis.set_yscale("log")
    axis.set_xlim(1, data.length)
    axis.grid(axis="x", visible=False)
    return lines


def limits(data, settings):
    """One y range for all panels: from the smallest error of LLA after the first positions to just above the random guess."""
    low, high = float("inf"), 0.0
    for (d, s), (strict, _) in itertools.product(settings, FORMS):
        for model in MODELS:
            if model == "linear":
                continue
            part = data.curve(d, s, strict, model)[16:]
            low, high = min(low, *part), max(high, *part)
    return low / 1.6, high * 1.6


def regression_fit(data, view):
    segments = data.main_segments
    columns = 2 if view.narrow else len(segments)
    rows = len(segments) if view.narrow else 2
    fig, axes = figure(view, rows, columns, panel=(2.55, 2.0) if view.narrow else (2.8, 2.35), sharex=True, sharey=True)
    low, high = limits(data, [(data.main_dim, s) for s in segments])
    for i, segment in enumerate(segments):
        for form, (strict, title) in enumerate(FORMS):
            axis = axes[i][form] if view.narrow else axes[form][i]
            lines = draw_curves(axis, data, view.theme, data.main_dim, segment, strict)
            axis.set_ylim(low, high)
            if view.narrow:
                axis.set_title(f"S = {segment}, " + ("strict" if strict else "as in the paper"))
            elif form == 0:
                axis.set_title(f"segments of {segment}")
    if not view.narrow:
        for form, (_, title) in enumerate(FORMS):
            axes[form][0].set_ylabel(("As in the paper" if form == 0 else "Strict") + "\nsquared error")
    for axis in axes[-1]:
        axis.set_xlabel("position")
    shown = [m for m in MODELS if m != "linear"]
    legend_below(fig, lines, [LABELS[m] for m in shown], 4)
    return fig


def scaling(data, view):
    fig, axes = figure(view, 2 if view.narrow else 1, 1 if view.narrow else 2, panel=(4.6, 2.9) if view.narrow else (4.4, 3.1))
    for axis, (strict, title) in zip(axes.flat, FORMS):
        for model in ("softmax", "mesanet") + (() if strict else ("random",)):
            color = view.theme.models[model]
            for d, s in data.settings:
                one = data.mean(d, s, strict, model) / data.mean(d, s, strict, "lla")
                axis.plot([d], [one], ".", color=color, alpha=0.4, ms=5, mew=0)
            axis.plot(data.dims, [data.ratio(d, strict, model) for d in data.dims], "o-", color=color, ms=4, label=LABELS[model])
        axis.axhline(1, color=view.theme.models["lla"], lw=1.5, label="LLA (= 1)")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(data.dims, [str(d) for d in data.dims])
        axis.set_xlabel("dimension d")
        axis.set_title(title[0].upper() + title[1:])
        axis.set_ylabel("error / LLA's error")
    low, high = axes.flat[1].get_ylim()
    axes.flat[1].set_ylim(min(low, 0.5), max(high, 3))
    axes.flat[1].yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.flat[1].yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    axes.flat[1].yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    handles, labels = axes.flat[0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 2 if view.narrow else 4)
    return fig


def layout(data, narrow):
    """Where each setting's panel goes, per form: {(d, s, strict): (row, column)}. A full grid has a row per dimension and a
    column per segment size; a scattered selection is a row of panels per form. Narrow views turn both round."""
    segments = sorted({s for _, s in data.settings})
    places = {}
    full = len(data.settings) == len(data.dims) * len(segments)
    for strict, _ in FORMS:
        for i, (d, s) in enumerate(data.settings):
            down, across = (data.dims.index(d), segments.index(s)) if full else (0, i)
            if narrow and full:
                places[d, s, strict] = (across + strict * len(segments), down)
            elif narrow:
                places[d, s, strict] = (across, int(strict))
            else:
                places[d, s, strict] = (down + strict * (len(data.dims) if full else 1), across)
    return places


def exp_all(data, view):
    places = layout(data, view.narrow)
    rows, columns = (1 + max(at[i] for at in places.values()) for i in (0, 1))
    fig, axes = figure(view, rows, columns, panel=(2.4, 1.5) if columns == 2 else (1.6, 1.3), sharex=True)
    for axis in axes.flat:
        axis.set_visible(False)
    lines = []
    for (d, s, strict), (row, column) in places.items():
        axis = axes[row][column]
        axis.set_visible(True)
        lines = draw_curves(axis, data, view.theme, d, s, strict, thin=True)
        axis.tick_params(labelsize=7)
        axis.set_xticks((512, 1024))
        axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(numticks=4))
        axis.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axis.set_title(f"d {d}, S {s}" + (" strict" if strict else ""), fontsize=8)
    legend_below(fig, lines, [LABELS[m] for m in MODELS if m != "linear"], 4)
    return fig


# --- What was found, in words ---------------------------------------------------------------------------------------------

def share(data, strict, better, worse, after_first_shift):
    """In how many settings one model's mean error is below another's."""
    count = total = 0
    for d, s in data.settings:
        first = s if after_first_shift else 0
        if first >= data.length:
            continue
        total += 1
        count += data.mean(d, s, strict, better, first) < data.mean(d, s, strict, worse, first)
    return count, total


def found_fit(data):
    d = data.main_dim
    shifted = [s for s in data.main_segments if s < data.length]
    sentences = []
    if shifted:
        s = 256 if 256 in shifted else shifted[-1]
        means = {m: data.mean(d, s, False, m, s) for m in MODELS}
        sentences.append(
            f"In the paper's form, after the first shift (S = {s}), the mean error is {number(means['lla'])} for LLA, "
            f"{number(means['softmax'])} for softmax, {number(means['mesanet'])} for MesaNet and {number(means['random'])} for a random "
            f"guess. (Linear attention, the plain sum of v k·q with keys that are not normalised, has {number(means['linear'])}, far above "
            "the figure.)")
        strict = {m: data.mean(d, s, True, m, s) for m in MODELS}
        sentences.append(
            f"<strong>Strictly, without the answer among the data, little of that lead is left:</strong> LLA {number(strict['lla'])}, softmax "
            f"{number(strict['softmax'])}, MesaNet {number(strict['mesanet'])}. In the upper row LLA mostly reads the answer back from its "
            "own key. (The paper's own caveat: as the dimension grows “it is less likely to do exact query q = k<sub>j</sub> as in this synthetic experiment”, "
            "which limits “the potential advantages of both softmax attention and LLA”.)")
    s = data.main_segments[-1]
    first = []
    for strict, name in ((False, "in the paper's form"), (True, "strictly")):
        before = {m: data.mean(d, s, strict, m, 0, s) for m in ("lla", "softmax", "mesanet")}
        first.append(f"{name} {LABELS[min(before, key=before.get)]} is lowest (LLA {number(before['lla'])}, softmax "
                     f"{number(before['softmax'])}, MesaNet {number(before['mesanet'])})")
    sentences.append(f"Before the first shift, within one segment of {s}, {'; '.join(first)}.")
    sentences.append(within_segment(data, d))
    return bullets(sentences)


def within_segment(data, d):
    """Whether more data of a segment helps: the first against the last quarter of the last segment."""
    s = 256 if 256 in data.main_segments else data.main_segments[0]
    last, quarter = data.length - s, max(1, s // 4)
    parts = []
    for strict, name in ((False, "in the paper's form"), (True, "strictly")):
        changes = []
        for model in ("lla", "softmax"):
            early, late = data.mean(d, s, strict, model, last, last + quarter), data.mean(d, s, strict, model, data.length - quarter)
            changes.append(f"{LABELS[model]} {'improves' if late < 0.9 * early else 'worsens' if late > 1.1 * early else 'hardly changes'} "
                           f"({number(early)} to {number(late)})")
        parts.append(f"{name} {' and '.join(changes)}")
    return f"From the first to the last quarter of the last segment (S = {s}), {'; '.join(parts)}."


def found_scaling(data):
    low, high = data.dims[0], data.dims[-1]
    if low == high or not data.common:
        return "More than one dimension with the same segment size is needed to tell."
    sizes = "S = " + ", ".join(map(str, data.common))
    inclusive = (f"In the paper's form, yes ({sizes}): softmax has {number(data.ratio(low, False, 'softmax'))} times LLA's error at d = {low} "
                 f"and {number(data.ratio(high, False, 'softmax'))} times at d = {high}; MesaNet {number(data.ratio(low, False, 'mesanet'))} "
                 f"and {number(data.ratio(high, False, 'mesanet'))} times.")
    if data.ratio(high, False, "softmax") < data.ratio(low, False, "softmax"):
        inclusive = inclusive.replace(", yes", ", no")
    ends = {m: (data.ratio(low, True, m), data.ratio(high, True, m)) for m in ("softmax", "mesanet")}
    shrinks = ends["softmax"][1] < ends["softmax"][0] and ends["mesanet"][1] < ends["mesanet"][0]
    verdict = "the lead does not grow with d: it shrinks" if shrinks else "the lead does not shrink with d"
    gone = [LABELS[m] for m in ends if ends[m][1] < 1]
    if gone:
        verdict += f", and at d = {high} {' and '.join(gone)} " + ("has" if len(gone) == 1 else "have") + " the lower error"
    strict = (f"<strong>Strictly, {verdict}.</strong> Softmax has {number(ends['softmax'][0])} times LLA's error at d = {low} and "
              f"{number(ends['softmax'][1])} at d = {high}, MesaNet {number(ends['mesanet'][0])} and {number(ends['mesanet'][1])} "
              "(below 1: better than LLA).")
    return inclusive + " " + strict


def found_all(data):
    parts = []
    for strict, name in ((False, "as in the paper"), (True, "strictly")):
        wins, total = share(data, strict, "lla", "softmax", False)
        mesa, total_mesa = share(data, strict, "lla", "mesanet", True)
        parts.append(f"{name}, LLA's mean error is below softmax's in {wins} of {total} settings and, after the first shift, below "
                     f"MesaNet's in {mesa} of {total_mesa}")
    text = "; ".join(parts) + "."
    return text[0].upper() + text[1:]


def standing(ratio):
    """Where LLA is, from a rival's error over its own."""
    return "far ahead" if ratio >= 3 else "ahead" if ratio >= 1.1 else "level" if ratio > 0.9 else "behind"


def summary(data):
    d = data.main_dim
    low, high = data.dims[0], data.dims[-1]
    text = "<strong>Test-time regression:</strong> with the answer among the data, as in the paper, LLA is "
    if data.common and low != high:
        inclusive = [data.ratio(e, False, "softmax") for e in (low, high)]
        strict = [data.ratio(e, True, "softmax") for e in (low, high)]
        text += f"{standing(min(inclusive))}, {'more' if inclusive[1] > inclusive[0] else 'less'} so with the dimension (softmax has " \
                f"{number(inclusive[0])} times its error at d = {low}, {number(inclusive[1])} times at d = {high}); predicting before seeing, " \
                f"softmax has {number(strict[0])} times its error at d = {low} and {number(strict[1])} times at d = {high}, and MesaNet " \
                f"{number(data.ratio(high, True, 'mesanet'))} times there"
    else:
        s = data.main_segments[-1]
        inclusive, strict = (data.mean(d, s, form, "softmax") / data.mean(d, s, form, "lla") for form in (False, True))
        text += f"{standing(inclusive)} (d = {d}, S = {s}: softmax has {number(inclusive)} times its error); predicting before seeing, " \
                f"softmax has {number(strict)} times its error"
    return text + "."


def best_table(data):
    rows = []
    for d, s in data.settings:
        for strict in (False, True):
            best = data.best(d, s, strict)
            cells = [str(d), str(s), "strict" if strict else "paper"]
            for m in MODELS:
                text = number(data.mean(d, s, strict, m))
                cells.append(f"<strong>{text}</strong>" if m == best else text)
            rows.append(cells)
    return table(["d", "segment", "form"] + [LABELS[m] for m in MODELS], rows,
                 "Mean squared error over all positions, summed over the d outputs; the lowest of each line in bold.")


def section(results):
    data = Regression(results)
    out = results.directory
    figures = [
        Figure("regression_fit", save(lambda v: regression_fit(data, v), out, "regression_fit"),
               f"Test-time regression, d = {data.main_dim}",
               "LLA outperforms the others as more shifts are seen and improves within each segment; MesaNet excels only before "
               "the first shift; softmax does not benefit from more data (Figure “regression fit”, S = 64, 256, 512, 1024).",
               found_fit(data), results.command),
        Figure("scaling", save(lambda v: scaling(data, v), out, "scaling"), "Does LLA's advantage grow with the dimension?",
               "The advantage of LLA scales with the data dimension (Figure “scaling”).", found_scaling(data), results.command),
    ]
    if len(data.settings) > len(data.main_segments):
        figures.append(Figure(
            "exp_all1", save(lambda v: exp_all(data, v), out, "exp_all1"), "Every setting that was run",
            "LLA's advantage scales with dimension and non-stationarity; trends are consistent over all d and S (Figure “all "
            "settings”).", found_all(data), results.command))
    timing = results.timing()
    speed = ""
    if timing:
        speed = (f" The run took {timing['seconds']:.0f} s on {timing['threads']} threads, {100 * timing['kernel_share']:.0f} % of it "
                 "inside the models.")
    intro = (f"Each sequence has {data.length} positions in segments; each segment draws its keys from its own cone and its values from "
             f"its own linear map plus noise {data.noise:g}. Every model predicts v<sub>i</sub> at k<sub>i</sub> without any training; "
             f"errors are averaged over {data.sequences:,} sequences. For this experiment the paper states neither ridges nor noise (elsewhere it has "
             "exp(q·k/√d), λ = sigmoid(Wx) and noise 0.1 in training): here LLA's ridge, relative to weights that sum to one, is "
             f"{data.ridge:g}, MesaNet's, on the plain sum of k k<sup>T</sup>, {results.select(model='mesanet')[0]['ridge']:g}, the scale 1/√d unless given, never tuned per setting. "
             "In the paper's form position i sees its own key and value, so the answer is among the data; in the strict form it sees "
             "only what came before." + speed)
    return Section("regression", "Test-time regression on piecewise linear data", intro, summary(data), figures,
                   [best_table(data)])
