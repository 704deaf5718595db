"""The paper's trained experiments: in-context regression, associative recall, state tracking."""
import itertools
import math
import statistics

import matplotlib.ticker

from .page import Figure, Section, bullets, table
from .records import number, plain
from .runs import Runs
from .style import LABELS, MARKERS, figure, legend_below, save


def percent(x):
    return f"{100 * x:.1f} %"


def setup(results, layers=2, width=128, heads=2):
    """The models and the data in words, from the settings the results record."""
    model = {"layers": layers, "width": width, "heads": heads, **results.settings["model"]}
    training = results.settings["training"]
    return (f"{model['layers']} layers without MLPs, width {model['width']}, {model['heads']} heads; batches of {training['batch']}. Scores are of {training['test']:,} test "
            f"examples; learning rate and epoch are chosen on {training['validation']:,} validation examples.")


def logarithmic(axes):
    """Log scale on shared axes, with labels also where the values span less than a decade. After everything is drawn."""
    for axis in axes:
        axis.set_yscale("log")
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for digits in ((1,), (1, 2, 5), (1, 2, 3, 5, 7), range(1, 10)):
        ticks = [d * 10.0 ** e for e in range(-12, 6) for d in digits if low <= d * 10.0 ** e <= high]
        if len(ticks) >= 3:
            break
    for axis in axes:
        axis.set_ylim(low, high)
        axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
        axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def legend(fig, axes, models):
    """Every model once, in its order, in as many columns as the figure is wide."""
    found = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels()):
            found.setdefault(label, handle)
    labels = [LABELS[m] for m in models if LABELS[m] in found]
    legend_below(fig, [found[label] for label in labels], labels, max(2, min(6, int(fig.get_size_inches()[0] / 1.6))))


def finished(fig, axes, used, ylabel, log, models):
    """What is the same for every figure of panels, of which the first `used` show something."""
    flat = [a for row in axes for a in row]
    for axis in flat[used:]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel(ylabel)
    if log:
        logarithmic(flat[:used])
    legend(fig, flat, models)
    return fig


def panels(runs, view, xlabel, ylabel, title, log):
    """One panel for each value of the outer axis: the score against the inner one."""
    outer = sorted({s[0] for s in runs.settings}) if len(runs.axes) > 1 else [None]
    columns = min(len(outer), 2 if view.narrow else 4)
    rows = -(-len(outer) // columns)
    fig, axes = figure(view, rows, columns, panel=(2.6, 2.4) if len(outer) > 1 else (4.6, 3.0), sharey=True)
    flat = [a for row in axes for a in row]
    for axis, value in zip(flat, outer):
        settings = [s for s in runs.settings if value is None or s[0] == value]
        for m in reversed(runs.models):  # LLA on top
            scores = [runs.score(s, m) for s in settings]
            if not any(scores):
                continue
            x = [s[-1] for s in settings]
            mean, low, high = ([getattr(y, field) if y else math.nan for y in scores] for field in ("mean", "low", "high"))  # no line across what was not run
            axis.plot(x, mean, "-", marker=MARKERS[m], ms=4 if m == "lla" else 6, color=view.theme.models[m], label=LABELS[m])
            axis.fill_between(x, low, high, color=view.theme.models[m], alpha=0.15, lw=0)
        axis.set_xscale("log", base=2)
        if not log:
            axis.set_ylim(-0.03, 1.03)
        ticks = sorted({s[-1] for s in settings})
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.xaxis.minorticks_off()
        axis.set_xlabel(xlabel)
        if value is not None:
            axis.set_title(title.format(value))
    return finished(fig, axes, len(outer), ylabel, log, runs.models)


def comparable(runs, settings):
    """Settings and models whose means can be compared: every model in every setting. A model run in half of what another was, or less, would leave too few settings: it is
    left out, and so is, of models that have none in common, the least run."""
    count = {m: sum(bool(runs.of(s, m)) for s in settings) for m in runs.models}
    models = [m for m in runs.models if 2 * count[m] > max(count.values())]
    while True:
        shared = [s for s in settings if all(runs.of(s, m) for m in models)]
        if shared:
            return shared, models
        models.remove(min(models, key=count.get))


def mean_curve(runs, settings, model, field):
    """Best score so far by epoch at the model's best learning rate: of each setting the mean over its seeds, of these the mean, so that a setting with more seeds counts no more."""
    lines = [[list(itertools.accumulate(r[field], lambda a, b: runs.best_of((a, b)))) for r in runs.of(s, model, learning_rate=runs.rate(s, model)) if r[field]]
             for s in settings]
    lines = [seeds for seeds in lines if seeds]
    longest = max((len(line) for seeds in lines for line in seeds), default=0)

    def at(line, epoch):
        return line[min(epoch, len(line) - 1)]  # a run that left early stays where it was
    return [statistics.fmean(statistics.fmean(at(line, epoch) for line in seeds) for seeds in lines) for epoch in range(longest)]


def curves(runs, view, field, xlabel, ylabel, log, title):
    """Best score so far against the epoch at each model's best learning rate: a panel for each value of the outer axis, averaged over the inner one."""
    groups = sorted({s[0] for s in runs.settings})
    columns = min(len(groups), 2 if view.narrow else 4)
    rows = -(-len(groups) // columns)
    fig, axes = figure(view, rows, columns, panel=(2.6, 2.4) if len(groups) > 1 else (4.6, 3.0), sharey=True)
    flat = [a for row in axes for a in row]
    for axis, value in zip(flat, groups):
        settings, models = comparable(runs, [s for s in runs.settings if s[0] == value])
        for m in reversed(models):
            line = mean_curve(runs, settings, m, field)
            if line:
                axis.plot(range(1, len(line) + 1), line, color=view.theme.models[m], label=LABELS[m], marker=MARKERS[m], ms=3, markevery=max(1, len(line) // 8))
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=5, integer=True))
        axis.set_xlabel(xlabel)
        axis.set_title(title.format(value))
    return finished(fig, axes, len(groups), ylabel, log, runs.models)


def rows_sentences(runs):
    total = bad = 0
    records = [r for r in runs.records if r["model"] == "lla"]
    if not records:
        return []
    for r in records:
        for statuses in r["rows"].values():
            total += sum(statuses.values())
            bad += sum(n for status, n in statuses.items() if status != "ok")
    if not total:
        return ["LLA's rows were not counted in these runs."]
    return [f"LLA's solver: {total:,} rows in forward and backward passes, {bad:,} of them ({bad / total:.1e}) with a status other than OK."]


def versus(runs, rival, show):
    """How LLA stands to another model: settings in which it is ahead, and the ratio or difference of the means."""
    pairs = [(runs.score(s, "lla"), runs.score(s, rival)) for s in runs.settings]
    pairs = [(a, b) for a, b in pairs if a and b]
    ahead = sum(runs.better(a.mean, b.mean) for a, b in pairs)
    return f"{LABELS[rival]}: LLA ahead in {ahead} of {len(pairs)}" + (f" (mean {show(statistics.fmean(a.mean for a, _ in pairs))} against "
                                                                      f"{show(statistics.fmean(b.mean for _, b in pairs))})" if pairs else "")


def common(runs, show, words):
    """How LLA stands to all others and to each; `words` names a setting."""
    rivals = [m for m in runs.models if m != "lla"]
    first, of = runs.wins("lla")
    sentences = []
    if of:
        close = runs.mean_only("lla")
        listed = "; ".join(f"{words.format(*s)}: {', '.join(LABELS[m] for m in others)}" for s, others in close)
        sentences.append(f"LLA is first in {first} of {of} settings" + (f", in {len(close)} of them in the mean only: a seed of another model is ahead of one of its own ({listed})"
                                                                       if close else "") + ".")
        sentences.append("Against each: " + "; ".join(versus(runs, m, show) for m in rivals) + ".")
    return sentences


def smaller_segments(runs):
    """The paper's "particularly with smaller segment sizes", length by length, against the best of the others."""
    sentences = []
    for length in sorted({s[0] for s in runs.settings}):
        ratios = []
        for setting in (s for s in runs.settings if s[0] == length):
            ours, others = runs.score(setting, "lla"), [(m, s) for m, s in runs.winner(setting) if m != "lla"]
            if ours and others:
                ratios.append((setting[1], others[0][1].mean / ours.mean, LABELS[others[0][0]]))
        if not ratios:
            continue
        text = f"L = {length}, error of the best of the others as a multiple of LLA's: " + ", ".join(f"S = {segment}: {number(ratio)} ({name})" for segment, ratio, name in ratios)
        if len(ratios) > 1:
            of = f"; of the {len(ratios)} sizes run" if len(ratios) < 4 else ";"  # the paper has four
            text += (f"{of} largest for the smallest S, as the paper says" if max(ratios, key=lambda r: r[1]) == ratios[0]
                     else f'{of} not largest for the smallest S: the paper\'s "particularly with smaller segment sizes" does not hold here')
        sentences.append(text + ".")
    return sentences


def in_context(results):
    runs = Runs(results, ("length", "segment"), "test_error", True)
    sentences = common(runs, number, "L = {}, S = {}")
    sentences += runs.not_run("L = {}, S = {}") + smaller_segments(runs)
    sentences += [*rows_sentences(runs), runs.shortened(100)]
    intro = (f"L shuffled pairs (x; y) of piecewise linear data, d = {results.settings['options']['dim']}, then {results.settings['options']['queries']} queries; mean squared error "
             f"on the queries, noiseless in the test. {setup(results)}")
    return Section(results.anchor("in-context"), results.titled("In-context regression"), intro,
                   f"<strong>{results.titled('In-context regression')}:</strong> {sentences[0] if runs.wins('lla')[1] else 'LLA alone was run.'}",
                   [Figure(results.anchor("in_context"), save(lambda v: panels(runs, v, "segment size S", "test error", "L = {}", True), results.directory, results.anchor("in_context")),
                           "Test error against the segment size", "LLA consistently outperforms other baselines across all configurations, particularly with smaller segment sizes.",
                           bullets(sentences), results.command),
                    Figure(results.anchor("in_context_curves"), save(lambda v: curves(runs, v, "test", "epoch", "best test error so far", True, "L = {}"), results.directory,
                                                     results.anchor("in_context_curves")),
                           "Learning curves, averaged over segment sizes", "No curves are given for this task.", bullets([runs.shortened(100)]), results.command)],
                   [runs.score_table(("L", "S"), "Test error, mean over seeds at the rate chosen on validation; the lowest in bold."),
                    runs.rate_table(("L", "S"), "Test error of every learning rate, first seed; last column: the best rate and epoch by the test set itself.")])


def transition(record):
    """Epochs (first at 10 %, first at 90 %) of the best accuracy so far; None where it did not get there."""
    def reach(level):
        return next((i + 1 for i, v in enumerate(record["test"]) if v >= level), None)
    return reach(0.1), reach(0.9)


def done_with(record, enough):
    return record["validation_best"] is not None and record["validation_best"] >= enough


def steps_table(runs):
    """Steps to the accuracy at which a run is done, at the rate chosen on validation, over the seeds: of models that have several."""
    enough = runs.results.settings["training"].get("leave_at", 0.99)
    def seeds(setting, model):
        return [r for r in runs.of(setting, model) if r["learning_rate"] == runs.rate(setting, model)]

    models = [m for m in runs.models if any(len(seeds(s, m)) > 1 for s in runs.settings)]
    rows = []
    for setting in runs.settings:
        cells = []
        for m in models:
            mine = seeds(setting, m)
            steps = sorted(r["steps"] for r in mine if done_with(r, enough))
            span = "never" if not steps else f"{steps[0]:,}" if steps[0] == steps[-1] else f"{steps[0]:,} to {steps[-1]:,}"
            cells.append(f"{span} ({len(steps)} of {len(mine)})" if mine else "")
        rows.append([str(v) for v in setting] + cells)
    return [table(["L", "pairs"] + [LABELS[m] for m in models], rows,
                  f"Steps to {percent(enough)} on validation at the rate chosen there, range over seeds (how many of them got there).")] if models else []


def solved(runs):
    """Which models reach the accuracy at which a run is done, in how many settings, and how soon at the best of their learning rates: first seed, which alone has them all."""
    enough = runs.results.settings["training"].get("leave_at", 0.99)
    def fewest(setting, model):
        return min((r["steps"] for r in runs.first_seed(setting, model) if done_with(r, enough)), default=None)

    texts = []
    for m in runs.models:
        tried = [s for s in runs.settings if runs.of(s, m)]
        steps = [x for x in (fewest(s, m) for s in tried) if x is not None]
        span = f" (after {number(min(steps))}" + (f" to {number(max(steps))}" if len(steps) > 1 else "") + " steps)" if steps else ""
        texts.append(f"{LABELS[m]} in {len(steps)} of {len(tried)}{span}")
    ours = [(s, fewest(s, "lla")) for s in runs.settings if runs.of(s, "lla")]
    done = [(s, x) for s, x in ours if x is not None]
    rivals = [m for m in runs.models if m != "lla"]
    others = [[fewest(s, m) for m in rivals] for s, _ in done]
    quickest = [min((x for x in steps if x is not None), default=math.inf) for steps in others]
    ahead = [sum(steps[i] is not None and steps[i] < x for (_, x), steps in zip(done, others)) for i in range(len(rivals))]
    sooner = sum(x < its for (_, x), its in zip(done, quickest))
    level = sum(x == its for (_, x), its in zip(done, quickest))
    return [f"LLA reaches {percent(enough)} validation accuracy in {len(done)} of {len(ours)} settings, in {sooner} of them in fewer steps than every other model that was run"
            + (f" and in {level} in as many as the quickest of them" if level else "")
            + (" (in fewer: " + ", ".join(f"{LABELS[m]} in {n}" for m, n in zip(rivals, ahead) if n) + ")" if any(ahead) else "") + ".",
            f"Reached {percent(enough)} at some learning rate, first seed: " + ", ".join(texts) + f". A run ends there: differences between accuracies above {percent(enough)} were not measured."]


def steps_at(record, epoch):
    return None if epoch is None else round(epoch * record["steps"] / max(1, len(record["test"])))


def plateau_panels(runs, view):
    """Accuracy against steps, first seed: a panel for each learning rate and number of examples, so that models are compared at the same ones."""
    rates, numbers = sorted({r["learning_rate"] for r in runs.records}), [examples for (examples,) in runs.settings]
    columns = min(len(numbers), 2 if view.narrow else 4)
    places = [(rate, examples) for rate in rates for examples in numbers]
    fig, axes = figure(view, -(-len(places) // columns), columns, panel=(2.6, 1.9), sharey=True)
    for axis, (rate, examples) in zip((a for row in axes for a in row), places):
        digits, exponent = f"{rate:e}".split("e")
        for m in reversed(runs.models):
            for record in (r for r in runs.first_seed((examples,), m) if r["learning_rate"] == rate and r["test"]):
                epochs = range(1, len(record["test"]) + 1)
                axis.plot([steps_at(record, epoch) for epoch in epochs], list(itertools.accumulate(record["test"], max)), color=view.theme.models[m], label=LABELS[m],
                          marker=MARKERS[m], ms=3, markevery=max(1, len(epochs) // 8))
        axis.set_ylim(-0.03, 1.03)
        axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=4, integer=True))
        axis.set_xlabel("steps")
        axis.set_title(f"{examples:,} examples, {float(digits):g}e{int(exponent)}")
    return finished(fig, axes, len(places), "best accuracy so far", False, runs.models)


def plateau(results):
    """One setting with several numbers of examples: when accuracy leaves its plateau, and how long the rise takes."""
    runs = Runs(results, ("examples",), "test_accuracy", False)
    rates = sorted({r["learning_rate"] for r in runs.records})
    rows, rises = [], {}
    for (examples,) in runs.settings:
        for m in runs.models:
            cells = []
            for rate in rates:
                records = runs.of((examples,), m, learning_rate=rate)
                low, high = (steps_at(records[0], epoch) for epoch in transition(records[0])) if records else (None, None)
                cells.append("" if not records else f"{low or '–'} to {high or '–'}")
                if records and high is not None:
                    rises.setdefault(m, []).append((high, high - low))
            rows.append([f"{examples:,}", LABELS[m], *cells])
    sentences = []
    for m in runs.models:
        tried = [r for r in runs.records if r["model"] == m]
        found = rises.get(m, [])
        text = f"{LABELS[m]}: {len(found)} of {len(tried)} runs reach 90 %"
        if found:
            text += (f", after {number(min(a for a, _ in found))} to {number(max(a for a, _ in found))} steps; the rise from 10 % takes "
                     f"{number(min(b for _, b in found))} to {number(max(b for _, b in found))} (0: within one epoch)")
        sentences.append(text + ".")
    first = runs.records[0]
    intro = (f"Associative recall, L = {first['length']}, {first['pairs']} pairs, with several numbers of training examples and every learning rate. {setup(results)}")
    return Section("recall-plateau", "Associative recall: plateau and transition", intro, f"<strong>Plateau:</strong> {sentences[0]}",
                   [Figure("recall_plateau", save(lambda v: plateau_panels(runs, v), results.directory, "recall_plateau"),
                           "Accuracy against steps, by learning rate and number of examples",
                           "Gated DeltaNet: an extended plateau, then an abrupt transition whose timing depends on learning rate and dataset size. LLA: consistent, gradual improvement.",
                           bullets(sentences), results.command)],
                   [table(["examples", "model", *(f"{r:g}" for r in rates)], rows, "Steps from 10 % to 90 % accuracy, by learning rate; –: not reached.")])


def recall(results):
    if len({r["examples"] for r in results.records}) > 1 and len({(r["length"], r["pairs"]) for r in results.records}) == 1:
        return plateau(results)
    runs = Runs(results, ("length", "pairs"), "test_accuracy", False)
    sentences = solved(runs) if "lla" in runs.models else []
    sentences += runs.not_run("L = {}, {} pairs")
    lasts = []
    for m in ("gated_deltanet", "lla", "softmax"):
        spans = []
        for r in runs.records:
            low, high = transition(r)
            if r["model"] == m and low is not None:
                per_epoch = r["steps"] / max(1, len(r["test"]))
                spans.append((low * per_epoch, None if high is None else (high - low) * per_epoch))
        if spans:
            through = [b for _, b in spans if b is not None]
            lasts.append(f"{LABELS[m]}: 10 % accuracy after {number(statistics.median(a for a, _ in spans))} steps in the median of {len(spans)} runs, "
                         + (f"from there to 90 % in {number(statistics.median(through))} ({len(through)} runs got there)" if through else "none of them reached 90 %"))
    if lasts:
        sentences.append("Plateau and transition: " + "; ".join(lasts) + ".")
    sentences += [*rows_sentences(runs), runs.shortened(32)]
    intro = (f"Multi-query associative recall: pairs of a key and a value from a vocabulary of {results.settings['options']['vocabulary']:,}, every key queried once; short "
             f"convolutions and feature maps off. {setup(results)}")
    return Section(results.anchor("recall"), results.titled("Associative recall, trained"), intro,
                   f"<strong>{results.titled('Associative recall, trained')}:</strong> {sentences[0] if sentences else 'LLA was not run.'}",
                   [Figure(results.anchor("recall"), save(lambda v: panels(runs, v, "key-value pairs", "test accuracy", "L = {}", False), results.directory, results.anchor("recall")),
                           "Test accuracy against the number of pairs",
                           "LLA achieves the highest accuracy in associative recall across different sequence lengths and number of key-value pairs.", bullets(sentences), results.command),
                    Figure(results.anchor("recall_curves"), save(lambda v: curves(runs, v, "test", "epoch", "best accuracy so far", False, "L = {}"), results.directory,
                                                 results.anchor("recall_curves")),
                           "Learning curves, averaged over pair counts",
                           "Gated DeltaNet: an extended plateau, then an abrupt transition whose timing depends on learning rate and dataset size. LLA: consistent, gradual improvement.",
                           bullets(lasts or ["Too few epochs to tell."]), results.command)],
                   [runs.score_table(("L", "pairs"), "Test accuracy, mean over seeds at the rate chosen on validation; the highest in bold (a run ends at 99 % on validation).", percent),
                    *steps_table(runs),
                    runs.rate_table(("L", "pairs"), "Test accuracy of every learning rate, first seed; last column: the best rate and epoch by the test set itself.", percent)])


def longer(runs):
    """What models of a variant have in the task's own results, which run to the paper's number of epochs."""
    beside = plain(runs.results)
    if not beside:
        return []
    whole = Runs(beside, runs.axes, runs.field, runs.lower)
    pairs = [(s, m, runs.score(s, m), whole.score(s, m)) for s in runs.settings for m in runs.models]
    return [f"With {beside.settings['training']['epochs']} epochs instead of {runs.results.settings['training']['epochs']}: "
            + ", ".join(f"N = {s[0]}, {LABELS[m]} {percent(b.mean)} ({percent(a.mean)} here)" for s, m, a, b in pairs if a and b) + "."] if any(a and b for *_, a, b in pairs) else []


def state_tracking(results):
    runs = Runs(results, ("items",), "test_accuracy", False)
    beside = []
    for s in runs.settings:
        a, b = runs.score(s, "lla"), runs.score(s, "softmax")
        if a and b:
            beside.append(f"N = {s[0]}: LLA {percent(a.mean)}, softmax {percent(b.mean)}; a difference of {100 * (a.mean - b.mean):+.1f} points.")
    sentences = beside + (common(runs, percent, "N = {}") or ["; ".join(f"N = {s[0]}: {LABELS[m]} {percent(x.mean)}" for s in runs.settings for m, x in runs.winner(s)) + ". One model only."])
    sentences += runs.not_run("N = {}") + longer(runs) + [*rows_sentences(runs), runs.shortened(64)]
    intro = (f"N items at positions, N/6 to N/3 swaps, then {results.settings['options']['queries']} positions whose item is asked for. {setup(results)}")
    return Section(results.anchor("state-tracking"), results.titled("State tracking"), intro, f"<strong>{results.titled('State tracking')}:</strong> {' '.join(beside) or sentences[0]}",
                   [Figure(results.anchor("state_tracking"), save(lambda v: panels(runs, v, "positions N", "test accuracy", "{}", False), results.directory, results.anchor("state_tracking")),
                           "Test accuracy against the number of positions", "LLA achieves test accuracy on par with softmax attention across N.", bullets(sentences), results.command),
                    Figure(results.anchor("state_tracking_curves"), save(lambda v: curves(runs, v, "test", "epoch", "best accuracy so far", False, "N = {}"), results.directory,
                                                         results.anchor("state_tracking_curves")),
                           "Learning curves", "No curves are given for this task.", bullets([runs.shortened(64)]), results.command)],
                   [runs.score_table(("N",), "Test accuracy, mean over seeds at the rate chosen on validation; the highest in bold.", percent),
                    runs.rate_table(("N",), "Test accuracy of every learning rate, first seed; last column: the best rate and epoch by the test set itself.", percent)])
