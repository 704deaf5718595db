"""The byte-level language model: bits per byte on Python's standard library, with paired intervals over files."""
import math
import statistics

import numpy as np

from .page import Figure, Section, bullets, table
from .records import number, plain
from .runs import ORDER
from .style import LABELS, MARKERS, figure, legend_below, save

RESAMPLES = 10_000
FEWEST_FILES = 10  # to draw from
COPIES_AT = 1.0    # one nat of training loss: where attention models learn to copy from the window their loss falls steeply through it
ATTENTION = ("lla", "softmax", "parallax")
FEWEST_RUNS = 5    # for a correlation


def of_budget(results, budget):
    return [r for r in results.records if r.get("budget", "steps") == budget] if results else []


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


def paired(ours, theirs):
    """Of both the runs whose seeds both have: these saw the same batches. All of them where no seed is in common."""
    seeds = {r["seed"] for r in ours} & {r["seed"] for r in theirs}
    return [sorted((r for r in runs if not seeds or r["seed"] in seeds), key=lambda r: r["seed"]) for runs in (ours, theirs)]


def interval(ours, theirs):
    """Difference in bits per byte and its 95 % interval: files are drawn with replacement, the same for both models. The mean over seeds first."""
    def files(records):
        return np.mean([[bits for _, bits in r["test_files"]] for r in records], axis=0)
    sizes = np.array([size for size, _ in ours[0]["test_files"]], dtype=float)
    difference = files(ours) - files(theirs)
    draws = np.random.default_rng(1).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    values = difference[draws].sum(axis=1) / sizes[draws].sum(axis=1)
    low, high = np.quantile(values, (0.025, 0.975))
    return float(difference.sum() / sizes.sum()), float(low), float(high)


def difference_text(ours, theirs):
    """With the seeds' own differences: the interval is over files and knows nothing of seeds."""
    ours, theirs = paired(ours, theirs)
    difference, low, high = interval(ours, theirs)
    few = len(ours[0]["test_files"]) < FEWEST_FILES
    verdict = "too few files for an interval" if few else "no difference" if low <= 0 <= high else "better" if high < 0 else "worse"
    same = [r["seed"] for r in ours] == [r["seed"] for r in theirs]
    each = [interval([a], [b])[0] for a, b in zip(ours, theirs)] if same else []
    if not same:
        seeds = "other seeds on each side"
    elif len(each) == 1:
        seeds = f"seed {ours[0]['seed']} only"
    else:
        seeds = f"seeds {', '.join(str(r['seed']) for r in ours)}: {', '.join(f'{d:+.4f}' for d in each)}"
        if verdict in ("better", "worse") and min(each) < 0 < max(each):
            verdict += " in the mean, but the seeds disagree"
    return f"{difference:+.4f} bits per byte (95 % interval over files {low:+.4f} to {high:+.4f}; {seeds}): {verdict}"


def copies_from(record, level=COPIES_AT):
    """The step at which the training loss falls through a level, between the middles of the epochs whose means are known; None where it does not."""
    loss, per = record["loss"], record["steps"] / max(1, len(record["loss"]))
    i = next((i for i, v in enumerate(loss) if v < level), None)
    if not i:
        return None
    return per * (i + 0.5 - (level - loss[i]) / (loss[i - 1] - loss[i]))


def lateness(records):
    """Whether runs end worse the later they fall through the level, as a sentence; nothing where there are too few of them."""
    points = [(copies_from(r), r["test_bits_per_byte"]) for r in records if r["model"] in ATTENTION]
    points = [p for p in points if p[0] is not None]
    if len(points) < FEWEST_RUNS:
        return []
    slope = np.polyfit(*zip(*points), 1)[0]
    return [f"Training loss falls through one nat, which is where attention models learn to copy from the window, after {number(min(p[0] for p in points))} to "
            f"{number(max(p[0] for p in points))} steps. Over {len(points)} runs of equal steps at all rates and seeds that step and bits per byte in the test have a correlation of "
            f"{np.corrcoef(*zip(*points))[0, 1]:.2f}: a hundred steps later is {100 * slope:+.3f} bits."]


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
                first = label not in seen  # of several seeds; the others are thin
                axis.plot([unit * (k + 1) for k in range(len(bits))], bits, style, color=view.theme.models[m], label=label if first else None,
                          marker=MARKERS[m] if first else None, ms=3, markevery=max(1, len(bits) // 6), lw=1.2 if first else 0.8)
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
            bands = list(zip(*([b["bits_per_byte"] for b in r["test_by_position"]] for r in mine)))  # of each position, every seed's
            width = results.settings["options"]["length"] / len(bands)
            points = [((i + 0.5) * width, b) for i, b in enumerate(bands) if None not in b]
            x = [p[0] for p in points]
            axis.plot(x, [statistics.fmean(p[1]) for p in points], color=view.theme.models[m], marker=MARKERS[m], ms=3, label=LABELS[m])
            axis.fill_between(x, [min(p[1]) for p in points], [max(p[1]) for p in points], color=view.theme.models[m], alpha=0.15, lw=0)
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
    rows = []
    for r in (r for m in ORDER for r in results.records if r["model"] == m and "test_bits_per_byte" in r):
        step = copies_from(r)
        rows.append([LABELS[r["model"]], {"steps": "equal steps", "time": "equal time"}.get(r["budget"], r["budget"]), f"{r['steps']:,}", f"{r['learning_rate']:g}", str(r["seed"]),
                     f"{r['validation_best'] / math.log(2):.4f}", f"{r['test_bits_per_byte']:.4f}", f"{r['test_repeated']['bits_per_byte']:.4f}", f"{r['test_fresh']['bits_per_byte']:.4f}",
                     "–" if step is None else f"{step:,.0f}"])
    return table(["model", "budget", "steps", "rate", "seed", "validation", "test", "repeated", "fresh", "one nat at step"], rows,
                 "Every run: bits per byte; rates are chosen on validation. Last column: where the training loss falls through one nat (a model that does not copy from the window "
                 "passes it too: whether it copies is seen where text repeats).")


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
                  f"{statistics.fmean(r['loss'][-1] for r in mine) / math.log(2):.4f}"]
        rows.append(cells)
    sentences += equal_time(results) + lateness(records + beside)
    control = of_budget(results, "control")
    pair = {m: [r for r in control if r["model"] == m] for m in ("lla", "softmax")}
    if pair["lla"] and pair["softmax"]:
        a, b = pair["lla"][0]["loss"], pair["softmax"][0]["loss"]
        sentences.append(f"Control: LLA with λ = ∞ follows softmax for {pair['lla'][0]['steps']} steps; the mean losses differ by at most {number(max(abs(x - y) for x, y in zip(a, b)))} nats.")
    results_table = table(["model", "parameters", "rate", "seeds", "bits per byte", "range", "minus softmax", "repeated", "fresh", "training loss at the end"], rows,
                          "Test set: Python's standard library, mean and range over seeds. Repeated: where the preceding 8 bytes occurred earlier in the window.")
    model = {"layers": 6, "width": 384, **results.settings["model"]}
    intro = (f"A byte-level model of {model['layers']} layers, width {model['width']}, windows of {results.settings['options']['length']:,} bytes, on the .py files of torch and its "
             "dependencies; tested once on Python's standard library.")
    summary = sentences[0] if sentences else "one model only."
    several = ["Thin lines are further seeds."] if any(len(chosen(runs, m)) > 1 for runs in (records, beside) for m in ORDER) else []
    return Section(results.anchor("language-model"), results.titled("A language model"), intro, f"<strong>{results.titled('Language model')}:</strong> {summary}",
                   [Figure(results.anchor("language_model"), save(lambda v: draw(results, v), results.directory, results.anchor("language_model")), "Validation loss against steps and seconds",
                           "The paper trains no language model.", bullets((sentences or [summary]) + several), results.command),
                    Figure(results.anchor("language_model_positions"), save(lambda v: draw_positions(results, v), results.directory, results.anchor("language_model_positions")),
                           "Test loss by position in the window", "The paper trains no language model.", bullets(["Bytes with at least half a window before them where the file has it; with several seeds their mean and range."]),
                           results.command)], [results_table, rate_table(results)])
