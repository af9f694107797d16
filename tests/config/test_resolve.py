"""From flags as given to a configuration without gaps and contradictions."""

import re
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError, divisors, nearest
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import GROUPS

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
LENGTH = "--train-iters 20 "
REAL_DATA = "--data-path corpus --tokenizer-type SentencePieceTokenizer --tokenizer-model bpe.model "


def resolved(flags, world_size=1, local_world_size=None):
    return resolve(parse_flags((SHAPE + flags).split()), world_size, local_world_size)


@pytest.mark.parametrize("flags", ["", LENGTH, LENGTH + REAL_DATA, "--train-samples 64 " + REAL_DATA, "--bf16 --load x --save y " + LENGTH])
def test_resolved_values_have_the_types_of_their_annotations(flags):
    config = resolved(flags)
    for group, members in GROUPS.items():
        for name, hint in get_type_hints(members).items():
            value = getattr(getattr(config, group), name)
            types = tuple(t for t in (get_args(hint) if type(None) in get_args(hint) else (hint,)))
            assert type(value) in types or (type(value) is tuple and hint == tuple[str, ...]), name


def test_model_values_follow_from_its_shape():
    model = resolved("").model
    assert (model.ffn_hidden_size, model.kv_channels, model.max_position_embeddings) == (256, 16, 32)


def test_given_model_values_stay():
    model = resolved("--ffn-hidden-size 100 --kv-channels 10 --max-position-embeddings 40").model
    assert (model.ffn_hidden_size, model.kv_channels, model.max_position_embeddings) == (100, 10, 40)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (None, None, None)),
        ("--checkpoint-activations", ("full", "uniform", 1)),
        ("--checkpoint-activations --checkpoint-num-layers 2", ("full", "uniform", 2)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", ("full", "block", 2)),
        ("--recompute-activations", ("selective", None, None)),
        ("--recompute-granularity selective", ("selective", None, None)),
    ],
)
def test_what_is_recomputed_follows_from_both_generations_of_flags(flags, expected):
    model = resolved(flags).model
    assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == expected


@given(
    micro=st.none() | st.integers(1, 8),
    microbatches=st.none() | st.integers(1, 8),
    nodes=st.integers(1, 6),
    ranks_per_node=st.integers(1, 8),
)
def test_global_batch_is_whole_micro_batches_on_every_rank(micro, microbatches, nodes, ranks_per_node):
    world_size = nodes * ranks_per_node
    flags = "" if micro is None else f"--micro-batch-size {micro} "
    if microbatches is not None:
        flags += f"--global-batch-size {(micro or 1) * microbatches * world_size}"
    training = resolved(flags, world_size, ranks_per_node).training
    assert training.micro_batch_size == (micro or 1)
    assert training.global_batch_size == (micro or 1) * (microbatches or 1) * world_size


def test_ranks_per_node_comes_from_the_launcher_unless_given():
    assert resolved("", 4, 2).distributed.ranks_per_node == 2
    assert resolved("--ranks-per-node 1", 4, 2).distributed.ranks_per_node == 1
    assert resolved("", 1, None).distributed.ranks_per_node == 1


def test_decay_lasts_as_long_as_training_in_its_own_unit():
    in_iterations, in_samples = resolved(LENGTH).optimizer, resolved("--train-samples 70 --micro-batch-size 8").optimizer
    assert (in_iterations.lr_decay_iters, in_iterations.lr_decay_samples) == (20, None)
    assert (in_samples.lr_decay_iters, in_samples.lr_decay_samples) == (None, 70)


def test_length_in_samples_gives_whole_iterations():
    training = resolved("--train-samples 70 --micro-batch-size 8").training
    assert (training.train_iters, training.train_samples) == (8, 70)


def test_nothing_is_assumed_for_real_data_with_length_and_lr():
    config = resolved(REAL_DATA + LENGTH + "--lr 1e-3 --micro-batch-size 2")
    assert (config.assumptions, config.notices) == ((), ())


def test_real_data_without_lr_gets_the_default_and_a_notice():
    config = resolved(REAL_DATA + LENGTH)
    assert config.optimizer.lr == 3e-4
    assert config.notices == ("--lr is not given: 0.0003 is used",)


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--tensor-model-parallel-size 2", ["--tensor-model-parallel-size 2", "one rank", "--nproc_per_node 2"]),
        ("--pipeline-model-parallel-size 2", ["--pipeline-model-parallel-size 2", "not available", "no pipeline", "choose 1"]),
        ("--fp16 --bf16", ["--fp16", "--bf16", "exclude", "give one"]),
        ("--fp16 --initial-loss-scale 1 --min-loss-scale 2", ["--initial-loss-scale 1.0", "--min-loss-scale 2.0", "choose 2.0 or more"]),
        ("--train-iters 5 --train-samples 6", ["--train-iters 5", "--train-samples 6", "exclude", "give one"]),
        ("--train-samples 3 --micro-batch-size 8", ["--train-samples 3", "global batch of 8", "choose 8 or more"]),
        ("--train-samples 30 --lr-decay-iters 5", ["--lr-decay-iters 5", "--train-samples", "use --lr-decay-samples"]),
        ("--train-samples 30 --lr-warmup-iters 5", ["--lr-warmup-iters 5", "--train-samples", "use --lr-warmup-samples"]),
        ("--train-iters 30 --lr-decay-samples 5", ["--lr-decay-samples 5", "iterations", "use --lr-decay-iters"]),
        ("--lr-warmup-samples 5", ["--lr-warmup-samples 5", "iterations", "use --lr-warmup-iters"]),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", ["--lr-warmup-fraction 0.1", "--lr-warmup-iters 5", "exclude", "give one"]),
        ("--lr-warmup-fraction 0.1 --lr-warmup-samples 5", ["--lr-warmup-fraction 0.1", "--lr-warmup-samples 5", "exclude", "give one"]),
        (
            "--train-iters 5 --lr-warmup-iters 5",
            ["--lr-warmup-iters 5", "below --lr-decay-iters, 5", "choose 4 or less", "--lr-decay-iters"],
        ),
        (
            "--train-samples 5 --lr-warmup-samples 9",
            ["--lr-warmup-samples 9", "below --lr-decay-samples, 5", "choose 4 or less", "--lr-decay-samples"],
        ),
        ("--lr 1e-3 --min-lr 2e-3", ["--min-lr 0.002", "above --lr 0.001", "choose at most 0.001"]),
        ("--lr 1e-3 --lr-warmup-init 2e-3", ["--lr-warmup-init 0.002", "above --lr 0.001", "choose at most 0.001"]),
        ("--max-position-embeddings 16", ["--max-position-embeddings 16", "below --seq-length 32", "choose 32 or more"]),
        ("--recompute-method block", ["--recompute-method block", "without --recompute-granularity full", "give that"]),
        ("--checkpoint-num-layers 2", ["--recompute-num-layers 2", "without --recompute-granularity full", "give that"]),
        ("--recompute-activations --recompute-method uniform", ["--recompute-method uniform", "without --recompute-granularity full"]),
        ("--checkpoint-activations --checkpoint-num-layers 3", ["--recompute-num-layers 3", "--num-layers 2", "choose 2 or less"]),
        ("--mock-data --data-path corpus", ["--mock-data", "--data-path corpus", "exclude", "give one"]),
        ("--mock-data --data-args-path f", ["--data-args-path f", "does not exist on this machine"]),
        ("--data-path a --train-data-path b", ["--data-path and --train-data-path", "exclude", "one of these ways"]),
        ("--train-data-path a --split 1", ["--split 1", "--train-data-path a", "exclude", "leave --split out"]),
        ("--data-path 0 a 1 b", ["--data-path", "a weight must be a positive number, not 0", "leave out"]),
        ("--data-path a --mid-level-dataset-surplus 0.1", ["--mid-level-dataset-surplus 0.1", "weighted blend", "leave it out"]),
        ("--dataloader-type cyclic", ["--dataloader-type cyclic", "choose single"]),
        ("--data-path corpus --train-iters 5", ["--data-path corpus", "needs its tokenizer", "--tokenizer-type", "--tokenizer-model"]),
        (REAL_DATA, ["--data-path corpus", "length", "give --train-iters or --train-samples"]),
        ("--mock-data --tokenizer-model bpe.model", ["--tokenizer-model bpe.model", "give --tokenizer-type"]),
        ("--mock-data --tokenizer-type SentencePieceTokenizer", ["--tokenizer-type SentencePieceTokenizer", "give --tokenizer-model"]),
        ("--mock-data --vocab-file v --train-iters 5", ["--vocab-file v needs its kind", "give --tokenizer-type", "GPT2BPETokenizer"]),
        ("--mock-data --tokenizer-type GPT2BPETokenizer --vocab-file v", ["GPT2BPETokenizer needs its merges.txt", "give --merge-file"]),
        ("--mock-data --tokenizer-type TikTokenizer --tokenizer-model t", ["name of its pattern, v1 or v2", "give --tiktoken-pattern"]),
        ("--mock-data --tokenizer-type HFTokenizer", ["HFTokenizer needs its model file", "give --tokenizer-model"]),
        ("--tiktoken-pattern v3", ["--tiktoken-pattern v3", "v1 or v2"]),
        (LENGTH + "--data-path c --tokenizer-type NullTokenizer", ["--tokenizer-type NullTokenizer", "give --vocab-size"]),
        ("--no-save-optim", ["--no-save-optim", "give --save"]),
        ("--async-save", ["--async-save", "give --save"]),
        ("--keep-last 2", ["--keep-last 2", "give --save"]),
        ("--save-retain-interval 20", ["--save-retain-interval 20", "give --save"]),
        (
            "--save x --save-interval 8 --save-retain-interval 20",
            ["--save-retain-interval 20", "--save-interval 8", "choose 16"],
        ),
        ("--save x --save-copies 2", ["--save-copies 2", "a disk of each node", "give --node-local-checkpoints"]),
        ("--save x --node-local-checkpoints --save-copies 2", ["--save-copies 2 needs 2 nodes", "has 1", "leave --save-copies out"]),
        ("--no-load-optim", ["--no-load-optim", "give --load"]),
        ("--load-last-good-checkpoint", ["--load-last-good-checkpoint", "give --load"]),
        ("--override-opt_param-scheduler", ["--override-opt-param-scheduler", "give --load"]),
        ("--use-checkpoint-opt-param-scheduler", ["--use-checkpoint-opt-param-scheduler", "give --load"]),
        (
            "--load x --override-opt-param-scheduler --use-checkpoint-opt_param-scheduler",
            ["--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler", "give one"],
        ),
        ("--use-checkpoint-args", ["--use-checkpoint-args", "give --load or --pretrained-checkpoint"]),
        ("--finetune", ["--finetune", "give --load"]),
        ("--ckpt-step 5", ["--ckpt-step 5", "give --load"]),
        ("--exit-on-missing-checkpoint", ["--exit-on-missing-checkpoint", "give --load"]),
    ],
)
def test_broken_rule_names_flag_value_and_remedy(flags, parts):
    with pytest.raises(FlagError) as error:
        resolved(flags)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_copies_need_as_many_nodes():
    flags = "--save x --node-local-checkpoints --global-batch-size 8 --save-copies"
    assert resolved(f"{flags} 2", 8, 4).checkpoint.save_copies == 2
    with pytest.raises(FlagError, match=r"--save-copies 3 needs 3 nodes with a disk each, and this run has 2; choose 2 or fewer"):
        resolved(f"{flags} 3", 8, 4)


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--micro-batch-size 2 --global-batch-size 12", ["--global-batch-size 12", "--micro-batch-size 2", "choose 8 or 16"]),
        ("--micro-batch-size 4 --global-batch-size 8", ["--global-batch-size 8", "choose 16, or --micro-batch-size 1 or 2"]),
        ("--zero-stage 3 --zero-hpz-partition-size 3", ["--zero-hpz-partition-size 3", "2 ranks of a node", "choose 1 or 2"]),
        ("--zero-quantized-gradients", ["--zero-quantized-gradients", "--zero-stage 0", "choose --zero-stage 1, 2 or 3"]),
        ("--quantization-block-size 48", ["--quantization-block-size 48", "a multiple of 32"]),
        ("--zero-stage 3 --zero-quantized-weights --zero-quantized-weights-bits 6", ["--zero-quantized-weights-bits 6", "choose 4 or 8"]),
        ("--tensor-model-parallel-size 3", ["--tensor-model-parallel-size 3", "2 ranks of a node", "choose 1 or 2"]),
    ],
)
def test_what_two_nodes_of_two_ranks_cannot_do_is_refused_with_flag_value_and_remedy(flags, parts):
    with pytest.raises(FlagError) as error:
        resolved(flags, 4, 2)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_heads_that_do_not_divide_the_hidden_size_are_told_which_do():
    with pytest.raises(FlagError, match="--num-attention-heads 5 does not divide --hidden-size 64; choose 1, 2, 4 or 8."):
        resolved("--num-attention-heads 5")


def test_missing_shape_is_named_with_an_example():
    with pytest.raises(FlagError) as error:
        resolve(parse_flags(["--hidden-size", "8"]), 1, None)
    assert str(error.value).startswith("--num-layers, --num-attention-heads, --seq-length must be given; a small GPT is --num-layers 12 ")


def test_world_that_ranks_per_node_does_not_divide_is_told_what_does():
    with pytest.raises(FlagError, match=r"^--ranks-per-node 4 does not divide the 6 ranks of the world; choose 1, 2, 3 or 6\.$"):
        resolved("--ranks-per-node 4", 6, 2)
    with pytest.raises(FlagError, match=r"^--ranks-per-node 4 \(from the launcher\) does not divide the 6 ranks of the world"):
        resolved("", 6, 4)


def test_a_partition_that_does_not_divide_a_node_is_told_what_does():
    with pytest.raises(
        FlagError, match="^--zero-hpz-partition-size 4 does not divide the 6 ranks of a node; choose 1, 2, 3 or 6, or start "
    ):
        resolved("--zero-stage 3 --zero-hpz-partition-size 4", 6, 6)


def test_one_rank_alone_keeps_no_secondary_copy():
    config = resolved(f"--zero-stage 3 --zero-hpz-partition-size 4 --lr 1 {LENGTH}")
    assert config.zero.zero_hpz_partition_size == 1
    assert config.notices == ("--zero-hpz-partition-size 4: there is one rank, so nothing crosses a link, is quantized or kept as a copy",)


def test_world_of_unknown_nodes_is_told_to_say_it():
    with pytest.raises(FlagError, match="--ranks-per-node is not given .* 4 ranks .* LOCAL_WORLD_SIZE.*; give --ranks-per-node"):
        resolved("", 4, None)


@given(global_batch=st.integers(1, 200), micro=st.integers(1, 8), world_size=st.integers(1, 12))
def test_global_batch_is_refused_exactly_when_it_does_not_split_and_the_remedies_do(global_batch, micro, world_size):
    flags = f"--global-batch-size {global_batch} --micro-batch-size {micro}"
    if global_batch % (micro * world_size) == 0:
        assert resolved(flags, world_size, world_size).training.global_batch_size == global_batch
        return
    with pytest.raises(FlagError) as error:
        resolved(flags, world_size, world_size)
    message = str(error.value)
    assert message.startswith(
        f"--global-batch-size {global_batch} is not a multiple of {micro * world_size} (--micro-batch-size {micro} x "
    )
    batches, _, micros = message.split("choose ")[1].partition(", or --micro-batch-size ")
    assert all(int(size) % (micro * world_size) == 0 and int(size) > 0 for size in batches.rstrip(".").split(" or "))
    assert all(global_batch % (int(size) * world_size) == 0 for size in re.findall(r"\d+", micros))
    assert bool(micros) == (global_batch % world_size == 0)


@pytest.mark.parametrize(
    "flags, notices",
    [
        ("--bf16 --loss-scale 8", ["--loss-scale has no effect without --fp16"]),
        ("--fp16 --loss-scale 8 --hysteresis 3", ["--hysteresis has no effect with --loss-scale"]),
        ("--fp16 --hysteresis 3", []),
        ("--tokenizer-type NullTokenizer --tokenizer-model m", ["--tokenizer-model has no effect with --tokenizer-type NullTokenizer"]),
        (
            "--tokenizer-type NullTokenizer --vocab-extra-ids 5",
            ["--vocab-extra-ids has no effect without --legacy-tokenizer"],
        ),
        (
            "--tokenizer-type NullTokenizer --legacy-tokenizer",
            ["--legacy-tokenizer has no effect without --tokenizer-type SentencePieceTokenizer or Llama2Tokenizer"],
        ),
        (REAL_DATA + "--legacy-tokenizer --vocab-extra-ids 5", []),
        (REAL_DATA + "--vocab-size 9", []),
        ("--save-interval 10", ["--save-interval has no effect without --save, and nothing of this run is saved"]),
        ("--log-memory-to-tensorboard", ["--log-memory-to-tensorboard has no effect without --tensorboard-dir or --wandb-project"]),
        ("--log-memory-to-tensorboard --wandb-project p", []),
        ("--timing-log-option max", ["--timing-log-option has no effect without --timing-log-level"]),
        ("--profile-step-start 1", ["--profile-step-start has no effect without --profile"]),
    ],
)
def test_flag_that_changes_nothing_is_noticed(flags, notices):
    config = resolved(f"{flags} --lr 1 {LENGTH}")
    assert list(config.notices) == notices


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_nearest_divisors_divide_and_none_left_out_is_nearer(number, wish):
    near = nearest(divisors(number), wish)
    left_out = [divisor for divisor in range(1, number + 1) if number % divisor == 0 and divisor not in near]
    assert near == sorted(near) and all(number % divisor == 0 for divisor in near)
    assert len(near) == 4 or not left_out
    assert all(abs(divisor - wish) >= max(abs(chosen - wish) for chosen in near) for divisor in left_out)


def test_divisors_of_twelve():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--zero-quantized-gradients-rotation hadamard", "-rotation hadamard changes nothing without --zero-quantized-gradients;"),
        ("--zero-quantized-gradients-rounding stochastic", "-rounding stochastic changes nothing without --zero-quantized-gradients;"),
        ("--zero-quantized-weights-bits 4", "--zero-quantized-weights-bits 4 changes nothing without --zero-quantized-weights;"),
        (
            "--zero-quantized-gradients --zero-quantized-gradients-intra-bits 16 --zero-quantized-gradients-inter-bits 16",
            "quantizes nothing; choose 4 or 8 for --zero-quantized-gradients-inter-bits",
        ),
        ("--zero-quantized-gradients --zero-quantized-gradients-rounding up", "--zero-quantized-gradients-rounding up"),
        ("--exit-signal SIGINT", "--exit-signal SIGINT changes nothing without --exit-signal-handler"),
        ("--exit-signal-handler", "--exit-signal-handler needs a folder to save in; give --save"),
        ("--profile", "--profile needs a folder for its traces; give --profile-dir or --tensorboard-dir"),
        (
            "--profile --profile-dir d --profile-step-end 10",
            "--profile-step-end 10 is not above --profile-step-start 10",
        ),
        ("--profile --profile-dir d --profile-ranks 0 64", "--profile-ranks 64 is not a rank of this world; choose among 0 to "),
        ("--log-progress", "--log-progress needs a folder to save in; give --save"),
    ],
)
def test_details_of_quantization_that_could_change_nothing_are_refused(flags, message):
    with pytest.raises(FlagError, match=message):
        resolved(f"--zero-stage 3 {flags}")


def test_one_node_that_would_quantize_nothing_is_told_so():
    flags = f"--zero-stage 3 --lr 1 {LENGTH} --zero-quantized-gradients --zero-quantized-gradients-intra-bits 16"
    with pytest.raises(FlagError, match="-intra-bits 16 leaves --zero-quantized-gradients nothing to quantize, because there is one node"):
        resolved(flags, 4, 4)
    assert resolved(flags, 4, 2).zero.zero_quantized_gradients


def test_nodes_of_one_rank_that_would_quantize_nothing_are_told_so():
    flags = f"--zero-stage 3 --lr 1 {LENGTH} --zero-quantized-gradients --zero-quantized-gradients-inter-bits 16"
    with pytest.raises(
        FlagError, match="-inter-bits 16 leaves --zero-quantized-gradients nothing to quantize, because each node has one rank"
    ):
        resolved(flags, 4, 1)
    assert resolved(flags, 4, 2).zero.zero_quantized_gradients
