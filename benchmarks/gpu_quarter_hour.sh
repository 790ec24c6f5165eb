#!/usr/bin/env bash
# The most of a few minutes on a lent GPU without a network: kernels and their tests, an ExLM and its MLM, timed steps.
#
#   python benchmarks/quarter_hour.py pack KIND ...          # beforehand, here; then send the tree with .gpu/
#   bash benchmarks/gpu_quarter_hour.sh KIND OUT [SECONDS]   # there
#   python benchmarks/quarter_hour.py unpack OUT runs        # here, with what came back
#
# KIND is smiles or text, OUT gets at most eight files, SECONDS (540) are all there is. The stages run in order of
# worth; each writes what it has when it ends, and one that fails or is cut off does not stop those after it. What is
# installed, compiled and unpacked stays in WORK for another call. All below can be set in the environment.
set -u
cd "$(dirname "$0")/.."
KIND=$1 OUT=$(realpath -m "$2") LIMIT=${3:-540}

WORK=${WORK:-/tmp/exlm-gpu}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
RECIPE=${RECIPE:-$KIND-medium}
TESTS_S=${TESTS_S:-90}   # for `pytest -m gpu`; 0: not again
EXLM_S=${EXLM_S:-200}    # for the ExLM, its start and validations included
TWIN_S=${TWIN_S:-150}    # for its MLM; 0: none
PARALLEL=${PARALLEL:-0}  # 1: both at the same time, for the same EXLM_S
BENCH=${BENCH:-1}        # 0: no timed steps of text-base afterwards
PROBE_STEPS=${PROBE_STEPS:-80}
BATCH_TOKENS=${BATCH_TOKENS:-65536}
LR=${LR:-2e-3}           # the recipes' 1e-3 is for 16,384 tokens; times the root of four
# 65,536 tokens are enough work to hide the launches of kernels at 5 M parameters, and twice as many would halve the
# steps. A step is one microbatch, a few GB. The rest spares the host: few rows in the log, one validation a quarter.
SETTINGS="device=$DEVICE train.batch_sequences=null train.batch_tokens=$BATCH_TOKENS optim.lr=$LR
    train.microbatch_tokens=$((4 * BATCH_TOKENS)) train.log_every_steps=20 train.validation_sequences=2048"
MORE=${MORE:-}           # further KEY=VALUE, which win

mkdir -p "$OUT" "$WORK"
LOG=$OUT/log.txt
DATA=$WORK/data-$KIND
export PYTHONPATH=$WORK/site:$PWD/src EXLM_CACHE_DIR=$WORK/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=1
say() { printf '== %4d s: %s\n' "$SECONDS" "$*" | tee -a "$LOG"; }

# stage NAME SECONDS COMMAND...: SIGTERM at the limit, upon which a training saves; its output goes to the log
stage() {
    local name=$1 limit=$2 status
    shift 2
    say "$name, at most $limit s"
    timeout --kill-after=30 "$limit" "$@" >"$WORK/$name.log" 2>&1
    status=$?
    { echo "---- $name"; cat "$WORK/$name.log"; } >>"$LOG"
    tail -n "${TAIL:-6}" "$WORK/$name.log"
    say "$name ended with $status"
    return $status
}

train() {
    local name=$1 seconds=$2 settings=()
    shift 2
    [ "$seconds" -le $((LIMIT - SECONDS - 25)) ] || seconds=$((LIMIT - SECONDS - 25))
    for setting in $SETTINGS $MORE; do settings+=(--set "$setting"); done
    rm -rf "$WORK/runs/$name"
    stage "train-$name" $((seconds + 20)) "$PYTHON" benchmarks/quarter_hour.py train "$name" --data "$DATA" \
        --seconds "$seconds" --run "$WORK/runs/$name" --out "$OUT" --probe-steps "$PROBE_STEPS" "${settings[@]}" "$@"
}

bench() {
    local name=$1 table=$2 lines
    shift 2
    [ $((LIMIT - SECONDS)) -ge 45 ] || { say "$name: no time left"; return; }
    lines=$(wc -l <"benchmarks/results/$table.csv")
    TAIL=40 stage "$name" $((LIMIT - SECONDS - 15)) "$PYTHON" benchmarks/bench_train_step.py --recipes "${BENCH_RECIPE:-text-base}" \
        --device "$DEVICE" --batch-share "${BENCH_SHARE:-0.0625}" --steps 5 --warmup 2 "$@"
    { echo "$name"; tail -n +$((lines + 1)) "benchmarks/results/$table.csv"; } >>"$OUT/rows.csv"
}

say "$KIND; $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -n 1)"
if [ ! -f "$WORK/installed" ]; then
    stage wheels 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$WORK/site" .gpu/wheels/*.whl && touch "$WORK/installed"
fi
EXLM_COMMIT=$("$PYTHON" -c 'import json, sys; print((json.load(open(sys.argv[1]))["commit"] or "")[:8])' \
    ".gpu/$KIND/packed.json") && export EXLM_COMMIT
rm -rf "$DATA"
"$PYTHON" benchmarks/quarter_hour.py lay-out "$KIND" --data "$DATA" >"$WORK/lay-out.log" 2>&1 &
laying=$!
stage build "${BUILD_S:-120}" "$PYTHON" -m exlm_cli doctor --build
if [ "$TESTS_S" -gt 0 ]; then
    TAIL=15 stage tests "$TESTS_S" "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider \
        $(grep -rl --include='test_*.py' 'mark\.gpu' tests)
fi
wait $laying || { say "lay-out failed"; tail -n 5 "$WORK/lay-out.log" | tee -a "$LOG"; }

if [ "$PARALLEL" = 1 ] && [ "$TWIN_S" -gt 0 ]; then
    rm -rf "$WORK/gate"
    train "$RECIPE-mlm" "$EXLM_S" --gate "$WORK/gate" --peers 2 &
    train "$RECIPE" "$EXLM_S" --gate "$WORK/gate" --peers 2
    wait $!
else
    train "$RECIPE" "$EXLM_S"
    [ "$TWIN_S" -eq 0 ] || train "$RECIPE-mlm" "$TWIN_S"
fi

if [ "$BENCH" = 1 ]; then
    bench steps train_step
    bench compiled train_step --set train.compile=true
    bench against-hf against_hf --against hf
fi
say "done"
ls -l "$OUT"
