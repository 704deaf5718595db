"""The byte-level language model: bits per byte on Python's standard library, with paired intervals over files."""
import math
import statistics

import numpy as np

from .page import Figure, Section, bullets, table
from .records import Results, number
from .runs import ORDER
from .style import LABELS, MARKERS, figure, legend_below, save

RESAMPLES = 10_000
FEWEST_FILES = 10  # to draw from


def of_budget(results, budget):
    return [r for r in results.records if r.get("budget", "steps") == budget] if results else []


def plain(results):
    """The task's own results beside a variant's: what the variant is compared with."""
    folder = results.directory.resolve().parent / results.task
    return Results(folder) if results.variant and (folder / "results.json").is_file() else None


def best_rate(records, model):
    """By validation, first seed."""
    mine = [r for r in records if r["model"] == model and r["validation_best"] is not None]
    if not mine:
        return None
    first = min(r["seed"] for r in mine)
    return min((r for r in mine if r["seed"] == first), key=lambda r: r["validation_best"])["learning_rate"]


def chosen(records, model):
    rate = best_rate(records, model)
    return [r for r in records if r["model"] == model and r["learning_rate"] == rate and "test_bits_per_byte" in r]


def interval(ours, theirs):
    """Difference in bits per byte and its 95 % interval: files are drawn with replacement, the same for both models."""
    def files(records):
        return np.mean([[bits for _, bits in r["test_files"]] for r in records], axis=0)
    sizes = np.array([size for size, _ in ours[0]["test_files"]], dtype=float)
    difference = files(ours) - files(theirs)
    draws = np.random.default_rng(1).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    values = difference[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(values, (0.025, 0.975))
    return float(difference.sum() / sizes.sum()), float(low), float(high)


def difference_text(ours, theirs):
    difference, low, high = interval(ours, theirs)
    few = len(ours[0]["test_files"]) < FEWEST_FILES
    verdict = "too few files for an interval" if few else "no difference" if low <= 0 <= high else "better" if high < 0 else "worse"
    return f"{difference:+.4f} bits per byte (95 % interval {low:+.4f} to {high:+.4f}): {verdict}"


def timed(results):
    """Runs of equal time; of a variant that has none those of the plain form."""
    return of_budget(results, "time") or of_budget(plain(results), "time")


def draw(results, view):
    records, beside = of_budget(results, "steps"), of_budget(plain(results), "steps")
    fig, axes = figure(view, 2 if view.narrow else 1, 1 if view.narrow else 2, panel=(4.4, 2.8), sharey=True)
    flat = [a for row in axes for a in row]
    for m in ORDER:
        lines = [(r, "-", LABELS[m]) for r in chosen(records, m)]
        lines += [(r, "--" if lines else "-", LABELS[m] + (", the plain form" if lines else "")) for r in chosen(beside, m)]
        seen = set()
        for r, style, label in lines:
            bits = [v / math.log(2) for v in r["validation"]]
            per = r["steps"] / len(bits)
            # Seconds of a run that shared its device say nothing.
            for axis, unit in ((flat[0], per), *(() if r.get("shared_device") else ((flat[1], r["seconds"] / len(bits)),))):
                axis.plot([unit * (k + 1) for k in range(len(bits))], bits, style, color=view.theme.models[m], label=None if label in seen else label,
                          marker=MARKERS[m], ms=3, markevery=max(1, len(bits) // 6), lw=1.2)
            seen.add(label)
        # A longer schedule in LLA's seconds: its rate falls later, so it is a curve of its own.
        for r in chosen(timed(results), m):
            bits = [v / math.log(2) for v in r["validation"]]
            for axis, whole in ((flat[0], r["steps"]), (flat[1], r["seconds"])):
                axis.plot([whole * (k + 1) / len(bits) for k in range(len(bits))], bits, ":", color=view.theme.models[m], lw=1.2,
                          label=f"{LABELS[m]}, {r['steps']:,} steps" if axis is flat[0] else None)
    flat[0].set_xlabel("steps")
    flat[1].set_xlabel("seconds of the run's share of its stack")
    flat[0].set_ylabel("validation, bits per byte")
    handles, labels = flat[0].get_legend_handles_labels()
    legend_below(fig, handles, labels, 2 if view.narrow else 4 if len(labels) <= 4 else 3)
    return fig


def draw_positions(results, view):
    records = of_budget(results, "steps")
    fig, axes = figure(view, 1, 1, panel=(5.4, 3.0))
    axis = axes[0][0]
    for m in ORDER:
        mine = chosen(records, m)
        if mine:
            bands = [b["bits_per_byte"] for b in mine[0]["test_by_position"]]
            width = results.settings["options"]["length"] / len(bands)
            points = [((i + 0.5) * width, b) for i, b in enumerate(bands) if b is not None]
            axis.plot([p[0] for p in points], [p[1] for p in points], color=view.theme.models[m], marker=MARKERS[m], ms=3, label=LABELS[m])
    axis.set_xlabel("position in the window")
    axis.set_ylabel("test, bits per byte")
    legend_below(fig, *axis.get_legend_handles_labels(), 2 if view.narrow else 4)
    return fig


def equal_time(results):
    """Each model with as many steps as fit into LLA's seconds, against LLA itself."""
    ours = chosen(of_budget(results, "steps"), "lla")
    sentences = []
    for m in ORDER:
        theirs = chosen(timed(results), m)
        if not ours or not theirs:
            continue
        sentences.append(f"Equal time: {LABELS[m]} with {theirs[0]['steps']:,} steps in the time of LLA's {ours[0]['steps']:,}: LLA minus {LABELS[m]} {difference_text(ours, theirs)}.")
    return sentences


def rate_table(results):
    """Every run: an untuned baseline convinces nobody."""
    rows = [[LABELS[r["model"]], {"steps": "equal steps", "time": "equal time"}.get(r["budget"], r["budget"]), f"{r['steps']:,}", f"{r['learning_rate']:g}", str(r["seed"]),
             f"{r['validation_best'] / math.log(2):.4f}", f"{r['test_bits_per_byte']:.4f}"]
            for m in ORDER for r in results.records if r["model"] == m and "test_bits_per_byte" in r]
    return table(["model", "budget", "steps", "rate", "seed", "validation", "test"], rows, "Every run: bits per byte; rates are chosen on validation.")


def section(results):
    records = of_budget(results, "steps")
    models = [m for m in ORDER if chosen(records, m)]
    beside = of_budget(plain(results), "steps")
    softmax = chosen(records, "softmax") or chosen(beside, "softmax")
    sentences, rows = [], []
    for m in models:
        mine = chosen(records, m)
        bits = [r["test_bits_per_byte"] for r in mine]
        cells = [LABELS[m], f"{mine[0]['parameters']:,}", f"{mine[0]['learning_rate']:g}", str(len(mine)), f"{statistics.fmean(bits):.4f}", f"{min(bits):.4f} to {max(bits):.4f}"]
        if softmax and m != "softmax":
            cells.append(f"{difference_text(mine, softmax)}")
            sentences.append(f"{LABELS[m]} against softmax: {difference_text(mine, softmax)}.")
        else:
            cells.append("")
        if chosen(beside, m):
            sentences.append(f"{LABELS[m]} against its plain form: {difference_text(mine, chosen(beside, m))}.")
        cells += [f"{statistics.fmean(r['test_repeated']['bits_per_byte'] for r in mine):.4f}", f"{statistics.fmean(r['test_fresh']['bits_per_byte'] for r in mine):.4f}",
                  f"{mine[0]['loss'][-1] / math.log(2):.4f}"]
        rows.append(cells)
    sentences += equal_time(results)
    control = of_budget(results, "control")
    pair = {m: [r for r in control if r["model"] == m] for m in ("lla", "softmax")}
    if pair["lla"] and pair["softmax"]:
        a, b = pair["lla"][0]["loss"], pair["softmax"][0]["loss"]
        sentences.append(f"Control: LLA with λ = ∞ follows softmax for {pair['lla'][0]['steps']} steps; the mean losses differ by at most {number(max(abs(x - y) for x, y in zip(a, b)))} nats.")
    results_table = table(["model", "parameters", "rate", "seeds", "bits per byte", "range", "minus softmax", "repeated", "fresh", "training loss at the end"], rows,
                          "Test set: Python's standard library. Repeated: where the preceding 8 bytes occurred earlier in the window.")
    model = {"layers": 6, "width": 384, **results.settings["model"]}
    intro = (f"A byte-level model of {model['layers']} layers, width {model['width']}, windows of {results.settings['options']['length']:,} bytes, on the .py files of torch and its "
             "dependencies; tested once on Python's standard library.")
    summary = sentences[0] if sentences else "one model only."
    return Section(results.anchor("language-model"), results.titled("A language model"), intro, f"<strong>{results.titled('Language model')}:</strong> {summary}",
                   [Figure(results.anchor("language_model"), save(lambda v: draw(results, v), results.directory, results.anchor("language_model")), "Validation loss against steps and seconds",
                           "The paper trains no language model.", bullets(sentences or [summary]), results.command),
                    Figure(results.anchor("language_model_positions"), save(lambda v: draw_positions(results, v), results.directory, results.anchor("language_model_positions")),
                           "Test loss by position in the window", "The paper trains no language model.", bullets(["Bytes with at least half a window before them where the file has it."]),
                           results.command)], [results_table, rate_table(results)])
