"""Joins islands by outer steps: the entry point for programs other than the training script.

    engine = shard(model, units, islands=nodes)  # every node trains a copy of the model by itself
    outer = join_islands(engine, OuterOptions(period=16))
    for batch in batches:
        engine.backward(loss_of(model(batch)))
        engine.step(learning_rate=1e-3)
        outer.step()  # every 16 steps, a unit moves to where all islands together have come
    with outer.outer_weights():
        evaluate(model)
    outer.close()
    engine.close()
    leave_world()

examples/outer_steps.py is a whole program.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_zpp.comm.backend import Backend
from megatron_zpp.comm.waits import Waits
from megatron_zpp.comm.world_links import WorldLinks, has_world
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.outer.all_islands import AllIslands
from megatron_zpp.outer.options import OuterOptions
from megatron_zpp.outer.steps import OuterSteps
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.islands import ranks_of_columns
from megatron_zpp.zero.alike import check_alike, digest_of, raising_alike
from megatron_zpp.zero.engine import ZeroEngine


def join_islands(
    engine: ZeroEngine,
    options: OuterOptions = OuterOptions(),
    *,
    backend: Backend | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> OuterSteps:
    """The outer steps of engines that shard(..., islands=N) made. Every rank of every island must call it, with the same arguments.

    Main weights must be the same on every island: those of shard(), or those of a checkpoint that every island has loaded.
    backend: collectives among the ranks that have the same place on each island, such as a part of comm/backend.py:VirtualWorld; by default
        those of torch.distributed, whose world is cut into islands as shard() did.
    timeout: of an exchange; a rank that waits for another longer than this fails. An island also waits while another is slower.
    Raises UserError on every rank if arguments or main weights differ between islands, or if the policy of the engine does not suit: stage
    0 with several ranks per island, lean between the nodes of one island.
    """
    islands = _islands(engine, backend)
    if backend is not None:
        made = WorldLinks.over(backend, engine.device, Observer())
    else:
        columns = ranks_of_columns(islands * engine.world_size, islands)
        made = WorldLinks.connect(Grid.of_nodes(islands, 1), columns, engine.device, timeout, Waits())
    column, device = made.links.backend, engine.device
    everyone = AllIslands(engine.links.backend, column, engine.world_size)
    try:
        check_alike(
            everyone, device, repr((options, engine.options.compared())).encode(), "options of outer steps, or of engines,", remedy=""
        )
        with raising_alike(everyone, device):
            engine.finish_updates()
            own = digest_of(unit.main_weight for unit in engine.trained)
        with raising_alike(everyone, device):
            check_alike(column, device, own, "main weights", remedy="", member="island")
        with raising_alike(everyone, device):
            return OuterSteps(engine, made.links, options, made.end)
    except Exception:  # on every rank
        made.end()
        raise


def _islands(engine: ZeroEngine, backend: Backend | None) -> int:
    if backend is not None:
        return backend.grid.world_size
    return dist.get_world_size() // engine.world_size if has_world() else 1
