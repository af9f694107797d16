#!/usr/bin/env bash
# Compiles every CUDA source without torch and without a GPU. See --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
bash scripts/compile_cuda.sh

Compiles every .cu of csrc/ for sm_80 and sm_90 with warnings as errors, and prints registers, spilled bytes and shared memory per kernel.
As many compilers run at a time as there are processors.
Needs nvcc (CUDA_HOME or PATH) and its host compiler; neither torch nor a GPU. Without nvcc it says so and succeeds.
TEXT
}

# The lines that ptxas prints for each kernel, as: architecture, kernel, registers, spilled bytes (stores + loads), shared bytes.
table_rows() {
    c++filt | sed -e 's/megatron_zpp:://g; s/cuda:://g; s/(anonymous namespace):://g' | awk '
        /Compiling entry function/ {
            architecture = $0; sub(/.*for .sm_/, "sm_", architecture); sub(/[^a-z0-9_].*/, "", architecture)
            kernel = $0; sub(/.*entry function .(void )?/, "", kernel); sub(/\(.*/, "", kernel)
            spilled = 0; shared = 0
        }
        /bytes spill stores/ { spilled = $5 + $9 }
        /Used [0-9]+ registers/ {
            for (i = 1; i < NF; ++i) {
                if ($i == "Used") registers = $(i + 1)
                if ($(i + 2) == "smem," || $(i + 2) == "smem") shared = $i
            }
            printf "| %s | `%s` | %d | %d | %d |\n", architecture, kernel, registers, spilled, shared
        }'
}

case "${1:-}" in
    "") ;;
    -h | --help) usage && exit ;;
    *) usage >&2 && echo "error: $1 is not an argument of this script." >&2 && exit 2 ;;
esac

nvcc="${CUDA_HOME:+$CUDA_HOME/bin/}nvcc"
if ! command -v "$nvcc" >/dev/null; then
    echo "$nvcc is not found: no CUDA source was compiled."
    exit
fi

# compile SOURCE ARCHITECTURE FOLDER: leaves the compiler's messages in FOLDER, and a file `compiled` if there was no warning.
compile() {
    mkdir -p "$3"
    if "$nvcc" --options-file csrc/nvcc_options.txt -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror -Xptxas -v \
        -gencode="arch=compute_$2,code=sm_$2" -c "$1" -o "$3/object.o" >"$3/messages" 2>&1; then
        touch "$3/compiled"
    fi
}

mapfile -t sources < <(find csrc -name '*.cu' | sort)
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
processors="$(nproc)"
for source in "${sources[@]}"; do
    for architecture in 80 90; do
        while (($(jobs -rp | wc -l) >= processors)); do
            wait -n || true
        done
        compile "$source" "$architecture" "$folder/$source/$architecture" &
    done
done
wait

echo "| GPU | kernel | registers | spilled bytes | shared bytes |"
echo "|---|---|---:|---:|---:|"
for source in "${sources[@]}"; do
    for architecture in 80 90; do
        if [[ ! -e "$folder/$source/$architecture/compiled" ]]; then
            cat "$folder/$source/$architecture/messages" >&2
            echo "error: $source does not compile for sm_$architecture without a warning." >&2
            exit 1
        fi
        table_rows <"$folder/$source/$architecture/messages"
    done
done
echo "${#sources[@]} CUDA sources compiled for sm_80 and sm_90 without a warning by $("$nvcc" --version | grep -o 'release [0-9.]*')"
