#!/usr/bin/env bash
# Loads a page of `lla report` in a real browser, phone and desktop, light and dark: every image must decode there, nothing may
# overflow sideways, and the console must stay silent. Leaves screenshots beside the page.
#   browser_test.sh PAGE
set -euo pipefail
page=$(realpath "$1")
browser=$(command -v chromium || command -v google-chrome) || { echo "no chromium: scripts/setup.sh browser installs it"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The page with a probe at its end that writes what it sees into the title.
python3 - "$page" "$work/probe.html" <<'PY'
import sys
text = open(sys.argv[1], encoding="utf-8").read()
probe = """<script>
window.addEventListener("load", () => {
  const images = [...document.images];
  const drawn = image => {  // drawing needs the decoded pixels
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 8;
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, 8, 8);
    return image.complete && image.naturalWidth > 200 && context.getImageData(0, 0, 8, 8).data.some(v => v > 0);
  };
  document.body.dataset.probe = JSON.stringify({images: images.length, decoded: images.filter(drawn).length,
    chosen: new Set(images.map(i => i.currentSrc)).size, narrow: matchMedia("(max-width: 640px)").matches,
    dark: matchMedia("(prefers-color-scheme: dark)").matches, overflow: document.documentElement.scrollWidth - innerWidth});
});
</script></body>"""
assert text.count("</body>") == 1
open(sys.argv[2], "w", encoding="utf-8").write(text.replace("</body>", probe))
PY

for view in "phone 400,2000 light" "phone 400,2000 dark" "desktop 1280,2000 light" "desktop 1280,2000 dark"; do
  read -r name size theme <<<"$view"
  scheme=$([ "$theme" = dark ] && echo 0 || echo 1)
  flags=(--headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" --window-size="$size"
         --blink-settings=preferredColorScheme="$scheme" --virtual-time-budget=10000)
  timeout 120 "$browser" "${flags[@]}" --enable-logging=stderr --v=0 --dump-dom "file://$work/probe.html" >"$work/dom" 2>"$work/log"
  if grep -E 'CONSOLE' "$work/log"; then echo "$name $theme: the console is not silent"; exit 1; fi
  python3 - "$work/dom" "$name" "$theme" <<'PY'
import html, json, re, sys
found = re.search(r'data-probe="([^"]*)"', open(sys.argv[1], encoding="utf-8").read())
assert found, "the page did not finish loading"
seen = json.loads(html.unescape(found.group(1)))
name, theme = sys.argv[2:]
assert seen["images"] > 0 and seen["decoded"] == seen["chosen"] == seen["images"], seen
assert seen["narrow"] == (name == "phone") and seen["dark"] == (theme == "dark"), seen
assert seen["overflow"] <= 0, f"{name}: {seen['overflow']} pixels too wide"
print(f"{name:8} {theme:6} {seen['images']} images decoded, console silent")
PY
  timeout 120 "$browser" "${flags[@]}" --screenshot="$(dirname "$page")/browser-$name-$theme.png" "file://$page" >/dev/null 2>&1
done
