"""Which numbers of the pages other tests compare, and which nobody measured."""

from __future__ import annotations

from figures.figure import Elsewhere, NotMeasured

DEFINITION = "what a word or a formula means"
LIMIT = "a limit or an interval that the code has, or that a test sets"
DEFAULT = "a flag's or another program's default"
EXAMPLE = "given in an example, or the setting of a measurement"
ARITHMETIC = "follows from the numbers beside it"
SOURCE = "from a data sheet, a paper or another project"
AGREED = "what a test demands"

GIB = r"[\d.]+ [GM]iB"
ELSEWHERE = (
    Elsewhere(
        "docs/memory.md",
        rf"\| ` \| {GIB} \| {GIB} \| (?:yes|no) \|",
        "docs/test_memory_page.py::test_each_row_of_the_example_is_the_plan_of_its_flags",
    ),
    Elsewhere(
        "docs/memory.md",
        rf"\| (?:none|`) \| \d \| {GIB}(?:, does not fit)? \| [\d.]+ \|",
        "docs/test_memory_page.py::test_each_time_of_the_example_is_that_of_the_plan",
    ),
    Elsewhere(
        "docs/recomputation.md",
        rf"\| (?:none|`) \| {GIB} \| {GIB} \|",
        "docs/test_recomputation_page.py::test_each_row_of_the_example_is_the_plan_of_its_flags",
    ),
    Elsewhere(
        "docs/long_sequences.md",
        r"\| (?:ZeRO|lean)\S+(?: \| [\d.]+){6} \| yes \||\| (?:ZeRO|lean)\S+(?: \| [\d.]+){3} \|",
        "docs/test_long_sequences_page.py::test_the_tables_of_memory_and_of_bytes_are_the_plans_of_the_command",
    ),
    Elsewhere(
        "docs/long_sequences.md",
        rf"\| \d \| \d+ \| \S+ \| \d \| [\d.]+ \| [\d.]+ \| {GIB} \| [\d.]+ \|",
        "docs/test_long_sequences_page.py::test_each_pair_of_sizes_is_planned_with_the_fastest_member",
    ),
    Elsewhere(
        "docs/long_sequences.md",
        rf"its activations take {GIB}, and a run with ZeRO-3 {GIB}|256K tokens with C = 16 take {GIB}",
        "docs/test_long_sequences_page.py::test_a_whole_sample_and_a_longer_one_need_what_the_text_says",
    ),
    Elsewhere(
        "docs/launching.md",
        r"takes \d+ MiB, that of ranks that share layers \d+ MiB|takes \d+ MiB for each other one on the node, and \d+ MiB",
        "docs/test_launching_page.py::test_the_buffers_of_exchanges_are_those_of_the_page",
    ),
    Elsewhere(
        "docs/worked_example.md",
        r"\d+\.\d+(?: x)?|1e-8",
        "docs/test_worked_example.py::test_every_decimal_number_of_the_text_stands_in_a_block_or_in_an_equation",
    ),
)

_PARTS = {
    "README.md": {"**(0.5 + 0.25k)M**": DEFINITION},
    "CONTRIBUTING.md": {"it has to pass in 8 minutes on 2 cores": LIMIT},
    "benchmarks/README.md": {
        "one H100 with 80 GB ran them": EXAMPLE,
        "for CUDA 13.0 and": EXAMPLE,
        "the data sheet's 989 TFLOP/s": SOURCE,
        "A model of 1.0 billion parameters, 4 samples": EXAMPLE,
        "a copy of as many, for 64 MB of bf16 values": EXAMPLE,
        "At 1 and 4 MB all data fit the caches": EXAMPLE,
        "The rows of 16 MB and more": EXAMPLE,
        "p = 0.1, beside torch's dropout": EXAMPLE,
        "The 32 MB of the last fp32 case": EXAMPLE,
        "The text is the library of Python 3.11.7, 31.5 MB": EXAMPLE,
        "One rank saves and loads 1 GB of state": EXAMPLE,
        "because it calls `fsync` every 64 MiB": LIMIT,
        "Chunks of 1 MiB are read whole": LIMIT,
        "tokenises 100 MB of JSON lines": EXAMPLE,
        "s that 100 MB take": EXAMPLE,
        "1 MB to 2 GB; the aim is 90 % from 64 MB up": LIMIT,
        "A copy at 90 % of the memory's rate moves about 16.5 bytes": SOURCE,
        "12 on an A100 and 11.5 on an H100": SOURCE,
        "Blocks are 2 MiB or more": SOURCE,
        "The model of 1.0 billion parameters has": EXAMPLE,
        "that of 6.9 billion has": EXAMPLE,
    },
    "docs/architectures.md": {
        "which says 175.0 billion": SOURCE,
        "a step of 1.0 billion parameters is": EXAMPLE,
        "are equal within 1e-5 in fp32": AGREED,
        "two thirds of 4 x hidden size": DEFINITION,
        "sqrt(2 x layers)": DEFINITION,
    },
    "docs/checkpoints.md": {
        "renews its modification time every 10 s": LIMIT,
        "has not changed within 180 s": LIMIT,
        "calls fsync every 64 MiB": LIMIT,
        "less than 128 MiB more memory": AGREED,
    },
    "docs/coming_from_deepspeed.md": {"hidden dropout is 0.1 unless": DEFAULT},
    "docs/data.md": {
        "with SIGKILL 5 times at random moments (20 times with": AGREED,
        "Qwen 2, 3 or 3.5": SOURCE,
        "when that takes 256 MB": LIMIT,
    },
    "docs/datasets.md": {
        "0.005 as in Megatron": SOURCE,
        "within 2e-6 in fp32": AGREED,
        "every 30 seconds": LIMIT,
        "after 5 minutes the waiting ranks": LIMIT,
    },
    "docs/flags_that_matter.md": {"dropout, 0.1 each unless given": DEFAULT},
    "docs/launching.md": {
        "(default 0.1) of which": DEFAULT,
        "a context of CUDA of 1 GiB": SOURCE,
        "after 10 seconds": LIMIT,
        "20 minutes before SLURM_JOB_END_TIME": LIMIT,
        "KillWait (30 seconds by default)": DEFAULT,
        "Give more than 300 seconds": LIMIT,
        "unknown for 10 seconds": LIMIT,
        "at most 8 KiB long": LIMIT,
    },
    "docs/long_runs.md": {
        "that of an uninterrupted run within 1e-5": AGREED,
        "within 10 minutes": LIMIT,
        "no heartbeat for 5 minutes, or for 60 to 80 % of": LIMIT,
        "within 10 s": LIMIT,
    },
    "docs/long_sequences.md": {
        "8 GPUs with 80 GB, links of 400 Gbit/s": EXAMPLE,
        "At 100 GB/s into a GPU": EXAMPLE,
        "of 8.2 s": ARITHMETIC,
        "where 128K with C = 8 take 23.1 GiB": ARITHMETIC,
    },
    "docs/memory.md": {
        "weight differences of 3 bits about 0.4": ARITHMETIC,
        "the plan assumes 2e9 parameters per second": EXAMPLE,
        "8 GPUs of 24 GB": EXAMPLE,
        "shape of 6.74 billion parameters": ARITHMETIC,
        "at 80 TFLOP/s per GPU, 100 GB/s between GPUs and 25 GB/s over PCIe": EXAMPLE,
    },
    "docs/numerics.md": {
        "In fp32 each gradient of a model of two blocks is within 1e-6": AGREED,
        "Over 20 steps at a rate of 1e-3 the losses agree within 1e-6, the norms within 2e-5": AGREED,
        "In fp32 each gradient is within 1e-6 of its largest value": AGREED,
        "so 1e-30 and 1e30 have the error of other values": AGREED,
        "learning rate 4e-3 with a cosine": EXAMPLE,
        "1e-6 relative over the 20 steps of the tests (at a learning rate of 1e-3": AGREED,
        "In fp32 the loss agrees within 1e-6 relative": AGREED,
        "that is about 3 times their root mean square": ARITHMETIC,
        "1, -2, 0.5 and 1.5, the others 0": EXAMPLE,
        "1 and 0.3, the others 0": EXAMPLE,
        "with its 95 % interval": DEFINITION,
        "from p = 2^-20 to 0.999": LIMIT,
    },
    "docs/recomputation.md": {"6.74 billion parameters": ARITHMETIC, "fp32 copies of at most 64 MiB at a time": LIMIT},
    "docs/slow_links.md": {
        "recorded on rank 0 at 160 Mbit/s": EXAMPLE,
        "It can exceed 100 %": DEFINITION,
        "Headers take 4.4 % of a link's rate": ARITHMETIC,
        "at least 1 % of the parameters": LIMIT,
        "more than 10 % off the nominal rate": LIMIT,
        "(0.5 + 0.25 k)M is 2.5M": ARITHMETIC,
        "within 3 % of the fastest": LIMIT,
        "A collective fails 15 seconds before": LIMIT,
    },
    "docs/zeropp.md": {
        "**(0.5 + 0.25k)M**": DEFINITION,
    },
}
NOT_MEASURED = tuple(NotMeasured(page, words, kind) for page, parts in _PARTS.items() for words, kind in parts.items())
