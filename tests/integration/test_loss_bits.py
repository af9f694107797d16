"""The loss does not depend on where states rest: the same bits at one world shape, fp32 rounding across shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY, losses, pretrain

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve
from megatron_zpp.data.datasets import DataRequest, SampleCounts, build_datasets
from megatron_zpp.model.gpt import GPT, materialize

STEPS = 20
STEPS_OF_BITS = 3
# At ten times this rate Adam, dividing by small second moments, amplifies the rounding of 3 x 2 ranks to 2.5e-6 within the 20 steps.
LR = 1e-3
DECAY = 0.3  # large, so that a weight which decays and must not is seen after a few steps
CLIP = 0.5  # below every gradient norm of these runs, so that clipping is active


# The matrix of worlds, dtypes and recomputation is walked in tests/zero/test_same_bits.py; here the GPT, over real links.
@pytest.mark.parametrize(
    ("nodes", "precision", "recompute"),
    [(2, "--bf16", "--checkpoint-activations"), pytest.param(3, "", "", marks=pytest.mark.long)],
    ids=str,
)
def test_loss_and_gradient_norm_have_the_same_bits_in_all_stages(
    ranks: RankPool, tmp_path: Path, nodes: int, precision: str, recompute: str
) -> None:
    found = [
        losses(
            pretrain(
                ranks,
                nodes,
                2,
                f"--micro-batch-size 2 --train-iters {STEPS_OF_BITS} --clip-grad {CLIP} --zero-stage {stage} {precision} {recompute}",
                tmp_path / f"{stage}.jsonl",
            )
        )
        for stage in range(4)
    ]
    assert len(found[0]) == STEPS_OF_BITS
    assert all(grad_norm > CLIP for _, grad_norm in found[0])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.fixture(scope="module")
def plain_losses() -> list[tuple[float, float]]:
    return plain_loop(global_batch_size=12)


@pytest.mark.parametrize(("nodes", "ranks_per_node", "stage"), [(1, 1, 3), (2, 2, 0), pytest.param(3, 2, 3, marks=pytest.mark.long)])
def test_every_shape_follows_a_plain_loop_within_fp32_rounding(
    ranks: RankPool, tmp_path: Path, plain_losses: list[tuple[float, float]], nodes: int, ranks_per_node: int, stage: int
) -> None:
    flags = f"--micro-batch-size 1 --global-batch-size 12 --train-iters {STEPS} --clip-grad {CLIP} --zero-stage {stage} --lr {LR} "
    flags += f"--weight-decay {DECAY}"
    found = losses(pretrain(ranks, nodes, ranks_per_node, flags, tmp_path / "run.jsonl"))
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in plain_losses], rel=1e-6)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in plain_losses], rel=1e-4)


def plain_loop(global_batch_size: int) -> list[tuple[float, float]]:
    """The same training without any of the engine: one process, torch's AdamW and clipping."""
    config = resolve(parse_flags([*TINY, "--train-iters", str(STEPS)]), 1, 1)
    request = DataRequest(seq_length=16, seed=1234, sample_counts=SampleCounts(STEPS * global_batch_size, 0, 0), vocab_size=100, eod=99)
    dataset = build_datasets(config.data, request)
    model = materialize(GPT(config.model, 104, config.training.seed, torch.float32)).train()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
    found = []
    for step in range(STEPS):
        total = 0.0
        for index in range(step * global_batch_size, (step + 1) * global_batch_size):
            sample = dataset.train[index]
            tokens, labels = torch.from_numpy(sample["tokens"])[None], torch.from_numpy(sample["labels"])[None]
            loss = model(tokens, labels, first_sample=index).mean()
            (loss / global_batch_size).backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((total / global_batch_size, norm))
    return found
