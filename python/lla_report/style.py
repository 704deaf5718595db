"""How every figure looks: one palette that the colour-blind can tell apart, light and dark, wide and narrow."""
import dataclasses
import io
import math
import os
import pathlib
import re
import tempfile

import matplotlib
import PIL.Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import matplotlib.ticker  # noqa: E402

MODELS = ("lla", "softmax", "mesanet", "linear", "random")
LABELS = {"lla": "LLA", "softmax": "softmax", "mesanet": "MesaNet", "linear": "linear attention", "random": "random guess",
          "mamba2": "Mamba-2", "gla": "GLA", "hyena": "Hyena", "gated_deltanet": "Gated DeltaNet", "parallax": "Parallax"}
# Where many models meet in one panel colour alone does not tell them apart.
MARKERS = {"lla": "o", "softmax": "s", "mamba2": "v", "gla": "D", "hyena": "P", "gated_deltanet": "^", "mesanet": "X", "linear": "<",
           "parallax": "*"}


@dataclasses.dataclass(frozen=True)
class Theme:
    name: str
    background: str
    text: str
    grid: str
    models: dict
    cycle: tuple


LIGHT = Theme(
    "light", "#ffffff", "#1d2430", "#d9dee6",
    {"lla": "#0067b1", "softmax": "#d1550a", "mesanet": "#0a8a62", "linear": "#a0509a", "random": "#7c8592",
     "mamba2": "#b3273e", "gla": "#5b6b00", "hyena": "#00808a", "gated_deltanet": "#9a7400", "parallax": "#5a4fcf"},
    ("#0067b1", "#d1550a", "#0a8a62", "#a0509a", "#9a7400", "#7c8592"))
DARK = Theme(
    "dark", "#161b22", "#dfe5ee", "#323a46",
    {"lla": "#58a9f0", "softmax": "#ff9450", "mesanet": "#45c898", "linear": "#d58ccf", "random": "#939eac",
     "mamba2": "#f0788c", "gla": "#b5c94a", "hyena": "#4cc6d0", "gated_deltanet": "#d8b13c", "parallax": "#a79cff"},
    ("#58a9f0", "#ff9450", "#45c898", "#d58ccf", "#d8b13c", "#939eac"))


@dataclasses.dataclass(frozen=True)
class View:
    """Where a figure will be looked at: a theme, and whether the page is as narrow as a phone's."""
    theme: Theme
    narrow: bool


def apply(theme):
    plt.rcParams.update({
        "figure.facecolor": theme.background, "axes.facecolor": theme.background, "savefig.facecolor": theme.background,
        "text.color": theme.text, "axes.labelcolor": theme.text, "axes.edgecolor": theme.grid, "xtick.color": theme.text,
        "ytick.color": theme.text, "grid.color": theme.grid, "axes.grid": True, "grid.linewidth": 0.6, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "axes.prop_cycle": matplotlib.cycler(color=theme.cycle),
        "font.size": 10, "axes.titlesize": 10.5, "axes.titleweight": "bold", "legend.frameon": False, "lines.linewidth": 1.5,
        "svg.hashsalt": "lla", "svg.fonttype": "path", "xtick.labelsize": 9, "ytick.labelsize": 9,
    })


def figure(view, rows, columns, panel=(2.75, 2.2), **kwargs):
    """A grid of panels; panel is the size of one, in inches. A page shows every figure as wide as itself: few panels are
    drawn wider, or their letters would be huge and legends and titles cut off."""
    apply(view.theme)
    width = max(columns * panel[0], 4.6 if view.narrow else 7.0)
    return plt.subplots(rows, columns, figsize=(width, rows * panel[1] + 0.5), squeeze=False, layout="constrained", **kwargs)


def sparse_ticks(axis):
    """Labels of a logarithmic axis (an axes' xaxis or yaxis) at powers of ten; where fewer than two are in sight, at three
    times one too. Matplotlib's own, at every digit, run into each other."""
    low, high = sorted(axis.get_view_interval())
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if sum(low <= 10.0**p <= high for p in powers) < 2:
        ticks = [m * 10.0**p for p in powers for m in (1, 3) if low <= m * 10.0**p <= high]
        axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks) if len(ticks) > 1 else matplotlib.ticker.MaxNLocator(3))
        axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def legend_below(fig, handles, labels, columns):
    """In so many columns, or as many as the figure is wide enough for."""
    for n in range(columns, 0, -1):
        legend = fig.legend(handles, labels, loc="outside lower center", ncols=n, handlelength=1.6, columnspacing=1.2)
        if n == 1 or legend.get_window_extent().width <= fig.bbox.width:
            return
        legend.remove()


def png(fig):
    """With a palette of 256 colours, enough for lines and their soft edges: a page has dozens of these, and phones load it."""
    drawn, small = io.BytesIO(), io.BytesIO()
    fig.savefig(drawn, format="png", dpi=170)
    PIL.Image.open(drawn).convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()


def save(draw, directory, name):
    """Draws for every view. Writes NAME.png and NAME.svg (light, wide) to the directory; returns {(theme, narrow): png}."""
    images = {}
    for theme in (LIGHT, DARK):
        for narrow in (False, True):
            fig = draw(View(theme, narrow))
            images[theme.name, narrow] = png(fig)
            if theme is LIGHT and not narrow:
                svg = io.StringIO()
                fig.savefig(svg, format="svg", metadata={"Date": None})
                text = re.sub(r"[ \t]+$", "", svg.getvalue(), flags=re.M)
                write(pathlib.Path(directory) / f"{name}.svg", text.encode())
                write(pathlib.Path(directory) / f"{name}.png", images[theme.name, narrow])
            plt.close(fig)
    return images


def write(path, content):
    """Replaces a file as a whole, or not at all. The new one gets a name nobody can foresee: no link is followed."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".lla-report-")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(file.fileno(), 0o644 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
