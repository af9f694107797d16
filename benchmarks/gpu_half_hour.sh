#!/usr/bin/env bash
# The first half hour on a machine with one GPU: four commands of less than ten minutes each. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
bash benchmarks/gpu_half_hour.sh NUMBER [arguments of gpu_check.sh]

  1  machine, build, bits of every kernel, ZeRO++ by threads on one GPU, a model of a billion parameters, rates of every kernel
  2  four NCCL ranks on one GPU, save and resume, a lost rank, the optimizer on the host, compute-sanitizer
  3  the training script: models of 125M and 1.3B parameters, a trace, ZeRO++ and lean on four NCCL ranks
  4  the hardware counters of every kernel, by ncu; if command 1 has found kernels that are slower than a copy

They run parts of gpu_check.sh, which needs torch, numpy and nvcc, and no network. Results go to $OUT/1 to $OUT/4 (default: gpu_half_hour);
what is printed has less than 12,000 characters. Exit code: 4 if there is no GPU, else that of gpu_check.sh.

Kernels are built once, into .build, and packed as $OUT/1/build.tgz: unpack it into the repository on the next machine that is bare.
2 and 3 mount more space for NCCL's ranks at /dev/shm if it has little and this user may.
TEXT
}

case "${1:-}" in
    1) seconds=560 parts=(library bits threads one_rank features training speed) ;;
    2) seconds=560 parts=(library nccl resume lost_rank tensor offload sanitizer) ;;
    3) seconds=560 parts=(library script) ;;
    4) seconds=500 parts=(library counters) ;;
    -h | --help) usage && exit ;;
    "") usage >&2 && exit 2 ;;
    *) usage >&2 && echo "error: $1 is not the number of a command; give 1, 2, 3 or 4." >&2 && exit 2 ;;
esac
number="$1"
shift

readonly LEAST_SHARED_MEBIBYTES=4096
shared="$(df -m --output=avail /dev/shm 2>/dev/null | tail -1 || true)"
if [[ "$number" == [23] ]] && ((${shared:-0} < LEAST_SHARED_MEBIBYTES)); then
    { mkdir -p /dev/shm && mount -t tmpfs -o size=16g tmpfs /dev/shm; } 2>&1 | sed 's/^/shared memory: /' || true
fi

export PATH="$PATH:/usr/local/cuda/bin" PYTHONUNBUFFERED=1 TORCH_EXTENSIONS_DIR="$PWD/.build"
folder="${OUT:-gpu_half_hour}/$number"
mkdir -p "$folder" .build
# A build that others own or can write to is not loaded; unpacking one may keep the owner that it had.
chown -R "$(id -u)" .build || true
chmod -R go-w .build || true

code=0
bash benchmarks/gpu_check.sh --limit-seconds "$seconds" --output "$folder" --parts "${parts[@]}" "$@" || code=$?
if ((number == 1)); then
    tar -czf "$folder/build.tgz" .build || echo "build.tgz is not whole"
fi
echo "command $number: exit code $code after $SECONDS s"
exit "$code"
