#!/usr/bin/env bash
# What happens to the lla command from outside: numbers that are none, damaged files, two runs in one folder, full disks and
# closed pipes, links and modules somebody left in a folder.   faults.sh LLA SOURCE_DIR
set -uo pipefail
lla=$1 source=$2
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch" || exit 1
failures=0
small="reproduce regression --d 8 --segment 8 --sequences 2"

fail() {
  printf '%s\n\n' "$*"
  failures=$((failures + 1))
}

# answers CODE PATTERN command...   Returns CODE with PATTERN on either stream, and nothing a program says to programmers.
answers() {
  local code=$1 pattern=$2 output status
  shift 2
  output=$("$@" 2>&1 </dev/null)
  status=$?
  [ $status -eq "$code" ] && grep -qE -- "$pattern" <<<"$output" || fail "$* returned $status, expected $code and /$pattern/: $output"
  if grep -qE 'Traceback|json\.exception|terminate called|what\(\)' <<<"$output"; then fail "$* said: $output"; fi
}

# ---- numbers: refused at once, nothing made ----------------------------------------------------------------------------

for bad in nan NaN inf -inf -1 "" abc 1x 1e400 0x10 " 1" 1e13; do
  answers 2 "^--tolerance: " "$lla" reproduce solver --tolerance "$bad" --out made
done
for bad in nan -1 ""; do
  for option in "regression --ridge" "regression --mesa-ridge" "regression --scale" "regression --noise" "rates --noise" \
    "rates --bandwidth" "memory --ridge" "memory --limit" "solver --ridge" "solver --tolerance"; do
    read -r task name <<<"$option"
    answers 2 "^--?[a-z-]+: " "$lla" reproduce "$task" --quick "$name" "$bad" --out made
  done
  for option in --ridge --seconds --tolerance; do answers 2 "^--?[a-z-]+: " "$lla" bench forward --length 64 --dim 8 "$option" "$bad"; done
done
for bad in nan -1 "" 1.5 1e3 99999999999999999999 abc; do
  answers 2 "^--sequences: " "$lla" reproduce regression --sequences "$bad" --out made
done
for bad in nan -1 ""; do
  for option in "regression --sequences" "regression --seed" "regression --d" "regression --segment" "rates --d" "memory --d" \
    "solver --d" "memory --seed"; do
    read -r task name <<<"$option"
    answers 2 "^--?[a-z-]+: " "$lla" reproduce "$task" --quick "$name" "$bad" --out made
  done
  for option in --length --dim --batch --heads --threads; do
    answers 2 "^--?[a-z-]+: " "$lla" bench forward "$option" "$bad"
  done
done
for zero in "regression --mesa-ridge" "regression --scale" "rates --noise" "rates --bandwidth" "memory --limit" "solver --tolerance"; do
  read -r task name <<<"$zero"
  answers 2 "above 0" "$lla" reproduce "$task" --quick "$name" 0 --out made
done
for option in "reproduce regression --out" "check --json" "bench forward --json" "report"; do
  # shellcheck disable=SC2086
  answers 2 ": is empty" "$lla" $option ""
done
answers 2 'this build has no "none"' "$lla" reproduce regression --quick --implementation none --out made
[ ! -e made ] || fail "a refused number or name left a folder"
for bad in 1e3 abc -2 2.5; do
  answers 2 'LLA_NUM_THREADS: "' env LLA_NUM_THREADS="$bad" "$lla" info
  answers 2 'LLA_NUM_THREADS: "' env LLA_NUM_THREADS="$bad" "$lla" $small --out made
done
answers 0 'lla [0-9]' env LLA_NUM_THREADS=abc "$lla" --version
[ ! -e made ] || fail "a refused number of threads left a folder"

# ---- two runs in one folder --------------------------------------------------------------------------------------------

"$lla" reproduce regression --d 8 --segment 8 --segment 16 --sequences 3000 --out shared >/dev/null 2>&1 &
first=$!
for _ in $(seq 200); do
  [ -s shared/.lock ] && break
  sleep 0.05
done
answers 1 "another run \(process $first\) is at work in shared" "$lla" $small --out shared
kill -9 $first
wait $first 2>/dev/null
answers 0 'Results: ' "$lla" $small --out shared # the killed one's lock went with it

# ---- damaged files -----------------------------------------------------------------------------------------------------

"$lla" $small --out good >/dev/null || fail "a small run failed"
bend() { # FOLDER python-statement about j, the contents of its results.json
  rm -rf "$1" && cp -r good "$1"
  python3 -c "import json; p='$1/results.json'; j=json.load(open(p)); $2; json.dump(j, open(p, 'w'))"
}
bend bent 'j["records"].append({})'
answers 1 'bent/results.json is damaged: record 11 has no "d"' "$lla" $small --out bent
answers 1 'bent/results.json is damaged: record 11 has no "d"' "$lla" report bent
bend bent 'j["records"][2]["mse"].pop()'
answers 1 'bent/results.json is damaged: "mse" of record 3' "$lla" $small --out bent
bend bent 'j["records"][2]["mse"][5] = float("nan")'
answers 1 'bent/results.json is not complete JSON' "$lla" report bent
bend bent 'j["machine"] = {}'
answers 1 'lla report: .*bent/results.json is damaged: there is no field .processor' "$lla" report bent
bend bent 'j["task"] = "weather"'
answers 1 'bent/results.json has the task "weather"' "$lla" report bent
printf '{"threads": 2, ' >good/timing.json
bend bent 'pass'
answers 1 'bent/timing.json is not complete JSON' "$lla" report bent
long="reproduce regression --d 8 --segment 8 --sequences 1000000 --out counted"
"$lla" $long >/dev/null 2>&1 &
stopped=$!
for _ in $(seq 100); do
  [ -d counted/partial ] && break
  sleep 0.05
done
sleep 0.5
kill -TERM $stopped # it writes a checkpoint and ends
wait $stopped
for count in 1000001 -1 1.5 '"many"'; do
  python3 -c "import glob, json, sys; p, = glob.glob('counted/partial/*.json'); j = json.load(open(p)); j['sequences_done'] = json.loads(sys.argv[1]); json.dump(j, open(p, 'w'))" "$count" \
    || fail "a stopped run left no checkpoint"
  answers 1 "has done $count of 1000000 sequences" timeout 20 "$lla" $long
done
answers 2 'not valid UTF-8' "$lla" $small --out "$(printf 'bad\xff')"
[ -z "$(find . -maxdepth 1 -name 'bad*')" ] || fail "a name that was refused left a folder"

# Saved inputs: cut short, with sizes and types that do not fit, options that are no numbers, random bytes.
python3 - "$lla" <<'PYTHON' || fail "check --replay was ended by a damaged file"
import random, struct, subprocess, sys

def array(name, size, values, dtype=1):
    head = struct.pack("<I", len(name)) + name.encode() + struct.pack("<II", dtype, len(size))
    return head + struct.pack(f"<{len(size)}q", *size) + struct.pack(f"<{len(values)}f", *values)

def call(**change):
    random.seed(1)
    shapes = dict(q=(5, 4), k=(6, 4), v=(6, 3), ridge=(), grad_o=(5, 3), options=(7,))
    values = {name: [random.random() for _ in range(eval("*".join(map(str, s)) or "1"))] for name, s in shapes.items()}
    values["options"] = [0.5, 1, -1, -1, 1e-3, 0, 0]
    values.update(change)
    return b"LLACASE1" + b"".join(array(name, s, values[name]) for name, s in shapes.items())

good = call()
nan, inf = float("nan"), float("inf")
files = [good[:n] for n in (0, 5, 8, 12, 30, 60, len(good) - 1)] + [good + b"x"]
for at in range(7):
    for value in (nan, inf, -inf, 1e30, -7.0):
        options = [0.5, 1, -1, -1, 1e-3, 0, 0]
        options[at] = value
        files.append(call(options=options))
files += [call(ridge=[value]) for value in (nan, -1.0, inf, 0.0)] + [call(q=[nan] * 20), call(k=[3e38] * 24)]
random.seed(2)
for _ in range(40):
    bent = bytearray(good)
    bent[random.randrange(8, 200)] = random.choice((0, 1, 2, 127, 128, 255))
    files.append(bytes(bent))
wrong = 0
for i, content in enumerate(files):
    open("bent.case", "wb").write(content)
    run = subprocess.run([sys.argv[1], "check", "--device", "cpu", "--replay", "bent.case"], capture_output=True, timeout=60)
    if run.returncode not in (0, 1, 2) or b"terminate called" in run.stderr:
        print(i, run.returncode, run.stderr[-200:])
        wrong += 1
for path in (".", "/dev/null", "/dev/zero"):
    run = subprocess.run([sys.argv[1], "check", "--replay", path], capture_output=True, timeout=60)
    if run.returncode not in (1, 2):
        print(path, run.returncode, run.stderr[-200:])
        wrong += 1
sys.exit(wrong > 0)
PYTHON

# ---- output that does not arrive ---------------------------------------------------------------------------------------

for command in "--version" "info" "info --json" "--help" "check --quick --filter f64"; do
  # shellcheck disable=SC2086
  "$lla" $command >/dev/full 2>errors && fail "$command >/dev/full returned 0"
  grep -q 'could not be written\|No space left' errors || fail "$command >/dev/full said: $(cat errors)"
  # shellcheck disable=SC2086
  "$lla" $command >&- 2>errors && fail "$command with a closed output returned 0"
  python3 - "$lla" $command <<'PYTHON' || fail "$command into a closed pipe returned 0"
import os, signal, subprocess, sys
read, write = os.pipe()
os.close(read)
ignoring = subprocess.run(sys.argv[1:], stdout=write, stderr=subprocess.DEVNULL, restore_signals=False)  # SIGPIPE ignored
usual = subprocess.run(sys.argv[1:], stdout=write, stderr=subprocess.DEVNULL)
sys.exit(ignoring.returncode == 0 or usual.returncode == 0)
PYTHON
done
# The results keep to themselves: no stream's number was theirs.
"$lla" $small --out closed >&- 2>/dev/null
cmp -s closed/results.csv good/results.csv || fail "results written with a closed output differ"
"$lla" $small --out closed2 >&- 2>&- <&-
cmp -s closed2/results.csv good/results.csv || fail "results written with everything closed differ"

# ---- what lies about in a folder ---------------------------------------------------------------------------------------

mkdir trap links
echo precious >victim
for name in .probe.tmp .probe results.json.tmp results.csv.tmp; do ln -s ../victim "links/$name"; done
"$lla" $small --out links >/dev/null || fail "a run among links failed"
[ "$(cat victim)" = precious ] || fail "a link was followed"

rm good/timing.json
for module in matplotlib numpy json runpy lla_report sitecustomize usercustomize; do
  echo "open('$scratch/ran-$module', 'w')" >"trap/$module.py"
done
mkdir -p trap/.venv/bin
printf '#!/bin/sh\ntouch %s/ran-venv\nexit 1\n' "$scratch" >trap/.venv/bin/python
chmod +x trap/.venv/bin/python
printf 'backend: module://matplotlib_trap\nfont.size: not a number\n' >trap/matplotlibrc
cp -r good trap/good
python=${LLA_PYTHON:-$source/.venv/bin/python}
[ -x "$python" ] || python=python3
if "$python" -c 'import matplotlib' 2>/dev/null; then
  cd trap || exit 1
  said=$(PYTHONPATH=. LLA_PYTHON=$python "$lla" report good 2>&1) || fail "report among traps failed: $said"
  grep -qi matplotlibrc <<<"$said" && fail "matplotlib read the folder's settings: $said"
  answers 1 'LLA_PYTHON is "no-such-python"' env LLA_PYTHON=no-such-python "$lla" report good
  env -u LLA_PYTHON "$lla" report good >/dev/null 2>&1
  cd ..
else
  echo "no matplotlib in $python: the page was not tried"
fi
ran=$(find . -maxdepth 1 -name 'ran-*')
[ -z "$ran" ] || fail "report ran what lay in the folder: $ran"

exit $((failures > 0))
