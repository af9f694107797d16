"""Flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import COUNT, POSITIVE_COUNT, POSITIVE_RANKS, flag, needs, unless

A_FOLDER_TO_SAVE_IN = needs("save", what="a folder to save in")
A_CHECKPOINT = needs("load", what="a checkpoint to load")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag(
        None, help="Folder to save checkpoints in, on a file system that all ranks share, or see --node-local-checkpoints.", unit="path"
    )
    load: str | None = flag(
        None,
        help="Folder to load a checkpoint from; if it holds none, the run starts from scratch, unless a flag below needs one.",
        unit="path",
    )
    node_local_checkpoints: bool = flag(
        False,
        help="The folders of --save, --load and --pretrained-checkpoint are on each node's own disk, with the files of its ranks.",
        needs=needs("save", "load", "pretrained_checkpoint", what="a folder of checkpoints"),
    )
    save_copies: int = flag(
        1,
        help="Nodes that have each file of a checkpoint: with 2, those of a node are also saved on the next one, and one disk may be lost.",
        unit="nodes",
        allowed=POSITIVE_RANKS,
        needs=needs("node_local_checkpoints", what="a disk of each node"),
        without_effect=unless("save", why=", and nothing of this run is saved"),
    )
    save_interval: int | None = flag(
        None,
        help="Iterations from one checkpoint to the next; the end of training is always saved under --save.",
        unit="iterations",
        aliases=("--persistent-save-interval",),
        allowed=POSITIVE_COUNT,
        without_effect=unless("save", why=", and nothing of this run is saved"),
    )
    async_save: bool = flag(
        False, help="Copy the state to host memory and write the checkpoint from there while training goes on.", needs=A_FOLDER_TO_SAVE_IN
    )
    keep_last: int | None = flag(
        None,
        help="Checkpoints to keep; older ones are deleted after a save.",
        unit="checkpoints",
        allowed=POSITIVE_COUNT,
        otherwise="all",
        needs=A_FOLDER_TO_SAVE_IN,
    )
    save_retain_interval: int | None = flag(
        None,
        help="Keep checkpoints at multiples of this, and the last one (or --keep-last); others are deleted after a save.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        needs=A_FOLDER_TO_SAVE_IN,
    )
    no_save_optim: bool = flag(False, help="Leave optimizer state out of checkpoints.", needs=A_FOLDER_TO_SAVE_IN)
    no_load_optim: bool = flag(False, help="Start with fresh optimizer state.", needs=A_CHECKPOINT)
    finetune: bool = flag(False, help="Load weights only: iteration, consumed samples and schedule start at 0.", needs=A_CHECKPOINT)
    pretrained_checkpoint: str | None = flag(
        None, help="Folder to load weights from, as with --finetune, if --load holds no checkpoint.", unit="path"
    )
    ckpt_step: int | None = flag(
        None, help="Iteration of the checkpoint to load.", unit="iterations", allowed=COUNT, otherwise="the latest", needs=A_CHECKPOINT
    )
    load_last_good_checkpoint: bool = flag(
        False,
        help="Verify the checkpoint before loading it; if it is damaged or missing, load the newest older one that is intact.",
        needs=A_CHECKPOINT,
    )
    exit_on_missing_checkpoint: bool = flag(
        False, help="End with an error if --load holds no checkpoint, instead of starting from scratch.", needs=A_CHECKPOINT
    )
    use_checkpoint_args: bool = flag(
        False,
        help="Take the model's shape and the tokenizer from the checkpoint, except values that flags give.",
        needs=needs("load", "pretrained_checkpoint", what="a checkpoint"),
    )
    override_opt_param_scheduler: bool = flag(
        False,
        help="Use the schedule of learning rate and weight decay that the flags give, even if the checkpoint's differs.",
        aliases=("--override-opt_param-scheduler",),
        needs=A_CHECKPOINT,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        help="Use the checkpoint's schedule of learning rate and weight decay, whatever the flags say.",
        aliases=("--use-checkpoint-opt_param-scheduler",),
        needs=A_CHECKPOINT,
    )
