"""Every relative link of the Markdown files leads to a file, and its anchor to a heading of that file; tables and bold
words are what renderers take for such.

    python3 tests/docs/links.py [ROOT]
"""
import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+(?:\([^()\s]*\))?)\)")


def text_of(path):
    """Without code: what looks like a link there is none."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(path):
    """Of the headings, as GitHub makes them: lower case, no punctuation, a dash for a space."""
    text = re.sub(r"^(```|~~~).*?^\1", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    found = {}
    for heading in re.findall(r"^#{1,6} +(.*?) *$", text, flags=re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        if count:
            found[f"{slug}-{count}"] = 1
    return found


def unrendered(text):
    """Lines whose stars or bars a reader would see: bold that ends between punctuation and a letter or a raised number,
    which closes nothing, and a table's rule that has been wrapped into prose."""
    for line in text.split("\n"):
        if "|---" in line and not re.match(r"\s*\|", line):
            yield line
        pieces = line.split("**")
        for before, after in zip(pieces[1::2], pieces[2::2]):
            if re.search(r"[^\w\s]$", before) and re.match(r"\w", after):
                yield line


def broken(root):
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"], cwd=root, capture_output=True,
                            text=True)
    # Outside a checkout (a source archive): what lies there.
    names = listed.stdout.split("\n") if listed.returncode == 0 else []
    files = [root / n for n in names if n] or [root / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + list(
        (root / "docs").rglob("*.md"))
    links = 0
    for path in (f for f in files if f.exists()):
        text = text_of(path)
        for line in unrendered(text):
            yield f"{path.relative_to(root)}: no renderer takes this for what it is meant to be: {line.strip()[:80]}"
        for target in LINK.findall(text):
            if re.match(r"[a-z]+:", target):
                continue
            links += 1
            name, _, anchor = target.partition("#")
            to = (path.parent / name).resolve() if name else path
            where = f"{path.relative_to(root)}: ({target})"
            if not to.exists():
                yield f"{where} leads nowhere"
            elif anchor and to.suffix == ".md" and anchor not in anchors(to):
                yield f"{where}: {to.name} has no heading #{anchor}"
    if links < 50:
        yield f"only {links} links were found under {root}"


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    problems = list(broken(root))
    print("\n".join(problems) or "every link leads somewhere, tables and bold words are such")
    sys.exit(bool(problems))
