"""Results of one task, and small helpers to pick from them."""
import json
import math
import pathlib

SCHEMA_VERSION = 1


class Results:
    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        with open(self.directory / "results.json", encoding="utf-8") as file:
            content = json.load(file)
        if content["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"{self.directory}/results.json has schema version {content['schema_version']}, not {SCHEMA_VERSION}")
        self.task = content["task"]
        self.settings = content["settings"]
        self.machine = content["machine"]
        self.command = content["command"]
        self.records = content["records"]
        self.summary = content.get("summary", {})

    def timing(self):
        path = self.directory / "timing.json"
        return json.loads(path.read_text()) if path.exists() else None

    def select(self, **wanted):
        return [r for r in self.records if all(r.get(name) == value for name, value in wanted.items())]

    def values(self, name, **wanted):
        """The distinct values of a field, in order."""
        return sorted({r[name] for r in self.select(**wanted)})


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
