"""Every command of the pages, of the programs' first lines and of their help is run by a test, or the table says why not."""

from __future__ import annotations

import ast
import re

import pytest
from harness.pages import Command, commands
from harness.places import HARNESS, ROOT

READER = HARNESS / "reader.py"
RUN = "tests/docs/test_commands_run.py"
SCRIPTS, TORCHRUN, SLURM = (f"tests/scripts/test_{name}.py" for name in ("all_scripts", "torchrun_scripts", "slurm_scripts"))
TUTORIAL, EXAMPLES = "tests/integration/test_tutorial.py", "tests/examples/test_examples.py"
WORLDS = "tests/docs/test_runs_of_pages.py::test_a_run_of_a_page_is_accepted_in_its_world"
DATA_PAGE = f"{RUN}::test_the_commands_of_the_data_page_tokenise_show_and_merge"
CHECKPOINTS = f"{RUN}::test_the_tools_of_the_checkpoints_page_read_what_readmes_training_has_saved"
MEGATRON = f"{RUN}::test_a_checkpoint_of_megatron_is_imported_as_the_page_says"
LAUNCHER = f"{RUN}::test_the_launcher_prints_the_commands_of_the_hosts_that_are_left"
LOSS_STUDY = "tests/benchmarks/test_loss_study.py::test_the_program_trains_seed_by_seed_what_is_missing_and_nothing_else"
COMMANDS = "tests/tools/test_entry_point.py"
INDEX = "It needs a package index; what a wheel holds is tested."
LOG_TOOLS = "tests/docs/test_logs_page.py::test_the_commands_that_watch_and_compare_runs_do_so"
FAKE_GPUS = "tests/benchmarks/test_fake_gpus.py::test_a_torch_without_cuda_is_refused_with_a_remedy"
BENCHMARK = f"{RUN}::test_a_benchmark_runs_with_small_sizes_and_writes_its_file"
QUICKSTART = f"{SCRIPTS}::test_the_quickstarts_runs_have_flags_that_parse"
EXTENSIONS = f"{SCRIPTS}::test_the_kernels_are_built_by_the_active_python"
TEST_SCRIPT = f"{SCRIPTS}::test_the_test_script_runs_every_check_and_passes_arguments_on"
SHAPES = "tests/scripts/test_model_scripts.py::test_the_shape_has_the_parameters_of_the_published_weights_to_the_last"
SMOKE = "tests/benchmarks/test_slow_links.py::test_the_kernel_counts_what_the_ledger_counts"

# A key is a whole command, or with three dots its beginning; the longest one that fits counts. A value is the test that runs it,
# FILE::TEST, or several, or a sentence that says why none does.
TABLE: dict[str, str | tuple[str, ...]] = {
    "bash scripts/quickstart.sh": QUICKSTART,
    "bash scripts/quickstart.sh [--no-venv] [--fresh]": QUICKSTART,
    "bash scripts/test.sh": TEST_SCRIPT,
    "bash scripts/test.sh tests/zero -k layout": TEST_SCRIPT,
    "bash scripts/test.sh --tier pure": TEST_SCRIPT,
    "bash scripts/test.sh --long": TEST_SCRIPT,
    "bash scripts/test.sh [--no-venv] [--long] [--tier NAME] [arguments of pytest]": TEST_SCRIPT,
    "bash scripts/build_extensions.sh": EXTENSIONS,
    "bash scripts/build_extensions.sh [--no-venv] [--portable]": EXTENSIONS,
    "bash scripts/compile_cuda.sh": f"{SCRIPTS}::test_without_nvcc_no_cuda_source_is_compiled_and_that_is_said",
    "bash scripts/quickstart.sh --fresh": QUICKSTART,
    "bash scripts/docs.sh": f"{SCRIPTS}::test_the_site_is_built_anew_and_a_warning_is_an_error",
    "bash scripts/docs.sh --serve": f"{SCRIPTS}::test_the_site_is_served_on_this_machine_only",
    "bash scripts/docs.sh [--no-venv] [--serve]": f"{SCRIPTS}::test_the_site_is_served_on_this_machine_only",
    "python -m docs.page_tables": "tests/docs/test_page_tables.py::test_the_tables_of_a_page_are_those_of_results_and_plans",
    "python -m docs.api_pages": "tests/docs/test_api_pages.py::test_the_stored_pages_are_what_the_docstrings_make",
    "source .venv/bin/activate": "It changes the reader's shell; the scripts that make .venv use it themselves.",
    "source scripts/models/llama3.1_8b.sh": SHAPES,
    "source scripts/models/gpt2_small.sh": SHAPES,
    "pip install ...": "It needs a package index; a run without the package says so, and that is tested where the flag is.",
    "python -m megatron_zpp.config.flags_page": "tests/config/test_flags_page.py::test_page_in_docs_is_current",
    "python -m pip install --editable . --constraint constraints.txt": INDEX,
    "python -m pip install --editable . --no-deps --no-build-isolation": "It changes the reader's environment; a wheel is tested.",
    "python -m pip wheel --no-deps --wheel-dir dist .": f"{COMMANDS}::test_a_wheel_holds_package_entry_tools_and_kernels_and_nothing_else",
    "python -m pip install --constraint constraints.txt dist/megatron_zpp-*.whl": INDEX,
    "python -m megatron_zpp.ops.extension": "tests/ops/test_extension.py::test_a_second_build_finds_the_first_and_says_where",
    "megatron-zpp --help": f"{COMMANDS}::test_help_lists_every_command_with_the_first_sentence_of_its_program",
    "megatron-zpp plan-run --help": f"{COMMANDS}::test_a_command_prints_its_flags",
    "megatron-zpp pretrain ...": f"{COMMANDS}::test_a_command_becomes_its_program_with_all_further_words",
    "megatron-zpp preprocess-data ...": f"{COMMANDS}::test_a_command_becomes_its_program_with_all_further_words",
    "megatron-zpp launch ...": f"{COMMANDS}::test_a_command_becomes_its_program_with_all_further_words",
    "torchrun --nproc_per_node 4 -m pretrain_zeropp_gpt ...": "It needs an installed package; the command beside it is its equal.",
    "torchrun --no-python ... megatron-zpp pretrain": "It needs an installed package; the command that it starts is tested.",
    "torchrun --max-restarts": "It names a flag of torchrun, no run.",
    # Tools
    "python tools/watch_run.py ...": LOG_TOOLS,
    "python tools/plot_run.py ...": LOG_TOOLS,
    "python tools/compare_runs.py ...": LOG_TOOLS,
    "python tools/train_tokenizer.py --input my_text.jsonl --model-prefix my_tokenizer --vocab-size 8192": (
        f"{RUN}::test_readmes_first_commands_make_a_tokenizer_and_a_corpus"
    ),
    "python tools/train_tokenizer.py --input my_text.jsonl --model-prefix my_tokenizer --vocab-size 32000": DATA_PAGE,
    "python tools/preprocess_data.py ...": (
        f"{RUN}::test_readmes_first_commands_make_a_tokenizer_and_a_corpus",
        DATA_PAGE,
    ),
    "python tools/inspect_dataset.py --data-path my_text_text_document ...": DATA_PAGE,
    "python tools/inspect_dataset.py --data-path merged ...": DATA_PAGE,
    "python tools/merge_datasets.py ...": DATA_PAGE,
    "python tools/build_data_cache.py ...": f"{RUN}::test_the_cache_of_a_run_is_built_in_advance",
    "python tools/inspect_checkpoint.py ...": CHECKPOINTS,
    "python tools/consolidate_checkpoint.py ...": CHECKPOINTS,
    "python tools/convert_to_hf.py ...": CHECKPOINTS,
    "python tools/convert_from_hf.py ...": CHECKPOINTS,
    "python tools/generate_text.py --load my_checkpoints --prompt Once upon a time": CHECKPOINTS,
    "python tools/convert_from_megatron.py --input megatron_checkpoints --output my_pretrained": MEGATRON,
    "python tools/convert_from_megatron.py --input megatron_checkpoints --output my_pretrained --dry-run": MEGATRON,
    "python tools/launch.py --hostfile hosts pretrain_zeropp_gpt.py ...": (LAUNCHER, WORLDS),
    "python tools/launch.py --hostfile hosts --exclude node3 ...": (LAUNCHER, WORLDS),
    "python tools/plan_run.py --nodes 24 ...": f"{RUN}::test_the_plan_of_the_slow_links_page_compares_the_members_and_recommends_one",
    "python tools/plan_run.py --nodes 4 ...": f"{RUN}::test_the_rows_that_the_long_sequences_page_shows_are_printed",
    # Runs
    "python pretrain_zeropp_gpt.py --help": f"{RUN}::test_the_help_of_a_run_is_printed",
    "python pretrain_zeropp_gpt.py --dry-run --nodes 2 ...": f"{RUN}::test_readmes_plan_is_made_where_no_data_are",
    "python pretrain_zeropp_gpt.py --dry-run --nodes 4 ...": f"{RUN}::test_the_plan_of_the_launching_page_has_its_parts",
    "python pretrain_zeropp_gpt.py --tensor-model-parallel-size 1 ...": (
        f"{TUTORIAL}::test_the_command_with_only_its_sizes_reduced_trains_on_two_nodes_of_two",
        f"{TUTORIAL}::test_the_command_as_printed_on_one_process_of_a_small_machine_is_refused_with_figures",
    ),
    "python pretrain_zeropp_gpt.py --num-layers 2 ...": f"{RUN}::test_the_profiled_iterations_are_written_where_the_page_says",
    "torchrun --nproc_per_node 4 pretrain_zeropp_gpt.py --zero-stage 3 ...": (
        f"{RUN}::test_readmes_training_saves_and_goes_on_with_more_ranks_and_zeropp",
        WORLDS,
    ),
    "torchrun --nproc_per_node 4 pretrain_zeropp_gpt.py --context-parallel-size 4 ...": (
        f"{RUN}::test_ranks_that_share_samples_or_layers_or_train_apart_do_as_the_page_says",
        WORLDS,
    ),
    "torchrun --nproc_per_node 4 pretrain_zeropp_gpt.py --tensor-model-parallel-size 2 ...": (
        f"{RUN}::test_ranks_that_share_samples_or_layers_or_train_apart_do_as_the_page_says",
        WORLDS,
    ),
    "torchrun --nproc-per-node 4 pretrain_zeropp_gpt.py --diloco-sync-period 8 ...": (
        f"{RUN}::test_ranks_that_share_samples_or_layers_or_train_apart_do_as_the_page_says",
        WORLDS,
    ),
    "torchrun --nnodes 4 --nproc_per_node 16 ...": f"{TUTORIAL}::test_the_script_holds_the_tutorials_command",
    "srun --nodes 4 --ntasks-per-node 16 ...": f"{TUTORIAL}::test_the_script_holds_the_tutorials_command",
    "MASTER_ADDR=node0 NODES=2 NODE_RANK=0 bash scripts/torchrun_nodes.sh --zeropp paper ...": (
        f"{TORCHRUN}::test_on_several_machines_each_is_told_its_place",
        f"{RUN}::test_readmes_training_saves_and_goes_on_with_more_ranks_and_zeropp",
        WORLDS,
    ),
    "MASTER_ADDR=node0 NODES=4 NODE_RANK=0 bash scripts/torchrun_nodes.sh ...": (
        f"{TORCHRUN}::test_on_several_machines_each_is_told_its_place"
    ),
    "bash scripts/torchrun_one_node.sh ...": f"{TORCHRUN}::test_on_one_machine_there_is_a_rank_per_gpu",
    "sbatch scripts/slurm_srun.sbatch --zeropp paper ...": (
        f"{SLURM}::test_the_flags_of_a_run_say_where_and_until_when_it_saves",
        WORLDS,
    ),
    "sbatch --nodes 4 scripts/slurm_srun.sbatch ...": (
        f"{SLURM}::test_srun_starts_a_rank_per_task_that_finds_its_place_and_the_flags",
        WORLDS,
    ),
    "sbatch --nodes 4 scripts/slurm_torchrun.sbatch ...": (f"{SLURM}::test_one_torchrun_per_node_starts_the_ranks_of_its_node"),
    "SIGNAL_SECONDS=60 sbatch --signal=USR1@60 --time=5": "It names no script; it shows which variable and option belong together.",
    "bash scripts/slurm_preprocess.sh ...": f"{SLURM}::test_an_array_of_shares_merged_is_one_corpus_byte_for_byte",
    "SHARES=16 bash scripts/slurm_preprocess.sh ...": f"{SLURM}::test_an_array_of_shares_merged_is_one_corpus_byte_for_byte",
    "mpirun -n 16 python pretrain_zeropp_gpt.py ...": "tests/scripts/test_real_launchers.py::test_no_rank_outlives_a_killed_mpirun",
    "nohup python pretrain_zeropp_gpt.py ...": "It is any run of one process, with a program of the system before it.",
    "deepspeed --hostfile hosts pretrain_gpt.py ...": "It is what users of DeepSpeed write; ours stands beside it.",
    # Examples
    "python -m examples.shard_your_own_module": f"{EXAMPLES}::test_a_module_of_your_own_learns_alone_and_as_well_on_two_ranks",
    "python -m examples.lora": f"{EXAMPLES}::test_adapters_learn_beside_a_frozen_model_and_are_saved_alone",
    "torchrun --nproc-per-node 2 -m examples.shard_your_own_module --checkpoints my_checkpoints": (
        f"{EXAMPLES}::test_a_module_of_your_own_goes_on_from_what_it_saved"
    ),
    "torchrun --nproc-per-node 2 -m examples.lora --model my_llama --text my_text.txt --save my_adapters.safetensors": (
        f"{EXAMPLES}::test_adapters_learn_beside_a_frozen_model_and_are_saved_alone"
    ),
    "python -m examples.codec_of_your_own": f"{EXAMPLES}::test_a_codec_of_your_own_sends_about_a_quarter_and_learns_as_well",
    "python -m examples.outer_steps": f"{EXAMPLES}::test_a_model_learns_on_islands_about_as_well_as_on_one_with_few_bytes_between_them",
    "torchrun --nproc-per-node 2 -m examples.outer_steps --islands 2": (
        f"{EXAMPLES}::test_a_model_learns_on_islands_about_as_well_as_on_one_with_few_bytes_between_them"
    ),
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE:29500 -m examples.outer_steps": (
        f"{EXAMPLES}::test_a_model_learns_on_islands_about_as_well_as_on_one_with_few_bytes_between_them"
    ),
    "python -m examples.hugging_face_model": f"{EXAMPLES}::test_a_model_of_transformers_learns_and_transformers_reads_what_was_saved",
    "torchrun --nproc-per-node 2 -m examples.hugging_face_model --model my_llama --text my_text.txt --save my_trained_llama": (
        f"{EXAMPLES}::test_a_model_of_transformers_learns_and_transformers_reads_what_was_saved"
    ),
    "python -m examples.one_unit": "tests/docs/test_worked_example.py::test_the_blocks_of_the_page_are_what_the_program_prints",
    # Benchmarks
    "python -m benchmarks.checkpoint ...": BENCHMARK,
    "python -m benchmarks.code_errors ...": BENCHMARK,
    "python -m benchmarks.quickstart ...": "tests/benchmarks/test_quickstart.py::test_the_file_says_how_it_was_made_and_under_which_load",
    "python -m benchmarks.constants": (
        "tests/benchmarks/test_constants.py::test_the_table_has_a_row_for_every_speed_with_what_was_measured_here"
    ),
    "python -m benchmarks.data_index ...": BENCHMARK,
    "python -m benchmarks.dropout ...": BENCHMARK,
    "python -m benchmarks.head_loss ...": BENCHMARK,
    "python -m benchmarks.host_adam ...": BENCHMARK,
    "python -m benchmarks.paper_table": BENCHMARK,
    "python -m benchmarks.quantization ...": BENCHMARK,
    "python -m benchmarks.long_sequences ...": (
        "tests/benchmarks/test_long_sequences.py::test_ranks_that_divide_a_sample_have_the_losses_of_one_rank_and_a_smaller_plan"
    ),
    "python -m benchmarks.loss_parity": LOSS_STUDY,
    "python -m benchmarks.loss_parity --groups first --seeds 9 10 11 12": LOSS_STUDY,
    "python -m benchmarks.loss_parity --model wide --groups rows --seeds 1 2 3 4 5 6 7 8": LOSS_STUDY,
    "python -m benchmarks.loss_parity --model islands --groups islands --train-iters 400": LOSS_STUDY,
    "python -m benchmarks.loss_parity --model islands-wide --groups islands-by-rate --train-iters 1024 --seeds 1": LOSS_STUDY,
    "python -m benchmarks.loss_parity --model islands-wide --settings ...": LOSS_STUDY,
    "python -m benchmarks.loss_parity --report-only": LOSS_STUDY,
    "python -m benchmarks.train_step ...": BENCHMARK,
    "python -m benchmarks.train_step --peers fsdp2 deepspeed": (
        "tests/benchmarks/test_train_step.py::test_without_deepspeed_no_world_is_started"
    ),
    "python -m benchmarks.save_copies ...": "It needs root, for networks of its own, and takes five minutes.",
    "python -m benchmarks.scale ...": "It needs root, for networks of its own, and takes half an hour.",
    "python -m benchmarks.sockets ...": BENCHMARK,
    "python -m benchmarks.time_to_loss --smoke": (
        "tests/benchmarks/test_time_to_loss.py::test_the_program_measures_and_reports_and_a_whole_run_has_the_losses_of_one_without_a_limit"
    ),
    "python -m benchmarks.time_to_loss ...": "It needs root and takes hours; --smoke runs the same program on a tiny model.",
    "python -m benchmarks.two_nodes --smoke": SMOKE,
    "python -m benchmarks.two_nodes ...": "It needs root and takes half an hour; --smoke runs the same program on a tiny model.",
    "python -m benchmarks.two_nodes --peers fsdp2 deepspeed": (
        "tests/benchmarks/test_peers.py::test_without_deepspeed_its_peer_is_refused_before_anything_starts"
    ),
    "python -m benchmarks.module_trace": "It starts four processes; test_labels_and_log.py has the names, test_pictures.py draws them.",
    "python -m benchmarks.step_trace ...": "It needs root, for a network of its own; test_pictures.py draws what it wrote.",
    "python -m benchmarks.reshard ...": BENCHMARK,
    "python -m benchmarks.preprocess ...": "It trains tokenizers on text of the machine it runs on, and takes minutes.",
    "python -m benchmarks.fake_gpus --gpus 4 COMMAND": FAKE_GPUS,
    "python -m benchmarks.gpu_host_path ...": FAKE_GPUS,
    "python -m benchmarks.gpu_table ...": "tests/benchmarks/test_gpu_table.py::test_what_four_commands_have_found_is_kept_and_printed",
    "python -m benchmarks.kernel_work ...": (
        "tests/benchmarks/test_kernel_work.py::test_accesses_of_a_warp_fill_the_sectors_that_they_touch"
    ),
    "python -m benchmarks.fake_gpus bash benchmarks/gpu_half_hour.sh 1": (
        "tests/benchmarks/test_gpu_rehearsal.py::test_a_command_of_the_half_hour_runs_on_fake_gpus_to_its_end"
    ),
    "bash benchmarks/gpu_check.sh ...": (
        "tests/benchmarks/test_gpu_check_runner.py::test_on_a_cpu_the_command_runs_parts_without_a_gpu_if_asked"
    ),
    "bash benchmarks/gpu_half_hour.sh 1": "It needs a GPU; the row of its rehearsal on fake GPUs names the test that runs it.",
    "bash benchmarks/gpu_half_hour.sh NUMBER [arguments of gpu_check.sh]": (
        "tests/benchmarks/test_gpu_check_runner.py::test_a_command_of_the_half_hour_ends_without_a_gpu_after_the_machine_with_a_code_of_its_own"
    ),
}


def named_by(key: str) -> tuple[str, ...]:
    """The tests that a row names; none where it gives a reason."""
    value = TABLE[key]
    return tuple(test for test in ((value,) if isinstance(value, str) else value) if "::" in test)


def row_of(text: str) -> str | None:
    """The key of the command's row."""
    fitting = [key for key in TABLE if text == key or (key.endswith(" ...") and f"{text} ".startswith(key.removesuffix("...")))]
    return max(fitting, key=len, default=None)


def is_only_the_beginning(command: Command) -> bool:
    """Whether the page names a command that stands in full elsewhere: `python tools/plan_run.py`, or one that ends in three dots."""
    words = command.words[: command.words.index("...")] if "..." in command.words else command.words
    return any(len(other.words) > len(words) and other.words[: len(words)] == words and "..." not in other.words for other in commands())


def test_every_command_has_a_row() -> None:
    without = [
        f"{command.page}: {command.text}" for command in commands() if row_of(command.text) is None and not is_only_the_beginning(command)
    ]
    assert not without


def test_every_row_has_a_command() -> None:
    assert set(TABLE) - {row_of(command.text) for command in commands()} == set()


def test_a_row_of_one_test_is_for_one_command() -> None:
    """A row with dots would else hide a second command, which its test does not run."""
    rows: dict[str, set[str]] = {}
    for command in commands():
        if (key := row_of(command.text)) is not None and not is_only_the_beginning(command):
            rows.setdefault(key, set()).add(command.text)
    assert {key: texts for key, texts in rows.items() if len(texts) > 1 and named_by(key) not in ((), (BENCHMARK,))} == {}


TESTS = sorted((test, key) for key in TABLE for test in named_by(key))


@pytest.mark.parametrize("test", sorted({test for test, _ in TESTS}))
def test_a_test_that_a_row_names_exists(test: str) -> None:
    file, name = test.split("::")
    assert name in {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("test", "key"), TESTS)
def test_a_test_that_a_row_names_has_the_program(test: str, key: str) -> None:
    words = re.findall(r"(?:\w+/)+([\w.]+)\.(?:py|sh|sbatch)\b|-m \w+\.(\w+)|(pretrain_zeropp_gpt|sbatch|plan_run)", key)
    text = (ROOT / test.split("::")[0]).read_text()
    text += READER.read_text() if "harness.reader" in text else ""
    assert not words or any(word in text for found in words for word in found if word)
