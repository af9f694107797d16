"""The flags of Megatron-LM's and Megatron-DeepSpeed's GPT scripts: each works, changes nothing with one line about it, or is refused."""

import re

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve

WORK = """
    --num-layers 2 / --hidden-size 8 / --num-attention-heads 2 / --ffn-hidden-size 8 / --kv-channels 4 / --seq-length 8
    --max-position-embeddings 8 / --group-query-attention / --num-query-groups 2 / --num-key-value-heads 2
    --position-embedding-type rope / --position-embedding-type learned_absolute / --use-rotary-position-embeddings
    --rotary-base 10000 / --rotary-position-embeddings-theta 10000 / --rotary-percent 0.5 / --rotary-interleaved
    --rotary-seq-len-interpolation-factor 2 / --use-rope-scaling / --rope-scaling-factor 8 / --no-position-embedding
    --make-vocab-size-divisible-by 64 / --normalization LayerNorm / --normalization rmsnorm / --norm-epsilon 1e-5
    --layernorm-epsilon 1e-5 / --apply-layernorm-1p / --swiglu / --squared-relu / --disable-bias-linear / --add-qkv-bias
    --qk-layernorm / --untie-embeddings-and-output-weights / --attention-backend flash / --attention-backend auto

    --attention-dropout 0 / --hidden-dropout 0 / --weight-decay 0.1 / --start-weight-decay 0.1 / --end-weight-decay 0.1
    --weight-decay-incr-style cosine / --clip-grad 1 / --adam-beta1 0.9 / --adam-beta2 0.95 / --adam-eps 1e-8 / --optimizer adam
    --lr 1e-4 / --min-lr 1e-5 / --lr-decay-style constant / --lr-decay-style linear / --lr-decay-style cosine
    --lr-decay-style inverse-square-root / --lr-decay-style WSD / --lr-decay-style wsd / --lr-decay-iters 9 / --lr-decay-samples 9
    --lr-wsd-decay-style exponential / --lr-wsd-decay-style minus_sqrt / --lr-wsd-decay-iters 9 / --lr-wsd-decay-samples 9
    --lr-warmup-iters 3 / --lr-warmup-samples 3 / --lr-warmup-fraction 0.1 / --lr-warmup-init 0
    --lr-decay-tokens 9 / --lr-warmup-tokens 9 / --train-tokens 99
    --override-opt_param-scheduler / --override-opt-param-scheduler
    --use-checkpoint-opt_param-scheduler / --use-checkpoint-opt-param-scheduler

    --micro-batch-size 1 / --batch-size 1 / --global-batch-size 8 / --rampup-batch-size 1 1 8 / --decrease-batch-size-if-needed
    --train-iters 5 / --train-samples 40 / --exit-interval 5 / --exit-duration-in-mins 9 / --exit-signal-handler
    --step-batch-size-schedule 0:768 / --kill-switch-file x / --iterations-to-skip 3 / --manual-gc / --manual-gc-interval 5
    --exit-signal SIGTERM / --seed 1234 / --init-method-std 0.02

    --fp16 / --bf16 / --loss-scale 4096 / --initial-loss-scale 65536 / --min-loss-scale 1 / --loss-scale-window 500 / --hysteresis 2

    --save x / --save-interval 5 / --persistent-save-interval 5 / --load x / --no-save-optim / --no-load-optim / --finetune
    --pretrained-checkpoint x / --ckpt-step 5 / --exit-on-missing-checkpoint / --use-checkpoint-args / --async-save
    --save-retain-interval 10 / --keep-last 2

    --tensor-model-parallel-size 2 / --sequence-parallel / --distributed-backend nccl
    --context-parallel-size 2 / --ds-sequence-parallel-size 2 / --cp-comm-type a2a
    --distributed-timeout-minutes 10 / --deterministic-mode / --num-workers 2 / --zero-stage 2 / --deepspeed_config x / --deepscale_config x
    --use-distributed-optimizer / --zero-quantized-weights / --zero-hpz-partition-size 8 / --zero-quantized-gradients

    --recompute-granularity full / --recompute-granularity selective / --recompute-method uniform / --recompute-method block
    --recompute-num-layers 1 / --recompute-activations / --checkpoint-activations / --checkpoint-num-layers 1
    --partition-activations / --distribute-saved-activations / --distribute-checkpointed-activations / --checkpoint-in-cpu
    --contigious-checkpointing

    --data-path 1 x 2 y / --split 98,2,0 / --train-data-path x / --valid-data-path x / --test-data-path x / --data-args-path x
    --per-split-data-args-path x / --data-cache-path x / --mock-data / --tokenizer-type GPT2BPETokenizer / --vocab-file x
    --merge-file x / --tokenizer-model x / --vocab-size 100 / --padded-vocab-size 128 / --vocab-extra-ids 0 / --reset-position-ids
    --reset-attention-mask / --dataloader-inter-document-masking / --eod-mask-loss / --dataloader-type single
    --mid-level-dataset-surplus 0.01

    --eval-iters 10 / --eval-interval 100 / --skip-train / --full-validation / --eval-micro-batch-size 1 / --eval-global-batch-size 8
    --start-eval-at-iter 5 / --multiple-validation-sets / --log-progress / --log-memory-interval 5 / --record-memory-history
    --memory-snapshot-path x
    --log-interval 10 / --log-throughput / --log-params-norm / --log-num-zeros-in-grad / --timing-log-level 1 / --timing-log-option max
    --tensorboard-dir x / --tensorboard-log-interval 1 / --tensorboard-queue-size 9 / --log-timers-to-tensorboard
    --log-memory-to-tensorboard / --log-world-size-to-tensorboard
    --log-validation-ppl-to-tensorboard / --no-log-loss-scale-to-tensorboard / --wandb-project x / --wandb-exp-name x
    --wandb-save-dir x / --no-bias-gelu-fusion / --openai-gelu / --legacy-tokenizer / --cpu-optimizer / --tiktoken-pattern v2
    --activations-checkpoint-method uniform / --activations-checkpoint-num-layers 2 / --exit-duration-in-mins 30000000
    --split '99,1,0' / --split 949, 50, 1 / --step-batch-size-schedule 0:16 2.4B:320
    --wandb-entity x / --profile / --profile-step-start 10 / --profile-step-end 12 / --profile-ranks 0
"""

CHANGE_NOTHING = """
    --use-flash-attn / --use-flash-attn-v1 / --use-flash-attn-v2 / --use-flash-attn-triton
    --data-parallel-random-init / --empty-unused-memory-level 1
    --attention-softmax-in-fp32 / --no-query-key-layer-scaling / --accumulate-allreduce-grads-in-fp32 / --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --dist-ckpt-optim-fully-reshardable / --abort-on-unmet-fused-kernel-constraints
    --no-save-rng / --no-load-rng / --ckpt-format torch_dist / --universal-checkpoint / --perform-initialization / --no-initialization
    --force-ds-sequence-parallel / --ds-sequence-parallel-overlap-comm
    --local-rank 0 / --local_rank=0 / --overlap-grad-reduce / --overlap-param-gather / --DDP-impl local
    --no-contiguous-buffers-in-local-ddp / --use-cpu-initialization / --lazy-mpu-init 1
    --no-async-tensor-model-parallel-allreduce / --async-tensor-model-parallel-allreduce / --tp-comm-overlap / --tp-comm-overlap-cfg x
    --tp-comm-overlap-rs-dgrad / --disable-tp-comm-overlap-ag / --disable-tp-comm-overlap-rs / --disable-tp-comm-bulk-dgrad
    --disable-tp-comm-bulk-wgrad / --tp-comm-bootstrap-backend nccl / --use-tp-pp-dp-mapping / --encoder-tensor-model-parallel-size 0
    --expert-tensor-parallel-size 1 / --no-gradient-accumulation-fusion / --no-masked-softmax-fusion
    --no-bias-dropout-fusion / --no-persist-layer-norm / --use-mcore-models
    --transformer-impl transformer_engine / --zero-reduce-scatter / --zero-contigious-gradients / --zero-reduce-bucket-size 1
    --zero-allgather-bucket-size 1 / --remote-device none / --use-pin-memory / --no-pin-cpu-grads
    --no-pin-cpu-params / --overlap-cpu-optimizer-d2h-h2d / --use-torch-optimizer-for-cpu-offload / --optimizer-offload-fraction 1.0
    --cpu-offloading-num-layers 0 / --cpu_torch_adam / --ds_fused_adam
    --no-pipeline-parallel / --deepspeed / --deepscale / --deepspeed-activation-checkpointing
    --synchronize-each-layer / --recompute-modules core_attn
    --no-mmap-bin-files / --num-dataset-builder-threads 4 / --no-create-attention-mask-in-dataloader / --data-impl mmap / --mmap-warmup
    --no-barrier-with-level-1-timing / --log-batch-size-to-tensorboard / --log-optimizer-states-to-tensorboard / --repeated-dataloader
    --num-experts 1 / --moe-expert-parallel-size 1 / --moe-loss-coeff 0.01 / --moe-train-capacity-factor 1.0 / --moe-min-capacity 4
    --moe-eval-capacity-factor 1.0 / --moe-router-topk 2 / --moe-token-dispatcher-type alltoall / --moe-grouped-gemm / --topk 1
    --mlp-type standard / --ep-world-size 1 / --expert-interval 2 / --create-moe-param-group / --disable-moe-token-dropping
    --expert-model-parallel-size 1 / --pipeline-model-parallel-size 1
"""

# A value, or the flag itself.
REFUSED = """
    --quick-geglu / --apply-residual-connection-post-layernorm / --onnx-safe / --bert-embedder-type x / --num-experts 8
    --num-experts 64 64 128 / --mlp-type residual / --retro-workdir x / --vision-pretraining
    --biencoder-projection-dim 1 / --ict-head-size 1 / --kd
    --sgd-momentum 0.9 / --optimizer sgd / --warmup 0.1 / --model-parallel-size 2 / --lion-beta1 0.9 / --muon-momentum 0.9
    --fp32-residual-connection / --fp16-lm-cross-entropy / --calculate-per-token-loss / --fp8-format hybrid / --fp8-margin 0
    --load-tag global_step5 / --reset-iteration / --no-load-lr-state / --override-ckpt-iteration / --non-persistent-save-interval 5
    --non-persistent-ckpt-type local / --non-persistent-local-ckpt-dir x / --non-persistent-local-ckpt-algo atomic
    --non-persistent-global-ckpt-dir x / --hierarchical-context-parallel-sizes 2 4 / --ds-sequence-parallel-fpdt / --remote-device cpu
    --cpu-offloading-num-layers 4 / --optimizer-offload-fraction 0.5
    --dataloader-type external / --fim-data / --train-data-exact-num-epochs 1
    --train-doc-idx-path x / --train-sample-idx-path x / --train-shuffle-idx-path x / --return-data-index / --random-ltd
    --profile-backward
    --pipeline-model-parallel-split-rank 1 / --decoder-first-pipeline-num-layers 2 / --decoder-last-pipeline-num-layers 2
    --pipeline-model-parallel-layout Et|L / --encoder-tensor-model-parallel-size 2 / --num-layers-per-virtual-pipeline-stage 2
    --decoupled-lr 5e-4 / --decoupled-min-lr 4e-5 / --mos / --kd-beta-ce 1 / --load-teacher x / --num-layers-teacher 2
    --num-experts-teacher 64 64 / --enable-zbh1-pipeline / --enable-zbh1-exact-semantics / --fp8-param-gather
    --ds-sequence-parallel-fpdt / --ds-sequence-parallel-fpdt-chunk-size 65536 / --ds-sequence-parallel-fpdt-offloading
    --curriculum-learning-legacy / --one-logger-project x / --log-straggler / --log-energy
    --pad-vocab-size-to 250880 / --extra-vocab-size 421 / --tokenizer-name-or-path x / --tokenizer-file x / --embed-layernorm
    --train-weighted-split-paths x / --valid-weighted-split-paths-path x / --kill-switch-path x / --skip-train-iteration-range 1-2
    --pp-partition-method x / --glu-activation swiglu / --attention-head-type multiquery / --q-lora-rank 8 / --rotary-scaling-factor 40
    --save-wgrads-interval 5
"""

# Megatron-LM's examples/gpt3/train_gpt3_175b_distributed.sh, what it passes to the training program.
MEGATRON_LM = """
    --num-layers 96 / --hidden-size 12288 / --num-attention-heads 96 / --seq-length 2048 / --max-position-embeddings 2048
    --attention-backend auto / --micro-batch-size 1 / --global-batch-size 1536 / --rampup-batch-size 16 16 5859375
    --train-iters 500000 / --weight-decay 0.1 / --adam-beta1 0.9 / --adam-beta2 0.95 / --init-method-std 0.006 / --clip-grad 1.0
    --fp16 / --lr 6.0e-5 / --lr-decay-style cosine / --min-lr 6.0e-6 / --lr-warmup-fraction .001 / --lr-decay-iters 430000
    --tensor-model-parallel-size 8 / --pipeline-model-parallel-size 16 / --data-path x / --vocab-file v / --merge-file m
    --split 949,50,1 / --log-interval 100 / --save-interval 10000 / --eval-interval 1000 / --save s / --load s / --eval-iters 10
    --tensorboard-dir t
"""
# Megatron-DeepSpeed's examples_deepspeed/pretrain_llama2_distributed.sh.
MEGATRON_DEEPSPEED = """
    --tensor-model-parallel-size 2 / --pipeline-model-parallel-size 2 / --num-layers 24 / --hidden-size 2048 / --ffn-hidden-size 5504
    --num-attention-heads 16 / --micro-batch-size 4 / --global-batch-size 32 / --seq-length 2048 / --max-position-embeddings 2048
    --train-iters 250000 / --save s / --load s / --data-path 1 x / --data-impl mmap / --tokenizer-type GPTSentencePieceTokenizer
    --tokenizer-model m / --split 949,50,1 / --distributed-backend nccl / --lr 3e-4 / --lr-decay-style cosine / --min-lr 3e-5
    --weight-decay 0.1 / --clip-grad 1 / --lr-warmup-iters 2000 / --optimizer adam / --adam-beta1 0.9 / --adam-beta2 0.95
    --log-interval 1 / --save-interval 10000 / --eval-interval 1000 / --eval-iters 10 / --bf16 / --no-query-key-layer-scaling
    --attention-dropout 0 / --hidden-dropout 0 / --use-rotary-position-embeddings / --untie-embeddings-and-output-weights
    --swiglu / --normalization rmsnorm / --disable-bias-linear / --num-key-value-heads 4 / --deepspeed
    --deepspeed_config={json} / --zero-stage=0 / --recompute-granularity full / --recompute-method uniform
"""
THEIR_JSON = """{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1,
    "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}}"""


def commands(text):
    """The words of each flag of a list."""
    lines = (line.split("/") for line in text.splitlines())
    return [part.split() for line in lines for part in line if part.strip()]


def script(text, **changed):
    """The words of a script; changed: other values by field name."""
    values = {f"--{name.replace('_', '-')}": [value] for name, value in changed.items()}
    return [word for flag, *rest in commands(text) for word in [flag, *values.get(flag, rest)]]


@pytest.mark.parametrize("words", commands(WORK), ids=" ".join)
def test_a_flag_of_megatron_sets_something(words):
    config = parse_flags(words)
    assert len(config.given) == 1 and not config.notices


@pytest.mark.parametrize("words", commands(CHANGE_NOTHING), ids=" ".join)
def test_a_flag_without_a_purpose_here_is_accepted_with_one_line_that_says_why(words):
    (notice,) = parse_flags(words).notices
    assert notice.startswith(f"accepted, has no effect here: {words[0].split('=')[0]} (")


@pytest.mark.parametrize("words", commands(REFUSED), ids=" ".join)
def test_a_flag_that_would_change_the_run_is_refused_with_what_to_do_instead(words):
    with pytest.raises(FlagError) as error:
        parse_flags(words)
    assert re.match(f"{words[0]}.* is not (accepted; (use|leave it out)|available.*choose )", str(error.value))


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["--pad-vocab-size-to", "250880"], ["--padded-vocab-size", "250880"]),
        (["--tokenizer-name-or-path", "x"], ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "x"]),
        (["--train-weighted-split-paths", "0.5", "x", "0.5", "y"], ["--train-data-path", "0.5", "x", "0.5", "y"]),
        (["--kill-switch-path", "x"], ["--kill-switch-file", "x"]),
        (["--skip-train-iteration-range", "2-3"], ["--iterations-to-skip", "2", "3"]),
    ],
)
def test_what_bigscience_and_bigcode_wrote_is_refused_with_a_remedy_that_is_accepted(words, instead):
    with pytest.raises(FlagError) as error:
        parse_flags(words)
    assert all(word in str(error.value) for word in instead if word.startswith("--"))
    assert not parse_flags(instead).notices


def test_megatron_lms_example_needs_one_edit_which_an_error_names():
    words = script(MEGATRON_LM)
    with pytest.raises(FlagError, match="--pipeline-model-parallel-size 16 is not available, .*choose 1"):
        resolve(parse_flags(words), 16, 8)
    words = script(MEGATRON_LM, pipeline_model_parallel_size="1")
    config = resolve(parse_flags(words), 16, 8)
    assert config.distributed.tensor_model_parallel_size == 8
    assert (config.training.global_batch_size, config.optimizer.lr_decay_style, config.data.tokenizer_type) == (
        1536,
        "cosine",
        "GPT2BPETokenizer",
    )


def test_megatron_deepspeeds_example_needs_one_edit_which_an_error_names(tmp_path):
    (tmp_path / "deepspeed.json").write_text(THEIR_JSON)
    text = MEGATRON_DEEPSPEED.replace("{json}", str(tmp_path / "deepspeed.json").replace("/", "\0"))
    words = [word.replace("\0", "/") for word in script(text)]
    with pytest.raises(FlagError, match="--pipeline-model-parallel-size 2 is not available, .*choose 1"):
        resolve(parse_flags(words), 8, 8)
    words = [word.replace("\0", "/") for word in script(text, pipeline_model_parallel_size="1")]
    config = resolve(parse_flags(words), 8, 8)
    assert (config.model.swiglu, config.model.normalization, config.model.num_query_groups) == (True, "RMSNorm", 4)


def test_a_dense_model_of_a_script_for_experts_takes_its_flags_with_a_line_each_and_experts_are_one_error():
    flags = "--moe-loss-coeff 0.01 --moe-grouped-gemm --moe-layer-freq 1 2"
    assert len(parse_flags(f"--num-experts 1 {flags}".split()).notices) == 4
    with pytest.raises(FlagError, match="^--num-experts 8 is not available, there are no experts; choose 1, or leave it out.$"):
        parse_flags(f"--num-experts 8 {flags}".split())


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        ("--activations-checkpoint-method uniform", " (--recompute-method is given as --activations-checkpoint-method)."),
        ("--recompute-method uniform", "; give that as well."),
        ("--recompute-method uniform --activations-checkpoint-method uniform", "; give that as well."),
        ("--batch-size 3 --global-batch-size 8", "(--micro-batch-size is given as --batch-size)."),
        ("--ds-sequence-parallel-size 3", "(--context-parallel-size is given as --ds-sequence-parallel-size)."),
        ("--cpu-optimizer --deepspeed_config {json}", "(--optimizer-cpu-offload is given as --cpu-optimizer)."),
        ("--use-distributed-optimizer --zeropp paper", "(--zero-stage is given as --use-distributed-optimizer)."),
    ],
)
def test_an_error_about_a_flag_names_the_spelling_that_the_script_has(tmp_path, words, ending):
    (tmp_path / "deepspeed.json").write_text('{"zero_optimization": {"offload_optimizer": {"device": "none"}}}')
    small = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --train-iters 1 "
    with pytest.raises(FlagError) as error:
        resolve(parse_flags((small + words).format(json=tmp_path / "deepspeed.json").split()), 4, 4)
    assert str(error.value).endswith(ending)


def test_refused_values_of_accepted_flags_are_named_at_once():
    with pytest.raises(FlagError) as error:
        parse_flags("--num-experts 8 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1".split())
    assert [line.split(" is not available, ")[0] for line in str(error.value).splitlines()] == [
        "--num-experts 8",
        "--expert-model-parallel-size 4",
    ]


@pytest.mark.parametrize(
    "flag", ["--xyzzyx", "--hf-ckpt-dir", "--load-mode", "--ds-inference", "--profile-execution", "--no-pipeline", "--tp"]
)
def test_no_hint_names_a_flag_that_has_only_letters_in_common(flag):
    with pytest.raises(FlagError, match=f"^{flag} is not a flag of this program; see --help for the list.$"):
        parse_flags([flag])


@pytest.mark.parametrize(
    ("flag", "meant"), [("--num-layer", "--num-layers"), ("--hidden-sz", "--hidden-size"), ("--clip-gradient", "--clip-grad")]
)
def test_a_flag_with_a_slip_is_told_the_right_one(flag, meant):
    with pytest.raises(FlagError, match=f"did you mean {meant}\\?"):
        parse_flags([flag, "1"])
