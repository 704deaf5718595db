#!/usr/bin/env python3
"""Puts the results of one trained experiment, made in several folders, into one.

    scripts/merge_results.py --out experiments/trained/results/recall FOLDER ...
    scripts/merge_results.py --shared ...       # marks the runs: something else used the device, their seconds say nothing

A queue cut into parts by --model or --length, on several machines or side by side, leaves a results.json in each part's
folder. What OUT has already stays; a run that is there twice is taken once, from the folder named first. Refused where
options, models' settings or training differ in anything but the lists of settings, models, learning rates and seeds."""
import argparse
import json
import re
import sys
from pathlib import Path

LISTS = ("learning_rates", "seeds")  # of "training"
FOLDERS = ("standard_library", "site_packages")  # of "corpus"
ORDER = ("lla", "softmax", "mamba2", "gla", "hyena", "gated_deltanet", "mesanet", "linear", "parallax")
RUN = ("task", "model", "length", "segment", "pairs", "items", "budget", "examples", "learning_rate", "seed")


def comparable(settings):
    """What must be the same in all folders."""
    rest = {k: v for k, v in settings.items() if k not in ("models", "settings")}
    rest["training"] = {k: v for k, v in settings["training"].items() if k not in (*LISTS, "beyond_edge")}
    if "corpus" in rest and not rest["corpus"].get("any"):  # the manifest sees to it that the text is the same anywhere
        rest["corpus"] = {k: v for k, v in rest["corpus"].items() if k not in FOLDERS}
    return rest


def bare(setting):
    """A setting without the models, rates and seeds that a part of the queue ran of it: the records tell."""
    training = {k: v for k, v in setting.get("training", {}).items() if k not in LISTS}
    return {**{k: v for k, v in setting.items() if k not in ("models", "training")}, **({"training": training} if training else {})}


def merged_settings(a, b):
    out = json.loads(json.dumps(a))
    out["models"] = [m for m in ORDER if m in a["models"] or m in b["models"]]
    out["settings"] = []
    for setting in map(bare, a["settings"] + b["settings"]):
        if setting not in out["settings"]:
            out["settings"].append(setting)
    out["settings"].sort(key=lambda s: [s.get(k, 0) for k in ("length", "segment", "pairs", "items")])
    for name in LISTS:
        out["training"][name] = sorted({*a["training"][name], *b["training"][name]})
    return out


def said(commands):
    """Commands without where they wrote to and when they were cut; those that differ in the model only as one."""
    models = {}
    for command in commands:
        rest = re.sub(rf" --(out|threads|seconds) \S+| --set corpus\.({'|'.join(FOLDERS)})=\S+", "", command)
        models.setdefault(re.sub(r" --model \S+", "", rest), []).extend(re.findall(r" --model \S+", rest))
    return [re.sub(r"^(\S+ \S+ \S+)", lambda m: m[1] + "".join(dict.fromkeys(names)), rest) for rest, names in models.items()]


def merge(files):
    """One file's content out of several, the first first."""
    result = None
    seen = set()
    for name, file in files:
        if result is None:
            result = {**file, "records": [], "settings": merged_settings(file["settings"], file["settings"])}
            if "corpus" in file["settings"]:
                result["settings"]["corpus"] = comparable(file["settings"])["corpus"]
            commands = file["command"].split("\n")
        else:
            for what in ("schema_version", "task"):
                if file[what] != result[what]:
                    raise ValueError(f"{name}: {what} is {file[what]!r}, not {result[what]!r}")
            if file["machine"].get("gpu") != result["machine"].get("gpu"):
                raise ValueError(f"{name} was made on {file['machine'].get('gpu')}, not on {result['machine'].get('gpu')}")
            ours, theirs = comparable(result["settings"]), comparable(file["settings"])
            different = [k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k)]
            if different:
                raise ValueError(f"{name} was made with other {', '.join(sorted(different))}")
            result["settings"] = merged_settings(result["settings"], file["settings"])
            commands += file["command"].split("\n")
        for record in file["records"]:
            run = tuple(record.get(k) for k in RUN)
            if run not in seen:
                seen.add(run)
                result["records"].append(record)
    result["command"] = "\n".join(said(commands))
    result["records"].sort(key=lambda r: [r.get(k) or 0 for k in ("length", "segment", "pairs", "items")] + [ORDER.index(r["model"]), r["learning_rate"], r["seed"]])
    return result


def write(path, result):
    """As the trainer writes it: a record a line."""
    head = {k: v for k, v in result.items() if k not in ("records", "summary")}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items())
    records = ",\n".join(json.dumps(r, ensure_ascii=False, separators=(",", ":")) for r in result["records"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + lines + ',\n"records": [\n' + records + "\n]}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shared", action="store_true", help="mark the folders' runs: their device was shared")
    args = parser.parse_args()
    files = []
    for folder in ([args.out] if (args.out / "results.json").exists() else []) + args.folders:
        file = json.loads((folder / "results.json").read_text())
        if args.shared and folder != args.out:
            for record in file["records"]:
                record["shared_device"] = True
        files.append((folder, file))
    try:
        result = merge(files)
    except ValueError as error:
        sys.exit(f"merge_results.py: {error}")
    write(args.out / "results.json", result)
    print(f"{args.out}: {len(result['records'])} runs")


if __name__ == "__main__":
    main()
