#!/usr/bin/env bash
# Builds the kernels of csrc/ for this machine. See --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
bash scripts/build_extensions.sh [--no-venv] [--portable]

  --no-venv    use the active environment instead of .venv; it needs torch and setuptools, and nothing is installed
  --portable   for every processor of this architecture rather than for this one; slower

Needs a compiler for the C++ standard of the installed torch (2.13: C++20, such as GCC 11 or clang 14; CXX names another compiler).
If torch has CUDA and nvcc is found (CUDA_HOME, PATH or /usr/local/cuda), the CUDA kernels are built too. nvcc has to be of torch's version
of CUDA (12 or 13), and calls the compiler that CXX names. The kernels are for the GPUs of this machine, or for the architectures in
TORCH_CUDA_ARCH_LIST (such as "8.0;9.0"), from 8.0 on. Runs on other machines find this build if they set the same list.
Takes about half a minute, with CUDA kernels some minutes, or no time if the same build exists.
Without the kernels everything runs on plain torch: same bits, slower. Runs on GPUs that quantize are refused then, unless
MEGATRON_ZPP_REFERENCE_OPS=1 is set.
TEXT
}

use_venv=yes
arguments=()
for argument in "$@"; do
    case "$argument" in
        --no-venv) use_venv=no ;;
        --portable) arguments+=("$argument") ;;
        -h | --help) usage && exit ;;
        *) usage >&2 && stop "$argument is not an argument of this script." ;;
    esac
done

if [[ "$use_venv" == yes ]]; then
    prepare_environment yes requirements.txt
else
    use_active_python
    python -c 'import setuptools, torch; assert torch.__version__ >= (2, 6)' >/dev/null ||
        stop "the active Python lacks torch 2.6 or newer, or setuptools; install them, or leave --no-venv out."
fi
python -m megatron_zpp.ops.extension ${arguments[@]+"${arguments[@]}"}
