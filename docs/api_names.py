"""What programs may call: the functions, classes and constants that the pages of docs/api describe.

A name is `file:name`, with the file below megatron_zpp/. The methods of a class may follow it; without any, the page has all of its public
methods and properties that have a docstring, and with `-` it has none. A class is shown with its constructor, unless a function in MADE_BY
makes its objects.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page of docs/api. introduction: what it is for, with what a reader needs to know before the names."""

    file: str
    title: str
    introduction: str
    names: tuple[str, ...]


SHARDING = Page(
    "sharding.md",
    "API: sharding a module",
    "Shards any `nn.Module` and trains it. `from megatron_zpp import shard, save, load` works, and so it does for the other names that a "
    "program needs. [Coming from FSDP2](../coming_from_fsdp2.md#a-module-of-your-own) has a program that begins "
    "with `shard`, and [examples/shard_your_own_module.py](../../examples/shard_your_own_module.py) is a whole one.",
    (
        "zero/shard.py:shard",
        "checkpoint/sharded_module.py:save",
        "checkpoint/sharded_module.py:load",
        "checkpoint/sharded_module.py:Restored",
        "zero/shard.py:full_weights",
        "zero/shard.py:leave_world",
        "zero/engine_options.py:EngineOptions",
        "zero/engine.py:ZeroEngine backward step finish_gradients update weight_norm gather_world state_bytes start_iteration "
        "finish_updates finish_differences weights_changed close",
        "outer/join.py:join_islands",
        "outer/options.py:OuterOptions -",
        "outer/steps.py:OuterSteps step outer_weights state_bytes close",
        "zero/optimizer_step.py:StepResult",
        "zero/engine.py:StateBytes",
        "zero/schedule.py:Prefetch",
        "zero/adam.py:AdamOptions -",
        "zero/loss_scaler.py:DynamicLossScaler",
        "parallel/grid.py:Grid of_nodes data_ranks nodes data_rank_of tensor_rank_of context_rank_of",
        "parallel/specs.py:Use",
        "comm/backend.py:VirtualWorld run",
        "comm/ledger.py:Ledger total inter_node_bytes",
        "comm/ledger.py:Category",
        "comm/ledger.py:Traffic",
        "monitor/observer.py:Observer",
    ),
)

POLICIES = Page(
    "policies.md",
    "API: policies and codes",
    "A policy says on which rung each state is kept, and how its values cross the links. It is the field `policy` of `EngineOptions` "
    "([sharding](sharding.md#engineoptions)). [ZeRO++ and lean](../zeropp.md) explains what each of them saves.",
    (
        "zero/policy.py:POLICIES",
        "zero/policy.py:ZEROPP",
        "zero/policy.py:LEAN",
        "zero/policy.py:with_quantized_weights",
        "zero/policy.py:with_secondary_weights",
        "zero/policy.py:with_quantized_gradients",
        "zero/policy.py:with_weight_differences",
        "zero/policy.py:with_gradients_summed_on_secondary",
        "zero/policy.py:with_offloaded_optimizer",
        "zero/policy.py:Policy in_world sends_differences in_full_precision",
        "zero/policy.py:Rung -",
        "comm/code.py:LinkCodes",
        "comm/code.py:Code",
        "comm/code.py:Levels",
        "comm/code.py:Rotation",
        "comm/code.py:Rounding",
    ),
)

CODECS = Page(
    "codecs.md",
    "API: codecs",
    "A codec makes payloads from values, and values from payloads, as a code says ([policies and codes](policies.md#code)). "
    "[examples/codec_of_your_own.py](../../examples/codec_of_your_own.py) has one of its own, which sends 8-bit floats; the field "
    "`make_codec` of `EngineOptions` chooses it.",
    (
        "comm/codec.py:Codec",
        "comm/codec.py:Regions",
        "comm/code.py:SliceShape",
        "comm/codec.py:SignKeys",
        "comm/codecs.py:make_codec",
        "comm/codecs.py:CastCodec",
        "comm/codecs.py:BlockCodec exact_values",
        "comm/gaussian_codec.py:GaussianCodec -",
    ),
)

CHECKPOINTS = Page(
    "checkpoints.md",
    "API: checkpoints",
    "Saves the state of an engine and loads it in any world; reads checkpoints of this program, of Hugging Face and of Megatron. "
    "[Checkpoints](../checkpoints.md) describes the files, [importing](../importing.md) the commands.",
    (
        "checkpoint/engine_state.py:EngineState",
        "checkpoint/progress.py:Progress",
        "checkpoint/saver.py:CheckpointSaver",
        "checkpoint/saver.py:SaveOptions",
        "checkpoint/saver.py:SavedCheckpoint",
        "checkpoint/stored_flags.py:open_checkpoint",
        "checkpoint/stored_flags.py:model_flags",
        "checkpoint/reader.py:CheckpointReader",
        "checkpoint/folders.py:find_checkpoint",
        "checkpoint/folders.py:complete_iterations",
        "checkpoint/manifest.py:read_manifest",
        "checkpoint/manifest.py:Manifest is_release",
        "checkpoint/manifest.py:CheckpointError",
        "checkpoint/manifest.py:DamagedCheckpointError",
        "checkpoint/release.py:write_release",
        "checkpoint/export.py:write_tensors",
        "checkpoint/export.py:write_parts",
        "checkpoint/shard_file.py:TensorEntry -",
        "checkpoint/hf/layouts.py:layout_holding",
        "checkpoint/hf/layouts.py:layout_of_type",
        "checkpoint/hf/layouts.py:Layout",
        "checkpoint/hf/folder.py:HfFolder",
        "checkpoint/megatron/folder.py:find_iteration",
        "checkpoint/megatron/folder.py:read_source",
        "checkpoint/megatron/source.py:Source",
        "checkpoint/megatron/joining.py:Joining weight parts",
    ),
)

DATA = Page(
    "data.md",
    "API: corpora, samples and tokenizers",
    "Reads and writes Megatron's PREFIX.bin and PREFIX.idx, cuts samples from them in Megatron's order, and makes tokenizers from flags "
    "([parse_flags](plans.md#parse_flags)). "
    "[Data](../data.md) has the commands, [datasets](../datasets.md) the rules.",
    (
        "data/indexed_dataset.py:IndexedDataset",
        "data/indexed_dataset.py:best_dtype",
        "data/indexed_dataset.py:check_token_ids",
        "data/preprocess/indexed_writer.py:IndexedDatasetWriter add_document add_documents add_sequences add_dataset finalize discard",
        "data/split.py:split_documents",
        "data/gpt_indices.py:build_gpt_indices",
        "data/gpt_indices.py:GPTIndices -",
        "data/gpt_dataset.py:GPTDataset",
        "data/gpt_dataset.py:Sample",
        "data/statistics.py:count_tokens",
        "data/statistics.py:unigram_cross_entropy",
        "data/tokenizers/tokenizer.py:build_tokenizer",
        "data/tokenizers/tokenizer.py:Tokenizer",
        "data/tokenizers/tokenizer.py:embedding_rows",
    ),
)

PLANS = Page(
    "plans.md",
    "API: plans",
    "Predicts memory, bytes and time of a run without starting it: a plan is a step of one rank on tensors without values. "
    "[Slow links](../slow_links.md#predict-it) has the commands that use it.",
    (
        "config/cli.py:parse_flags",
        "config/schema.py:Config -",
        "training/run_plan.py:plan_run",
        "training/members.py:MEMBERS",
        "training/members.py:Member",
        "training/members.py:PlannedWorld",
        "training/run_plan.py:RunPlan",
        "training/memory_need.py:MemoryNeed",
        "training/plan/planned_step.py:PlannedMemory",
        "training/plan/planned_step.py:PlannedStep -",
        "training/plan/clock.py:StepTime busy",
        "training/hardware.py:planned_machine",
        "training/hardware.py:peak_teraflops",
        "training/plan/machine.py:Machine -",
        "training/plan/machine.py:LinkSpeed",
        "training/plan/machine.py:CodecSpeed -",
        "training/plan/machine.py:HostSpeed",
        "training/plan/machine.py:Overlap",
        "model/shapes.py:ModelShape unit_specs uses",
        "parallel/topology.py:Topology of_nodes partitions slice_of members",
    ),
)

MADE_BY = {"ZeroEngine": "shard", "OuterSteps": "join_islands", "CheckpointReader": "open_checkpoint"}  # functions of the same page

PAGES = (SHARDING, POLICIES, CODECS, CHECKPOINTS, DATA, PLANS)
