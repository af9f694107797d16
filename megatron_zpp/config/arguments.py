"""The block of arguments that Megatron prints at start-up."""

from __future__ import annotations

from megatron_zpp.config.options import options
from megatron_zpp.config.schema import PLAN_GROUP, Config

HEADER = "------------------------ arguments ------------------------"
FOOTER = "-------------------- end of arguments ---------------------"
NAME_COLUMNS = 48


def arguments(config: Config) -> dict[str, str]:
    """Every field that a run has and its value as text, sorted by name."""
    names = sorted(option.name for option in options() if option.group != PLAN_GROUP)
    return {name: _text(config.value_of(name)) for name in names}


def arguments_block(config: Config) -> str:
    """One line per argument between Megatron's header and footer, the names filled up with dots."""
    lines = [f"  {name} {'.' * (NAME_COLUMNS - len(name))} {value}" for name, value in arguments(config).items()]
    return "\n".join([HEADER, *lines, FOOTER])


def _text(value: object) -> str:
    return " ".join(value) or "None" if isinstance(value, tuple) else str(value)
