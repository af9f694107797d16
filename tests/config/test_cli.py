"""From words to a Config."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.config.cli import PROGRAM, default_in_words, error_text, help_text, parse_flags
from megatron_zpp.config.flag import FlagError, any_of
from megatron_zpp.config.obsolete import ACCEPTED, REFUSED, REFUSED_FAMILIES
from megatron_zpp.config.options import options
from megatron_zpp.config.schema import GROUPS, Config

WHOLE_HELP = help_text()


def words_after(option):
    """A value of the option, and the words that give it."""
    if option.kind is bool:
        return True, []
    if option.kind is tuple:
        return ("a", "b"), ["a", "b"]
    if isinstance(option.flag.allowed, tuple):
        return option.flag.allowed[-1], [str(option.flag.allowed[-1])]
    value = {"quantization_block_size": 64, "rope_scaling_factor": 2.0}.get(option.name) or {int: 3, float: 0.125, str: "text"}[option.kind]
    return value, [str(value)]


def test_no_flags_give_the_defaults():
    assert parse_flags([]) == Config()


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_every_spelling_sets_its_field_and_only_it(option):
    value, words = words_after(option)
    for spelling in option.spellings:
        config = parse_flags([spelling, *words])
        assert config.value_of(option.name) == value
        assert config.given == {option.name}
        assert config.with_values(**{option.name: option.default}) == Config(given=config.given, notices=config.notices)


@given(st.floats(min_value=0, max_value=1e30, allow_nan=False))
def test_a_float_survives_the_command_line(lr):
    assert parse_flags(["--lr", repr(lr)]).optimizer.lr == lr


def test_value_after_an_equals_sign():
    assert parse_flags(["--lr=3e-4"]).optimizer.lr == 3e-4


def test_batch_size_is_micro_batch_size():
    assert parse_flags(["--batch-size", "4"]).training.micro_batch_size == 4


def test_two_spellings_of_one_value_agree():
    assert parse_flags(["--micro-batch-size", "4", "--batch-size", "4"]).training.micro_batch_size == 4


def test_last_word_wins_so_that_scripts_can_append():
    assert parse_flags(["--lr", "1", "--lr", "0.5"]).optimizer.lr == 0.5


@pytest.mark.parametrize(
    "words, parts",
    [
        ("--micro-batch-size 2 --batch-size 4", ["--micro-batch-size 2", "--batch-size 4", "give only one"]),
        ("--layernorm-epsilon 1e-6 --norm-epsilon 1e-5", ["--norm-epsilon 1e-05", "--layernorm-epsilon 1e-06", "give only one"]),
        ("--checkpoint-activations --recompute-activations", ["--checkpoint-activations", "--recompute-activations", "give only one"]),
        ("--zero-stag 3", ["--zero-stag ", "did you mean --zero-stage?"]),
        ("--num_layers 3", ["--num_layers ", "did you mean --num-layers?"]),
        ("-lr=3", ["-lr ", "did you mean --lr?"]),
        ("--xyzzyx", ["--xyzzyx", "--help"]),
        ("--num-layer=3", ["--num-layer ", "did you mean --num-layers?"]),
        ("stray", ["stray", "belongs to no flag", "--help"]),
        ("--bf16 true", ["true", "belongs to no flag"]),
        ("--bf16=true", ["--bf16", "'true'", "--help"]),
        ("--lr", ["--lr", "expected one argument", "--help"]),
        ("--data-path --bf16", ["--data-path", "expected at least one argument", "--help"]),
        ("--num-layers twelve", ["--num-layers twelve", "not a whole number", "such as 8"]),
        ("--num-layers 1.5", ["--num-layers 1.5", "not a whole number", "such as 8"]),
        ("--lr fast", ["--lr fast", "not a number", "such as 0.1"]),
        ("--zero-stage 4", ["--zero-stage 4", "not available", "choose 0, 1, 2 or 3"]),
        ("--lr-decay-style step", ["--lr-decay-style step", "choose constant, linear, cosine"]),
        ("--batch-size 0", ["--batch-size 0", "out of range", "at least 1"]),
        ("--seed -1", ["--seed -1", "out of range", "at least 0 and at most 4294967295"]),
        ("--hidden-dropout 1", ["--hidden-dropout 1.0", "out of range", "at least 0 and below 1"]),
        ("--lr nan", ["--lr nan", "out of range", "at least 0"]),
        ("--quantization-block-size 100", ["--quantization-block-size 100", "a multiple of 32 and at least 32"]),
    ],
)
def test_mistake_names_flag_value_and_remedy(words, parts):
    with pytest.raises(FlagError) as error:
        parse_flags(words.split())
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("option", [option for option in options() if option.kind in (int, float)], ids=lambda option: option.name)
def test_every_numeric_flag_refuses_minus_one(option):
    with pytest.raises(FlagError, match=f"^{option.spelling} -1"):
        parse_flags([option.spelling, "-1"])


@pytest.mark.parametrize("spelling", ACCEPTED)
def test_old_flag_is_accepted_with_one_notice_and_changes_nothing(spelling):
    value = (ACCEPTED[spelling].only or ("1",))[0]
    values = [] if ACCEPTED[spelling].num_values == 0 else [value]
    config = parse_flags([spelling, *values, "--num-layers", "2"])
    (notice,) = config.notices
    assert notice.startswith(f"accepted, has no effect here: {spelling} (")
    assert config == Config(given=config.given, notices=config.notices).with_values(num_layers=2)


@pytest.mark.parametrize("words", ["--moe-router-topk 2", "--cuda-graph-impl local", "--cuda-graph-scope attn mlp"])
def test_every_flag_of_an_accepted_family_is_accepted_with_one_notice(words):
    spelling, *_ = words.split()
    config = parse_flags([*words.split(), "--num-layers", "2"])
    (notice,) = config.notices
    assert notice.startswith(f"accepted, has no effect here: {spelling} (")


@pytest.mark.parametrize("spelling", REFUSED)
def test_refused_flag_names_its_replacement(spelling):
    with pytest.raises(FlagError) as error:
        parse_flags(["--num-layers", "2", spelling, "2"])
    assert str(error.value) == f"{spelling} is not accepted; {REFUSED[spelling]}."


@pytest.mark.parametrize("prefix", REFUSED_FAMILIES)
def test_every_flag_of_a_refused_family_is_refused(prefix):
    with pytest.raises(FlagError) as error:
        parse_flags([f"{prefix}something", "2"])
    assert str(error.value) == f"{prefix}something is not accepted; {REFUSED_FAMILIES[prefix]}."


def test_no_family_swallows_a_flag_that_exists():
    known = [*ACCEPTED, *(spelling for option in options() for spelling in option.all_spellings)]
    assert not [spelling for spelling in known if spelling.startswith(tuple(REFUSED_FAMILIES))]


@pytest.mark.parametrize("spelling", [spelling for spelling, accepted in ACCEPTED.items() if accepted.only])
def test_an_accepted_flag_with_a_value_that_would_change_something_is_refused(spelling):
    with pytest.raises(FlagError) as error:
        parse_flags([spelling, "4"])
    assert str(error.value).startswith(f"{spelling} 4 is not available, ")
    assert f"choose {any_of(ACCEPTED[spelling].only)}, or leave it out" in str(error.value)


def test_all_wrong_flags_and_values_are_named_at_once_a_line_for_each():
    with pytest.raises(FlagError) as error:
        parse_flags(
            "--num-layers 2 --zero-stag 3 --warmup 0.1 --num-experts 8 --mos --optimizer sgd --xyzzyx=4 --lr fast "
            "--cp-comm-type p2p --context-parallel-size 2".split()
        )
    lines = error_text(error.value).splitlines()
    named = ["--zero-stag is not a flag", "--warmup is not accepted", "--mos is not accepted", "--xyzzyx is not a flag"]
    named += ["--lr fast is not a number", "--optimizer sgd is not available", "--num-experts 8 is not available"]
    named += ["--cp-comm-type p2p is not available"]
    assert len(lines) == len(named)
    assert all(line.startswith(f"{PROGRAM}: error: {text}") for line, text in zip(lines, named, strict=True))


@pytest.mark.parametrize(
    "words, hint",
    [("--lr-decay-style Cosin", "(did you mean cosine?)"), ("--tokenizer-type GPT2Tokenizer", "(did you mean GPT2BPETokenizer?)")],
)
def test_a_mistyped_choice_names_the_nearest(words, hint):
    with pytest.raises(FlagError) as error:
        parse_flags(words.split())
    assert hint in str(error.value)


def test_replacements_of_refused_flags_exist():
    known = {spelling for option in options() for spelling in option.spellings}
    remedies = [*REFUSED.values(), *REFUSED_FAMILIES.values()]
    named = {word.rstrip(",") for remedy in remedies for word in remedy.split() if word.startswith("--")}
    assert named <= known


def test_help_names_every_flag_group_and_exits_with_0(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_flags(["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert all(spelling in printed for option in options() for spelling in option.spellings)
    assert all(f"\n{group}:\n" in printed for group in GROUPS)


def test_a_shorthand_is_its_flag_with_a_value_and_contradicts_another():
    config = parse_flags(["--use-rotary-position-embeddings"])
    assert config.model.position_embedding_type == "rope" and config.given == {"position_embedding_type"}
    assert parse_flags(["--use-rotary-position-embeddings", "--position-embedding-type", "rope"]) == config
    with pytest.raises(
        FlagError, match="--position-embedding-type none and --use-rotary-position-embeddings are two values for one setting"
    ):
        parse_flags(["--use-rotary-position-embeddings", "--position-embedding-type", "none"])


@pytest.mark.parametrize("word", ["RMSNorm", "rmsnorm", "RMSNORM"])
def test_capitals_of_a_choice_do_not_matter(word):
    assert parse_flags(["--normalization", word]).model.normalization == "RMSNorm"


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_help_tells_default_and_unit_of_every_flag(option):
    details = [default_in_words(option)] + ([f"unit: {option.flag.unit}"] if option.flag.unit not in ("", "1", "path") else [])
    assert "".join(f"{option.flag.help} ({'; '.join(details)}".split()) in "".join(WHOLE_HELP.split())  # lines break within flags, too


def test_help_tells_defaults_in_words():
    for told in (
        "Transformer blocks. (required; unit: blocks; at least 1)",
        "(default: --seq-length; unit: tokens; at least 1)",
        "excludes --bf16. (default: off)",
    ):
        assert "".join(told.split()) in "".join(WHOLE_HELP.split())  # lines break within flags, too


def test_error_text_names_the_program():
    assert error_text(FlagError("--lr is wrong.")) == f"{PROGRAM}: error: --lr is wrong."
