"""The parts of benchmarks/gpu_check.py on the CPU at tiny size, and what they rest on."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.fake_streams.gpus import Gpu, run_on_gpus
from harness.fake_streams.machine import FakeEvent, FakeStream
from harness.fake_streams.timed_model import step_time
from torch import Tensor

from benchmarks.gpu import (
    bits,
    builds,
    entry_runs,
    features,
    kernel_kinds,
    library,
    long_runs,
    lost_rank,
    machine,
    nccl,
    offload,
    one_rank,
    rank_processes,
    resume,
    sharing,
    speed,
    threads,
    training,
)
from benchmarks.gpu.commands import Done
from benchmarks.gpu.deadline import Deadline
from benchmarks.gpu.device_errors import attempt, is_fatal
from benchmarks.gpu.differences import largest_difference
from benchmarks.gpu.entry_runs import Entry, Finished, run_entries
from benchmarks.gpu.outcome import NotDone, Outcome
from benchmarks.gpu.place import Place
from benchmarks.gpu.rank_processes import FOUND_VARIABLE, HOST_IDS, MULTI_RANK, ONE_GPU_EACH, Ended, Sharing
from benchmarks.gpu.stalls import MeasuredStreams
from benchmarks.gpu.texts import printed
from megatron_zpp.comm.lanes import StreamLanes
from megatron_zpp.comm.links import INTRA_CLIMB
from megatron_zpp.comm.streams import Streams
from megatron_zpp.model import attention_kernel
from megatron_zpp.ops import dropout_reference, extension, gaussian_reference, reference, softmax_reference
from megatron_zpp.ops.build import Build
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.policy import POLICIES
from megatron_zpp.zero.schedule import Prefetch
from testbed import thread_ranks
from testbed.kernels.bit_differences import Comparison
from testbed.kernels.timed_ops import BOUND_BY_MEMORY, timed_ops

CPU = Place(torch.device("cpu"), is_tiny=True)


def still(seconds: float = 1e6) -> Deadline:
    """A deadline whose clock stands still."""
    return Deadline(seconds, lambda: 0.0)


def run(part: Any, seconds: float = 1e6) -> Outcome:
    outcome = Outcome()
    part.run(still(seconds), outcome)
    return outcome


# ---- parts


def test_the_part_machine_says_why_torch_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        warnings.warn("the NVIDIA driver is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    with pytest.raises(NotDone, match=r"^everything on a GPU: torch finds none here .*; the NVIDIA driver is too old\)$"):
        run(machine)


def test_what_cannot_be_told_of_a_machine_is_no_reason_to_stop_but_a_gpu_that_does_not_compute_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a part that has passed lets the others run."""

    def fail() -> Any:
        raise OSError("no such network")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(8))
    monkeypatch.setattr(machine.socket, "if_nameindex", fail)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: fail())
    found = run(machine)
    assert found.end() == "passed" and f"torch: {torch.__version__}" in found.lines
    assert found.omissions[0] == found.omissions[-1] == "a description of this machine: OSError: no such network"
    monkeypatch.setattr(torch, "ones", lambda *_, **__: fail())
    with pytest.raises(OSError, match="no such network"):
        run(machine)


@pytest.mark.parametrize("free_mebibytes, is_enough", [(64, False), (4096, True)])
def test_the_part_machine_says_if_shared_memory_is_too_small_for_the_ranks_of_nccl(
    free_mebibytes: int, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_mebibytes << 20))
    outcome = Outcome()
    with pytest.raises(NotDone):
        machine.run(still(), outcome)
    assert outcome.measured["shared_memory_free_mebibytes"] == free_mebibytes
    assert outcome.omissions == [] if is_enough else "has 64 MiB free, and NCCL may take 816 MiB; mount" in outcome.omissions[0]


@pytest.mark.parametrize("part", [training, offload, one_rank], ids=lambda part: part.__name__)
def test_a_part_that_trains_loads_the_kernels_first_as_a_run_does(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise InterruptedError("loads")

    monkeypatch.setattr(extension, "load", load)
    with pytest.raises(InterruptedError, match="loads"):
        run(part)


def test_the_part_training_measures_speed_phases_and_memory_of_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in {"WARMUP_STEPS": 2, "TIMED_STEPS": 2, "PROFILED_STEPS": 1, "SHORT_STEPS": 1}.items():
        monkeypatch.setattr(training, name, count)
    monkeypatch.setattr(training, "VARIANTS", training.VARIANTS[:1])  # compiling takes long
    outcome = run(training)
    names = {"1 micro-batch", "8 micro-batches", "1 micro-batch, weights kept, whole logits", "8 micro-batches, weights kept, whole logits"}
    assert outcome.failures == [] and names <= outcome.measured.keys()
    assert outcome.measured["seconds_by_phase"]["forward-backward"] > 0 and outcome.measured["launches_per_unit"] > 0


def test_a_comparison_that_needs_more_memory_than_there_is_is_left_out_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(training, "_measure_all", lambda *_: None)
    monkeypatch.setattr(training, "_time_variant", run_out)
    outcome = run(training)
    assert outcome.omissions[-1] == "weights kept, whole logits: it does not fit into the memory of this GPU"
    assert [failure.partition(" runs")[0] for failure in outcome.failures] == ["attention by flash", "--compile"]


def test_if_the_attention_that_auto_takes_fails_the_same_model_is_measured_with_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")

    measured: list[str] = []
    monkeypatch.setattr(training, "_measure_all", fail)
    monkeypatch.setattr(training, "_time_variant", lambda time, outcome, place, flags, variant: measured.append(variant.flags))
    outcome = run(training)
    assert len(outcome.failures) == 1 and "CUDNN_STATUS_EXECUTION_FAILED" in outcome.failures[0]
    assert "--attention-backend flash" in measured


def test_the_part_one_rank_finds_that_gradients_and_losses_are_those_of_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    small = one_rank.SHAPE.replace("--hidden-size 128", "--hidden-size 32").replace("--seq-length 64", "--seq-length 16")
    for name, value in {"SHAPE": small, "STAGES": (0, 3), "COMPARED_STEPS": 3, "TINY_STEPS": 1}.items():
        monkeypatch.setattr(one_rank, name, value)
    outcome = run(one_rank)
    assert outcome.failures == [] and len(outcome.measured) == 4


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "own, others, expected",
    [
        ([2.0, 3.0], [2.0, 4.0], 0.25),
        ([0.0, -0.0], [0.0, 0.0], 0.0),
        ([], [], 0.0),
        ([1.0], [0.0], INF),
        ([1.0, NAN, 1.0], [1.0, 1.0, 1.0], INF),
        ([1.0, 1.0], [1.0, NAN], INF),
        ([INF], [INF], INF),
    ],
)
def test_runs_with_a_number_that_is_not_finite_never_agree(own: list[float], others: list[float], expected: float) -> None:
    assert largest_difference(own, others) == expected


@pytest.mark.parametrize(
    "spoil, count",
    [(lambda gradients: gradients, 0), (lambda gradients: 1.1 * gradients, 1), (lambda gradients: gradients * torch.nan, 1)],
)
def test_the_part_one_rank_fails_if_a_gradient_is_wrong(
    spoil: Callable[[torch.Tensor], torch.Tensor], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = one_rank.engine_gradients
    monkeypatch.setattr(one_rank, "engine_gradients", lambda session: {name: spoil(own) for name, own in right(session).items()})
    monkeypatch.setattr(one_rank, "COMPARED_STEPS", 1)
    outcome = Outcome()
    one_rank._compare(outcome, CPU, "stage 3", f"{one_rank.SHAPE} --zero-stage 3", 1e-5, 1e-4)
    assert len(outcome.failures) == count


def test_the_part_features_trains_each_case_and_names_the_attention_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("plain", "fp16", "documents in a Llama", "recomputed blocks", "compiled")
    monkeypatch.setattr(features, "LENGTHS", {True: "--seq-length 16"})
    monkeypatch.setattr(features, "STEPS", 2)
    monkeypatch.setattr(features, "CASES", [case for case in features.CASES if case.name in names])
    outcome = run(features)
    assert outcome.failures == [] and "compiled: only on a GPU" in outcome.omissions
    assert any("flash" in kernel for kernel in outcome.measured["plain"]["attention"])
    assert outcome.measured["recomputed blocks"]["losses"] == outcome.measured["plain"]["losses"]


def test_a_case_that_raises_is_a_failure_and_an_error_of_the_device_ends_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(flags: str, place: Any) -> None:
        raise RuntimeError("CUDA error: misaligned address" if "fp16" in flags else "no kernel")

    monkeypatch.setattr(features, "Session", break_down)
    monkeypatch.setattr(features, "CASES", [case for case in features.CASES if case.name in ("plain", "fp16", "Llama")])
    outcome = run(features)
    assert len(outcome.failures) == 2 and "misaligned address" in outcome.failures[1]


def test_a_kernel_of_attention_that_fails_is_a_failure_and_one_that_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = next(case for case in features.CASES if case.name == "attention fused")
    monkeypatch.setattr(features, "CASES", [refused])
    missing = run(features)
    assert missing.failures == [] and "attention fused: --attention-backend fused has no kernel on cpu" in missing.omissions[0]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")

    monkeypatch.setattr(attention_kernel, "attend", fail)
    failed = run(features)
    assert failed.omissions == [] and "CUDNN_STATUS_NOT_INITIALIZED" in failed.failures[0]


@pytest.mark.parametrize("part", [one_rank, features])
def test_without_time_a_part_names_what_it_leaves_out(part: Any) -> None:
    outcome = run(part, seconds=0.5)
    assert len(outcome.late) > 5 and outcome.failures == []


@pytest.mark.long
def test_every_feature_trains_on_the_cpu() -> None:
    assert run(features).failures == []


@pytest.mark.virtual
@pytest.mark.long
def test_the_part_threads_has_equal_bits_on_the_cpu() -> None:
    assert run(threads).failures == []


def test_the_part_speed_calls_every_kernel_and_knows_the_bytes_that_each_call_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(extension, "has_kernels_for", lambda device_type: False)
    monkeypatch.setattr(extension, "has_loss_kernels_for", lambda device_type: False)
    kernels = (*extension.OPS, *extension.LOSS_OPS)
    for module, kernel in product((reference, gaussian_reference, dropout_reference, softmax_reference), kernels):
        if hasattr(module, kernel):
            monkeypatch.setattr(module, kernel, noting(called, kernel, getattr(module, kernel)))
    row_numel = 3 * speed.BLOCK_NUMEL
    for codes, name, make in timed_ops(speed.SLICES, row_numel, speed.BLOCK_NUMEL, "cpu"):
        call, moved_bytes = make()
        called.append("")
        call()
        assert moved_bytes > speed.SLICES * row_numel, (codes, name)  # three payloads of 4 bits are least
    first_of_each_call = {kernel for before, kernel in pairwise(called) if before == ""}
    assert first_of_each_call == set(kernels)


def noting(called: list[str], kernel: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def note(*arguments: Any, **options: Any) -> Any:
        called.append(kernel)
        return function(*arguments, **options)

    return note


class Graphs:
    """Stands in for torch.cuda's graphs. error: of the capture. stream: the current one; a capture that fails leaves its own."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.stream = "own"
        self.replayed = 0

    def replay(self) -> None:
        self.replayed += 1

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.stream = "of the capture"
        yield
        if self.error is not None:
            raise self.error
        self.stream = "own"

    @contextmanager
    def entered(self, stream: str) -> Iterator[None]:
        before = self.stream
        try:
            yield
        finally:
            self.stream = before


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error: operation not permitted when stream is capturing")])
def test_the_part_speed_launches_plainly_what_cannot_be_captured_and_says_so(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, called = Graphs(error), list[int]()
    for name, stand_in in {
        "synchronize": lambda: None, "CUDAGraph": lambda: graphs, "graph": graphs.graph, "stream": graphs.entered,
        "current_stream": lambda: graphs.stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    replay, why = speed._replayed([lambda: called.append(1), lambda: called.append(2)])
    called.clear()
    replay()
    assert graphs.stream == "own" and (called, graphs.replayed) == (([], 1) if error is None else ([1, 2], 0))
    assert why == ("" if error is None else f"RuntimeError: {error}")
    told = speed._without_graph([speed.Result(64, "INT8", "encode bf16", 1, 1.0, 1.0, 1.0, why)])
    assert told == ([] if error is None else [f"1 of 1 measurements count the host's launches, because no graph could be captured: {why}"])


def test_the_values_that_the_part_speed_times_come_from_a_generator_of_their_own() -> None:
    before = torch.random.get_rng_state()
    for _, _, make in timed_ops(1, speed.BLOCK_NUMEL, speed.BLOCK_NUMEL, "cpu"):
        make()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_part_speed_says_which_ops_miss_its_aim() -> None:
    ops = (("INT8", "encode bf16", 0.89), ("INT8", "decode to bf16", 0.91), ("Gaussian 3, rounds 1", "encode bf16", 0.5))
    results = [speed.Result(64, codes, op, 1, 1.0, 1.0, share) for codes, op, share in ops]
    assert speed._aims(results) == ["aim missed: INT8 encode bf16 at 64 MB: 89% of copy"]
    assert [line.split("|")[3].strip() for line in speed._table(results)[2:]] == [op for _, op, _ in ops]
    names = {(codes, op) for codes, op, _ in timed_ops(1, speed.BLOCK_NUMEL, speed.BLOCK_NUMEL, "cpu")}
    assert names > BOUND_BY_MEMORY


@pytest.fixture
def kernels() -> None:
    Build().make()
    assert extension.load()


def compared_long(name: str) -> Comparison:
    """The comparison of a run with its four parts."""
    comparison = Comparison()
    long_runs.CHECKS[name](long_runs.Long(comparison, 2**14 + 256 * 37, 2**13))
    return comparison


def wrong_at(op: Callable[..., None], written: int, least_numel: int, number: int) -> Callable[..., None]:
    """The op with a wrong bit in element `number` of what it writes, its argument `written`, if that has so many elements."""

    def call(*arguments: Any, **options: Any) -> None:
        op(*arguments, **options)
        result = arguments[written]
        if result.numel() >= least_numel:
            rows = result if result.ndim == 2 else result.unsqueeze(0)
            rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[result.itemsize])[divmod(number, rows.shape[1])] ^= 1

    return call


@pytest.mark.usefixtures("kernels")
def test_the_part_bits_compares_long_runs_with_their_parts() -> None:
    assert [compared_long(name).count() / 4 for name in long_runs.CHECKS] == [2, 2, 1, 4, 1, 4]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "name, op, number, words",
    [
        ("runs", "encode_blocks", 17_000, "codes of bfloat16 in 8 bits, {part}: row 0, element 17,000"),
        ("runs", "decode_blocks", 17_000, "bfloat16 of 8 bits, {part}: row 0, element 17,000"),
        ("means", "decode_mean_blocks", 17_000, "2 members in 8 bits, {part}: row 0, element 17,000"),
        ("means", "recode_mean_blocks", 8_500, "codes in 4 bits of 2 members in 8 bits, {part}: row 0, element 8,500"),
        ("exact means", "mean_values", 17_000, "float32 mean of 2 bfloat16 members, {part}: row 0, element 17,000"),
        ("Gaussian codes", "encode_gaussian", 130, "scales of bfloat16 in 4 bits, {part}: row 0, element 130"),
        ("Gaussian codes", "encode_gaussian", 208 + 8_500, "codes of bfloat16 in 4 bits, {part}: row 0, element 8,500"),
        ("Gaussian codes", "decode_gaussian", 17_000, "bfloat16 of 4 bits, {part}: row 0, element 17,000"),
        ("Gaussian codes", "decode_mean_gaussian", 17_000, "2 members in 4 bits, {part}: row 0, element 17,000"),
        ("dropout", "drop_values", 17_000, "bfloat16 from index 8589934587 on, {part}: element 17,000"),
        ("loss", "softmax_gradient", 17_000, "gradient of bfloat16 logits in rows of 256, {part}: row 66, element 104"),
    ],
)
def test_a_long_run_with_a_wrong_element_is_named_with_its_part_its_index_in_the_run_and_both_values(
    name: str, op: str, number: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = long_runs if op == "softmax_gradient" else torch.ops.megatron_zpp
    written = 3 if op == "softmax_gradient" else 1
    monkeypatch.setattr(where, op, wrong_at(getattr(where, op), written, 12_000, number))  # more than a part has
    comparison = compared_long(name)
    assert comparison.differing[op] == 1
    sentence = f"{op}, {words.format(part='values 16,384 to 24,576 of 25,856')} is 0x"
    (named,) = [difference for difference in comparison.differences if difference.startswith(sentence)]
    assert re.search(r"is 0x([0-9a-f]+) instead of 0x(?!\1)[0-9a-f]+; 1 of [0-9,]+ elements differs", named)


@pytest.mark.usefixtures("kernels")
def test_the_part_bits_names_at_most_eight_differences_of_a_kernel_in_all_its_checks_and_counts_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bits, "SIZES", ((32, 2),))
    monkeypatch.setattr(bits, "GAUSSIAN_BLOCKS", (1,))
    monkeypatch.setattr(torch.ops.megatron_zpp, "decode_blocks", wrong_at(torch.ops.megatron_zpp.decode_blocks, 1, 0, 3))
    outcome = run(bits)
    sentence = "decode_blocks, payloads [3, 96], to float32, bits 4, 2 blocks of 32, kind 0 of float32: row 0, element 3 in block 0 is 0x"
    assert outcome.failures[0].startswith(sentence) and f"FAILS: {outcome.failures[0]}" in outcome.lines
    assert [failure.partition(",")[0] for failure in outcome.failures] == ["decode_blocks"] * 8
    assert "2 blocks of 32: 534 results, with 120 differences" in outcome.lines
    assert "rows at odd places: 36 results, with 18 differences" in outcome.lines
    assert "holds: dropout: 240 results equal the reference's bit for bit" in outcome.lines
    in_all_checks = 120 + 18 + 24 + 9  # the last: of a long run all parts but the first, with which it begins
    assert outcome.lines[-1] == f"more results differ: {in_all_checks - 8} of decode_blocks"


@pytest.mark.usefixtures("kernels")
def test_what_is_printed_of_a_kernel_with_one_code_off_in_one_block_says_op_dtype_size_index_and_both_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = torch.ops.megatron_zpp.encode_blocks

    def one_code_off(values: Tensor, payloads: Tensor, bits_: int, block_numel: int, *others: Any) -> None:
        encode(values, payloads, bits_, block_numel, *others)
        if (values.dtype, bits_, block_numel) == (torch.bfloat16, 8, 96):
            payloads[1, 500] ^= 1

    monkeypatch.setattr(bits, "SIZES", ((32, 2), (96, 45)))
    checks = bits._checks
    monkeypatch.setattr(bits, "_checks", lambda *arguments: list(checks(*arguments))[:2])  # of these sizes
    monkeypatch.setattr(torch.ops.megatron_zpp, "encode_blocks", one_code_off)
    text = printed({"bits": {**run(bits).as_json("failed"), "seconds": 1.0}}, "gpu_check.txt")
    case = "encode_blocks, values bfloat16 [3, 4320], bits 8, 45 blocks of 96, kind 0"
    named = re.escape(f"FAILED, bits: {case}: row 1, byte 500 in the codes of block 5 is 0x")
    found = re.search(rf"{named}([0-9a-f]{{2}}) instead of 0x([0-9a-f]{{2}}); 1 of [0-9,]+ elements differs", text)
    assert found is not None and int(found[1], 16) ^ int(found[2], 16) == 1
    assert text.count("FAILED, bits: ") == 8 and "more results differ: " in text


@pytest.mark.usefixtures("kernels")
def test_after_an_error_of_the_device_the_part_bits_ends_with_all_that_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bits, "SIZES", ((32, 2),))
    monkeypatch.setattr(torch.ops.megatron_zpp, "decode_blocks", wrong_at(torch.ops.megatron_zpp.decode_blocks, 1, 0, 3))
    monkeypatch.setattr(torch.ops.megatron_zpp, "drop_values", fail)
    outcome = Outcome()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        bits.run(still(), outcome)
    assert len(outcome.failures) == 9 and outcome.failures[-1].startswith("dropout runs, and does not end with RuntimeError: CUDA error")
    assert outcome.lines[-1] == "more results differ: 112 of decode_blocks"


@pytest.mark.long
def test_the_part_bits_compares_the_kernels_of_the_cpu() -> None:
    assert run(bits).failures == []


def test_after_an_error_a_part_goes_on_unless_the_device_is_broken() -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    outcome = Outcome()
    attempt(outcome, "one", lambda: fail("CUDA out of memory"))
    attempt(outcome, "two", lambda: outcome.say("done"))
    with pytest.raises(RuntimeError, match="illegal"):
        attempt(outcome, "three", lambda: fail("CUDA error: an illegal memory access"))
    assert [failure.split()[0] for failure in outcome.failures] == ["one", "three"] and "done" in outcome.lines


@pytest.mark.parametrize(
    "text, broken",
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("encode_blocks could not be launched: an illegal memory access was encountered", True),  # by a kernel before
        ("CUDA error: device-side assert triggered", True),
        ("encode_blocks could not be launched: too many resources requested for launch", False),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
        ("CUDA error: out of memory", False),
        ("values must be contiguous", False),
    ],
)
def test_a_device_is_broken_after_a_kernel_that_failed_and_not_after_one_that_was_not_launched(text: str, broken: bool) -> None:
    assert is_fatal(RuntimeError(text)) == broken


# ---- ranks as threads


class NoStreams:
    """A device whose one stream runs each operation at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = self

    def make(self, *, is_urgent: bool = False) -> NoStreams:
        return self

    def current(self) -> NoStreams:
        return self

    def entered(self, stream: Any) -> Any:
        return nullcontext()

    def record_event(self) -> NoStreams:
        return self

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

    def host_memory(self, numel: int, dtype: torch.dtype, *, is_pinned: bool = True) -> Tensor:
        return torch.zeros(numel, dtype=dtype)


@pytest.mark.virtual
def test_threads_that_share_a_device_compute_the_bits_of_a_virtual_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ranks, "CudaStreams", NoStreams)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", NoStreams)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(threads, "STEPS", 2)
    some = next(run for run in threads.RUNS if run.name == "ZeRO-3 and hpZ")
    found = [
        run_ranks(Grid.of_nodes(2, 2), CPU.device, lambda place: threads.train(some, None, place))
        for run_ranks in (thread_ranks.run_on_one_gpu, thread_ranks.run_on_cpu)
    ]
    assert found[0] == found[1]


# ---- stalls


class MachineMarks:
    """Marks in simulated time."""

    def mark(self, stream: FakeStream) -> FakeEvent:
        return FakeEvent(stream.machine, {}, stream.free_at)

    def seconds(self, first: FakeEvent, second: FakeEvent) -> float:
        return second.time - first.time


@pytest.mark.virtual
def test_measured_stalls_are_the_time_for_which_computation_stands_still() -> None:
    def program(gpu: Gpu) -> tuple[dict[str, float], float]:
        machine: Streams = gpu.machine
        measured = MeasuredStreams(machine, MachineMarks(), is_recording=True)
        step_time(replace(gpu, lanes=StreamLanes(measured)), EngineOptions(POLICIES[3], prefetch=Prefetch(0, 0)), uses=6, microbatches=1)
        return measured.take(), gpu.machine.waits

    for stalls, waits in run_on_gpus((1, 4), program, times={INTRA_CLIMB: 0.5}):
        assert waits > 0 and sum(stalls.values()) == pytest.approx(waits)
        assert next(iter(stalls)) == "lanes.wait intra-climb"


# ---- kernels


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "attention"),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void megatron_zpp::cuda::softmax_parts_kernel<true, Bf16Bits>", "fused loss"),
        ("void megatron_zpp::cuda::encode_kernel<Teams<32>>", "quantization and dropout"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("Memcpy DtoD (Device -> Device)", "copies and fills"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "norms"),
        ("void cunn_SoftMaxForward<8, float>", "loss"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "other elementwise"),
        ("some_new_kernel", "everything else"),
    ],
)
def test_kernels_are_sorted_by_the_names_of_libraries(kernel: str, kind: str) -> None:
    assert kernel_kinds.kind_of(kernel) == kind


# ---- ranks as processes

FAKE_RANK = """
import json, os, pathlib, sys, time
job = pathlib.Path(sys.argv[1])
for index, one in enumerate(json.loads(job.read_text())):
    flags = one["flags"]
    if "--dies" in flags or ("--dies-as-second" in flags and index > 0):
        print("rank is on fire", flush=True)
        os._exit(1)
    if "--refused" in flags:
        job.with_name(f"{job.name}.{index}.{os.environ['RANK']}").write_text("2")
    if "--hangs" in flags or "--refused" in flags:
        time.sleep(1000)
    if os.environ["RANK"] == "0":
        pathlib.Path(flags[flags.index("--log-jsonl") + 1]).write_text(json.dumps({"lm_loss": index, "grad_norm": 1.0}))
    job.with_name(f"{job.name}.{index}.{os.environ['RANK']}").write_text("0")
"""


def finished_runs(flags: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, run_seconds: float = 60.0) -> list[Finished]:
    program = folder / "rank.py"
    program.write_text(FAKE_RANK)
    monkeypatch.setattr(entry_runs, "PROGRAM", (str(program),))
    entries = [Entry(f"run {index}", one) for index, one in enumerate(flags)]
    return list(run_entries(entries, 2, ONE_GPU_EACH, Deadline(300.0), run_seconds=run_seconds))


def test_a_run_that_fails_is_told_and_the_next_ones_begin_in_new_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finished_runs(["", "--dies", "", ""], tmp_path, monkeypatch)
    losses = [(one.entry.name, one.losses) for one in found]
    assert losses == [("run 0", [[0, 1]]), ("run 1", []), ("run 2", [[0, 1]]), ("run 3", [[1, 1]])]
    assert [("rank is on fire" in one.errors, one.errors == []) for one in found] == [(number == 1, number != 1) for number in range(4)]


def test_a_run_that_fails_after_others_in_its_processes_is_tried_in_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finished_runs(["", "--dies-as-second"], tmp_path, monkeypatch)
    assert [(one.entry.name, one.losses, one.errors) for one in found] == [("run 0", [[0, 1.0]], []), ("run 1", [[0, 1.0]], [])]


def test_a_run_that_hangs_or_is_slow_is_ended_and_late_and_the_next_ones_begin_in_new_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_runs, "START_SECONDS", 0.5)
    found = finished_runs(["--hangs", "--dies"], tmp_path, monkeypatch, run_seconds=0.5)
    assert [(one.entry.name, one.is_late) for one in found] == [("run 0", True), ("run 1", False)]
    assert "exit code None" in found[0].errors[0] and "rank is on fire" in found[1].errors


def test_a_run_that_has_failed_is_not_late_even_if_its_processes_take_long_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = finished_runs(["--refused"], tmp_path, monkeypatch)
    assert found.errors and not found.is_late


@pytest.mark.parametrize("is_late", [False, True])
def test_a_late_run_is_no_failure_of_its_part(is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(entries: list[Entry], *_: Any, **__: Any) -> list[Finished]:
        return [Finished(entry, [], ["last words"], is_late) for entry in entries]

    for part in (nccl, resume):
        monkeypatch.setattr(part, "run_entries", ended)
    of_nccl, of_resume = Outcome(), Outcome()
    nccl.compare_runs(still(), of_nccl, nccl.RUNS[:2], ONE_GPU_EACH, {}, {})
    resume.check_runs(still(), of_resume, tmp_path, 1, ONE_GPU_EACH)
    assert [len(outcome.failures) for outcome in (of_nccl, of_resume)] == ([0, 0] if is_late else [2, 6])
    assert [len(outcome.late) for outcome in (of_nccl, of_resume)] == ([2, 6] if is_late else [0, 0])
    assert "last words" in of_nccl.lines and "last words" in of_resume.lines


class Survivors:
    """Time that passes in sleep alone, and ranks of which all but the lost one end `after` seconds after it."""

    def __init__(self, after: float) -> None:
        self.now = 0.0
        self.after = after
        self.killed: list[int] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def codes(self) -> list[int | None]:
        return [-9 if rank in self.killed else 1 if self.killed and self.now > self.after else None for rank in range(lost_rank.RANKS)]

    def ended(self) -> list[Ended]:
        return [Ended(rank, code, self.now, "last words") for rank, code in enumerate(self.codes())]


@pytest.mark.parametrize(
    "after, seconds, failures, late, measured",
    [(50.0, 100.0, 0, 0, 50.0), (62.0, 100.0, 1, 0, 60.0), (50.0, 10.0, 0, 1, 10.0)],
    ids=["in time", "after the timeout", "too little time"],
)
def test_after_a_rank_is_lost_the_others_have_the_time_that_the_flag_says(
    after: float, seconds: float, failures: int, late: int, measured: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, outcome = Survivors(after), Outcome()
    monkeypatch.setattr(lost_rank, "clock", world)
    monkeypatch.setattr(lost_rank, "Deadline", lambda seconds: Deadline(seconds, lambda: world.now))
    (tmp_path / "log").write_text(3 * '"lm_loss"')
    lost_rank._lose(Deadline(seconds, lambda: world.now), outcome, world, tmp_path / "log")
    assert (len(outcome.failures), len(outcome.late)) == (failures, late)
    assert outcome.measured["seconds_until_all_ended"] == pytest.approx(measured, abs=0.2)


def test_a_library_that_is_loaded_when_the_time_is_over_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome()
    for code in (None, 1):
        monkeypatch.setattr(library, "run_program", lambda *_, code=code: Done(code, ["last words"]))
        library.check_loads(still(), outcome, "a new process", "cpu")
    assert outcome.late == ["a new process that loads the library"] and outcome.failures == ["a new process loads its bodies for cpu"]


def test_without_time_no_run_is_begun() -> None:
    assert list(run_entries([Entry("run", "")], 2, ONE_GPU_EACH, still(1.0), run_seconds=60.0)) == []


def one_that_ended(code: int | None) -> Ended:
    return Ended(0, code, 1.0, ["node:7 NCCL WARN Duplicate GPU detected", "Traceback"])


@pytest.mark.parametrize("working, gpus, chosen", [((HOST_IDS, MULTI_RANK), 1, HOST_IDS), ((MULTI_RANK,), 2, MULTI_RANK)])
def test_the_first_way_in_which_ranks_can_share_a_gpu_is_taken(
    working: tuple[Sharing, ...], gpus: int, chosen: Sharing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sharing, "_tried", lambda time, way, world_size: [one_that_ended(0 if way in working else 1)])
    assert sharing.working_sharing(still(), Outcome(), 4) is chosen


@pytest.mark.parametrize("code", [1, None], ids=["refused", "slow"])
def test_if_ranks_cannot_share_a_gpu_their_words_are_kept_and_it_is_late_if_they_are_only_slow(
    code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sharing, "_tried", lambda time, way, world_size: [one_that_ended(code)])
    with pytest.raises(NotDone, match="^4 ranks did not exchange numbers over NCCL .*: node:7 NCCL WARN Duplicate GPU detected$"):
        sharing.working_sharing(still(), outcome, 4)
    said = [f"[rank 0, exit code {code}] Traceback", f"[rank 0, exit code {code}]", "node:7 NCCL WARN Duplicate GPU detected", "Traceback"]
    assert outcome.lines == [f"{HOST_IDS.name}:", *said, f"{MULTI_RANK.name}:", *said]
    assert outcome.late == ([] if code else ["an exchange of numbers among 4 ranks"])


@pytest.mark.parametrize(
    "code, seconds, tries",
    [(0, 100.0, [2, 0]), (1, 100.0, [2, 0]), (None, 1e6, [2, 0]), (None, 100.0, [2, 2])],
    ids=["works", "refused", "hangs", "without time for all ways"],
)
def test_one_attempt_of_ranks_to_share_a_gpu_is_enough_for_all_parts_unless_it_had_too_little_time(
    code: int | None, seconds: float, tries: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Sharing] = []

    def try_it(time: Deadline, way: Sharing, world_size: int) -> list[Ended]:
        tried.append(way)
        return [one_that_ended(code if way is MULTI_RANK else 1)]

    def outcome_of_a_part() -> tuple[object, int]:
        before = len(tried)
        try:
            found: object = sharing.working_sharing(still(seconds), Outcome(), 4)
        except NotDone as reason:
            found = str(reason)
        return found, len(tried) - before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sharing, "_tried", try_it)
    monkeypatch.setenv(FOUND_VARIABLE, str(tmp_path / "found.json"))
    (first, first_tries), (second, second_tries) = outcome_of_a_part(), outcome_of_a_part()
    assert first == second and [first_tries, second_tries] == tries
    assert first is MULTI_RANK if code == 0 else "NCCL WARN" in str(first)


def test_a_rank_hears_why_nccl_refuses_and_looks_for_no_other_network_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    environment = rank_processes._environment(1, 2)
    assert environment["NCCL_DEBUG"] == "INFO" and environment["NCCL_SOCKET_IFNAME"] == "=lo"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo" and environment["NCCL_MNNVL_ENABLE"] == "0"


def test_ranks_that_share_a_gpu_have_host_ids_of_their_own_or_one_and_the_switch() -> None:
    assert [HOST_IDS.of_rank(rank) for rank in (0, 1)] == [{"NCCL_HOSTID": "rank0"}, {"NCCL_HOSTID": "rank1"}]
    assert MULTI_RANK.of_rank(1) == {"NCCL_HOSTID": "one host", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert ONE_GPU_EACH.of_rank(1) == {}


def test_a_ninja_that_fails_comes_first_on_the_path_of_builds_without_ninja(tmp_path: Path) -> None:
    folder = builds._with_broken_ninja(tmp_path / "bin")
    assert subprocess.run([shutil.which("ninja", path=str(folder)) or "true", "--version"], check=False).returncode == 1


@pytest.mark.virtual
def test_threads_of_ranks_end_with_the_error_of_the_one_that_failed() -> None:
    def fail(place: Any) -> None:
        if place.backend.rank == 1:
            raise RuntimeError("rank 1 is on fire")
        place.backend.gather_world(torch.zeros(1))

    with pytest.raises(RuntimeError, match="rank 1 is on fire|another rank"):
        thread_ranks.run_on_cpu(Grid.of_nodes(1, 2), CPU.device, fail)
