"""scripts/merge_results.py: one results.json out of the folders of a queue that was cut into parts."""
import copy
import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

SETTINGS = {"task": "recall", "models": ["lla"], "settings": [{"length": 64, "pairs": 4}], "options": {"vocabulary": 32}, "model": {},
            "training": {"epochs": 2, "learning_rates": [0.001], "seeds": [1]}}


def results(model, length, rate, loss, **changes):
    settings = copy.deepcopy(SETTINGS)
    settings.update(models=[model], settings=[{"length": length, "pairs": 4}])
    settings["training"]["learning_rates"] = [rate]
    record = {"task": "recall", "model": model, "length": length, "pairs": 4, "examples": 10, "learning_rate": rate, "seed": 1, "loss": [loss]}
    file = {"schema_version": 1, "task": "recall", "settings": settings, "machine": {"processor": "a", "gpu": "H"},
            "command": f"lla reproduce recall --model {model} --seed 1 --seconds 9 --out x", "records": [record]}
    return {**file, **changes}


def merge(folder, *files, shared=()):
    for i, file in enumerate(files):
        (folder / str(i)).mkdir(exist_ok=True)
        (folder / str(i) / "results.json").write_text(json.dumps(file))
    command = [sys.executable, REPOSITORY / "scripts" / "merge_results.py", "--out", folder / "all", *shared, *(folder / str(i) for i in range(len(files)))]
    return subprocess.run(command, capture_output=True, text=True)


def test_parts_become_one(tmp_path):
    done = merge(tmp_path, results("softmax", 128, 5e-4, 2.0), results("lla", 64, 1e-3, 1.0), results("lla", 64, 1e-3, 7.0))
    assert done.returncode == 0 and "2 runs" in done.stdout, done.stderr
    got = json.loads((tmp_path / "all" / "results.json").read_text())
    assert [(r["model"], r["loss"]) for r in got["records"]] == [("lla", [1.0]), ("softmax", [2.0])]  # a run that is there twice: the first
    assert got["settings"]["models"] == ["lla", "softmax"] and got["settings"]["training"]["learning_rates"] == [5e-4, 1e-3]
    assert [s["length"] for s in got["settings"]["settings"]] == [64, 128]
    assert got["command"] == "lla reproduce recall --model softmax --model lla --seed 1"
    # What is there stays, what comes later is marked.
    assert merge(tmp_path, results("lla", 64, 1e-3, 9.0), results("gla", 64, 1e-3, 3.0), shared=["--shared"]).returncode == 0
    got = json.loads((tmp_path / "all" / "results.json").read_text())["records"]
    assert [(r["model"], r["loss"][0], r.get("shared_device")) for r in got] == [("lla", 1.0, None), ("gla", 3.0, True), ("softmax", 2.0, None)]


@pytest.mark.parametrize("change, said", [({"task": "in-context"}, "task is 'in-context'"), ({"machine": {"processor": "a"}}, "was made on None, not on H"),
                                          ({"settings": {**SETTINGS, "options": {"vocabulary": 64}}}, "was made with other options"),
                                          ({"settings": {**SETTINGS, "training": {**SETTINGS["training"], "epochs": 3}}}, "other training")])
def test_what_does_not_belong_together_is_refused(tmp_path, change, said):
    done = merge(tmp_path, results("softmax", 64, 1e-3, 2.0), results("lla", 64, 1e-3, 1.0, **change))
    assert done.returncode == 1 and said in done.stderr
    assert not (tmp_path / "all").exists()


def test_a_setting_is_there_once_whoever_ran_it(tmp_path):
    """A queue names models, rates and seeds with each setting; the merged file has them in its own lists and in the records."""
    files = [results("lla", 64, 1e-3, 1.0), results("softmax", 64, 5e-4, 1.0)]
    for file, seeds in zip(files, ([1], [2, 3])):
        training = {"learning_rates": file["settings"]["training"]["learning_rates"], "seeds": seeds, "examples": 10}
        file["settings"]["settings"] = [{"length": 64, "pairs": 4, "models": file["settings"]["models"], "training": training}]
        file["settings"]["training"]["seeds"] = seeds
    assert merge(tmp_path, *files).returncode == 0
    got = json.loads((tmp_path / "all" / "results.json").read_text())["settings"]
    assert got["settings"] == [{"length": 64, "pairs": 4, "training": {"examples": 10}}]
    assert (got["models"], got["training"]["learning_rates"], got["training"]["seeds"]) == (["lla", "softmax"], [5e-4, 1e-3], [1, 2, 3])


def text_results(rate, corpus, *words):
    file = results("softmax", 64, rate, 1.0)
    file["settings"]["corpus"] = corpus
    file["command"] += "".join(f" --set {word}" for word in words)
    return file


def test_the_same_text_read_from_elsewhere(tmp_path):
    """The manifest sees to it that the text is the same, wherever its files lie."""
    there = text_results(1e-3, {"test_bytes": 9, "standard_library": ["there/python"]}, 'corpus.standard_library=["there/python"]')
    done = merge(tmp_path, there, text_results(2e-3, {"test_bytes": 9}))
    assert done.returncode == 0 and "2 runs" in done.stdout, done.stderr
    got = json.loads((tmp_path / "all" / "results.json").read_text())
    assert got["settings"]["corpus"] == {"test_bytes": 9} and "there" not in got["command"]
    done = merge(tmp_path, text_results(5e-4, {"test_bytes": 8}))
    assert done.returncode == 1 and "was made with other corpus" in done.stderr
    # Without the manifest's check nobody knows: the folders count.
    unchecked = [text_results(rate, {"any": True, "standard_library": [folder]}) for rate, folder in ((1e-3, "a"), (2e-3, "b"))]
    (tmp_path / "unchecked").mkdir()
    done = merge(tmp_path / "unchecked", *unchecked)
    assert done.returncode == 1 and "was made with other corpus" in done.stderr
