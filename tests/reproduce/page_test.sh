#!/usr/bin/env bash
# From the command to the page: small runs of every task, `lla report`, then page_check.py on what came out; and the
# sentences `lla report` and `lla reproduce` answer bad input with.
#   page_test.sh LLA SOURCE_DIR WORK_DIR
set -euo pipefail
lla=$1 source=$2 work=$3
rm -rf "$work"
mkdir -p "$work"
cd "$work"

python=${LLA_PYTHON:-$source/.venv/bin/python}
[ -x "$python" ] || python=python3
"$python" -c 'import matplotlib, numpy' || { echo "no matplotlib in $python: scripts/setup.sh run sets it up"; exit 1; }
export LLA_PYTHON=$python

"$lla" reproduce regression --d 8 --d 16 --segment 256 --segment 1024 --sequences 4 --out out/regression >/dev/null
"$lla" reproduce rates --quick --d 1 --out out/rates >/dev/null
"$lla" reproduce memory --quick --d 16 --limit 0.25 --out out/memory >/dev/null
"$lla" reproduce memory --decode --quick --d 16 >/dev/null
"$lla" reproduce solver --quick --d 16 --out out/solver >/dev/null
"$lla" reproduce interpolation --out out/interpolation >/dev/null
"$lla" reproduce capacity --quick --d 16 --out out/capacity >/dev/null
"$lla" reproduce lemmas --quick --d 1 --out out/lemmas >/dev/null
"$lla" reproduce iterations --quick --d 16 --out out/iterations >/dev/null
for study in ridges kernels queries; do  # their own folders by default
  "$lla" reproduce regression --study $study --d 8 --d 16 --sequences 2 >/dev/null
done
# The trained experiments are a program of their own, which not every build has.
trained=""
if [ -x "$(dirname "$lla")/lla_train" ]; then
  trained="in-context recall state-tracking"
  # What would run and how long it would take, for a GPU that is elsewhere too; a subset; the config as it would be used.
  "$lla" reproduce recall --length 64 --model lla --device cuda --dry-run | grep -q "6 stacks; about"
  "$lla" reproduce in-context --paper --dry-run --device cuda | grep -q "96 stacks; about"
  "$lla" reproduce state-tracking --quick --print-config --set training.warmup=7 | grep -q '"warmup": 7'
  for task in $trained; do
    OMP_NUM_THREADS=1 LLA_NUM_THREADS=1 "$lla" reproduce $task --quick --model lla --model softmax --epochs 2 --set training.examples=640 \
      --set training.batch=32 --set training.validation=32 --set training.test=32 --device cpu --out out/$task >/dev/null 2>&1
  done
  # The plateau study at a size for this: one setting with two numbers of examples.
  OMP_NUM_THREADS=1 LLA_NUM_THREADS=1 "$lla" reproduce recall --quick --model lla --model gated_deltanet --epochs 2 --device cpu --out out/recall-plateau \
    --set 'settings=[{"length":16,"pairs":4,"training":{"examples":640}},{"length":16,"pairs":4,"training":{"examples":320}}]' \
    --set training.batch=32 --set training.validation=32 --set training.test=32 >/dev/null 2>&1
  trained="$trained recall-plateau"
  cp -r out/state-tracking out/state-tracking-short  # a variant of a task, on the same page
  trained="$trained state-tracking-short"
fi
for name in language-model language-model-softplus; do  # its text is too much to read here: the committed runs
  mkdir out/$name
  cp "$source/experiments/trained/results/$name/results.json" out/$name/
  trained="$trained $name"
done
page=$("$lla" report out)
[ "$page" = "$work/out/index.html" ] || { echo "report printed '$page'"; exit 1; }
"$python" "$source/tests/reproduce/page_check.py" out regression rates memory memory-decode solver interpolation capacity lemmas iterations \
  regression-ridges regression-kernels regression-queries $trained
"$lla" report out/regression >/dev/null
"$python" "$source/tests/reproduce/page_check.py" out/regression regression
cp out/regression/index.html first.html
"$lla" report out/regression >/dev/null
cmp first.html out/regression/index.html || { echo "the page is not the same when rebuilt"; exit 1; }

# Bad input: a sentence, an exit code that is not 0, nothing touched.
refused() {  # expected part of the message, then the command
  local expected=$1 message
  shift
  if message=$("$@" 2>&1); then echo "accepted: $*"; exit 1; fi
  case $message in *"$expected"*) ;; *) printf 'expected "%s" from: %s\ngot: %s\n' "$expected" "$*" "$message"; exit 1 ;; esac
}
cp -r out/regression kept
LLA_TRAIN=/nowhere refused "is not at /nowhere: build it with" "$lla" reproduce recall
refused "--d: 7 not in" "$lla" reproduce regression --d 7
refused "--segment: 48 not in" "$lla" reproduce regression --segment 48
refused "this run has" "$lla" reproduce regression --d 8 --segment 256 --sequences 4 --seed 2 --out out/regression
refused "--query-noise" "$lla" reproduce regression --query-noise 1.5
refused "--study" "$lla" reproduce regression --study everything
refused "measured on a GPU only" "$lla" reproduce memory --quick --batch 4 --out new
refused "for a GPU" "$lla" reproduce memory --quick --paper --out new
refused "excludes" "$lla" reproduce memory --quick --paper --d 64 --out new
refused "excludes" "$lla" reproduce regression --study kernels --ridge 1 --out new
refused "no NAME_q.npy" "$lla" reproduce iterations --layers out --out new
refused "is not a directory" "$lla" report nowhere
mkdir empty
refused "no results in empty" "$lla" report empty
refused "could not be made" "$lla" reproduce regression --quick --out /dev/null/x
cut -c1-1000 out/regression/results.json >kept/results.json
refused "is not complete JSON" "$lla" report kept
refused "is not complete JSON" "$lla" reproduce regression --d 8 --segment 256 --sequences 4 --out kept
"$lla" info | grep -q '^CUDA: none' && refused "--device cuda cannot be used" "$lla" reproduce regression --quick --device cuda --out new
[ ! -e new ] || { echo "a refused run left a directory"; exit 1; }
"$python" "$source/tests/reproduce/page_check.py" out/regression regression
