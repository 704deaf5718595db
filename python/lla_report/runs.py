"""Runs of trained models: which learning rate counts, what a setting came to, and how far its runs got."""
import dataclasses
import statistics

from .page import table
from .records import number
from .style import LABELS

ORDER = ("lla", "softmax", "mamba2", "gla", "hyena", "gated_deltanet", "mesanet", "linear", "parallax")
RECORD = {"task", "model", "examples", "learning_rate", "seed"}


@dataclasses.dataclass
class Score:
    """Of one model in one setting: the mean over seeds at the learning rate with the best validation score."""
    mean: float
    low: float
    high: float
    seeds: int
    learning_rate: float
    on_test: float  # the best epoch and rate by the test set itself, the paper's choice


class Runs:
    """The records of one task. `axes`: the fields that make a setting, outermost first."""

    def __init__(self, results, axes, score, lower_is_better):
        self.results, self.axes, self.field, self.lower = results, axes, score, lower_is_better
        self.records = results.records
        self.models = [m for m in ORDER if any(r["model"] == m for r in self.records)]
        self.settings = sorted({tuple(r[a] for a in axes) for r in self.records})

    def of(self, setting, model, **more):
        return [r for r in self.records if r["model"] == model and tuple(r[a] for a in self.axes) == setting
                and all(r[k] == v for k, v in more.items())]

    def better(self, a, b):
        return a < b if self.lower else a > b

    def best_of(self, values):
        return min(values) if self.lower else max(values)

    def rate(self, setting, model):
        """The learning rate with the best validation score of any seed, of equal ones that with most seeds; None where every
        run failed. Any seed: where one alone learns at all, the others' rates say nothing."""
        records = [r for r in self.of(setting, model) if r["validation_best"] is not None]
        if not records:
            return None
        best = self.best_of(r["validation_best"] for r in records)
        equal = [r["learning_rate"] for r in records if r["validation_best"] == best]
        return max(equal, key=lambda rate: sum(r["learning_rate"] == rate for r in records))

    def first_seed(self, setting, model):
        records = self.of(setting, model)
        first = min((r["seed"] for r in records), default=None)
        return [r for r in records if r["seed"] == first]

    def score(self, setting, model):
        rate = self.rate(setting, model)
        if rate is None:
            return None
        values = [r[self.field] for r in self.of(setting, model, learning_rate=rate) if r[self.field] is not None]
        on_test = [r.get(self.field + "_chosen_on_test") for r in self.of(setting, model)]
        on_test = [v for v in on_test if v is not None]
        return Score(statistics.fmean(values), min(values), max(values), len(values), rate, self.best_of(on_test)) if values else None

    def winner(self, setting):
        """The models from best to worst, with their scores."""
        scored = [(m, self.score(setting, m)) for m in self.models]
        return sorted(((m, s) for m, s in scored if s), key=lambda pair: pair[1].mean if self.lower else -pair[1].mean)

    def wins(self, model):
        """(settings in which a model is first, settings it was run in with another)."""
        ranked = [self.winner(s) for s in self.settings]
        ranked = [r for r in ranked if len(r) > 1 and any(m == model for m, _ in r)]
        return sum(r[0][0] == model for r in ranked), len(ranked)

    def mean_only(self, model):
        """Settings where `model` is first in the mean, but a seed of another model is ahead of one of its own; each with those models."""
        found = []
        for setting in self.settings:
            ranked = self.winner(setting)
            if len(ranked) > 1 and ranked[0][0] == model:
                worst = ranked[0][1].high if self.lower else ranked[0][1].low
                others = [m for m, s in ranked[1:] if self.better(self.best_of((s.low, s.high)), worst)]
                if others:
                    found.append((setting, others))
        return found

    def not_run(self, words):
        """Models missing in some settings, as a sentence; `words` names a setting."""
        missing = {LABELS[m]: [words.format(*s) for s in self.settings if not self.of(s, m)] for m in self.models}
        listed = [f"{model} ({'; '.join(settings)})" for model, settings in missing.items() if settings]
        return ["Not run: " + ", ".join(listed) + "."] if listed else []

    def score_table(self, names, caption, show=number):
        rows = []
        for setting in self.settings:
            ranked = self.winner(setting)
            first = ranked[0][0] if ranked else None
            cells = []
            for m in self.models:
                s = self.score(setting, m)
                text = "" if s is None else show(s.mean) + (f" ({show(s.low)} to {show(s.high)})" if show(s.low) != show(s.high) else "")
                cells.append(f"<strong>{text}</strong>" if m == first else text)
            rows.append([str(v) for v in setting] + cells)
        return table(list(names) + [LABELS[m] for m in self.models], rows, caption)

    def rate_table(self, names, caption, show=number):
        """Every learning rate of every model, first seed: an untuned baseline convinces nobody."""
        rates = sorted({r["learning_rate"] for r in self.records})
        rows = []
        for setting in self.settings:
            for m in (m for m in self.models if self.of(setting, m)):
                cells = []
                for rate in rates:
                    records = self.of(setting, m, learning_rate=rate)
                    values = [r[self.field] for r in sorted(records, key=lambda r: r["seed"]) if r[self.field] is not None]
                    failed = [r for r in records if r["ended"] == "not finite"]
                    cells.append(show(values[0]) if values else "not finite" if failed else "")
                score = self.score(setting, m)
                rows.append([str(v) for v in setting] + [LABELS[m]] + cells + ["" if score is None else f"{score.seeds}",
                            "" if score is None else show(score.on_test)])
        return table(list(names) + ["model"] + [f"{r:g}" for r in rates] + ["seeds", "chosen on test"], rows, caption)

    def shortened(self, cap):
        """What a reader must know of runs that are shorter than the paper's, as a sentence."""
        epochs = [len(r["validation"]) for r in self.records]
        planned = sorted({self.results.settings["training"].get("epochs", 0)})
        flat = [r for r in self.records if r["flattened"]]
        capped = [r for r in self.records if r["ended"] == "cap"]
        failed = [r for r in self.records if r["ended"] == "not finite"]
        ran = f"{min(epochs)} to {max(epochs)}" if min(epochs) < max(epochs) else f"{max(epochs)}"
        text = f"{len(self.records)} runs, {ran} epochs of at most {planned[0]}; the paper's cap is {cap}. "
        if planned[0] < cap:
            text += "These runs are shortened: the learning rate's schedule ends with them. "
        text += (f"Of the {len(capped)} that ran to their end {sum(r in flat for r in capped)} had flattened (validation score changed by less than 1 % over the "
                 f"last fifth); {len(failed)} were stopped because they were no longer finite.")
        return text
