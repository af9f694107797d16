"""Megatron's block of arguments."""

import re

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.options import arguments, arguments_block, options


def test_block_is_framed_sorted_and_complete():
    header, *lines, footer = arguments_block(parse_flags(["--num-layers", "2", "--data-path", "a", "b"])).splitlines()
    assert header == "------------------------ arguments ------------------------"
    assert footer == "-------------------- end of arguments ---------------------"
    names = [line.split()[0] for line in lines]
    assert names == sorted(option.name for option in options() if option.group != "plan")
    assert all(re.fullmatch(r"  [a-z0-9_]+ \.+ .*", line) and line.index(". ") == 2 + 48 for line in lines)
    assert "  num_layers " + "." * 38 + " 2" in lines
    assert "  data_path " + "." * 39 + " a b" in lines


def test_arguments_are_text_by_name():
    assert arguments(parse_flags(["--bf16"]))["bf16"] == "True"
