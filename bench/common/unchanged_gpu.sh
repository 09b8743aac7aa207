#!/usr/bin/env bash
# Does a change that should change nothing leave the GPU path as fast as it was? On one GPU, both checkouts in turns:
#
#     bench/common/unchanged_gpu.sh BEFORE OUT [engine|replay ...]
#
# engine: steps of 1 to 256 decodes and the whole loop, on the worker and the engine of each (bench/engine.py);
# replay: the evaluation in short, one rate on a server of each (pensieve replay, started one after the other, twice).
# BEFORE is the other checkout, OUT a folder for tables and JSON. PYTHON names a Python whose torch has CUDA.
set -euo pipefail
before=$(realpath "$1")
out=$(realpath "$2")
parts=${*:3}
after=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
python=${PYTHON:-python3}
model=$(mktemp -d)
trap 'rm -rf "$model"' EXIT
mkdir -p "$out"

if [[ " ${parts:-engine replay} " == *" engine "* ]]; then
  "$python" "$after/bench/common/before_after.py" --before "$before" --rounds "${ROUNDS:-2}" --json "$out/unchanged_engine.json" \
    --only 'sections (decode|loop) .*batch=(1|64|256)\b.* (step ms|gap|host)' -- \
    bench/engine.py --section decode --section loop --out '{folder}' | tee "$out/unchanged_engine.md"
fi

if [[ " ${parts:-engine replay} " == *" replay "* ]]; then
  PYTHONPATH=$after${PYTHONPATH:+:$PYTHONPATH} "$python" "$after/bench/dummy_model.py" llama-2-13b-gqa10 "$model" >/dev/null
  serve="-P -m pensieve serve --model $model --load-format dummy --listen 127.0.0.1:0 --store sqlite:///$model/SIDE.sqlite3
    --device cuda --dtype bfloat16 --max-running 512 --max-batch-tokens 8192 --disconnect-grace 0
    --device-cache 40GiB --host-cache 32GiB"
  serve=$(tr -s '[:space:]' ' ' <<<"$serve")
  targets=()
  for server in "before 1" "after 1" "before 2" "after 2"; do
    side=${server% *}
    targets+=(--name "$server" --start "PYTHONPATH=${!side}${PYTHONPATH:+:$PYTHONPATH} $python ${serve/SIDE/${server/ /}}")
  done
  PYTHONPATH=$after${PYTHONPATH:+:$PYTHONPATH} "$python" -P -m pensieve replay sharegpt --conversations 900 --rates "${RATE:-20}" --think-time 6 \
    --run-in 60 --warm-up 12 --window "${WINDOW:-20}" --stop-after-window --processes 4 --seed 1 --start-timeout 200 \
    --json "$out/unchanged_replay.json" "${targets[@]}" | tee "$out/unchanged_replay.txt"
fi
