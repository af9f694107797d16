"""Trains with each configuration of the ladder on 4 ranks as 2 nodes x 2, and compares losses that must be equal bit for bit.

On a machine with a GPU all ranks share it: with different NCCL_HOSTID, NCCL treats them as ranks of different machines. Without a GPU they
use gloo.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from gpu.outcome import NotDone, Outcome

ROOT = Path(__file__).resolve().parents[2]
RANKS, RANKS_PER_NODE = 4, 2
RUN_SECONDS = 90
PART_SECONDS = float(os.environ.get("GPU_CHECK_LADDER_SECONDS", "240"))
SHAPE = (
    "--num-layers 3 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --vocab-size 500 --mock-data --num-workers 0 "
    "--train-iters 5 --micro-batch-size 2 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --deterministic-mode "
    f"--ranks-per-node {RANKS_PER_NODE} --distributed-timeout-minutes 1"
)
HPZ = f"--zero-hpz-partition-size {RANKS_PER_NODE}"
QUANTIZED = "--zero-quantized-weights --zero-quantized-gradients"
TWO_MICROBATCHES = f"--global-batch-size {2 * 2 * RANKS}"


@dataclass(frozen=True)
class Run:
    """Flags of one run. same_as: the run whose losses and gradient norms it must equal bit for bit."""

    name: str
    flags: str
    same_as: str | None = None
    keeps_to_reference: bool = False


# The most important runs come first, because time may run out.
RUNS = (
    Run("ZeRO-3", "--zero-stage 3 --bf16"),
    Run("ZeRO-0", "--zero-stage 0 --bf16", "ZeRO-3"),
    Run("all of ZeRO++ but hpZ", f"--zero-stage 3 --bf16 {QUANTIZED} {TWO_MICROBATCHES}"),
    Run("all of ZeRO++", f"--zero-stage 3 --bf16 {QUANTIZED} {HPZ} {TWO_MICROBATCHES}", "all of ZeRO++ but hpZ"),
    Run("all of ZeRO++, reference ops", f"--zero-stage 3 --bf16 {QUANTIZED} {HPZ} {TWO_MICROBATCHES}", "all of ZeRO++", True),
    Run("ZeRO-3, recomputation", "--zero-stage 3 --bf16 --checkpoint-activations", "ZeRO-3"),
    Run("ZeRO-3 and hpZ", f"--zero-stage 3 --bf16 {HPZ}", "ZeRO-3"),
    Run("ZeRO-1", "--zero-stage 1 --bf16", "ZeRO-3"),
    Run("ZeRO-2", "--zero-stage 2 --bf16", "ZeRO-3"),
    Run(
        "all of ZeRO++, recomputation",
        f"--zero-stage 3 --bf16 {QUANTIZED} {HPZ} {TWO_MICROBATCHES} --checkpoint-activations",
        "all of ZeRO++",
    ),
    Run("ZeRO-3, fp32", "--zero-stage 3"),
    Run("ZeRO-0, fp32", "--zero-stage 0", "ZeRO-3, fp32"),
)

SMOKE_TEST = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
dist.init_process_group("nccl")
sent, received = torch.full((4,), float(rank), device="cuda"), torch.empty(4, device="cuda")
dist.all_to_all_single(received, sent)
torch.cuda.synchronize()
assert received.tolist() == [0.0, 1.0, 2.0, 3.0], received
dist.destroy_process_group()
"""


def run() -> Outcome:
    import torch

    outcome = Outcome()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _check_nccl_shares_a_gpu()
    else:
        outcome.omissions.append("NCCL: torch finds no GPU here; the ranks ran on the CPU over gloo")
    start, losses = time.monotonic(), {}
    for some in RUNS:
        if time.monotonic() - start > PART_SECONDS:
            outcome.omissions.append(f"run '{some.name}': the {PART_SECONDS:.0f} s for these runs were over")
            continue
        try:
            losses[some.name] = _losses(some)
        except RuntimeError as error:
            outcome.check(f"run '{some.name}' ends well", holds=False)
            outcome.lines += str(error).splitlines()[-25:]
            continue
        _compare(outcome, some, losses)
    outcome.measured = {"backend": "nccl" if on_gpu else "gloo", "losses": losses, "seconds": round(time.monotonic() - start, 1)}
    return outcome


def _compare(outcome: Outcome, some: Run, losses: dict[str, list[list[float]]]) -> None:
    own = losses[some.name]
    outcome.check(f"'{some.name}' trains: loss {own[0][0]:.4f} to {own[-1][0]:.4f}", holds=own[-1][0] < own[0][0])
    if some.same_as in losses:
        statement = f"'{some.name}' has the losses and gradient norms of '{some.same_as}', bit for bit"
        outcome.check(statement, holds=own == losses[some.same_as])


def _losses(some: Run) -> list[list[float]]:
    """Loss and gradient norm of every iteration, unrounded. Raises RuntimeError with the output of the ranks if the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        jsonl = Path(folder) / "run.jsonl"
        flags = [*SHAPE.split(), *some.flags.split(), "--log-jsonl", str(jsonl)]
        extra = {"MEGATRON_ZPP_REFERENCE_OPS": "1"} if some.keeps_to_reference else {}
        start_world(["pretrain_zeropp_gpt.py", *flags], extra)
        records = [json.loads(line) for line in jsonl.read_text().splitlines()]
    return [[record["lm_loss"], record["grad_norm"]] for record in records if "lm_loss" in record]


def _check_nccl_shares_a_gpu() -> None:
    try:
        start_world(["-c", SMOKE_TEST], {})
    except RuntimeError as error:
        raise NotDone(f"NCCL does not run {RANKS} ranks on the GPUs of this machine:\n{str(error)[-1500:]}") from error


def start_world(arguments: list[str], extra: dict[str, str]) -> None:
    """Runs `python arguments` as RANKS ranks, and kills all that are left at the end.

    Raises RuntimeError with their output if one fails or the time is over.
    """
    port = str(_free_port())
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(RANKS)]
        processes = [_start_rank(rank, arguments, {"MASTER_PORT": port, **extra}, log) for rank, log in enumerate(logs)]
        try:
            codes = _exit_codes(processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            said = "\n".join(
                f"[rank {rank}, exit code {code}] {log.read_text()[-1200:]}"
                for rank, (code, log) in enumerate(zip(codes, logs, strict=True))
            )
            raise RuntimeError(said)


def _start_rank(rank: int, arguments: list[str], extra: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": str(rank % RANKS_PER_NODE),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
        "MASTER_ADDR": "127.0.0.1",
        "NCCL_HOSTID": f"rank{rank}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **extra,
    }
    with log.open("wb") as file:
        return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def _exit_codes(processes: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes after all processes have ended, one has failed, or the time is over; -1 for processes that still run."""
    deadline = time.monotonic() + RUN_SECONDS
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            break
        time.sleep(0.1)
    time.sleep(1.0 if any(process.poll() for process in processes) else 0.0)  # so that the others can print their errors
    return [process.poll() if process.poll() is not None else -1 for process in processes]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
