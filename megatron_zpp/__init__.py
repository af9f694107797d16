"""GPT pretraining with its own ZeRO, which also shards and trains any module. The one place of the version.

What a program needs to train a module of its own can be imported from here. Importing the package alone imports nothing: each name
brings its file, and torch, when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` says that a name is exported
    from megatron_zpp.checkpoint.manifest import CheckpointError as CheckpointError
    from megatron_zpp.checkpoint.sharded_module import Restored as Restored
    from megatron_zpp.checkpoint.sharded_module import load as load
    from megatron_zpp.checkpoint.sharded_module import save as save
    from megatron_zpp.comm.backend import VirtualWorld as VirtualWorld
    from megatron_zpp.comm.code import Code as Code
    from megatron_zpp.comm.code import LinkCodes as LinkCodes
    from megatron_zpp.comm.ledger import Category as Category
    from megatron_zpp.monitor.observer import Observer as Observer
    from megatron_zpp.outer.join import join_islands as join_islands
    from megatron_zpp.outer.options import OuterOptions as OuterOptions
    from megatron_zpp.outer.steps import OuterSteps as OuterSteps
    from megatron_zpp.parallel.grid import Grid as Grid
    from megatron_zpp.parallel.specs import Use as Use
    from megatron_zpp.system.user_error import UserError as UserError
    from megatron_zpp.zero.adam import AdamOptions as AdamOptions
    from megatron_zpp.zero.engine import ZeroEngine as ZeroEngine
    from megatron_zpp.zero.engine_options import EngineOptions as EngineOptions
    from megatron_zpp.zero.loss_scaler import ConstantLossScaler as ConstantLossScaler
    from megatron_zpp.zero.loss_scaler import DynamicLossScaler as DynamicLossScaler
    from megatron_zpp.zero.optimizer_step import StepResult as StepResult
    from megatron_zpp.zero.policy import LEAN as LEAN
    from megatron_zpp.zero.policy import POLICIES as POLICIES
    from megatron_zpp.zero.policy import ZEROPP as ZEROPP
    from megatron_zpp.zero.policy import Policy as Policy
    from megatron_zpp.zero.policy import Rung as Rung
    from megatron_zpp.zero.policy import with_gradients_summed_on_secondary as with_gradients_summed_on_secondary
    from megatron_zpp.zero.policy import with_offloaded_optimizer as with_offloaded_optimizer
    from megatron_zpp.zero.policy import with_quantized_gradients as with_quantized_gradients
    from megatron_zpp.zero.policy import with_quantized_weights as with_quantized_weights
    from megatron_zpp.zero.policy import with_secondary_weights as with_secondary_weights
    from megatron_zpp.zero.policy import with_weight_differences as with_weight_differences
    from megatron_zpp.zero.schedule import Prefetch as Prefetch
    from megatron_zpp.zero.shard import full_weights as full_weights
    from megatron_zpp.zero.shard import leave_world as leave_world
    from megatron_zpp.zero.shard import shard as shard

__version__ = "0.3.0"

_FILES = {
    "CheckpointError": "checkpoint.manifest",
    "Restored": "checkpoint.sharded_module",
    "load": "checkpoint.sharded_module",
    "save": "checkpoint.sharded_module",
    "VirtualWorld": "comm.backend",
    "Code": "comm.code",
    "LinkCodes": "comm.code",
    "Category": "comm.ledger",
    "Observer": "monitor.observer",
    "join_islands": "outer.join",
    "OuterOptions": "outer.options",
    "OuterSteps": "outer.steps",
    "Grid": "parallel.grid",
    "Use": "parallel.specs",
    "UserError": "system.user_error",
    "AdamOptions": "zero.adam",
    "ZeroEngine": "zero.engine",
    "EngineOptions": "zero.engine_options",
    "ConstantLossScaler": "zero.loss_scaler",
    "DynamicLossScaler": "zero.loss_scaler",
    "StepResult": "zero.optimizer_step",
    "LEAN": "zero.policy",
    "POLICIES": "zero.policy",
    "ZEROPP": "zero.policy",
    "Policy": "zero.policy",
    "Rung": "zero.policy",
    "with_gradients_summed_on_secondary": "zero.policy",
    "with_offloaded_optimizer": "zero.policy",
    "with_quantized_gradients": "zero.policy",
    "with_quantized_weights": "zero.policy",
    "with_secondary_weights": "zero.policy",
    "with_weight_differences": "zero.policy",
    "Prefetch": "zero.schedule",
    "full_weights": "zero.shard",
    "leave_world": "zero.shard",
    "shard": "zero.shard",
}
__all__ = [*_FILES]


if not TYPE_CHECKING:  # a type checker would take it for all names that are misspelled

    def __getattr__(name: str) -> Any:
        if name not in _FILES:
            raise AttributeError(f"module 'megatron_zpp' has no attribute '{name}'")
        return getattr(import_module(f"megatron_zpp.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
