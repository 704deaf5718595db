"""Results of one task, and small helpers to pick from them."""
import json
import math
import pathlib

SCHEMA_VERSION = 1


class Damaged(Exception):
    """A results file that does not hold what its task writes, as one sentence that names it."""


def read_json(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also bytes that are not UTF-8
        raise Damaged(f"{path} is not complete JSON: {error}") from None


class Results:
    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.path = self.directory / "results.json"
        content = read_json(self.path)
        for name in ("schema_version", "task", "settings", "machine", "command", "records"):
            if not isinstance(content, dict) or name not in content:
                raise Damaged(f'{self.path} has no "{name}"')
        if content["schema_version"] != SCHEMA_VERSION:
            raise Damaged(f"{self.path} has schema version {content['schema_version']}, not {SCHEMA_VERSION}")
        self.task = content["task"]
        self.settings = content["settings"]
        self.machine = content["machine"]
        self.command = content["command"]
        self.records = content["records"]
        self.summary = content.get("summary", {})

    @property
    def variant(self):
        """What the folder's name adds to the task's: "softplus" in language-model-softplus, "" where it adds nothing."""
        name = self.directory.resolve().name
        return name[len(self.task) + 1:] if name.startswith(self.task + "-") else ""

    def anchor(self, name):
        """A name for the page with the variant where there is one: a page may hold several of a task."""
        return f"{name}-{self.variant}" if self.variant else name

    def titled(self, title):
        return f"{title}: {self.variant.replace('-', ' ')}" if self.variant else title

    def timing(self):
        path = self.directory / "timing.json"
        return read_json(path) if path.exists() else None

    def select(self, **wanted):
        return [r for r in self.records if all(r.get(name) == value for name, value in wanted.items())]

    def values(self, name, **wanted):
        """The distinct values of a field, in order."""
        return sorted({r[name] for r in self.select(**wanted)})


def plain(results):
    """The task's own results beside a variant's: what the variant is compared with."""
    folder = results.directory.resolve().parent / results.task
    return Results(folder) if results.variant and (folder / "results.json").is_file() else None


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def number(x):
    """Three significant digits, with thousands separated and no exponent where none is needed."""
    if x == 0:
        return "0"
    if 1e-3 <= abs(x) < 1e6:
        digits = max(0, 2 - math.floor(math.log10(abs(x))))
        return f"{x:,.{digits}f}"
    mantissa, exponent = f"{x:.1e}".split("e")
    return f"{mantissa}·10<sup>{int(exponent)}</sup>"
