"""python/lla_report: what it says of trained runs with several seeds, and of when a language model learns to copy."""
import json
import math
import sys

import pytest
from conftest import REPOSITORY

pytest.importorskip("matplotlib")
sys.path.insert(0, str(REPOSITORY / "python"))
from lla_report import language, page, regression, studies, style, trained  # noqa: E402
from lla_report.records import Results  # noqa: E402
from lla_report.runs import Runs  # noqa: E402
from lla_report.style import DARK, LABELS, LIGHT, View  # noqa: E402

FILES = 20


def text_run(seed, bits, model="lla", rate=1e-3, loss=(2.0, 0.5), steps=200):
    """Bits per byte of each file, or one for all."""
    bits = bits if isinstance(bits, list) else [bits] * FILES
    return {"model": model, "budget": "steps", "learning_rate": rate, "seed": seed, "steps": steps, "loss": list(loss), "validation_best": loss[-1],
            "test_files": [[100, 100 * b] for b in bits], "test_bits_per_byte": sum(bits) / len(bits)}


def test_seeds_are_compared_with_their_own():
    # A seed that only one side has does not count.
    said = language.difference_text([text_run(1, 1.5), text_run(2, 9.0)], [text_run(1, 1.0)])
    assert said == "+0.5000 bits per byte (95 % interval over files +0.5000 to +0.5000; seed 1 only): worse"
    said = language.difference_text([text_run(3, 1.1), text_run(1, 1.3)], [text_run(1, 1.0), text_run(3, 1.0), text_run(2, 0.0)])
    assert said == "+0.2000 bits per byte (95 % interval over files +0.2000 to +0.2000; seeds 1, 3: +0.3000, +0.1000): worse"
    assert "other seeds on each side): better" in language.difference_text([text_run(1, 1.0)], [text_run(2, 2.0)])


def test_seeds_that_disagree_are_no_verdict():
    ours, theirs = [text_run(1, 1.01), text_run(2, 2.0), text_run(3, 0.99)], [text_run(s, 1.0) for s in (1, 2, 3)]
    assert language.difference_text(ours, theirs).endswith("seeds 1, 2, 3: +0.0100, +1.0000, -0.0100): worse in the mean, but the seeds disagree")
    # Files that differ both ways: the interval has zero inside, whatever the seeds say.
    mixed = [1.0 + (0.5 if i % 2 else -0.5) for i in range(FILES)]
    assert language.difference_text([text_run(1, mixed), text_run(2, mixed)], theirs[:2]).endswith(": no difference")


def test_when_a_run_learns_to_copy():
    assert language.copies_from(text_run(1, 1, loss=(2.0, 1.5, 0.5), steps=300)) == pytest.approx(200)  # halfway between the middles 150 and 250
    assert language.copies_from(text_run(1, 1, loss=(2.0, 1.5, 0.9), steps=300)) == pytest.approx(150 + 100 * 0.5 / 0.6)
    assert language.copies_from(text_run(1, 1, loss=(2.0, 1.5, 1.2), steps=300)) is None
    assert language.copies_from(text_run(1, 1, loss=(0.9, 0.5))) is None  # before the first epoch ended: not known
    runs = [text_run(s, 1 + 0.3 * (v - 0.5), loss=(3.0, 1.0 + v, 1.0 - v, 0.1)) for s, v in ((1, 0.1), (2, 0.3), (3, 0.5), (4, 0.7))]
    assert language.lateness(runs) == []  # too few for a correlation
    late = text_run(5, 2.0, loss=(3.0, 2.0, 1.5, 0.5))
    said = language.lateness([*runs, late, text_run(1, 5.0, model="gated_deltanet")])
    assert len(said) == 1 and "Over 5 runs" in said[0] and "after 100 to 150 steps" in said[0]


def trained_results(folder, records, epochs=4):
    folder.mkdir(parents=True)
    task = "recall" if "pairs" in records[0] else "state-tracking"
    settings = {"model": {}, "options": {"queries": 8}, "training": {"epochs": epochs, "batch": 8, "test": 10, "validation": 10, "leave_at": 0.99}}
    (folder / "results.json").write_text(json.dumps({"schema_version": 1, "task": task, "settings": settings, "machine": {}, "command": "made", "records": records}))
    return Results(folder)


def accuracy(model, rate, seed, reached, steps, **setting):
    return {"model": model, "learning_rate": rate, "seed": seed, "steps": steps, "validation_best": reached, "test_accuracy": reached, "test_accuracy_chosen_on_test": reached,
            "validation": [reached], "test": [reached], "ended": "accuracy" if reached >= 0.99 else "cap", "flattened": False, "rows": {}, "examples": 10, **setting}


def test_accuracy_and_steps_over_seeds(tmp_path):
    here = {"length": 64, "pairs": 4}
    records = [accuracy("lla", 5e-4, 1, 1.0, 300, **here), accuracy("lla", 1e-3, 1, 0.995, 150, **here),
               accuracy("lla", 5e-4, 2, 0.99, 100, **here), accuracy("lla", 5e-4, 3, 0.999, 450, **here),
               accuracy("softmax", 1e-3, 1, 0.4, 900, **here), accuracy("softmax", 1e-3, 2, 0.7, 900, **here), accuracy("gla", 1e-3, 1, 1.0, 600, **here)]
    runs = Runs(trained_results(tmp_path / "recall", records), ("length", "pairs"), "test_accuracy", False)
    table = runs.score_table(("L", "pairs"), "", trained.percent)
    assert "99.6 % (99.0 % to 100.0 %)" in table and "55.0 % (40.0 % to 70.0 %)" in table
    table = trained.steps_table(runs)[0]  # at the rate chosen on validation; GLA has one seed
    assert "100 to 450 (3 of 3)" in table and "never (0 of 2)" in table and "GLA" not in table
    # Every rate was run with the first seed only, so the fewest steps at any rate are of that seed.
    assert "LLA in 1 of 1 (after 150 steps)" in trained.solved(runs)[1]


def test_the_rate_at_which_any_seed_learns_counts(tmp_path):
    here = {"length": 64, "pairs": 4}
    records = [accuracy("softmax", 1e-3, 1, 0.012, 900, **here), accuracy("softmax", 5e-4, 1, 0.01, 900, **here), accuracy("softmax", 5e-4, 2, 0.97, 900, **here)]
    score = Runs(trained_results(tmp_path / "recall", records), ("length", "pairs"), "test_accuracy", False).score((64, 4), "softmax")
    assert (score.learning_rate, score.seeds, score.mean) == (5e-4, 2, pytest.approx(0.49))


def test_first_in_the_mean_only_is_said(tmp_path):
    def regression(model, seed, error, segment):
        return {**accuracy(model, 1e-3, seed, error, 300, length=64, segment=segment), "test_error": error, "test_error_chosen_on_test": error}
    records = [regression(m, seed, e, 64) for m, errors in (("lla", (0.01, 0.05)), ("gated_deltanet", (0.04, 0.09)), ("softmax", (0.051, 0.2))) for seed, e in enumerate(errors, 1)]
    records += [regression(m, seed, e, 8) for m, errors in (("lla", (0.8, 0.81)), ("softmax", (0.82,))) for seed, e in enumerate(errors, 1)]
    runs = Runs(trained_results(tmp_path / "in-context", records), ("length", "segment"), "test_error", True)
    said = trained.common(runs, str, "L = {}, S = {}")[0]
    assert said == "LLA is first in 2 of 2 settings, in 1 of them in the mean only: a seed of another model is ahead of one of its own (L = 64, S = 64: Gated DeltaNet)."
    apart = Runs(trained_results(tmp_path / "apart", [r for r in records if r["segment"] == 8]), ("length", "segment"), "test_error", True)
    assert trained.common(apart, str, "L = {}, S = {}")[0] == "LLA is first in 1 of 1 settings."
    # Of accuracies the larger is the better one.
    here = {"items": 16}
    records = [accuracy("lla", 1e-3, s, x, 300, **here) for s, x in ((1, 0.6), (2, 0.98))] + [accuracy("parallax", 1e-3, s, x, 300, **here) for s, x in ((1, 0.7), (2, 0.8))]
    runs = Runs(trained_results(tmp_path / "tracking", records), ("items",), "test_accuracy", False)
    assert runs.mean_only("lla") == [((16,), ["parallax"])]


def test_a_model_run_once_does_not_narrow_the_means_of_all(tmp_path):
    records = [accuracy(m, 1e-3, 1, 1.0, 300, length=64, pairs=p) for m, pairs in (("lla", (4, 8, 16)), ("softmax", (8, 16)), ("parallax", (4,))) for p in pairs]
    runs = Runs(trained_results(tmp_path / "recall", records), ("length", "pairs"), "test_accuracy", False)
    assert trained.comparable(runs, runs.settings) == ([(64, 8), (64, 16)], ["lla", "softmax"])
    assert trained.comparable(runs, [(64, 4)]) == ([(64, 4)], ["lla", "parallax"])
    half = [*records, accuracy("lla", 1e-3, 1, 1.0, 300, length=64, pairs=32), accuracy("softmax", 1e-3, 1, 1.0, 300, length=64, pairs=32),
            accuracy("parallax", 1e-3, 1, 1.0, 300, length=64, pairs=16)]
    runs = Runs(trained_results(tmp_path / "half", half), ("length", "pairs"), "test_accuracy", False)
    assert trained.comparable(runs, runs.settings) == ([(64, 8), (64, 16), (64, 32)], ["lla", "softmax"])  # Parallax: two of four


def test_no_line_across_a_setting_that_was_not_run(tmp_path):
    records = [accuracy("lla", 1e-3, 1, 0.9, 300, length=64, pairs=p) for p in (4, 8, 16)] + [accuracy("mesanet", 1e-3, 1, 0.5, 300, length=64, pairs=p) for p in (4, 16)]
    runs = Runs(trained_results(tmp_path / "recall", records), ("length", "pairs"), "test_accuracy", False)
    fig = trained.panels(runs, View(LIGHT, False), "pairs", "accuracy", "L = {}", False)
    lines = {line.get_label(): list(line.get_ydata()) for line in fig.axes[0].get_lines()}
    assert lines[LABELS["lla"]] == [0.9] * 3 and lines[LABELS["mesanet"]] == pytest.approx([0.5, math.nan, 0.5], nan_ok=True)


def test_the_plateau_shows_every_rate(tmp_path):
    records = [accuracy(model, rate, 1, 1.0, steps, length=128, pairs=16, examples=examples)
               for examples, steps in ((20_000, 78), (40_000, 156)) for rate in (1e-4, 1e-3) for model in ("lla", "softmax")
               if (model, rate) != ("softmax", 1e-4)]
    runs = Runs(trained_results(tmp_path / "recall", records), ("examples",), "test_accuracy", False)
    fig = trained.plateau_panels(runs, View(LIGHT, False))
    shown = [a for a in fig.axes if a.get_visible()]
    assert [a.get_title() for a in shown] == [f"{n:,} examples, {rate}" for rate in ("1e-4", "1e-3") for n in (20_000, 40_000)]
    assert [len(a.lines) for a in shown] == [1, 1, 2, 2]
    assert [a.lines[0].get_xdata()[-1] for a in shown] == [78, 156, 78, 156]


def test_sizes_that_were_not_run_are_said(tmp_path):
    def regression(model, segment, error):
        return {**accuracy(model, 1e-3, 1, error, 300, length=512, segment=segment), "test_error": error, "test_error_chosen_on_test": error}
    records = [regression(m, s, e) for s, ours, theirs in ((64, 0.01, 0.3), (512, 0.1, 0.2)) for m, e in (("lla", ours), ("softmax", theirs))]
    runs = Runs(trained_results(tmp_path / "in-context", records), ("length", "segment"), "test_error", True)
    assert trained.smaller_segments(runs)[0].endswith("; of the 2 sizes run largest for the smallest S, as the paper says.")
    records += [regression(m, s, e) for s in (128, 256) for m, e in (("lla", 0.01), ("softmax", 0.5))]
    runs = Runs(trained_results(tmp_path / "whole", records), ("length", "segment"), "test_error", True)
    assert "; not largest for the smallest S" in trained.smaller_segments(runs)[0]


def test_of_rates_equal_on_validation_the_one_with_seeds_counts(tmp_path):
    here = {"length": 64, "pairs": 8}
    records = [accuracy("lla", 1e-4, 1, 1.0, 900, **here), accuracy("lla", 1e-3, 1, 1.0, 300, **here), accuracy("lla", 1e-3, 2, 0.5, 900, **here),
               accuracy("softmax", 1e-4, 1, 1.0, 900, **here), accuracy("softmax", 1e-3, 1, 0.99, 300, **here), accuracy("softmax", 1e-3, 2, 0.995, 300, **here),
               accuracy("gla", 1e-3, 1, 1.0, 300, **{**here, "pairs": 4})]
    runs = Runs(trained_results(tmp_path / "recall", records), ("length", "pairs"), "test_accuracy", False)
    assert runs.rate((64, 8), "lla") == 1e-3 and runs.score((64, 8), "lla").mean == 0.75
    assert runs.rate((64, 8), "softmax") == 1e-4  # seeds outweigh no validation score
    assert runs.rate((64, 4), "lla") is None
    assert runs.not_run("L = {}, {} pairs") == ["Not run: LLA (L = 64, 4 pairs), softmax (L = 64, 4 pairs), GLA (L = 64, 8 pairs)."]
    assert runs.rate_table(("L", "pairs"), "").count("GLA") == 1  # no row where it was not run
    assert "in 0 of them in fewer steps than every other model that was run and in 1 in as many as the quickest of them." in trained.solved(runs)[0]
    quick = [accuracy("lla", 1e-3, 1, 1.0, 300, **here), accuracy("parallax", 1e-3, 1, 1.0, 200, **here)]
    runs = Runs(trained_results(tmp_path / "quick", quick), ("length", "pairs"), "test_accuracy", False)
    assert trained.solved(runs)[0].endswith("in 0 of them in fewer steps than every other model that was run (in fewer: Parallax in 1).")


def test_a_setting_with_more_seeds_counts_no_more_in_a_mean_curve(tmp_path):
    records = [accuracy("lla", 1e-3, seed, 1.0, 300, length=64, pairs=4) for seed in (1, 2, 3)] + [accuracy("lla", 1e-3, 1, 0.2, 300, length=64, pairs=8)]
    for r, test in zip(records, ([0.4, 1.0], [0.1, 0.7, 0.6], [1.0], [0.2, 0.1])):
        r["test"] = test
    runs = Runs(trained_results(tmp_path / "recall", records), ("length", "pairs"), "test_accuracy", False)
    assert trained.mean_curve(runs, runs.settings, "lla", "test") == pytest.approx([(0.5 + 0.2) / 2, (0.9 + 0.2) / 2, (0.9 + 0.2) / 2])
    assert trained.mean_curve(runs, runs.settings, "gla", "test") == []


def test_state_tracking_beside_its_whole_number_of_epochs(tmp_path):
    trained_results(tmp_path / "state-tracking", [accuracy("softmax", 1e-3, 1, 0.66, 640, items=16)], epochs=64)
    short = [accuracy("lla", 1e-3, 1, 0.69, 160, items=16), accuracy("softmax", 1e-3, 1, 0.57, 160, items=16)]
    results = trained_results(tmp_path / "state-tracking-16-epochs", short, epochs=16)
    said = trained.longer(Runs(results, ("items",), "test_accuracy", False))
    assert said == ["With 64 epochs instead of 16: N = 16, softmax 66.0 % (57.0 % here)."]
    alone = Results(tmp_path / "state-tracking")
    assert trained.state_tracking(results).summary.endswith("N = 16: LLA 69.0 %, softmax 57.0 %; a difference of +12.0 points.")
    assert trained.longer(Runs(alone, ("items",), "test_accuracy", False)) == []
    section = trained.state_tracking(alone)
    assert section.summary.endswith("N = 16: softmax 66.0 %. One model only.") and "LLA's" not in section.figures[0].found


def drawn(fig):
    fig.canvas.draw()
    renderer = fig.canvas.get_renderer()

    def inside(artist):
        box = artist.get_window_extent(renderer)
        return box.x0 >= fig.bbox.x0 - 1 and box.x1 <= fig.bbox.x1 + 1
    return renderer, inside


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_nothing_is_cut_off_where_there_are_few_panels(columns, narrow):
    fig, axes = style.figure(View(DARK, narrow), 1, columns, panel=(2.5, 2.1))
    names = [*LABELS.values()][:6]
    lines = [axes[0][0].plot([1, 2], label=name)[0] for name in names]
    title = axes[0][0].set_title("d = 1: squared bias at the boundary", fontsize=9) if columns == 1 else None
    style.legend_below(fig, lines, names, 6)
    _, inside = drawn(fig)
    assert inside(fig.legends[0]) and len(fig.legends) == 1
    assert title is None or inside(title)
    style.plt.close(fig)


@pytest.mark.parametrize("low, high", [(2e-4, 4e-3), (0.04, 0.23), (3e-4, 7e-3), (0.2, 0.9), (1.1, 1.9), (1e-7, 1e3)])
def test_labels_of_a_logarithmic_axis_stand_apart(low, high):
    for narrow, columns in ((False, 3), (True, 2)):
        fig, axes = style.figure(View(LIGHT, narrow), 1, columns, panel=(2.5, 2.1))
        axis = axes[0][0]
        axis.loglog([low, high], [low, high])
        style.sparse_ticks(axis.xaxis)
        renderer, _ = drawn(fig)
        boxes = [t.get_window_extent(renderer) for t in axis.get_xticklabels(which="both") if t.get_text() and t.get_visible()]
        boxes = sorted((b for b in boxes if axis.bbox.x0 - 1 <= (b.x0 + b.x1) / 2 <= axis.bbox.x1 + 1), key=lambda b: b.x0)
        assert len(boxes) >= (2 if high / low > 4 else 1)
        assert all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:])), [t.get_text() for t in axis.get_xticklabels()]
        style.plt.close(fig)


def test_every_command_on_a_line_of_its_own():
    assert page.made_by("lla <one>") == '<div class="commands"><code>lla &lt;one&gt;</code></div>'
    assert page.made_by("one\ntwo").count("<code>") == 2 and "details" not in page.made_by("one\ntwo")
    assert "<summary>5 commands</summary>" in page.made_by("a\nb\nc\nd\ne")


def test_noisy_queries_of_one_dimension_are_said_once(tmp_path):
    for dims, times in ((8,), 1), ((8, 16), 1):
        folder = tmp_path / f"{len(dims)}" / "regression-queries"
        folder.mkdir(parents=True)
        records = [{"d": d, "segment": 256, "strict": strict, "model": model, "query_noise": noise, "mse_mean": 1.0 + noise, "ridge": 0.1, "sequences": 2}
                   for d in dims for strict in (False, True) for model in ("lla", "softmax", "mesanet") for noise in (0, 0.1, 1)]
        (folder / "results.json").write_text(json.dumps({"schema_version": 1, "task": "regression", "settings": {}, "machine": {}, "command": "made", "records": records}))
        section = studies.queries(Results(folder))
        assert section.summary.count("(d = 8)") == times and ("high dimension" in section.summary) == (len(dims) > 1)
        assert section.figures[0].found.count("d = 8, as in the paper") == times


def test_the_verdict_follows_the_numbers():
    """"Far ahead" stood there whatever had been measured, at 1.5 times as at a hundred."""
    assert [regression.standing(r) for r in (177, 1.48, 1.0, 0.5)] == ["far ahead", "ahead", "level", "behind"]
