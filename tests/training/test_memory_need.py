"""What a rank needs of memory, whether a run fits, and the smallest world that does."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.counted import in_gib
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.memory_check import LARGEST_NODES, AvailableMemory, check_fits, smallest_nodes
from megatron_zpp.training.memory_need import MemoryNeed, memory_need
from megatron_zpp.training.plan.kinds import (
    ACTIVATIONS,
    COPY,
    GATHERED,
    GRADIENTS,
    KEPT_INPUTS,
    MAIN_WEIGHTS,
    MOMENTS,
    OPTIMIZER,
    OTHER,
    OUTER,
    PAYLOADS,
    PINNED,
    WEIGHTS,
)
from megatron_zpp.training.sharding import grid_of, shape_of

GIB = 2**30
VOCABULARY = 50304
TUTORIAL = "--num-layers 40 --hidden-size 6144 --seq-length 512 --num-attention-heads 32 --batch-size 1 --fp16 --checkpoint-activations"
ZEROPP = "--zero-stage 3 --zero-quantized-weights --zero-quantized-gradients --zero-hpz-partition-size"
SMALL = "--num-layers 4 --hidden-size 256 --seq-length 64 --num-attention-heads 4 --batch-size 1 --fp16"


class Run:
    """A configuration in a world."""

    vocabulary = VOCABULARY

    def __init__(self, flags: str, nodes: int, ranks_per_node: int, tensor_ranks: int = 1, context_ranks: int = 1) -> None:
        shared = f" --tensor-model-parallel-size {tensor_ranks} --context-parallel-size {context_ranks}"
        self.config: Config = resolve(parse_flags((flags + shared).split()), nodes * ranks_per_node, ranks_per_node)
        self.grid = grid_of(self.config, nodes * ranks_per_node)

    def need(self, *, is_on_gpu: bool = True) -> MemoryNeed:
        return memory_need(self.config, self.vocabulary, self.grid, is_on_gpu=is_on_gpu)

    def activations(self, *, is_on_gpu: bool = True) -> int:
        return self.need(is_on_gpu=is_on_gpu).of(ACTIVATIONS)

    def check(
        self, available_bytes: int | None, *, host_bytes: int | None = None, is_on_gpu: bool = True, is_after_start: bool = False
    ) -> MemoryNeed:
        available = AvailableMemory(available_bytes, host_bytes, is_after_start)
        return check_fits(self.config, self.vocabulary, self.grid, is_on_gpu=is_on_gpu, available=available)

    def refusal(
        self, available_bytes: int | None, *, host_bytes: int | None = None, is_on_gpu: bool = True, is_after_start: bool = False
    ) -> str:
        with pytest.raises(UserError, match="needs") as error:
            self.check(available_bytes, host_bytes=host_bytes, is_on_gpu=is_on_gpu, is_after_start=is_after_start)
        return str(error.value)


class RunOfFewWords(Run):
    """Needs the most memory in the backward of a block, not in that of the embedding or the loss."""

    vocabulary = 1024


def test_the_tutorials_model_needs_4_3_gib_of_states_per_rank_beside_its_copy_and_fits_its_64_gpus_of_32_gb() -> None:
    """4.29 GiB is 16 bytes x 18.43 billion parameters / 64, what the tutorial's log calls MemAllocated."""
    need = Run(f"{TUTORIAL} {ZEROPP} 16", 4, 16).need()
    assert (need.states - need.of(COPY)) / GIB == pytest.approx(4.29, abs=0.01)
    assert need.of(COPY) / GIB == pytest.approx(18.43e9 * (1 + 4 / 256) / 16 / GIB, rel=0.01)
    assert need.total < 32e9


@pytest.mark.parametrize(("nodes", "ranks_per_node", "gib"), [(1, 1, 275), (1, 8, 34.3)])
def test_the_tutorials_model_on_fewer_ranks_needs_what_16_bytes_per_parameter_say(nodes: int, ranks_per_node: int, gib: float) -> None:
    need = Run(f"{TUTORIAL} --zero-stage 3", nodes, ranks_per_node).need()
    assert need.states / GIB == pytest.approx(gib, rel=0.002)


@pytest.mark.parametrize("flags", ["--optimizer-cpu-offload", "--zero-quantized-weights", "--zero-hpz-partition-size 4"])
def test_what_a_rank_keeps_of_the_weights_for_a_step_has_a_name_that_is_true_without_a_secondary_rung(flags: str) -> None:
    need = Run(f"{SMALL} --zero-stage 3 {flags}", 2, 4).need()
    assert f"copy of weights {in_gib(need.of(COPY))}" in str(need) and "secondary" not in str(need)


def test_a_run_that_fits_is_not_refused_and_neither_is_one_in_unknown_memory() -> None:
    run = Run(f"{SMALL} --zero-stage 3", 1, 2)
    assert run.check(run.need().total) == run.check(None) == run.need()


def test_a_run_that_lacks_one_byte_is_refused_with_every_part_in_figures() -> None:
    run = Run(f"{TUTORIAL} {ZEROPP} 16", 1, 16)
    need = run.need()
    text = run.refusal(need.total - 1)
    parts = {kind: need.of(kind) for kind in (WEIGHTS, GRADIENTS, OPTIMIZER, COPY, GATHERED, PAYLOADS, ACTIVATIONS)}
    parts |= {"CUDA context and workspaces": need.device.context + need.device.workspaces, "NCCL buffers": need.device.communicators}
    assert all(f"{name} {in_gib(nbytes)}" in text for name, nbytes in parts.items())
    assert f"each of the 16 ranks needs {in_gib(need.total)}" in text and f"has {in_gib(need.total - 1)} of GPU memory" in text
    world = "the smallest world that fits is 2 nodes of 16 ranks with this much memory each"
    assert text.endswith(f"; {world}, or give --optimizer-cpu-offload or --checkpoint-in-cpu.")


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_the_smallest_world_fits_and_one_node_less_does_not(ranks_per_node: int) -> None:
    text = Run(f"{TUTORIAL} --zero-stage 3", 1, ranks_per_node).refusal(40 * GIB)
    nodes = int(text.split("the smallest world that fits is ")[1].split()[0])
    totals = [Run(f"{TUTORIAL} --zero-stage 3", count, ranks_per_node).need().total for count in (nodes - 1, nodes)]
    assert totals[1] <= 40 * GIB < totals[0]


def test_a_larger_world_has_more_data_ranks_and_no_more_tensor_ranks() -> None:
    few, many = (Run(f"{SMALL} --zero-stage 3", nodes, 4, tensor_ranks=2) for nodes in (1, 3))
    text = few.refusal(many.need(is_on_gpu=False).total, is_on_gpu=False)
    assert "the smallest world that fits is 3 nodes of 4 ranks" in text


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_that_share_layers_have_half_of_the_states_but_for_what_both_hold_and_less_activations(stage: int) -> None:
    flags = f"{SMALL} --zero-stage {stage}"
    alone, shared = RunOfFewWords(flags, 2, 2).need(), RunOfFewWords(flags, 2, 4, tensor_ranks=2).need()  # as many data ranks
    assert 0.5 < shared.states / alone.states < 0.505
    assert stage != 3 or 0.5 < shared.of(GATHERED) / alone.of(GATHERED) < 0.505
    assert alone.of(ACTIVATIONS) / 2 < shared.of(ACTIVATIONS) < alone.of(ACTIVATIONS)


LONG = "--num-layers 4 --hidden-size 256 --seq-length 16384 --num-attention-heads 8 --batch-size 1 --fp16 --zero-stage 3"


@pytest.mark.parametrize("kind", ["", "--checkpoint-activations", "--position-embedding-type rope --num-query-groups 4 --swiglu"])
def test_activations_of_a_rank_fall_with_the_ranks_that_divide_samples_and_states_stay(kind: str) -> None:
    needs = {ranks: Run(f"{LONG} {kind} --vocab-size 1000", 1, 4, context_ranks=ranks).need(is_on_gpu=False) for ranks in (1, 4)}
    assert needs[4].states == needs[1].states
    fixed = 2 * 50304 * 256 * 2 + 64 * 2**20  # gradients of head and embedding, and the logits of a chunk
    assert needs[4].of(ACTIVATIONS) == pytest.approx(needs[1].of(ACTIVATIONS) / 4, abs=4 * fixed)


def test_a_run_whose_activations_do_not_fit_is_told_of_more_ranks_for_each_sample() -> None:
    text = Run(LONG, 1, 8).refusal(200 * 2**20, is_on_gpu=False)
    assert "no number of such nodes is enough" in text and "--context-parallel-size 2" in text
    assert "--context-parallel-size 8" in Run(LONG, 1, 8, context_ranks=4).refusal(2**20, is_on_gpu=False)
    assert "--context-parallel-size 2" in Run(f"{LONG} --train-samples 800", 1, 8).refusal(2**20, is_on_gpu=False)
    assert "--context-parallel" not in Run(LONG, 1, 8, context_ranks=8).refusal(2**20, is_on_gpu=False)


def test_a_run_whose_scores_do_not_fit_because_of_attention_dropout_is_told_so_first() -> None:
    dropping = f"{LONG} --attention-dropout 0.1"
    text = Run(dropping, 1, 8).refusal(200 * 2**20, is_on_gpu=False)
    assert "no number of such nodes is enough; choose --attention-dropout 0, --checkpoint-activations" in text
    assert "--attention-dropout" not in Run(f"{LONG} --attention-dropout 0", 1, 8).refusal(200 * 2**20, is_on_gpu=False)
    assert "--attention-dropout" not in Run(dropping, 1, 8).refusal(200 * 2**20)  # kernels of GPUs keep no scores


def test_the_smallest_world_of_samples_on_several_nodes_has_whole_groups_of_nodes() -> None:
    run = Run(f"{TUTORIAL} --zero-stage 3", 2, 4, context_ranks=8)
    text = run.refusal(40 * GIB)
    nodes = int(text.split("the smallest world that fits is ")[1].split()[0])
    totals = [Run(f"{TUTORIAL} --zero-stage 3", count, 4, context_ranks=8).need().total for count in (nodes - 2, nodes)]
    assert nodes % 2 == 0 and totals[1] <= 40 * GIB < totals[0]


def test_a_group_whose_activations_do_not_fit_is_told_of_sequence_parallelism_and_of_a_larger_group() -> None:
    few = Run(SMALL.replace("--batch-size 1", "--batch-size 2"), 1, 8, tensor_ranks=2)
    assert few.refusal(2**20).endswith(
        "; choose --checkpoint-activations, --sequence-parallel, --zero-stage 3, --tensor-model-parallel-size 4, a smaller "
        "--micro-batch-size or a smaller model."
    )
    odd = f"{SMALL} --zero-stage 3 --seq-length 66 --max-position-embeddings 68"
    for flags, tensor_ranks in ((odd, 4), (f"{odd} --sequence-parallel", 2)):  # 4 ranks cannot divide 66 tokens
        text = Run(flags, 1, 4, tensor_ranks=tensor_ranks).refusal(2**20)
        assert text.endswith("; choose --checkpoint-activations or a smaller model.")
    copied = Run(f"{SMALL} --zero-stage 3 --zero-hpz-partition-size 4", 1, 8)
    assert "--tensor-model-parallel-size 2" in copied.refusal(2**20)
    divided = Run(f"{SMALL} --sequence-parallel --zero-stage 3", 1, 4, tensor_ranks=4)
    assert divided.refusal(2**20).endswith("; choose --checkpoint-activations or a smaller model.")


@pytest.mark.parametrize(
    ("flags", "ranks", "tensor_ranks", "context_ranks", "refused"),
    [
        (SMALL, 4, 1, 4, 2),  # 8 ranks cannot divide 4 heads
        (f"{SMALL} --num-attention-heads 8", 4, 1, 4, 2),  # 2 data ranks are no group of 4
        (f"{SMALL} --zeropp paper --zero-hpz-partition-size 4", 4, 1, 1, 2),  # 4 does not divide 2 data ranks
        (  # 2 groups cannot divide 3 samples
            f"{SMALL} --num-attention-heads 6 --kv-channels 8 --ffn-hidden-size 96 --max-position-embeddings 66 --global-batch-size 3",
            6,
            2,
            1,
            3,
        ),
    ],
)
def test_a_larger_group_that_the_run_would_refuse_is_no_lever(
    flags: str, ranks: int, tensor_ranks: int, context_ranks: int, refused: int
) -> None:
    with pytest.raises(FlagError):
        Run(flags, 1, ranks, refused, context_ranks)
    assert f"--tensor-model-parallel-size {refused}" not in Run(flags, 1, ranks, tensor_ranks, context_ranks).refusal(2**20)


def test_where_no_world_fits_the_levers_are_named() -> None:
    text = Run(SMALL.replace("--batch-size 1", "--batch-size 2"), 1, 2).refusal(2**20)
    assert "; no number of such nodes is enough; " in text
    assert text.endswith(
        "; choose --checkpoint-activations, --zero-stage 3, --tensor-model-parallel-size 2, a smaller --micro-batch-size or a smaller "
        "model."
    )


def test_a_copy_too_large_for_a_partition_is_named_since_more_nodes_do_not_shrink_it() -> None:
    text = Run(f"{TUTORIAL} {ZEROPP} 2", 2, 2).refusal(8 * GIB)
    assert text.endswith("; not even 1024 such nodes are enough; choose --zero-hpz-partition-size 1 or a smaller model.")


@pytest.mark.parametrize(
    "flags, levers",
    [
        ("--zeropp lean", "--zeropp paper"),
        ("--zeropp lean --global-batch-size 8", "--zero-gradients-between-microbatches primary, --zeropp paper"),
        ("--zeropp paper", "--zero-stage 3 without --zeropp, --tensor-model-parallel-size 2"),
        ("--zero-stage 3 --zero-hpz-partition-size 2 --zero-quantized-weight-differences", "no --zero-quantized-weight-differences"),
    ],
)
def test_where_a_kept_copy_is_too_large_a_lever_is_what_the_run_accepts(flags: str, levers: str) -> None:
    text = Run(f"{TUTORIAL} {flags}", 2, 2).refusal(8 * GIB)
    assert text.endswith(f"; choose {levers} or a smaller model."), text


def test_a_node_of_one_rank_that_sends_differences_is_not_told_to_divide_its_weights() -> None:
    text = Run(f"{TUTORIAL} --zeropp lean --zero-stage 2", 2, 1).refusal(8 * GIB)
    assert text.endswith("; not even 1024 such nodes are enough; choose a smaller model.")


def test_levers_stand_beside_the_smallest_world() -> None:
    run = Run(f"{SMALL} --zero-stage 2", 1, 2)
    assert run.refusal(run.need(is_on_gpu=False).total - 1, is_on_gpu=False).endswith(
        ", or give --checkpoint-activations or --zero-stage 3."
    )


def test_where_activations_do_not_fit_beside_whole_logits_a_loss_in_chunks_is_a_lever() -> None:
    run = Run(f"{SMALL} --zero-stage 3 --loss-chunk-tokens 0", 1, 2)
    assert run.refusal(run.need(is_on_gpu=False).total - 1, is_on_gpu=False).endswith(
        ", or give --checkpoint-activations or --loss-chunk-tokens 1024."
    )


def test_attention_dropout_on_the_cpu_keeps_scores() -> None:
    run = RunOfFewWords(f"{SMALL} --seq-length 512", 1, 1)
    assert run.activations(is_on_gpu=False) > run.activations()


def test_attention_as_plain_products_keeps_scores_and_flash_alone_leaves_shared_heads_shared() -> None:
    shared = f"{SMALL} --group-query-attention"
    need = RunOfFewWords(shared, 1, 1).activations()
    assert RunOfFewWords(f"{shared} --attention-backend flash", 1, 1).activations() == need
    repeated = 4 * 64 * 2 * 2 * (4 - 1) * 64  # blocks, tokens, bytes, key and value, heads more than one, channels of a head
    assert RunOfFewWords(f"{shared} --attention-backend fused", 1, 1).activations() - need >= repeated
    scores = 4 * 64 * 4 * 12 * 64  # blocks, tokens, heads, bytes of a score, scores
    assert RunOfFewWords(f"{shared} --attention-backend unfused", 1, 1).activations() - need > scores / 2


@pytest.mark.parametrize(("dropout", "kept", "beside"), [(0.0, 4, 12), (0.1, 9, 7)])
def test_on_gpus_plain_products_keep_scores_in_fp32_and_with_dropout_twice_and_a_mask_of_bytes(
    dropout: float, kept: int, beside: int
) -> None:
    """The bytes of a score that benchmarks/fake_gpus.py has shown: of each block, and in the backward of one."""
    flags = f"{SMALL} --attention-backend unfused --attention-dropout {dropout} --max-position-embeddings 8192 --seq-length"
    short, long = (Run(f"{flags} {tokens}", 1, 1).activations() for tokens in (4096, 8192))
    quadratic = (4 * kept + beside) * 4 * 4096**2  # blocks; heads, tokens x tokens
    assert long - 2 * short == pytest.approx(2 * quadratic, rel=0.01)  # what grows with tokens alone cancels


def test_on_gpus_there_are_no_fp32_values_of_a_chunk_of_logits() -> None:
    head = "--hidden-size 64 --seq-length 1024 --loss-chunk-tokens 512"  # the peak is in the loss
    run = Run(f"{SMALL} {head} --zero-stage 3 --attention-backend flash --attention-dropout 0", 1, 1)
    difference = run.activations(is_on_gpu=False) - run.activations()
    assert difference == pytest.approx(4 * 512 * VOCABULARY, abs=2**20)  # the rest is what attention keeps on each device


@pytest.mark.parametrize(("flags", "bytes_per_parameter"), [("", 12), ("--no-save-optim", 4)])
def test_the_copy_for_async_save_is_host_memory_the_device_s_where_that_is_the_host(flags: str, bytes_per_parameter: int) -> None:
    plain, saving = (Run(f"{SMALL} --zero-stage 3 --save here {extra}", 1, 2) for extra in ("", f"--async-save {flags}"))
    copy = saving.need().save_copy
    parameters = sum(math.prod(param.whole_shape) for unit in shape_of(saving.config, VOCABULARY).unit_specs() for param in unit.params)
    assert copy == pytest.approx(bytes_per_parameter * parameters / 2, rel=0.01)  # and padding
    assert saving.need(is_on_gpu=False).total == plain.need(is_on_gpu=False).total + copy
    assert saving.need().total == plain.need().total and plain.need().save_copy == 0


def test_where_activations_alone_do_not_fit_no_other_world_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plans = Run(f"{SMALL} --zero-stage 3", 1, 2), []

    def counted(*parts: Any, **options: Any) -> MemoryNeed:
        plans.append(parts)
        return memory_need(*parts, **options)

    monkeypatch.setattr("megatron_zpp.training.memory_check.memory_need", counted)
    assert "; no number of such nodes is enough; " in run.refusal(run.activations() - 1)
    assert {grid for _, _, grid in plans} == {run.grid}


def test_a_copy_for_async_save_that_does_not_fit_is_named() -> None:
    run = Run(f"{SMALL} --zero-stage 3 --save here --async-save", 1, 2)
    need = run.need(is_on_gpu=False)
    text = run.refusal(need.total - 1, is_on_gpu=False)
    assert f"copy for --async-save {in_gib(need.save_copy)}" in text and "or give --checkpoint-activations or no --async-save." in text
    text = run.refusal(None, host_bytes=need.save_copy - 1)
    assert text.startswith(f"--async-save needs {in_gib(need.save_copy)} of pinned host memory on each of the 2 ranks")
    assert run.check(None, host_bytes=need.save_copy) == run.need()


def test_a_cpu_has_neither_context_nor_workspaces_nor_buffers_of_nccl() -> None:
    run = Run(f"{SMALL} --zero-stage 3 --attention-dropout 0", 2, 2)
    on_cpu, on_gpu = run.need(is_on_gpu=False), run.need()
    assert on_cpu.device.total == 0 and on_gpu.device.total > GIB
    assert on_gpu.total == on_gpu.tensors.total + on_gpu.device.total and on_gpu.states == on_cpu.states
    assert "CUDA" not in str(on_cpu) and "NCCL" not in str(on_cpu)


def test_lanes_on_streams_of_a_gpu_need_fewer_buffers_than_the_thread_of_a_cpu() -> None:
    run = RunOfFewWords(f"{SMALL} --zero-stage 3", 2, 2)
    assert run.need().of(PAYLOADS) < run.need(is_on_gpu=False).of(PAYLOADS)


def test_one_rank_has_a_context_and_workspaces_and_no_buffers_of_nccl() -> None:
    device = Run(SMALL, 1, 1).need().device
    assert device.context > 0 and device.workspaces > 0 and device.communicators == 0


def test_what_is_free_after_the_start_has_context_and_buffers_of_nccl_behind_it() -> None:
    run = Run(f"{SMALL} --zero-stage 3", 2, 2)
    need = run.need()
    free = need.total - need.device.context - need.device.communicators
    assert run.check(free, is_after_start=True).total == free
    text = run.refusal(free - 1, is_after_start=True)
    assert f"needs {in_gib(free)} of memory" in text and f"has {in_gib(free - 1)} of free GPU memory" in text
    assert f"CUDA context and workspaces {in_gib(need.device.workspaces)}" in text and "NCCL" not in text


def test_a_larger_world_that_is_to_fit_into_free_memory_has_the_buffers_of_more_links() -> None:
    one, two = (Run(f"{TUTORIAL} --zero-stage 3", nodes, 4).need() for nodes in (1, 2))
    more = two.beside(one.device).device
    assert more.communicators == two.device.communicators - one.device.communicators > 0
    assert more.context == 0 and more.workspaces == two.device.workspaces


@given(limit=st.integers(2, LARGEST_NODES), start=st.integers(1, 40), fixed=st.integers(0, 10**9), divided=st.integers(10**7, 10**12))
def test_the_search_finds_the_least_number_that_fits(limit: int, start: int, fixed: int, divided: int) -> None:
    def total(nodes: int) -> int:
        return fixed + -(-divided // nodes)

    limit = max(limit, start + 1)
    assert smallest_nodes(total, total(limit), start, LARGEST_NODES) == limit


@given(st.integers(2, LARGEST_NODES - 40), st.integers(1, 40))
def test_the_search_finds_it_whatever_the_bytes_that_fall(more: int, start: int) -> None:
    assert smallest_nodes(lambda nodes: int(nodes < start + more), 0, start, LARGEST_NODES) == start + more


def test_the_search_ends_where_nothing_fits() -> None:
    assert smallest_nodes(lambda nodes: 2, 1, 1, 2) is None


# ---- islands

ISLANDS = "--zero-stage 3 --diloco-sync-period 16"


def test_outer_states_of_a_rank_are_8_bytes_of_its_part_and_2_of_its_slice_on_each_island() -> None:
    alone, joined = Run(f"{TUTORIAL} --zero-stage 3", 1, 8).need(), Run(f"{TUTORIAL} {ISLANDS}", 4, 8).need()
    owned = alone.of(GRADIENTS) // 4
    assert joined.of(WEIGHTS, GRADIENTS, OPTIMIZER) == alone.of(WEIGHTS, GRADIENTS, OPTIMIZER)
    assert joined.of(OUTER) == pytest.approx((8 / 4 + 2) * owned, rel=1e-3)
    assert joined.states == alone.states + joined.of(OUTER)
    assert f"outer weights, momentum and copies {in_gib(joined.of(OUTER))}" in str(joined)


def test_a_gpu_of_an_island_also_has_the_buffers_of_nccl_to_the_other_islands() -> None:
    alone, joined = Run(f"{SMALL} --zero-stage 3", 1, 2).need(), Run(f"{SMALL} {ISLANDS}", 2, 2).need()
    between = Run(f"{SMALL} --zero-stage 3", 2, 1).need()
    assert joined.device.communicators == alone.device.communicators + between.device.communicators > 0


def test_the_copy_for_async_save_on_an_island_has_the_outer_states_and_main_weights_and_moments() -> None:
    alone, joined = (Run(f"{SMALL} {flags} --save here --async-save", 2, 2).need() for flags in ("--zero-stage 3", ISLANDS))
    owned = alone.save_copy / 12  # of 4 ranks; on islands of 2 a rank owns twice as many
    assert joined.save_copy == pytest.approx((2 * 12 + 2 * (4 + 4 + 2) / 2) * owned, rel=0.01)
    weights = Run(f"{SMALL} {ISLANDS} --save here --async-save --no-save-optim", 2, 2).need()
    assert weights.save_copy == pytest.approx(4 * owned, rel=0.01)


def test_the_smallest_world_of_islands_gives_each_of_them_more_nodes() -> None:
    flags = f"{TUTORIAL} {ISLANDS}"
    text = Run(flags, 2, 4).refusal(60 * GIB)
    words = re.search(
        r"the smallest world that fits is (\d+) nodes of 4 ranks with this much memory each, (\d+) of them on each island", text
    )
    assert words is not None and "on each island (--diloco-islands 2)" in text
    nodes = int(words[1])
    assert int(words[2]) == nodes // 2 and text.startswith("each of the 8 ranks needs ")
    totals = [Run(f"{flags} --diloco-islands 2", count, 4).need().total for count in (nodes - 2, nodes)]
    assert totals[1] <= 60 * GIB < totals[0]


def test_an_optimizer_on_the_host_is_a_lever_of_islands_if_it_fits() -> None:
    flags = f"{TUTORIAL} {ISLANDS}"
    offloaded = Run(f"{flags} --optimizer-cpu-offload", 2, 4).need().total
    assert "give --optimizer-cpu-offload" in Run(flags, 2, 4).refusal(offloaded)
    assert "--optimizer-cpu-offload" not in Run(flags, 2, 4).refusal(offloaded - 2**20)


def test_fewer_islands_in_the_same_world_are_a_lever_if_they_fit() -> None:
    flags = f"{TUTORIAL} {ISLANDS}"
    two, four = (Run(f"{flags} --diloco-islands {islands}", 4, 4).need().total for islands in (2, 4))
    assert two < four
    text = Run(flags, 4, 4).refusal(two)
    assert "--diloco-islands 2" in text.split(", or give ")[1]
    assert "give --diloco-islands" not in Run(flags, 4, 4).refusal(two - 2**20)


def test_islands_that_may_have_one_node_only_are_not_told_of_larger_worlds() -> None:
    for flags, ranks in (("--zeropp lean --diloco-sync-period 16", 4), ("--zero-stage 0 --diloco-sync-period 16", 1)):
        assert "no number of such nodes is enough; choose " in Run(f"{TUTORIAL} {flags}", 2, ranks).refusal(8 * GIB)


def test_a_group_of_more_ranks_is_tried_in_the_world_of_all_islands() -> None:
    assert "--tensor-model-parallel-size 2" in Run(f"{SMALL} {ISLANDS} --batch-size 2", 2, 2).refusal(2**20)
    text = Run(f"{SMALL} {ISLANDS} --save here --async-save", 2, 2).refusal(None, host_bytes=1)
    assert text.endswith("leave --async-save out, or take more nodes for each island.") and "on each of the 4 ranks" in text


# ---- the optimizer's state on the host

OFFLOADED = f"{SMALL} --zero-stage 3 --optimizer-cpu-offload --save x"


def test_offload_moves_12_bytes_per_owned_parameter_from_the_device_to_the_host_and_adds_a_payload() -> None:
    plain, offloaded = Run(f"{SMALL} --zero-stage 3", 1, 2).need(), Run(f"{SMALL} --zero-stage 3 --cpu-offload", 1, 2).need()
    owned = plain.of(GRADIENTS) // 4
    on_host = offloaded.tensors.on_host
    assert on_host[MAIN_WEIGHTS] + on_host[MOMENTS] == 12 * owned and plain.host == 0
    assert plain.states == 16 * owned and offloaded.states == 4 * owned + 2 * owned  # a payload of 2 bytes per owned parameter
    assert offloaded.host == 12 * owned + on_host[PINNED] + on_host[OTHER] and on_host[OTHER] < 100


def test_without_a_gpu_offload_moves_nothing_and_needs_the_same_memory_and_a_payload() -> None:
    plain = Run(f"{SMALL} --zero-stage 3", 1, 2).need(is_on_gpu=False)
    offloaded = Run(f"{SMALL} --zero-stage 3 --cpu-offload", 1, 2).need(is_on_gpu=False)
    assert offloaded.host == 0 and offloaded.total == plain.total + plain.of(GRADIENTS) // 2


def test_too_little_host_memory_is_named_with_every_part_in_figures() -> None:
    run = Run(f"{OFFLOADED} --async-save", 1, 2)
    need = run.need()
    text = run.refusal(None, host_bytes=need.host - 1)
    parts = {kind: need.tensors.on_host[kind] for kind in (MAIN_WEIGHTS, MOMENTS, PINNED)} | {"copy for --async-save": need.save_copy}
    assert text.startswith(f"--optimizer-cpu-offload, --async-save: each of the 2 ranks needs {in_gib(need.host)} of host memory (")
    assert all(f"{name} {in_gib(nbytes)}" in text for name, nbytes in parts.items())
    assert f"and has {in_gib(need.host - 1)}; take more nodes, or leave --optimizer-cpu-offload or --async-save out." in text
    assert run.check(None, host_bytes=need.host) == need


def test_a_run_that_is_too_large_for_its_gpus_and_fits_with_offload_is_told_so() -> None:
    plain, offloaded = Run(f"{SMALL} --zero-stage 1", 1, 2), Run(f"{SMALL} --zero-stage 1 --cpu-offload", 1, 2)
    nbytes = offloaded.need().total
    assert "--optimizer-cpu-offload" in plain.refusal(nbytes)
    assert offloaded.check(nbytes) == offloaded.need()


# ---- inputs of recomputed chunks

RECOMPUTED = f"{SMALL} --seq-length 8192 --loss-chunk-tokens 128 --zero-stage 3 --checkpoint-activations"  # the peak is that of a block
HIDDEN_BYTES = 8192 * 256 * 2


def test_inputs_on_the_host_leave_the_device_but_for_two_and_are_named_where_the_host_is_too_small() -> None:
    plain, run = Run(RECOMPUTED, 1, 2).need(), Run(f"{RECOMPUTED} --checkpoint-in-cpu", 1, 2)
    need = run.need()
    assert need.host == 4 * HIDDEN_BYTES and plain.total - need.total == (4 - 2) * HIDDEN_BYTES
    text = run.refusal(None, host_bytes=need.host - 1)
    assert text.startswith("--checkpoint-in-cpu: each of the 2 ranks needs ") and f"inputs of recomputed chunks {in_gib(need.host)}" in text
    assert text.endswith("; raise --recompute-num-layers, or leave --checkpoint-in-cpu out.")
    assert run.check(None, host_bytes=need.host) == need


def test_inputs_state_and_saved_copy_share_the_host() -> None:
    run = Run(f"{RECOMPUTED} --checkpoint-in-cpu --optimizer-cpu-offload --save x --async-save", 1, 2)
    need = run.need()
    assert need.tensors.on_host[KEPT_INPUTS] == 4 * HIDDEN_BYTES and need.host == sum(need.tensors.on_host.values()) + need.save_copy
    text = run.refusal(None, host_bytes=need.host - 1)
    flags = ["--optimizer-cpu-offload", "--checkpoint-in-cpu", "--async-save"]
    assert text.startswith(f"{', '.join(flags)}: ")
    assert text.endswith("; take more nodes, or leave --optimizer-cpu-offload, --checkpoint-in-cpu or --async-save out.")


def test_without_a_gpu_inputs_stay_in_the_same_memory_in_places_that_last() -> None:
    plain, on_host = (Run(f"{RECOMPUTED} {flag}", 1, 2).need(is_on_gpu=False) for flag in ("", "--checkpoint-in-cpu"))
    assert on_host.host == 0 and on_host.of(KEPT_INPUTS) == 4 * HIDDEN_BYTES == plain.of(ACTIVATIONS) - on_host.of(ACTIVATIONS)
    assert on_host.total == plain.total
    assert f"inputs of recomputed chunks {in_gib(4 * HIDDEN_BYTES)}" in str(on_host)


def test_a_run_that_lacks_what_the_host_could_keep_of_its_inputs_is_told_so() -> None:
    less = Run(f"{RECOMPUTED} --checkpoint-in-cpu", 1, 2).need()
    run = Run(RECOMPUTED, 1, 2)
    assert "--checkpoint-in-cpu" in run.refusal(less.total) and "--checkpoint-in-cpu" not in run.refusal(less.total - 1)
    assert "--checkpoint-in-cpu" not in run.refusal(less.total, host_bytes=less.host - 1)


def test_divided_inputs_take_their_part_and_an_arena_lasts_from_start_to_end() -> None:
    plain, divided, arena = (
        Run(f"{RECOMPUTED} {flags}", 1, 2, tensor_ranks=2).need()
        for flags in ("", "--partition-activations", "--partition-activations --contiguous-checkpointing")
    )
    # The whole inputs that backward has come from the other half of what they save.
    assert plain.total - divided.total == 4 * HIDDEN_BYTES // 2 - 2 * HIDDEN_BYTES
    assert arena.of(KEPT_INPUTS) == 4 * HIDDEN_BYTES // 2 and arena.total == divided.total


def test_a_run_with_apex_is_planned_where_apex_is_not_installed() -> None:
    apex = Run(f"{SMALL} --norm-backend apex --optimizer-backend apex", 1, 2)
    assert apex.need() == Run(SMALL, 1, 2).need()
