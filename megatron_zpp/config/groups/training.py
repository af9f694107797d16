"""Flags of training: length, batches, evaluation, ends."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import COUNT, POSITIVE_COUNT, POSITIVE_TOKENS, Bounds, flag, needs
from megatron_zpp.config.groups.checkpoint import A_FOLDER_TO_SAVE_IN


@dataclass(frozen=True)
class TrainingConfig:
    """Batch size, length, evaluation and end of the run."""

    micro_batch_size: int = flag(
        None,
        help="Samples in one forward pass of one rank.",
        unit="samples",
        aliases=("--batch-size",),
        allowed=POSITIVE_COUNT,
        otherwise="1",
    )
    global_batch_size: int = flag(
        None,
        help="Samples in one optimizer step of all ranks; a multiple of --micro-batch-size x ranks.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="--micro-batch-size x ranks",
    )
    rampup_batch_size: tuple[str, ...] = flag(
        (),
        help="START INCREMENT SAMPLES: the global batch grows from START to --global-batch-size by INCREMENT, in equal stages over "
        "SAMPLES.",
        unit="samples",
    )
    step_batch_size_schedule: str | None = flag(
        None,
        help='Global batch sizes by consumed tokens, such as "0:768 250B:1536"; replaces --global-batch-size.',
        unit="tokens:samples",
        is_phrase=True,
    )
    decrease_batch_size_if_needed: bool = flag(
        False, help="Round a global batch down to a multiple of --micro-batch-size x ranks instead of refusing it."
    )
    train_iters: int = flag(
        None,
        help="Length of training in optimizer steps; excludes --train-samples, and with --train-tokens the shorter of the two counts.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        otherwise="--train-samples / --global-batch-size; 50 when neither data nor length is given",
    )
    train_samples: int | None = flag(
        None, help="Length of training in samples; excludes --train-iters.", unit="samples", allowed=POSITIVE_COUNT
    )
    train_tokens: int | None = flag(
        None,
        help="Length of training in tokens, rounded up to whole samples; with --train-iters or --train-samples the shorter counts.",
        unit="tokens",
        allowed=POSITIVE_TOKENS,
    )
    iterations_to_skip: tuple[str, ...] = flag(
        (),
        help="Iterations to skip, counted from 1 as they are printed: their samples are consumed without training on them.",
        unit="iterations",
    )
    skip_train: bool = flag(False, help="Do not train: evaluate the checkpoint of --load on the validation and test sets, and end.")
    exit_interval: int | None = flag(
        None, help="Exit at the first iteration that is a multiple of this.", unit="iterations", allowed=POSITIVE_COUNT
    )
    exit_duration_in_mins: int | None = flag(
        None,
        help="Exit at the first step that ends this long after the process began; with --save it saves first.",
        unit="minutes",
        allowed=POSITIVE_COUNT,  # scripts give 57 years
    )
    exit_signal_handler: bool = flag(
        False,
        help="Save and exit, with exit code 0, at the step in which any rank gets SIGINT (Ctrl-C), SIGTERM, SIGUSR1 or --exit-signal.",
        needs=A_FOLDER_TO_SAVE_IN,
    )
    exit_signal: str = flag(
        "SIGTERM",
        help="One more signal of --exit-signal-handler.",
        allowed=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),
        needs=needs("exit_signal_handler"),
    )
    kill_switch_file: str | None = flag(None, help="Save and exit at the first step at which this file exists for rank 0.", unit="path")
    max_consecutive_bad_iterations: int = flag(
        100,
        help="After this many steps in a row with a NaN or infinite loss or gradient, save the state from before them (islands do not) "
        "and end with an error; 0 never ends the run.",
        unit="iterations",
        allowed=COUNT,
    )
    seed: int = flag(1234, help="Seed of weights, dropout and data order.", unit="1", allowed=Bounds(at_least=0, at_most=2**32 - 1))
    eval_interval: int = flag(1000, help="Iterations from one validation to the next.", unit="iterations", allowed=POSITIVE_COUNT)
    eval_iters: int = flag(
        100, help="Global batches of one validation, and of the test; 0 turns both off.", unit="iterations", allowed=COUNT
    )
    start_eval_at_iter: int = flag(0, help="First iteration that may be followed by a validation.", unit="iterations", allowed=COUNT)
    eval_micro_batch_size: int = flag(
        None,
        help="Samples in one forward pass of one rank in an evaluation.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="--micro-batch-size",
    )
    eval_global_batch_size: int = flag(
        None,
        help="Samples of all ranks in one global batch of an evaluation; a multiple of --eval-micro-batch-size x ranks.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="--global-batch-size",
    )
    full_validation: bool = flag(
        False, help="Validate on every sample of every validation set, each once, instead of --eval-iters batches."
    )
    manual_gc: bool = flag(
        False, help="Collect Python's garbage only at --manual-gc-interval and at evaluations, on every rank at the same time."
    )
    manual_gc_interval: int = flag(
        0,
        help="Iterations from one collection to the next under --manual-gc; 0 collects at evaluations alone.",
        unit="iterations",
        allowed=COUNT,
        needs=needs("manual_gc"),
    )
    no_manual_gc_eval: bool = flag(False, help="Collect nothing before and after evaluations under --manual-gc.", needs=needs("manual_gc"))
    deterministic_mode: bool = flag(False, help="Only kernels that give the same bits every time (CPU runs always do).")
    compile: bool = flag(
        False, help="Let torch.compile make kernels of the blocks: the same loss within rounding; the first steps wait for a compiler."
    )
