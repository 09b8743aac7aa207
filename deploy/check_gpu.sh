#!/usr/bin/env bash
# Shows on a machine with a GPU, without containers, what the CUDA image and the systemd unit rely on: a server starts,
# compiles its kernels and answers as a user without rights or a home, in a folder that it cannot write, when the state
# folder and /tmp are all that it can write. Less than 90 s, of which most is the first compilation.
#   deploy/check_gpu.sh                  # PYTHON=python3.12: one with torch for CUDA; PYTHONPATH: more packages
# Run as root it becomes user 10001, like the image; else it stays who it is.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=$(command -v "${PYTHON:-python3}")
case $PYTHON in /*) ;; *) PYTHON=$PWD/$PYTHON ;; esac
LIMIT=${LIMIT:-80}

work=$(mktemp -d -t pensieve-check.XXXXXX)
server=
trap '[ -z "$server" ] || { kill -TERM "$server" 2>/dev/null && wait "$server"; } || true; rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -m 755 "$work/site" "$work/here"
mkdir -m 700 "$work/state"
cp -rL "$root/pensieve" "$work/site/"
chmod -R a+rX "$work/site"
chmod 555 "$work/here"

as=()
if [ "$(id -u)" = 0 ]; then
  chown 10001:10001 "$work/state"
  as=(setpriv --reuid=10001 --regid=10001 --clear-groups --inh-caps=-all --no-new-privs)
fi
# As in the image, but for the home, which is missing altogether.
environment=(-u HOME PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
  XDG_STATE_HOME="$work/state" XDG_CACHE_HOME="$work/state/cache" HF_HOME="$work/state/models"
  TRITON_CACHE_DIR="$work/state/cache/triton" CUDA_CACHE_PATH="$work/state/cache/cuda")
program='import sys; from pensieve.cli.main import main; sys.argv[0] = "pensieve"; main()'

cd "$work/here"
if "${as[@]}" env "${environment[@]}" sh -c 'touch here 2>/dev/null || touch ../site/here 2>/dev/null'; then
  [ "$(id -u)" = 0 ] && { echo "check_gpu: the user can write where it should not" >&2; exit 1; }
fi
mkfifo "$work/ready"
began=$SECONDS
"${as[@]}" env "${environment[@]}" timeout --foreground --kill-after=15 "$LIMIT" "$PYTHON" -P -c "$program" serve --device "${DEVICE:-cuda}" \
  --listen 127.0.0.1:0 --admin 127.0.0.1:0 >"$work/ready" 2>"$work/log" &
server=$!
exec 3<"$work/ready"
read -r line <&3 || { echo "check_gpu: the server did not start" >&2; cat "$work/log" >&2; exit 1; }
echo "ok: started in $((SECONDS - began)) s: $line"
address=${line#*grpc=}
address=${address%% *}
PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}" timeout 30 "$PYTHON" -P -c '
import sys
from pensieve.client import Client
with Client(sys.argv[1]) as client:
    chat = client.create_session()
    print("ok: a turn was answered:", repr(chat.send("My name is Ada. What is my name?", max_output_tokens=24).text))
    print("ok: and another:", repr(chat.send("Thank you.", max_output_tokens=24).text))
' "$address"
# `timeout` hands the signal on.
kill -TERM "$server"
wait "$server" && status=0 || status=$?
server=
[ "$status" = 0 ] || { echo "check_gpu: the server ended with status $status" >&2; cat "$work/log" >&2; exit 1; }
echo "ok: drained, with status 0"

count() { find "$work/state" -path '*/cache/triton/*' -name "$1" | wc -l; }
kernels=$(count '*.cubin') launchers=$(count '*.so')
if [ "${DEVICE:-cuda}" = cuda ] && { [ "$kernels" = 0 ] || [ "$launchers" = 0 ]; }; then
  echo "check_gpu: nothing was compiled into TRITON_CACHE_DIR" >&2
  exit 1
fi
echo "ok: TRITON_CACHE_DIR has $kernels kernels and $launchers compiled launchers"
echo "ok: written below the state folder: $(cd "$work/state" && find . -mindepth 1 -maxdepth 3 -not -path './cache/triton/*' | sort | tr '\n' ' ')"
