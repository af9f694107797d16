"""Megatron's block of arguments."""

import getpass
import os
import re

import pytest

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.data_sources import parse_blend
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


@pytest.mark.parametrize("option", [option for option in options() if option.flag.unit == "path"], ids=lambda option: option.spelling)
def test_the_home_folder_stands_in_for_its_sign_in_every_path(option):
    home = os.path.expanduser("~")
    for sign in ("~", f"~{getpass.getuser()}"):
        value = parse_flags([f"{option.spelling}={sign}/x"]).value_of(option.name)
        assert value == ((f"{home}/x",) if option.kind is tuple else f"{home}/x")
    assert parse_flags([f"{option.spelling}=a~/~no-such-user"]).value_of(option.name) in ("a~/~no-such-user", ("a~/~no-such-user",))


def test_the_home_folder_stands_in_for_its_sign_in_the_corpora_of_a_file():
    assert parse_blend("--data-args-path", ["0.5", "~/a", "0.5", "b"]).prefixes == (os.path.expanduser("~/a"), "b")
    assert parse_blend("--data-args-path", ["~/a"]).prefixes == (os.path.expanduser("~/a"),)
