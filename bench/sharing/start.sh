#!/usr/bin/env bash
# Runs bench/sharing/peers.py where nothing can be installed: wheels and the parts of a packed vLLM (vllm-part-*.tar, one
# xz archive cut to pieces, of a tree for PYTHONPATH) travel in the folder WHEELS.
#
#     bench/sharing/start.sh WHEELS SITE OUT [options of peers.py]
#
# SITE is made: packages, compiled graphs. PYTHON names a Python whose torch has CUDA. PROGRAM names another program that
# takes --out; bench/http_door/peers.py needs starlette and uvicorn with h11, anyio and idna, which vLLM has too.
set -euo pipefail
wheels=$(realpath "$1")
mkdir -p "$2" "$3"
site=$(realpath "$2")
out=$(realpath "$3")
shift 3
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
"$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$wheels"/*.whl
"$python" - "$wheels" "$site" <<'UNPACK'
import lzma, pathlib, sys, tarfile, time

begun, (wheels, site) = time.time(), map(pathlib.Path, sys.argv[1:])


class Parts:
    """The parts one after the other, as one file."""

    def __init__(self, paths):
        self.files = [path.open("rb") for path in paths]

    def read(self, count=-1):
        while self.files:
            data = self.files[0].read(count)
            if data:
                return data
            self.files.pop(0).close()
        return b""


parts = sorted(wheels.glob("vllm-part-*.tar"))
if parts:
    with tarfile.open(fileobj=lzma.LZMAFile(Parts(parts)), mode="r|") as packed:
        packed.extractall(site, filter="tar")
print(f"{len(parts)} parts unpacked in {time.time() - begun:.0f} s", flush=True)
UNPACK
ln -sfn "$root/pensieve" "$site/pensieve" # not the root itself: its other folders have names of other packages
mkdir -p "$site/bin"
printf '#!/bin/sh\nexec "%s" -P -m vllm.entrypoints.cli.main "$@"\n' "$python" >"$site/bin/vllm"
chmod +x "$site/bin/vllm"
export PYTHONPATH=$site PATH=$site/bin:$PATH
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_WORKER_MULTIPROC_METHOD=fork VLLM_CACHE_ROOT=$site/.vllm VLLM_NO_USAGE_STATS=1
export DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRITON_CACHE_DIR=$site/.triton
cd "$root"
"$python" -P -c 'import torch, sys; print(sys.version.split()[0], torch.__version__, torch.cuda.is_available())
import grpc, google.protobuf, pensieve; print("grpc", grpc.__version__, "protobuf", google.protobuf.__version__)
from pensieve.v1 import pensieve_pb2_grpc
import pensieve.http.run, starlette, uvicorn; print("starlette", starlette.__version__, "uvicorn", uvicorn.__version__)' || true
# Beside the first server's start: whether all that vLLM imports is there, and its bytecode for later.
"$python" -P -c 'import vllm; print("vllm", vllm.__version__)
import vllm.entrypoints.openai.api_server, vllm.v1.worker.gpu_worker, vllm.v1.engine.core' >"$out/vllm-import.log" 2>&1 &
exec "$python" "${PROGRAM:-bench/sharing/peers.py}" --out "$out" "$@"
