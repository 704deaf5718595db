"""Figures and the page of `lla report`: reads results.json files, writes PNG, SVG and one self-contained index.html."""
