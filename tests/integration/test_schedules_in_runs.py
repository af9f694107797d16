"""Whole runs whose batch, rate and validation follow schedules: consumed samples and bytes are exact, and a resume changes no bit."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness.closed_forms import INT4, INT8, Features, inter_node_bytes
from harness.patience import wait_until
from harness.rank_pool import RankPool
from harness.tiny_corpus import counting_documents, write_corpus
from harness.tiny_runs import TINY, losses, pretrain
from test_bad_input import entry_and_output, message_of
from test_resume import told

from megatron_zpp.parallel.grid import Grid

# Batches of 4, 4, 8 and 12 samples up to sample 28, then 16: two whole ones until sample 70 would be passed.
RAMP = "--train-samples 70 --rampup-batch-size 4 4 24 --global-batch-size 16"
SIZES, CONSUMED = [4, 4, 8, 12, 16, 16], [4, 8, 16, 28, 44, 60]
SCHEDULES = (
    "--lr-decay-style WSD --lr-wsd-decay-samples 40 --lr-warmup-samples 16 "
    "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.5"
)
ZEROPP = "--zero-stage 3 --bf16 --zero-quantized-weights --zero-hpz-partition-size 2 --zero-quantized-gradients"
BY_CHANCE = "--zero-quantized-gradients-rounding stochastic --zero-full-precision-iters 2"


def trained(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records if "lm_loss" in record]


def test_a_ramp_consumes_what_it_says_and_its_bytes_follow_the_number_of_micro_batches(ranks: RankPool, tmp_path: Path) -> None:
    records = pretrain(ranks, 2, 2, f"{RAMP} {ZEROPP}", tmp_path / "run.jsonl")
    assert trained(records, "global_batch_size") == SIZES and trained(records, "consumed_samples") == CONSUMED
    assert trained(records, "consumed_tokens") == [16 * samples for samples in CONSUMED]
    features = Features(keeps_secondary=True, weights=INT8, gradients=INT4)
    expected = [inter_node_bytes(features, Grid.of_nodes(2, 2), microbatches=size // 4, element_bytes=2) for size in SIZES]
    assert trained(records, "inter_node_bytes") == trained(records, "inter_node_bytes_per_iteration") == expected


@pytest.mark.parametrize(("nodes", "flags"), [(1, "--zero-stage 1"), (2, f"{ZEROPP} {BY_CHANCE}")], ids=["ZeRO-1", "ZeRO++"])
def test_a_run_resumed_in_the_middle_of_its_ramp_has_the_same_bits(ranks: RankPool, tmp_path: Path, nodes: int, flags: str) -> None:
    flags = f"{RAMP} {SCHEDULES} {flags} --eval-iters 1 --eval-interval 2 --iterations-to-skip 2"
    whole = pretrain(ranks, nodes, 2, f"{flags} --save {tmp_path / 'saved'} --save-interval 3", tmp_path / "whole.jsonl")
    assert trained(whole, "iteration") == [1, 3, 4, 5, 6]
    assert trained(whole, "consumed_samples") == [CONSUMED[0], *CONSUMED[2:]]
    rest = pretrain(ranks, nodes, 2, f"{flags} --load {tmp_path / 'saved'} --ckpt-step 3", tmp_path / "rest.jsonl")
    assert [told(record) for record in rest] == [told(record) for record in whole if record["iteration"] > 3]


def test_differences_of_a_step_before_an_iteration_that_is_passed_over_are_those_that_a_save_adds(ranks: RankPool, tmp_path: Path) -> None:
    flags = "--bf16 --zeropp lean --quantization-block-size 256 --num-layers 4 --train-iters 3 --global-batch-size 4 --iterations-to-skip 2"
    whole = pretrain(ranks, 2, 2, flags, tmp_path / "whole.jsonl")
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 2, 2, f"{flags} {checkpoints} --exit-interval 1", tmp_path / "parts.jsonl")
    assert losses(pretrain(ranks, 2, 2, f"{flags} {checkpoints}", tmp_path / "parts.jsonl")) == losses(whole)


def test_passed_over_iterations_take_samples_and_leave_rate_and_weights(ranks: RankPool, tmp_path: Path) -> None:
    flags = "--zero-stage 2 --train-iters 6 --global-batch-size 4 --lr-decay-style linear"
    plain = pretrain(ranks, 1, 2, flags, tmp_path / "plain.jsonl")
    records = pretrain(ranks, 1, 2, f"{flags} --iterations-to-skip 2 3", tmp_path / "skipping.jsonl")
    assert trained(records, "iteration") == [1, 4, 5, 6] and trained(records, "consumed_samples") == [4, 16, 20, 24]
    assert trained(records, "learning_rate") == trained(plain, "learning_rate")[:4]
    assert losses(records)[0] == losses(plain)[0] and losses(records)[1] != losses(plain)[3]


def test_a_run_of_so_many_samples_goes_on_with_other_ranks_and_batches_up_to_its_last_whole_batch(ranks: RankPool, tmp_path: Path) -> None:
    checkpoints = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    pretrain(ranks, 2, 2, f"{RAMP} {checkpoints} --zero-stage 3 --exit-interval 3", tmp_path / "run.jsonl")
    message = message_of(ranks, 1, 3, f"{RAMP} {checkpoints}")
    assert "--global-batch-size 16 is not a multiple of 3" in message and "--decrease-batch-size-if-needed" in message
    records = pretrain(ranks, 1, 3, f"{RAMP} {checkpoints} --decrease-batch-size-if-needed", tmp_path / "run.jsonl")
    assert trained(records, "consumed_samples") == [4, 8, 16, 28, 43, 58]
    assert trained(records, "iteration") == list(range(1, 7))


def test_weight_decay_changes_the_weights_as_its_schedule_says(ranks: RankPool, tmp_path: Path) -> None:
    flags = "--train-iters 3 --global-batch-size 2 --weight-decay"
    constant = pretrain(ranks, 1, 2, f"{flags} 0.5", tmp_path / "constant.jsonl")
    same = "--weight-decay-incr-style linear --start-weight-decay 0.5 --end-weight-decay 0.5"
    assert losses(pretrain(ranks, 1, 2, f"{flags} 0 {same}", tmp_path / "same.jsonl")) == losses(constant)
    rising = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 --weight-decay-incr-samples 2"
    found = losses(pretrain(ranks, 1, 2, f"{flags} 0 {rising}", tmp_path / "rising.jsonl"))
    without = losses(pretrain(ranks, 1, 2, f"{flags} 0", tmp_path / "without.jsonl"))
    assert found[:2] == without[:2] and found[2] != without[2]


@pytest.fixture
def corpora(tmp_path: Path) -> str:
    """Flags of a training corpus and two validation corpora of 7 and 2 samples of 16 tokens."""
    lengths = {"train": [50] * 6, "wiki": [7 * 16 + 1], "code": [2 * 16 + 1]}
    paths = {
        name: write_corpus(tmp_path, [[t % 100 for t in d] for d in counting_documents(of)], name=name) for name, of in lengths.items()
    }
    return f"--train-data-path {paths['train']} --valid-data-path {paths['wiki']} {paths['code']} --tokenizer-type NullTokenizer"


def validations(records: list[dict[str, Any]]) -> list[tuple[int, str, float]]:
    found = [record for record in records if "validation_loss" in record]
    return [(record["iteration"], record.get("validation_set", ""), record["validation_loss"]) for record in found]


def test_whole_validation_is_the_same_on_every_world_and_the_weighted_mean_of_its_sets(
    ranks: RankPool, tmp_path: Path, corpora: str
) -> None:
    flags = (
        f"{corpora} --train-iters 2 --global-batch-size 4 --eval-interval 1 --eval-iters 1 --full-validation --save {tmp_path / 'saved'}"
    )
    apart = pretrain(ranks, 2, 2, f"{flags} --multiple-validation-sets --zero-stage 3", tmp_path / "apart.jsonl")
    assert [(iteration, name) for iteration, name, _ in validations(apart)] == [(1, "wiki"), (1, "code"), (2, "wiki"), (2, "code")]
    again = f"{corpora} --train-iters 2 --load {tmp_path / 'saved'} --skip-train --eval-iters 1 --full-validation"
    for nodes, ranks_per_node, micro_batch_size in [(1, 1, 1), (1, 3, 2)]:
        log = tmp_path / f"{ranks_per_node}.jsonl"
        evaluation = f"--eval-micro-batch-size {micro_batch_size} --eval-global-batch-size {6 * micro_batch_size}"
        ((iteration, name, loss),) = validations(pretrain(ranks, nodes, ranks_per_node, f"{again} {evaluation}", log))
        assert (iteration, name) == (2, "")
        # fp32 losses of the same weights, whose products are summed in another order: a few units in the last place of a loss of about 4.6.
        assert loss == pytest.approx((7 * validations(apart)[2][2] + 2 * validations(apart)[3][2]) / 9, rel=1e-6)


def test_every_named_set_has_megatrons_line_and_training_notices_nothing(ranks: RankPool, tmp_path: Path, corpora: str) -> None:
    flags = f"{corpora} --train-iters 3 --global-batch-size 4 --zero-stage 3 --bf16 --zero-hpz-partition-size 2"
    plain = pretrain(ranks, 2, 2, flags, tmp_path / "plain.jsonl")
    named = "--multiple-validation-sets --validation-set-names encyclopedia programs --full-validation --eval-iters 1 --eval-interval 1"
    lines = ["--log-line-format", "megatron-lm"]
    watched = [*TINY, *flags.split(), *named.split(), *lines, "--log-jsonl", str(tmp_path / "watched.jsonl")]
    *_, (code, output) = ranks.run(2, 2, entry_and_output, watched)
    assert code == 0
    line = r" validation-(\w+) loss at iteration (\d+)(?: on validation set)? \| lm loss value: (\S+) \| lm loss PPL: (\S+) \| "
    found = [(int(iteration), name) for name, iteration, _, _ in re.findall(line, output)]
    assert found == [(iteration, name) for iteration in (1, 2, 3) for name in ("encyclopedia", "programs")]
    assert re.search(r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration        3/       3 \| consumed samples: ", output, re.M)
    records = pretrain(ranks, 2, 2, f"{flags} {named}", tmp_path / "records.jsonl")
    assert losses(records) == losses(plain)
    assert trained(records, "inter_node_bytes") == trained(plain, "inter_node_bytes")


def test_a_kill_switch_saves_and_ends_the_run_and_keeps_the_next_one_from_starting(ranks: RankPool, tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    flags = f"--train-iters 5 --kill-switch-file {switch} --save {tmp_path / 'saved'} --save-interval 9"
    codes = ranks.run(1, 2, entry_with_switch, [*TINY, *flags.split()], str(switch))
    assert [code for code, _ in codes] == [0, 0]
    assert f"exiting program because {switch} is there at iteration 2" in codes[0][1]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert f"--kill-switch-file {switch} is there" in message_of(ranks, 1, 2, flags)


def entry_with_switch(flags: list[str], switch: str) -> tuple[int, str]:
    """The entry, during whose second step the file is made."""
    from megatron_zpp.zero.engine import ZeroEngine

    finish, steps = ZeroEngine.finish_gradients, 0

    def finish_with_switch(engine: ZeroEngine) -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            Path(switch).touch()
        finish(engine)

    ZeroEngine.finish_gradients = finish_with_switch  # type: ignore[method-assign]
    try:
        return entry_and_output(flags)
    finally:
        ZeroEngine.finish_gradients = finish  # type: ignore[method-assign]


def test_deterministic_mode_names_an_environment_that_contradicts_it(ranks: RankPool) -> None:
    results = ranks.run(1, 2, entry_with_workspace, ":0:0")
    assert all(code != 0 for code, _ in results)
    assert "--deterministic-mode does not go with CUBLAS_WORKSPACE_CONFIG=:0:0" in results[0][1]


def entry_with_workspace(workspace: str) -> tuple[int, str]:
    from test_bad_input import entry_and_errors

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
        return entry_and_errors(["--train-iters 1 --deterministic-mode"])


def test_the_steps_before_iterations_that_are_passed_over_at_the_end_have_their_line(ranks: RankPool, tmp_path: Path) -> None:
    flags = "--zero-stage 1 --train-iters 6 --global-batch-size 4 --log-interval 4 --iterations-to-skip 6"
    records = pretrain(ranks, 1, 2, flags, tmp_path / "run.jsonl")
    assert trained(records, "iteration") == [4, 6] and trained(records, "consumed_samples") == [16, 24]


def test_a_file_that_ends_the_run_is_seen_in_iterations_that_are_passed_over(ranks: RankPool, tmp_path: Path) -> None:
    skipped = " ".join(map(str, range(1, 100_001)))
    switch = tmp_path / "stop"
    log = tmp_path / "run.jsonl"

    def end_the_run() -> None:
        wait_until(log.exists, "the run has not passed the check that refuses a file from before")
        switch.touch()

    flags = f"--zero-stage 1 --train-iters 100000 --global-batch-size 4 --kill-switch-file {switch} --iterations-to-skip {skipped}"
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(end_the_run)
        assert trained(pretrain(ranks, 1, 2, flags, log), "iteration") == []
        ended.result()
