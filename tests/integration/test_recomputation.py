"""Whatever backward computes again: the same loss bits, and the bytes that the schedule says."""

from __future__ import annotations

from pathlib import Path

from harness.closed_forms import Features, inter_node_bytes
from harness.rank_pool import RankPool
from harness.tiny_runs import losses, pretrain

from megatron_zpp.parallel.grid import Grid

CHUNKS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
HPZ = "--zero-stage 3 --zero-hpz-partition-size 2"


def test_with_dropout_on_recomputation_has_the_loss_bits_of_stage_0_without_it_and_moves_the_bytes_of_stage_3(
    ranks: RankPool, tmp_path: Path
) -> None:
    def run(flags: str) -> list[dict[str, float]]:
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        return pretrain(ranks, 2, 2, f"--train-iters 2 --micro-batch-size 2 --clip-grad 0.5 {flags}", log)

    plain = losses(run(""))
    assert len(plain) == 2
    assert losses(run(CHUNKS)) == plain
    expected = inter_node_bytes(Features(keeps_secondary=True), Grid.of_nodes(2, 2), microbatches=1, element_bytes=4)
    for flags in (CHUNKS, BLOCK, "--recompute-activations"):
        records = run(f"{HPZ} {flags}")
        assert losses(records) == plain
        assert [record["inter_node_bytes"] for record in records] == [expected] * 2
