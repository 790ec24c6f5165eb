#!/usr/bin/env bash
# The most of 15 minutes on a lent GPU without a network: steps of text-base and its MLM, then a pair of equal FLOPs.
#
#   python benchmarks/quarter_hour.py pack KIND ...            # beforehand, here, for each KIND; .gpu/ travels along
#   bash benchmarks/gpu_quarter_hour.sh OUT SECONDS KIND...    # there, in one call or two
#   python benchmarks/quarter_hour.py unpack OUT runs          # here, with what came back
#
# KIND is text or smiles, in the order of worth; SECONDS are all that a call has, OUT gets at most eight files. The
# machine takes a minute or two to start and a call at most 600 s, so 15 minutes are two calls at once one after the
# other, while the machine is warm:
#
#   bash benchmarks/gpu_quarter_hour.sh "$OUT" 560 text           # .gpu/wheels and .gpu/text travel along
#   bash benchmarks/gpu_quarter_hour.sh "$OUT" 190 text smiles    # .gpu/smiles travels along
#
# Stages run in order of worth; one that fails or is cut off does not stop those after it, and each writes what it has.
# A later call repeats no stage, and goes on with a training that was cut off: WORK has all that is installed,
# compiled, unpacked and saved. A pair trains at the same time: two small models fill a GPU better than one. All below
# can be set in the environment.
set -u
cd "$(dirname "$0")/.."
OUT=$(realpath -m "$1") LIMIT=$2
shift 2

WORK=${WORK:-/tmp/exlm-gpu}
PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cuda}
BUILD_S=${BUILD_S:-120}          # limits of the stages before the models
STEPS_S=${STEPS_S:-60}
COMPILED_S=${COMPILED_S:-150}
TESTS_S=${TESTS_S:-60}           # for `pytest -m gpu`; 0: none
STEPS_RECIPE=${STEPS_RECIPE:-text-base}
STEPS_SHARE=${STEPS_SHARE:-0.0625}
PROBE_STEPS=${PROBE_STEPS:-80}
BATCH_TOKENS=${BATCH_TOKENS:-65536}
LR=${LR:-2e-3}                   # the recipes' 1e-3 is for 16,384 tokens; times the root of four
# 65,536 tokens are enough work to hide the launches of kernels at 5 M parameters, and twice as many would halve the
# steps. A step is one microbatch, a few GB. The rest spares the host: few rows in the log, one validation a quarter.
SETTINGS="device=$DEVICE train.batch_sequences=null train.batch_tokens=$BATCH_TOKENS optim.lr=$LR
    train.microbatch_tokens=$((4 * BATCH_TOKENS)) train.log_every_steps=20 train.validation_sequences=2048"
MORE=${MORE:-}                   # further KEY=VALUE, which win
SPARE_S=25                       # of a call, for what a training still does after its limit

mkdir -p "$OUT" "$WORK/attempted" "$WORK/whole"
LOG=$OUT/log.txt
export PYTHONPATH=$WORK/site:$PWD/src EXLM_CACHE_DIR=$WORK/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} HF_HUB_OFFLINE=1
say() { printf '== %4d s: %s\n' "$SECONDS" "$*" | tee -a "$LOG"; }

# stage NAME SECONDS COMMAND...: SIGTERM at the limit, upon which a training saves; its output goes to the log
stage() {
    local name=$1 limit=$2 status
    shift 2
    say "$name, at most $limit s"
    timeout --kill-after=20 "$limit" "$@" >"$WORK/$name.log" 2>&1
    status=$?
    { echo "---- $name"; cat "$WORK/$name.log"; } >>"$LOG"
    tail -n "${TAIL:-6}" "$WORK/$name.log"
    say "$name ended with $status"
    return $status
}

# once NAME SECONDS COMMAND...: a stage that no later call repeats, however it ends; `wheels` is none
once() {
    [ ! -e "$WORK/attempted/$1" ] || return 0
    [ $((LIMIT - SECONDS)) -gt "$SPARE_S" ] || { say "$1: no time left"; return 1; }
    touch "$WORK/attempted/$1"
    stage "$@"
}

# train RECIPE KIND SECONDS PEERS: in the background of a pair
train() {
    local settings=() name=$1 kind=$2 seconds=$3 peers=$4
    for setting in $SETTINGS $MORE; do settings+=(--set "$setting"); done
    stage "train-$name" $((seconds + 10)) "$PYTHON" benchmarks/quarter_hour.py train "$name" --data "$WORK/data-$kind" \
        --seconds "$seconds" --run "$WORK/runs/$name" --out "$OUT" --probe-steps "$PROBE_STEPS" \
        --gate "$WORK/gate-$kind" --peers "$peers" "${settings[@]}" && touch "$WORK/whole/$name"
}

# pair KIND SECONDS: the ExLM and its MLM of equal FLOPs, or what of them is not at its end
pair() {
    local name begun=0 peers=0 training=()
    rm -rf "$WORK/gate-$1"
    for name in "$1-medium" "$1-medium-mlm"; do
        if compgen -G "$WORK/runs/$name/checkpoints/step-[0-9]*" >/dev/null; then begun=1; else peers=$((peers + 1)); fi
    done
    [ $((begun * peers)) -eq 0 ] || say "$1: one of the pair began in an earlier call, so their FLOPs are not equal"
    for name in "$1-medium" "$1-medium-mlm"; do
        [ -e "$WORK/whole/$name" ] || { train "$name" "$1" "$2" "$peers" & training+=($!); }
    done
    wait "${training[@]}"
}

# unfinished KIND...: how many of them are not at their end
unfinished() {
    local kind count=0
    for kind in "$@"; do
        { [ -e "$WORK/whole/$kind-medium" ] && [ -e "$WORK/whole/$kind-medium-mlm" ]; } || count=$((count + 1))
    done
    echo $count
}

say "$*; $(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>&1 | head -n 1)"
# the one stage that the others need is tried again
[ -e "$WORK/attempted/wheels" ] || stage wheels 60 "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade \
    --target "$WORK/site" .gpu/wheels/*.whl && touch "$WORK/attempted/wheels"
for kind in "$@"; do
    if [ ! -e "$WORK/data-$kind/packed.json" ]; then
        "$PYTHON" benchmarks/quarter_hour.py lay-out "$kind" --data "$WORK/data-$kind" >"$WORK/lay-out-$kind.log" 2>&1 &
    fi
done
EXLM_COMMIT=$("$PYTHON" -c 'import json, sys; print((json.load(open(sys.argv[1]))["commit"] or "")[:8])' \
    "$(ls .gpu/*/packed.json | head -n 1)") && export EXLM_COMMIT
once build "$BUILD_S" "$PYTHON" -m exlm_cli doctor --build
steps=("$PYTHON" benchmarks/bench_train_step.py --recipes "$STEPS_RECIPE" --out "$OUT" --batch-share "$STEPS_SHARE"
    --device "$DEVICE" --steps 10 --warmup 5)
TAIL=20 once steps "$STEPS_S" "${steps[@]}"
TAIL=20 once steps-compiled "$COMPILED_S" "${steps[@]}" --set train.compile=true
if [ "$TESTS_S" -gt 0 ]; then
    TAIL=15 once tests "$TESTS_S" "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider \
        $(grep -rl --include='test_*.py' 'mark\.gpu' tests)
fi
wait
while [ $# -gt 0 ]; do
    if [ ! -e "$WORK/data-$1/packed.json" ]; then
        say "lay-out of $1 failed"
        tail -n 5 "$WORK/lay-out-$1.log" | tee -a "$LOG"
    elif [ "$(unfinished "$1")" -gt 0 ]; then
        # it shares what is left with those after it
        seconds=$(((LIMIT - SECONDS - SPARE_S) / $(unfinished "$@")))
        if [ "$seconds" -ge 30 ]; then pair "$1" "$seconds"; else say "$1: no time left"; fi
    fi
    shift
done
say "done"
ls -l "$OUT"
