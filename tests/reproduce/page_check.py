"""page_check.py DIR TASK...: parses DIR/index.html and decodes every image in it; checks the figures' files."""
import base64
import html.parser
import io
import pathlib
import sys
import xml.etree.ElementTree

import matplotlib.image

FIGURES = {
    "regression": ("regression_fit", "scaling"),
    "regression-ridges": ("ridges",),
    "regression-kernels": ("kernels",),
    "regression-queries": ("queries",),
    "interpolation": ("front-lla", "walk"),
    "capacity": ("capacity",),
    "lemmas": ("lemmas",),
    "iterations": ("iterations-16",),
    "rates": ("rates", "boundary"),
    "memory": ("memory",),
    "memory-decode": ("memory-decode",),
    "in-context": ("in_context", "in_context_curves"),
    "recall": ("recall", "recall_curves"),
    "recall-plateau": ("recall_plateau",),
    "state-tracking": ("state_tracking", "state_tracking_curves"),
    "state-tracking-short": ("state_tracking-short", "state_tracking_curves-short"),
    "language-model-softplus": ("language_model-softplus", "language_model_positions-softplus"),
    "language-model": ("language_model", "language_model_positions"),
    "solver": ("solver_iterations", "solver_forms", "solver_positions"),
}
VOID = {"meta", "link", "img", "source", "br"}


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.images, self.text, self.figures, self.ids, self.links = [], [], [], {}, set(), []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "figure":
            self.figures[attributes["id"]] = []
        if "id" in attributes:
            assert attributes["id"] not in self.ids, f"two elements are called {attributes['id']}"
            self.ids.add(attributes["id"])
        for name in ("src", "srcset", "href"):
            if name in attributes:
                self.links.append(attributes[name])
        if tag in ("img", "source"):
            self.images.append(attributes.get("src") or attributes["srcset"])
        if tag == "img":
            assert attributes["alt"], "an image without a description"

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.text.append(data)
        if "figure" in self.open:
            list(self.figures.values())[-1].append(data)


def decode(uri):
    head, data = uri.split(",", 1)
    assert head == "data:image/png;base64", head
    image = matplotlib.image.imread(io.BytesIO(base64.b64decode(data, validate=True)), format="png")
    assert min(image.shape[:2]) > 200, image.shape
    assert image[..., :3].std() > 0.01, "an empty picture"
    return image


def main():
    directory, tasks = pathlib.Path(sys.argv[1]), sys.argv[2:]
    content = (directory / "index.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(content)
    page.close()
    assert not page.open, f"not closed: {page.open}"
    for task in tasks:
        assert task in page.ids, f"no section {task}"
        for name in FIGURES[task]:
            text = "".join(page.figures[f"figure-{name}"])
            for part in ("The paper claims", "We found", "Made by", f"lla reproduce {task.split('-')[0]}"):
                assert part in text, f"{name}: no '{part}'"
            files = directory / task if (directory / task).is_dir() else directory
            matplotlib.image.imread(files / f"{name}.png")
            root = xml.etree.ElementTree.parse(files / f"{name}.svg").getroot()
            assert root.tag.endswith("svg") and len(list(root.iter())) > 50, f"{name}.svg is empty"
    if "regression" in tasks:
        assert "Strictly" in "".join(page.text), "the strict form is not spoken of"
    # Self-contained: nothing is fetched; links stay on the page.
    for link in page.links:
        assert link.startswith(("data:", "#")), f"the page refers to {link[:80]}"
        if link.startswith("#"):
            assert link[1:] in page.ids, f"{link} leads nowhere"
    assert "nan" not in [w.strip(".,;:").lower() for w in "".join(page.text).split()], "a NaN in the text"
    # Light and dark, wide and narrow, for every figure.
    assert len(page.images) == 4 * len(page.figures)
    for uri in page.images:
        decode(uri)
    print(f"{directory}: {len(page.figures)} figures, {len(page.images)} images decoded")


main()
