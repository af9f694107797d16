"""Tests that the emulation of CUDA gives wrong results wherever a kernel lacks one of its barriers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from megatron_zpp.ops.build import SOURCES
from testbed.kernels.emulation import FLAGS, STAND_INS

pytestmark = pytest.mark.compiles
BARRIER = "__syncthreads();"

# Each program ends with 0 if its results are right. One grid block computes three rounds, whose values fall from round to round.
PROGRAMS = {
    "quantization/cuda/teams.h": """
using namespace megatron_zpp::cuda;
int main() {
  bool is_right = true;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(256);
  cudaLaunchKernelEx(&config, +[](bool* is_right) {
    for (uint32_t base = 3000; base > 0; base -= 1000) {
      *is_right = *is_right && team_max<Teams<256, 1, 4>>(base + threadIdx.x) == base + 255;
    }
  }, &is_right);
  return is_right ? 0 : 1;
}
""",
    "softmax/cuda/softmax_parts.cu": """
using namespace megatron_zpp;
int main() {
  constexpr int64_t kTokens = 3, kColumns = 1024;
  float logits[kTokens * kColumns], largest[kTokens], sums[kTokens], label[kTokens];
  const int64_t labels[kTokens] = {};
  for (int64_t i = 0; i < kTokens * kColumns; ++i) {
    logits[i] = static_cast<float>(i % kColumns - 1000 * (i / kColumns));
  }
  const LogitRows<float> rows{{logits, kColumns}, labels, kTokens, kColumns, 0, kColumns};
  cuda::launch_softmax_parts(rows, TokenSums<float>{largest, sums}, label, nullptr);
  bool is_right = true;
  for (int64_t token = 0; token < kTokens; ++token) {
    is_right = is_right && largest[token] == logits[(token + 1) * kColumns - 1];
    is_right = is_right && std::fabs(sums[token] * (1 - std::exp(-1.0)) - 1) < 1e-5;  // a geometric series
  }
  return is_right ? 0 : 1;
}
""",
}


def built(program: str, folder: Path) -> Path:
    """The program, compiled in the folder."""
    (folder / "program.cpp").write_text(program)
    options = [flag for flag in FLAGS if flag != "-shared"]
    includes = [f"-I{path}" for path in (STAND_INS, *include_paths())]
    subprocess.run([os.environ.get("CXX", "c++"), *options, *includes, "program.cpp", "-o", "program"], cwd=folder, check=True)
    return folder / "program"


def run(program: Path, without: int | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"EMULATED_GRID_LIMIT": "1", "LEFT_OUT": str(without)}
    return subprocess.run([program], env=environment, capture_output=True, text=True, check=False)


def built_with_each_barrier_optional(source: str, folder: Path) -> Path:
    """The source's program, which leaves out the barrier that LEFT_OUT names."""
    first, *others = (SOURCES / source).read_text().split(BARRIER)
    shutil.copytree(SOURCES, folder / "csrc")
    barriers = [f'if (left_out != "{index}") {BARRIER}{text}' for index, text in enumerate(others)]
    (folder / "csrc" / source).write_text("".join([first, *barriers]))
    left_out = 'static const std::string left_out = std::getenv("LEFT_OUT");'
    return built(f'#include <cstdlib>\n#include <string>\n{left_out}\n#include "csrc/{source}"\n{PROGRAMS[source]}', folder)


def barriers(source: str) -> int:
    return (SOURCES / source).read_text().count(BARRIER)


def test_every_source_with_barriers_has_a_program() -> None:
    sources = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*") if path.is_file() and BARRIER in path.read_text()}
    assert sources == set(PROGRAMS)


@pytest.mark.parametrize("source", PROGRAMS)
def test_a_kernel_that_lacks_one_of_its_barriers_has_wrong_results(source: str, tmp_path: Path) -> None:
    program = built_with_each_barrier_optional(source, tmp_path)
    assert run(program).returncode == 0
    assert barriers(source) > 0
    assert [barrier for barrier in range(barriers(source)) if run(program, barrier).returncode == 0] == []


def test_a_barrier_that_one_warp_never_reaches_ends_the_process_and_says_why(tmp_path: Path) -> None:
    kernel = "+[] { if (threadIdx.x < 32) __syncthreads(); }"
    launch = f"cudaLaunchConfig_t config{{}}; config.blockDim = dim3(64); cudaLaunchKernelEx(&config, {kernel});"
    finished = run(built(f"#include <cuda_runtime.h>\nint main() {{ {launch} }}\n", tmp_path))
    assert finished.returncode < 0 and "wait at a barrier that others never reach" in finished.stderr
