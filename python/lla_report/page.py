"""The page: one HTML file, images and style inside, readable offline, on a phone, in light and dark."""
import base64
import dataclasses
import html

STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --text: #1d2430; --soft: #566070; --line: #d9dee6; --card: #f5f7fa; --accent: #0067b1; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #161b22; --text: #dfe5ee; --soft: #9aa6b6; --line: #323a46; --card: #1e252e; --accent: #58a9f0; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 17px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.2rem 1rem 4rem; }
h1 { font-size: clamp(1.5rem, 5vw, 2.1rem); line-height: 1.2; margin: 0.6rem 0 0.4rem; }
h2 { font-size: clamp(1.25rem, 4vw, 1.6rem); line-height: 1.25; margin: 3rem 0 0.5rem; padding-top: 1rem; border-top: 2px solid var(--line); }
h3 { font-size: 1.12rem; margin: 0 0 0.6rem; }
p { margin: 0.5rem 0; }
.lead { font-size: 1.08rem; }
.soft { color: var(--soft); font-size: 0.92rem; }
nav { margin: 1rem 0; display: flex; flex-wrap: wrap; gap: 0.4rem 1.2rem; }
a { color: var(--accent); }
figure { margin: 2rem 0; }
figure img { width: 100%; height: auto; display: block; }
dl { background: var(--card); border-radius: 8px; padding: 0.9rem 1.1rem; margin: 0.8rem 0 0; }
dt { font-weight: 600; font-size: 0.82rem; text-transform: uppercase; letter-spacing: 0.04em; color: var(--soft); }
dd { margin: 0.1rem 0 0.7rem; }
dd:last-child { margin-bottom: 0; }
code { font: 0.88em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.commands code { display: block; margin: 0.3rem 0; padding-left: 1.2rem; text-indent: -1.2rem; }
summary { cursor: pointer; color: var(--accent); }
ul { margin: 0.4rem 0; padding-left: 1.2rem; }
li { margin: 0.25rem 0; }
.scroll { overflow-x: auto; margin: 0 0 1.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; width: 100%; }
.caption { color: var(--soft); font-size: 0.9rem; margin: 1.5rem 0 0.4rem; }
th, td { padding: 0.28rem 0.7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
"""


@dataclasses.dataclass
class Figure:
    name: str
    images: dict  # {(theme name, narrow): png bytes}
    title: str
    claim: str    # what the paper says
    found: str    # what was found, HTML
    command: str  # a line each where there were several


@dataclasses.dataclass
class Section:
    anchor: str
    title: str
    intro: str    # HTML
    summary: str  # the one sentence a hurried reader takes away, HTML
    figures: list
    tables: list = dataclasses.field(default_factory=list)


def table(head, rows, caption):
    def line(cells, tag):
        return "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells) + "</tr>"

    # The caption stays where it is when a phone scrolls the table sideways.
    return (f'<p class="caption">{caption}</p><div class="scroll" tabindex="0"><table><thead>{line(head, "th")}</thead><tbody>'
            + "".join(line(r, "td") for r in rows) + "</tbody></table></div>")


def bullets(sentences):
    return "<ul>" + "".join(f"<li>{s}</li>" for s in sentences) + "</ul>"


def data_uri(image):
    return "data:image/png;base64," + base64.b64encode(image).decode()


def picture(figure):
    """The browser takes the first source that fits: narrow and dark, narrow, dark, otherwise the img."""
    narrow, dark = "(max-width: 640px)", "(prefers-color-scheme: dark)"
    sources = [(f"{narrow} and {dark}", ("dark", True)), (narrow, ("light", True)), (dark, ("dark", False))]
    tags = "".join(f'<source media="{media}" srcset="{data_uri(figure.images[key])}">' for media, key in sources)
    return (f'<picture>{tags}<img src="{data_uri(figure.images["light", False])}" '
            f'alt="{html.escape(figure.title, quote=True)}"></picture>')


def made_by(command):
    """Each command on a line of its own; many are folded away."""
    lines = command.split("\n")
    listed = '<div class="commands">' + "".join(f"<code>{html.escape(line)}</code>" for line in lines) + "</div>"
    return listed if len(lines) <= 3 else f"<details><summary>{len(lines)} commands</summary>{listed}</details>"


def render_figure(figure):
    return (f'<figure id="figure-{figure.name}"><h3>{html.escape(figure.title)}</h3>{picture(figure)}<figcaption><dl>'
            f"<dt>The paper claims</dt><dd>{html.escape(figure.claim)}</dd><dt>We found</dt><dd>{figure.found}</dd>"
            f"<dt>Made by</dt><dd>{made_by(figure.command)}</dd></dl></figcaption></figure>")


def render_section(section):
    return (f'<section id="{section.anchor}"><h2>{html.escape(section.title)}</h2><p>{section.intro}</p>'
            + "".join(map(render_figure, section.figures)) + "".join(section.tables) + "</section>")


def render(sections, machines):
    links = "".join(f'<a href="#{s.anchor}">{html.escape(s.title)}</a>' for s in sections) if len(sections) > 1 else ""
    made_on = "; ".join(sorted(machines))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Local Linear Attention: what we could reproduce</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Local Linear Attention: what we could reproduce</h1>
<p class="lead">Local Linear Attention (LLA) fits a small linear regression around every query instead of a weighted average. Under each
figure: what the paper claims, what we found when we ran it, and the command that made it.</p>
<p class="soft">Computed on {html.escape(made_on)}.</p>
<ul>{"".join(f"<li>{s.summary}</li>" for s in sections)}</ul>
{f"<nav>{links}</nav>" if links else ""}
{"".join(map(render_section, sections))}
</main>
</body>
</html>
"""
