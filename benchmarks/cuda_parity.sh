#!/usr/bin/env bash
# Parity on an NVIDIA GPU: CUDA and TensorRT, in exact settings and in their own, with proof of where the nodes ran.
#
#     bash benchmarks/cuda_parity.sh [--device N] [--dry-run]
#     BUNDLE=my-bundle bash benchmarks/cuda_parity.sh
#
# Makes virtual environments in CUDA_PARITY_DIR (.venv-cuda-parity), exports the shipped checkpoint with both ways of mixing
# (needs PyTorch; not with BUNDLE=DIR, a bundle that was exported elsewhere, and BUNDLE_DFT=DIR, the same with --mixing dft),
# compares, and writes benchmarks/results/cuda_parity.json. --dry-run prints every command and runs none.
#
# Exit code 0 when all is as it should be, 1 for a finding, 2 for bad usage, 3 when there was nothing to run on.
set -euo pipefail

device=0
dry=
usage() {
    printf 'cuda_parity: %s\nusage: bash benchmarks/cuda_parity.sh [--device N] [--dry-run]\n' "$1" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=1 ;;
        --device)
            [[ ${2:-} =~ ^[0-9]+$ ]] || usage "--device must be a number, as nvidia-smi counts, found '${2:-}'"
            device=$2
            shift
            ;;
        *) usage "unknown argument '$1'" ;;
    esac
    shift
done

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
dir=${CUDA_PARITY_DIR:-.venv-cuda-parity}
bundle=${BUNDLE:-$dir/kjv-matmul}
dft=${BUNDLE_DFT:-}
[ -n "${BUNDLE:-}" ] || dft=${dft:-$dir/kjv-dft}
gpu=$dir/gpu
results=benchmarks/results

# Shows a command as it could be pasted, and runs it.
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ -n "$dry" ] || "$@"
}

# The same for commands whose exit code is a result; leaves it in `code`.
code=0
attempt() {
    code=0
    run "$@" || code=$?
}

# The worst so far: a finding counts more than something that did not run, which counts more than nothing.
worst=0
note() {
    case $1 in
        0) ;;
        3) [ "$worst" -ne 0 ] || worst=3 ;;
        *) worst=1 ;;
    esac
}

step() { printf '\n== %s\n' "$*"; }

if [ -z "$dry" ]; then
    for each in ${BUNDLE:+"$BUNDLE"} ${BUNDLE_DFT:+"$BUNDLE_DFT"}; do
        [ -f "$each/manifest.json" ] || usage "expected a bundle, found no manifest.json in '$each'"
    done
    # Before gigabytes are downloaded.
    if ! command -v nvidia-smi >/dev/null && ! (ldconfig -p | grep 'libcuda\.so\.1' >/dev/null); then
        echo "NOT RUN  cuda_parity  no NVIDIA driver on this machine (neither nvidia-smi nor libcuda.so.1)" >&2
        exit 3
    fi
    mkdir -p "$dir" "$results"
    command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv
fi

if [ -z "${BUNDLE:-}" ]; then
    step "a bundle of each way of mixing"
    run python3 -m venv "$dir/export"
    run "$dir/export/bin/pip" install -q -r requirements.txt -e .
    run "$dir/export/bin/caracal" export export/caracal_export/checkpoints/kjv -o "$bundle" --overwrite
    run "$dir/export/bin/caracal" export export/caracal_export/checkpoints/kjv -o "$dft" --mixing dft --overwrite
fi

step "an environment with CUDA and TensorRT"
run python3 -m venv "$gpu"
run "$gpu/bin/pip" install -q -e '.[cuda]' 'onnxruntime-gpu[cuda,cudnn]'
attempt "$gpu/bin/pip" install -q -e '.[tensorrt]'
[ "$code" -eq 0 ] || echo "TensorRT was not installed; its rows will say so"
# ONNX Runtime finds CUDA's libraries where pip puts them, but not TensorRT's.
site=$(python3 -c 'import sys; print("lib/python%d.%d/site-packages" % sys.version_info[:2])')
libraries=$root/$gpu/$site/tensorrt_libs
[[ $gpu != /* ]] || libraries=$gpu/$site/tensorrt_libs
libraries=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

step "what is there"
attempt env LD_LIBRARY_PATH="$libraries" "$gpu/bin/caracal" providers --ep cuda,tensorrt

step "CUDA: exact, and as it comes (TF32)"
attempt "$gpu/bin/caracal" parity "$bundle" --ep "cuda:$device" --fast --json "$dir/cuda.json"
note "$code"

step "every computing node of the exact run was on CUDA"
attempt "$gpu/bin/python" - "$dir/cuda.json" <<'PY'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    (row,) = [row for row in json.load(file)["providers"] if row["mode"] == "exact"]
if not row["placement"]:
    print("NOT RUN  placement  nothing is recorded:", row["reason"] or "no reason given")
    sys.exit(3)
wrong = []
for graph, placement in row["placement"].items():
    nodes, sizes, elsewhere = placement["nodes"], placement["shape_only"], placement["elsewhere"]
    print(f"{graph}: {nodes}, {sizes} that work out sizes, {len(elsewhere)} computing nodes elsewhere")
    if not nodes.get("CUDAExecutionProvider") or elsewhere:
        wrong.append(graph)
print("FAILED  placement  not all on CUDA: " + ", ".join(wrong) if wrong else "PASSED  placement  all on CUDA")
sys.exit(1 if wrong else 0)
PY
note "$code"

# TensorRT has no option that turns TF32 off, only the driver's variable; so its fast row is without TF32 too.
step "TensorRT: exact, and as it comes; building engines takes minutes"
attempt env NVIDIA_TF32_OVERRIDE=0 LD_LIBRARY_PATH="$libraries" "$gpu/bin/caracal" parity "$bundle" \
    --ep "tensorrt:$device" --fast --time-limit 1800 --json "$dir/tensorrt.json"
note "$code"

if [ -n "$dft" ]; then
    step "CUDA has no kernel for DFT: exit code 1 is what is expected here"
    attempt "$gpu/bin/caracal" parity "$dft" --ep "cuda:$device" --json "$dir/cuda-dft.json"
    if [ -z "$dry" ]; then
        if [ "$code" -eq 1 ]; then
            echo "PASSED  the missing DFT kernel was caught (exit code 1)"
        else
            echo "FAILED  the missing DFT kernel was not caught: exit code $code, expected 1"
            note 1
        fi
    fi
else
    echo "NOT RUN  the missing DFT kernel: give BUNDLE_DFT=DIR, a bundle of caracal export --mixing dft"
fi

step "all together"
attempt "$gpu/bin/caracal" parity merge "$dir/cuda.json" "$dir/tensorrt.json" \
    --json "$results/cuda_parity.json" --report "$dir/report"
note "$code"
[ -n "$dry" ] || echo "written: $results/cuda_parity.json and $dir/report; exit code $worst"
exit "$worst"
