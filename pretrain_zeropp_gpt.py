"""Pretrains a GPT: the run from top to bottom. Every setting is a flag; see --help or docs/flags.md."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import megatron_zpp.system.process_start  # noqa: F401  its clock starts here, before anything slow
from megatron_zpp.checkpoint.checkpoint_args import with_checkpoint_args
from megatron_zpp.config.cli import ERROR_EXIT_CODE, asks_for_help, error_text, help_text, parse_flags
from megatron_zpp.config.defaults import banner
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.options import arguments_block
from megatron_zpp.config.resolve import resolve
from megatron_zpp.config.schema import Config
from megatron_zpp.monitor.logging import RankPrinter
from megatron_zpp.parallel.failures.launcher_watch import FAILURE_EXIT_CODE, LauncherWatch
from megatron_zpp.parallel.launch import Launch, is_launched, read_job, read_launch
from megatron_zpp.system.interrupts import INTERRUPTED_EXIT_CODE, Interrupts
from megatron_zpp.system.lasting_stream import tell_lost_lines, use_lasting_streams
from megatron_zpp.system.user_error import UserError

if TYPE_CHECKING:
    from megatron_zpp.parallel.initialize import RankLost, World
    from megatron_zpp.training.save_lock import SaveLock
    from megatron_zpp.training.writers import Writers

INTERRUPTED = "interrupted"


def main(argv: list[str]) -> int:
    try:
        launch = read_launch(os.environ)
    except UserError as error:
        if not (asks_for_help(argv) or "--dry-run" in argv):
            return refuse(str(error))
        launch = Launch(0, 1, 0, 1)  # neither help nor a plan starts anything
    if asks_for_help(argv):
        RankPrinter(launch.rank, launch.world_size).on_first(help_text())
        return 0
    config, given, mistake = Config(), Config(), None
    try:
        given = with_checkpoint_args(parse_flags(argv))
        if given.plan.dry_run:
            return show_plan(given, launch)
        launch.check_equal_nodes(given.distributed.ranks_per_node)
        config = resolve(given, launch.world_size, launch.local_world_size)
    except FlagError as error:
        mistake = str(error)
    if mistake is not None and (launch.world_size == 1 or "--dry-run" in argv):
        return refuse(mistake, launch.rank)
    with LauncherWatch(launch.rank, is_launched=is_launched(os.environ)) as watch:
        return run_in_world(config, given, launch, mistake, watch)


def show_plan(config: Config, launch: Launch) -> int:
    """Prints the plan of --dry-run on the first rank; returns the exit code."""
    from megatron_zpp.training.dry_run import described_plan

    try:
        text = described_plan(config, launch)
    except UserError as error:
        return refuse(str(error), launch.rank)
    RankPrinter(launch.rank, launch.world_size).on_first(text)
    return 0


def run_in_world(config: Config, given: Config, launch: Launch, mistake: str | None, watch: LauncherWatch) -> int:
    """Runs the training and returns the exit code. given: the configuration before `resolve`.

    mistake: error text of this rank's flags, on which all ranks agree first.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else torch prints the stack of every request to a store that is lost
    from megatron_zpp.parallel.initialize import RankLost, StartupError, World, choose_device  # torch is imported from here on
    from megatron_zpp.system.open_files import allow_open_files
    from megatron_zpp.training.save_lock import SaveLock

    try:
        allow_open_files(launch.world_size, config.distributed.ranks_per_node or launch.local_world_size or 1, config.data.num_workers)
        device = choose_device(launch, config.distributed.distributed_backend)
        world = World(launch, device, timedelta(minutes=config.distributed.distributed_timeout_minutes))
    except UserError as error:
        return refuse(str(error))
    except RankLost as error:
        return end(launch.rank, error)
    watch.report = partial(world.report_failure, is_cause=True)
    save_lock = SaveLock(config.checkpoint.save, read_job(os.environ), world)
    world.release = watch.release = save_lock.release
    try:
        world.agree_on_errors(mistake)
        train(config, given, launch, world, save_lock)
        save_lock.release()
        exit_code = 0
    except StartupError as error:
        save_lock.release()
        exit_code = refuse(str(error), launch.rank)
    except BaseException as error:  # Ctrl-C as well: no thread of gloo or of a lane may run while the interpreter shuts down
        fail(world, error, save_lock)
    try:
        world.leave()
    except RankLost as error:
        return end(launch.rank, error)
    return exit_code


def train(config: Config, given: Config, launch: Launch, world: World, save_lock: SaveLock) -> None:
    """The run: checks, model, data, engine, training. Raises StartupError on every rank for a mistake of the user."""
    from megatron_zpp.checkpoint.island_state import state_of
    from megatron_zpp.parallel.topology import check_placement
    from megatron_zpp.training import setup, start, startup_checks
    from megatron_zpp.training.earlier_data import data_notices, reading_of_run, with_reading
    from megatron_zpp.training.host_threads import share_cores
    from megatron_zpp.training.instruments import make_instruments
    from megatron_zpp.training.kept_rules import with_kept_rules
    from megatron_zpp.training.kernels import prepare_kernels
    from megatron_zpp.training.same_data import check_same_data
    from megatron_zpp.training.save_lock import disk_of
    from megatron_zpp.training.sharding import sample_groups_of
    from megatron_zpp.training.stop_conditions import check_kill_switch
    from megatron_zpp.training.stored_run import with_schedule
    from megatron_zpp.training.trainer import Trainer
    from megatron_zpp.training.writers import open_writers

    printer = RankPrinter(launch.rank, launch.world_size)
    printer.on_first("\n".join(filter(None, [banner(config), arguments_block(config), *config.notices])))
    startup_checks.check_same_flags(config, world)
    hosts = world.hosts()
    startup_checks.check_same_devices(world, hosts)
    with world.agreement():
        if config.training.deterministic_mode:
            startup_checks.use_deterministic_kernels()
        check_placement(hosts, config.distributed.ranks_per_node)
    disk = disk_of(config, world)
    save_lock.take(disk, printer.on_first)
    with world.agreement():
        instruments = make_instruments(config, world.device, world.rank)
    links = setup.build_links(config, world, instruments)
    column = setup.build_column(config, world, instruments)
    about_host = share_cores(config, world, hosts)
    memory = startup_checks.available_memory(world, hosts)
    source = start.find_resume_source(config, world, disk, printer.on_first)
    with world.agreement():
        check_kill_switch(config.training, launch.rank)
        startup_checks.check_backends(config, world.device)
        config = start.with_earlier_samples(config, given, source.stored, launch)
        sample_groups = sample_groups_of(config, links.grid)
        config, about_rules = with_kept_rules(with_schedule(config, source.stored, sample_groups), source.stored)
        vocabulary = setup.build_vocabulary(config)
        model = setup.build_model(config, vocabulary.padded_size, source.stored, links)
    startup_checks.check_memory(config, vocabulary.padded_size, links.grid, world, memory)
    with world.agreement("preparing data", printer.on_first):
        data_progress = setup.progress_printer(launch, hosts[launch.rank], printer)
        is_first_here = launch.local_rank == 0
        datasets = setup.build_run_data(config, vocabulary, source.stored, data_progress, checks_token_ids=is_first_here)
        writers = open_writers(config, printer, instruments, save_lock)
        config = config.with_values(vocab_size=vocabulary.size)
    with closing(writers, world):
        check_same_data(vocabulary, datasets.sources, world.gather_texts)
        startup_checks.check_save_is_shared(config, world, disk)
        kernels = prepare_kernels(config, world, hosts)
        about_model = setup.describe_run(config, links, vocabulary.size, model)
        about_device = startup_checks.about_device(config, world.device)
        lines = [*about_model, about_device, about_host, kernels, *about_rules, *datasets.messages]
        printer.on_first("\n".join(filter(None, lines)))
        printer.milestone("after dataloaders are built")
        engine = setup.build_engine(config, model, links, instruments)
        outer = setup.build_outer(config, engine, column)
        with world.agreement():
            # With --node-local-checkpoints ranks wait for each other here: whatever is wrong before that is so on every rank.
            progress = start.load_progress(config, state_of(engine, outer), source)
            config = start.with_remaining_batches(config, progress, sample_groups)
        here = reading_of_run(config, vocabulary, datasets, progress.consumed_samples)
        about_data: list[str] = []
        if source.stored is not None:
            with world.agreement("comparing the data with those of the checkpoint", printer.on_first):
                about_data = data_notices(config, source.stored, here, datasets) if world.rank == 0 else []  # it reads whole indices
        if world.rank == 0:  # it lists the folder of checkpoints
            printer.on_first(start.describe_start(config, source, progress, about_data))
        progress = with_reading(progress, here)
        source.close()
        del source  # its manifest has a piece of each unit from each rank: half a GiB where thousands saved it
        Trainer(config, model, engine, datasets, writers, progress, outer).run()
    if outer is not None:
        outer.close()
    engine.close()


@contextmanager
def closing(writers: Writers, world: World) -> Iterator[None]:
    """Closes the writers at the end of the block. Reports a failure to the other ranks first, because closing may take long."""
    from megatron_zpp.parallel.initialize import StartupError

    try:
        yield
    except StartupError:
        raise
    except BaseException as error:
        report(world, error)
        raise
    finally:
        writers.close()


def refuse(mistake: str, rank: int = 0) -> int:
    """Prints a mistake of the user on the first rank; returns the exit code."""
    if rank == 0:
        print(error_text(FlagError(mistake)), file=sys.stderr, flush=True)
    return ERROR_EXIT_CODE


def in_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"{INTERRUPTED}{error if error.args else ' before training began'}"
    return f"{type(error).__name__}: {error}"


def report(world: World, error: BaseException) -> str:
    """Reports the error to the other ranks; returns the first failure that any rank has reported."""
    return world.report_failure(in_words(error), is_cause=isinstance(error, KeyboardInterrupt))


def end(rank: int, error: RankLost) -> int:
    """Says which failure has ended this rank while the ranks came together or apart; returns the exit code."""
    print(f"[Rank {rank}] ended, because {error}", file=sys.stderr, flush=True)
    return FAILURE_EXIT_CODE


def fail(world: World, error: BaseException, save_lock: SaveLock) -> None:
    """Prints the error and the rank that failed first, and ends this process at once, so that no rank waits for it.

    Where ranks are interrupted, one of them prints one sentence: all get the signal, and the first one to end may fail others.
    """
    is_interrupted = isinstance(error, KeyboardInterrupt)
    first = report(world, error)
    of_this_rank = f"rank {world.rank}: {INTERRUPTED}"
    if first.startswith(of_this_rank):
        print(f"pretrain_zeropp_gpt.py: {INTERRUPTED}{first.removeprefix(of_this_rank)}", file=sys.stderr, flush=True)
    elif not is_interrupted:
        if not first.partition(": ")[2].startswith(INTERRUPTED):
            traceback.print_exception(error)
        print(f"[Rank {world.rank}] ended, because {first}", file=sys.stderr, flush=True)
    save_lock.release()  # last: until the process ends, a thread may still be writing a checkpoint
    os._exit(INTERRUPTED_EXIT_CODE if is_interrupted else FAILURE_EXIT_CODE)


if __name__ == "__main__":
    use_lasting_streams()  # a lost terminal must not cost a checkpoint
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as a shell without job control starts a command in the background
        signal.signal(signal.SIGINT, Interrupts().raise_first)
    try:
        exit_code = main(sys.argv[1:])
    except KeyboardInterrupt:  # while torch is imported or a plan is made; later, run_in_world ends the process
        print("pretrain_zeropp_gpt.py: interrupted", file=sys.stderr)
        exit_code = INTERRUPTED_EXIT_CODE
    sys.stdout.flush()
    tell_lost_lines()
    sys.stderr.flush()
    os._exit(exit_code)  # at once: a thread of gloo that frees a tensor while the interpreter shuts down would abort a finished run
