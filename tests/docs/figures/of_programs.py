"""Figures of the other benchmarks: benchmarks/README.md has their tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import gpu_host_path
import gpu_table
import head_loss
import preprocess
import quantization
import reshard
from figures.figure import Figure
from figures.results import FOLDER, only, results, spread

MIB, GIB = 2**20, 2**30
PAGE, LONG, CHANGES = "benchmarks/README.md", "docs/long_sequences.md", "CHANGELOG.md"


def kernels() -> list[dict[str, Any]]:
    return list(results("quantization_cpu")["results"])


def kernel_row(one: dict[str, Any]) -> str:
    rates = f"{one['gigabytes_per_second']:.1f} | {one['memcpy_gigabytes_per_second']:.1f}"
    shares = f"{one['share_of_memcpy']:.0%} | {one['factor_over_reference']:.0f}"
    return f"| {one['megabytes']} | INT{one['bits']} | {one['op']} | {rates} | {shares} |"


def of_kernels(key: str, *ops: str, least: int = 0, most: int = 10**9) -> list[float]:
    """One figure of the rows with these ops, of messages of `least` to `most` megabytes."""
    return [one[key] for one in kernels() if one["op"] in ops and least <= one["megabytes"] <= most]


def percents(shares: Iterable[float]) -> list[float]:
    return [100 * share for share in shares]


def gaussian(key: str, rounds: str, *ops: str) -> list[float]:
    return [one[key] for one in results("gaussian_cpu")["results"] if one["op"].endswith(rounds) and one["op"].split(",")[0] in ops]


def gaussian_table() -> str:
    return quantization._table([quantization.Result(**one) for one in results("gaussian_cpu")["results"]])


def mean_over_decoding() -> list[float]:
    """What a mean of two costs, in decodings."""
    rows = {(one["codes"], one["op"]): one["nanoseconds_per_value"] for one in results("gaussian_cpu")["results"]}
    return [rows[codes, op] / rows[codes, f"decode to bf16,{op.rpartition(',')[2]}"] for codes, op in rows if "mean of 2" in op]


def dropout_row(one: dict[str, Any]) -> str:
    dtype = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[one["dtype"]]
    times = f"{one['milliseconds']:.1f} | {one['torch_milliseconds']:.1f} | {one['share_of_torch']:.0%}"
    return f"| {one['block']} | {dtype} | {one['megabytes']:.0f} | {times} | {one['torch_kept_bytes']:.0f} |"


def disk() -> dict[str, float]:
    found: dict[str, float] = results("checkpoint")["results"]
    return found


def preprocessed() -> list[preprocess.Result]:
    return [preprocess.Result(one["tokenizer"], one["megabytes"], one["seconds"]) for one in results("preprocess")["speed"]]


def faster_than_before() -> list[float]:
    return [one.rate("tool") / one.rate("before") for one in preprocessed()]


def index_of(measure: str, builder: str) -> dict[str, float]:
    found = results("data_index")["figures"]
    return next(one for one in found if (one["measure"], one["builder"]) == (measure, builder))


def of_index(measure: str, builder: str) -> list[float]:
    return [index_of(measure, builder)[key] for key in ("seconds", "peak_megabytes")]


def heads() -> list[dict[str, Any]]:
    return list(results("head_loss")["results"])


def head_table() -> str:
    return head_loss._table([head_loss.Result(**one) for one in heads()])


def of_whole(key: str, chunk_tokens: int, dtype: str = "") -> list[float]:
    """A figure of chunks relative to that of whole logits."""
    return [
        one[key] / whole_of(one)[key]
        for one in heads()
        if one["way"] == "chunks" and one["chunk_tokens"] == chunk_tokens and dtype in one["dtype"]
    ]


def whole_of(one: dict[str, Any]) -> dict[str, Any]:
    return only("head_loss", dtype=one["dtype"], vocabulary=one["vocabulary"], way="whole logits")


def in_forward(key: str, of: str) -> list[float]:
    """A figure of gradients in forward, relative to whole logits or to chunks of as many tokens."""
    ways = [one for one in heads() if one["way"] == "gradients in forward"]
    if of == "whole logits":
        return [one[key] / whole_of(one)[key] for one in ways]
    alike = [{name: one[name] for name in ("dtype", "vocabulary", "chunk_tokens")} for one in ways]
    return [one[key] / only("head_loss", way="chunks", **same)[key] for one, same in zip(ways, alike, strict=True)]


def planned_errors() -> list[float]:
    """By how many percent the plan is above what was measured."""
    return [100 * (one["planned_mib"] / one["peak_mib"] - 1) for one in heads() if one["planned_mib"] is not None]


def reshard_tables() -> tuple[str, str]:
    found = results("reshard")
    checkpoints = [reshard.Checkpoint(**one) for one in found["checkpoints"]]
    return reshard.checkpoint_table(checkpoints), reshard.load_table([reshard.Load(**one) for one in found["loads"]])


def most_read() -> float:
    return max(one["read_bytes"] / one["wanted_bytes"] for one in results("reshard")["loads"])


def activations(tokens: int) -> list[object]:
    """A row of peaks: MiB of one rank, and of 2 and 4 beside it."""
    peaks = {one["ranks"]: one["peak_bytes"] for one in results("long_sequences")["measured"] if one["tokens"] == tokens}
    return [f"{peaks[1] / MIB:.1f} MiB", *(f"{peaks[ranks] / MIB:.1f} MiB ({peaks[ranks] / peaks[1]:.2f})" for ranks in (2, 4))]


def planned_above() -> list[float]:
    return [100 * (one["planned_bytes"] / one["peak_bytes"] - 1) for one in results("long_sequences")["measured"]]


def limited() -> dict[str, Any]:
    found: dict[str, Any] = results("long_sequences")["limited"]
    return found


def host_path(name: str = "gpu_host_path") -> list[gpu_host_path.Measured]:
    return [gpu_host_path.Measured(**one) for one in results(name)["measured"]]


def peaks_above_today() -> list[float]:
    """The least and the most GiB by which the peak of a run with the older code is above that of today."""
    today = {one.name: one.peak_bytes for one in host_path()}
    above = [(one.peak_bytes - today[one.name]) / GIB for one in host_path("gpu_host_path_before")]
    return [min(above), max(above)]


def planned_on_gpus() -> list[float]:
    """The least and the most of the peak in percent, and the most of runs that recompute nothing."""
    shares = {one.name: 100 * one.planned_bytes / one.peak_bytes for one in host_path()}
    return [min(shares.values()), max(shares.values()), max(share for name, share in shares.items() if "recomputed" not in name)]


def kernel_count() -> int:
    """Raises ValueError if one spills."""
    rows = [row.split(" | ") for row in (FOLDER / "cuda_kernels.md").read_text(encoding="utf-8").splitlines() if row.startswith("| sm_")]
    if any(spilled != "0" for *_, spilled, _ in rows):
        raise ValueError("a kernel spills registers")
    return len(rows)


def on_h100(*patterns: str) -> list[float]:
    """Shares of a copy's rate in percent, of the calls on an H100 whose codes and name match a pattern."""
    return [
        100 * one["share_of_copy"]
        for one in results("gpu_h100")["kernels"]
        if any(re.fullmatch(pattern, f"{one['codes']}, {one['op']}") for pattern in patterns)
    ]


def steps_on_h100(variant: str) -> list[float]:
    """Milliseconds of a step of 1.0 billion parameters, for 1 and for 8 micro-batches."""
    return [one["ms"] for one in results("gpu_h100")["step"] if one["variant"] == variant]


def milliseconds_of(kind: str) -> float:
    return float(1e3 * results("gpu_h100")["seconds_by_kind"][kind])


def most_above_plan() -> float:
    """By how many percent a peak of the training script on an H100 is above its plan, at most."""
    return max(100 * (one["speed"]["peak_bytes"] / one["planned_bytes"] - 1) for one in results("gpu_h100")["runs"])


def products_of_peak() -> list[float]:
    return [max(one["mfu"] / one["of_products"] for one in results("gpu_h100")["step"])]


RECODED = r"INT[48], (decode, mean of \d, encode.*|encode rotated.*|encode .*stochastically)"

FIGURES = (
    Figure(PAGE, "{}", lambda: [gpu_table.kernel_table(results("gpu_h100"))]),
    Figure(PAGE, "{}", lambda: [gpu_table.run_table(results("gpu_h100"))]),
    Figure(PAGE, "{}", lambda: [gpu_table.variant_table(results("gpu_h100"))]),
    Figure(PAGE, "Products of large square matrices alone reach {:.2f} of them on this GPU.", products_of_peak),
    Figure(PAGE, "the peak is at most {:.1f} % above it.", lambda: [most_above_plan()]),
    Figure(
        PAGE,
        "matrix products for {:.1f} ms and attention for {:.1f} ms. The optimizer takes {:.1f} ms,",
        lambda: map(milliseconds_of, ("matrix products", "attention", "optimizer")),
    ),
    Figure(
        PAGE,
        "encode of integers except INT4 codes of bf16 reach {:.0f} % or more.",
        lambda: [
            min(
                on_h100(
                    "bf16, (mean.*|dropout|gradient of logits)", "INT[48], decode to .*", "INT8, encode (bf16|fp32)", "INT4, encode fp32"
                )
            )
        ],
    ),
    Figure(PAGE, "INT4 codes of bf16 reach {:.0f} %.", lambda: on_h100("INT4, encode bf16")),
    Figure(
        PAGE, "added to an fp32 sum reaches {:.0f} to {:.0f} % with integers", lambda: spread(on_h100("INT[48], decode, add mean of 2"))
    ),
    Figure(PAGE, "codes after a decode reach {:.0f} to {:.0f} %,", lambda: spread(on_h100(RECODED))),
    Figure(PAGE, "Gaussian codes {:.0f} to {:.0f} %: most of them", lambda: spread(on_h100("Gaussian.*"))),
    Figure(
        "docs/recomputation.md",
        "the first reaches {:.0f} % on an H100, and the second {:.0f} %; plain torch reaches {:.0f} % and {:.0f} %.",
        lambda: [*on_h100("bf16, (parts|gradient) of logits"), *on_h100("bf16, .* of logits, by torch")],
    ),
    Figure(
        "docs/architectures.md",
        "parameters is {:.1f} ms shorter with cuDNN than with flash",
        lambda: [steps_on_h100("attention by flash")[0] - steps_on_h100("defaults")[0]],
    ),
    Figure(
        "README.md",
        "1.3 billion parameters: an MFU of {:.0f} %, memory at most {:.0f} % above the plan",
        lambda: [
            max(100 * one["speed"]["mfu"] for one in results("gpu_h100")["runs"] if one["name"].startswith("1.3B")),
            math.ceil(most_above_plan()),
        ],
    ),
    Figure("docs/launching.md", "the context took {:.0f} MiB;", lambda: [results("gpu_h100")["beside_allocator_bytes"] / 2**20]),
    Figure(PAGE, "Parts of logits reach {:.0f} %.", lambda: on_h100("bf16, parts of logits")),
    Figure(
        PAGE,
        "on {} x {} values in blocks of {}, compiled by nvcc {} for sm_80",
        lambda: [results("kernel_work")[name] for name in ("slices", "run_numel", "block_numel", "nvcc")],
    ),
    Figure(PAGE, "{}", lambda: ["\n".join(gpu_host_path.memory_table(host_path()))]),
    Figure(PAGE, "{}", lambda: ["\n".join(gpu_host_path.calls_table(host_path()))]),
    Figure(PAGE, "{}", lambda: ["\n".join(gpu_host_path.calls_table(host_path("gpu_host_path_before")))]),
    Figure(PAGE, "Its peaks are {:.1f} to {:.1f} GiB higher", peaks_above_today),
    Figure(PAGE, "The plan is {:.1f} % to {:.1f} % of the peak; at most {:.0f} % without recomputation", planned_on_gpus),
    *(Figure(PAGE, "{}", lambda one=one: [kernel_row(one)]) for one in kernels()),
    Figure(
        PAGE,
        "from 16 MB up, encode and decode run at {:.0f} % of memcpy speed or more",
        lambda: [min(percents(of_kernels("share_of_memcpy", "encode", "decode to bf16", least=16)))],
    ),
    Figure(
        PAGE, "From 1 MB up, decode runs at {:.0f} % or more.", lambda: [min(percents(of_kernels("share_of_memcpy", "decode to bf16")))]
    ),
    Figure(
        PAGE,
        "bound by its arithmetic at {:.0f} to {:.0f} GB/s.",
        lambda: spread(of_kernels("gigabytes_per_second", "encode")),
    ),
    Figure(
        PAGE,
        "memcpy reaches {:.0f} GB/s; there encode has {:.0f} to {:.0f} % of it.",
        lambda: (
            max(of_kernels("memcpy_gigabytes_per_second", "encode", most=4)),
            *spread(percents(of_kernels("share_of_memcpy", "encode", most=4))),
        ),
    ),
    Figure(PAGE, "{}", lambda: [gaussian_table()]),
    Figure(
        PAGE,
        "encoding and decoding of a value take {:.1f} to {:.1f} ns with one round of rotation and {:.1f} to {:.1f} ns with two, "
        "and are {:.0f} times "
        "as fast as the reference or more.",
        lambda: (
            *spread(gaussian("nanoseconds_per_value", "1 round", "encode", "decode to bf16")),
            *spread(gaussian("nanoseconds_per_value", "2 rounds", "encode", "decode to bf16")),
            min(gaussian("factor_over_reference", "", "encode", "decode to bf16")),
        ),
    ),
    Figure(
        PAGE,
        "bound by their arithmetic, at {:.0f} to {:.0f} % of memcpy speed. A mean of two costs {:.1f} to {:.1f} times a decoding",
        lambda: (*spread(percents(gaussian("share_of_memcpy", "", "encode", "decode to bf16"))), *spread(mean_over_decoding())),
    ),
    *(Figure(PAGE, "{}", lambda one=one: [dropout_row(one)]) for one in results("dropout_cpu")["results"]),
    # Checkpoints
    Figure(
        PAGE,
        "| plain write, plain read | {:.2f}, {:.2f} GB/s | |",
        lambda: (disk()["plain_write_gb_per_second"], disk()["plain_read_gb_per_second"]),
    ),
    Figure(
        PAGE,
        "| save | {:.2f} GB/s | {:.0f} % of the plain write; {:.0f} MiB beyond the state |",
        lambda: (disk()["save_gb_per_second"], 100 * disk()["save_share_of_plain_write"], disk()["save_extra_bytes"] / MIB),
    ),
    Figure(
        PAGE,
        "| load | {:.2f} GB/s | {:.0f} % of the plain write, {:.0f} % of the plain read; {:.0f} MiB beyond the state |",
        lambda: (
            disk()["load_gb_per_second"],
            100 * disk()["load_share_of_plain_write"],
            100 * disk()["load_share_of_plain_read"],
            disk()["load_extra_bytes"] / MIB,
        ),
    ),
    Figure(
        PAGE,
        "| pause for a save in the background | {:.3f} s | {:.1f} % of a save that is waited for; iterations beside it take "
        "{:.2f} s longer in all |",
        lambda: (disk()["pause_seconds"], 100 * disk()["pause_share_of_save"], disk()["slowdown_seconds"]),
    ),
    Figure(PAGE, "{}", lambda: reshard_tables()[:1]),
    Figure(PAGE, "{}", lambda: reshard_tables()[1:]),
    Figure(PAGE, "rows: {:.1f} times its bytes", lambda: [most_read()]),
    # Text and indices
    Figure(PAGE, "{}", lambda: [preprocess.speed_table(preprocessed())]),
    Figure(
        PAGE,
        "The start of the tool counts too. It is a part of the {:.1f} to {:.1f} s that 100 MB take",
        lambda: spread([one.seconds["tool"] for one in preprocessed()]),
    ),
    Figure(
        PAGE,
        "{}",
        lambda: [preprocess.memory_table(results("preprocess_memory")["memory"]).partition("\n\n")[0]],
    ),
    Figure(
        "docs/data.md",
        "So it is {:.0f} to {:.0f} times as fast per CPU second as a program",
        lambda: spread([one.rate("tool") / one.rate("package") for one in preprocessed()]),
    ),
    Figure(CHANGES, "Text becomes tokens {:.0f} to {:.0f} times as fast per CPU second", lambda: spread(faster_than_before())),
    Figure(
        PAGE,
        "| indices, 1,000,000,000 tokens in 1,000,000 documents | C++ | {:.3f} | {:.0f} | | the same | numpy | {:.3f} | {:.0f} |",
        lambda: (*of_index("build", "C++"), *of_index("build", "numpy")),
    ),
    Figure(
        PAGE,
        "| blend of 8 corpora, 976,562 samples | C++ | {:.3f} | {:.0f} | | the same | numpy | {:.1f} | {:.0f} |",
        lambda: (*of_index("blend", "C++"), *of_index("blend", "numpy")),
    ),
    Figure(PAGE, "| opening the cached indices | | {:.3f} | {:.0f} |", lambda: of_index("open", "C++")),
    Figure(
        PAGE,
        "which C++ does {:.0f} times as fast as numpy. Cached indices open in {:.0f} ms.",
        lambda: (index_of("blend", "numpy")["seconds"] / index_of("blend", "C++")["seconds"], 1e3 * index_of("open", "C++")["seconds"]),
    ),
    # Head and loss
    Figure(PAGE, "{}", lambda: [head_table()]),
    Figure(
        PAGE,
        "chunks of 1024 tokens, the default, need {:.2f} to {:.2f} of the memory of whole logits. In bf16 they take {:.2f} of the time",
        lambda: (*spread(of_whole("peak_mib", 1024)), max(of_whole("seconds", 1024, "bf16"))),
    ),
    Figure(PAGE, "they take {:.2f} to {:.2f} times as long.", lambda: spread(of_whole("seconds", 1024, "fp32"))),
    Figure(
        PAGE,
        "Gradients in forward take {:.2f} to {:.2f} of the time and {:.1f} to {:.1f} times the memory of chunks of the same number of "
        "tokens",
        lambda: (*spread(in_forward("seconds", "whole logits")), *spread(in_forward("peak_mib", "chunks"))),
    ),
    Figure(
        PAGE,
        "The plan is between {:.0f} % below and {:.0f} % above what was measured.",
        lambda: (-min(planned_errors()), max(planned_errors())),
    ),
    Figure(
        PAGE,
        "{:.0f} million elements on one core: {:.2f} of torch's rate, {:.2f} with clipping",
        lambda: (
            results("host_adam")["results"][0]["elements"] / 1e6,
            only("host_adam", way="units")["share"],
            only("host_adam", way="units, clipped")["share"],
        ),
    ),
    # Long sequences
    *(Figure(LONG, f"| {tokens} |" + " {} |" * 3, lambda tokens=tokens: activations(tokens)) for tokens in (4096, 8192, 16384)),
    Figure(LONG, "The plan of these runs is {:.0f} to {:.0f} % above the measured peaks.", lambda: spread(planned_above())),
    Figure(
        LONG,
        "With a limit of {:.0f} MiB for each process (RLIMIT_DATA, beyond what it has before its model), {} ranks train on a "
        "sample of {} tokens, "
        "with a peak of {:.1f} MiB each",
        lambda: (
            limited()["limit_bytes"] / MIB,
            limited()["together"]["ranks"],
            limited()["together"]["tokens"],
            limited()["together"]["peak_bytes"] / MIB,
        ),
    ),
    Figure(
        PAGE,
        "the registers of each of the {} kernels, none of which spills",
        lambda: [kernel_count()],
    ),
)
