"""The proof that batches have the ids of the packages that define them."""

import json
import os
import pickle
import random
import unicodedata
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.cut_tokenizers import ALL_PATTERNS, ASCII, FIRST_BYTES, NEXT_BYTES, PROBE, added_token, cut_tokenizer
from harness.places import ROOT
from harness.trained_tokenizers import tiktoken_lines, training_texts, write_gpt2_files
from tokenizers import Tokenizer

from megatron_zpp.data.tokenizers import fast_encoder
from megatron_zpp.data.tokenizers.byte_pair_encoding import BytePairEncoding
from megatron_zpp.data.tokenizers.gpt2 import PATTERN, GPT2BPETokenizer
from megatron_zpp.data.tokenizers.huggingface import HuggingFaceTokenizer
from megatron_zpp.data.tokenizers.served_text import YOUNG, KnownCharacters
from megatron_zpp.data.tokenizers.tik import PATTERNS, TikTokenizer

pytest.importorskip("gigatoken")

SERVED = "gigatoken encodes, with the ids of tokenizers."
NAMES = ("GPT-2, its own", "GPT-2", "Qwen 2", "Llama 3", "GPT-4o", "Nemotron", "Qwen 3.5", "DeepSeek")
HARD_CHARACTERS = [
    *"'sStTdDmMreREveVElLabcXYZ019  \t\n\r\v\f/!?-_.,()<>|\0\x1c\x1f\x85\xa0\u1680\u2000\u2028\u202f\u3000\u200b\ufeff\ufffd\uffff",
    *"\u0301\u0903\u20dd\u01c5\u02b0\u4e2d\u0660\u2160\xb2\u3042\u30a2\u200d\xad\uac00\u0130\u0344\u2126\u017f\u212a\ue000\ufb01\u9fa6",
    *(
        "'s",
        "'S",
        "'ll",
        "'LL",
        "'Re",
        "'\u017f",
        "'\u212a",
        "\r\n",
        "   ",
        "\U0010ffff",
        "\U0001f600",
        "e\u0301",
        "\u1100\u1161",
        "<|endoftext|>",
    ),
]


def load(folder: Path, content: dict[str, Any]) -> HuggingFaceTokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return HuggingFaceTokenizer(str(folder))


def ids_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    ids, lengths = tokenizer.tokenize_batch(texts)
    ends = lengths.cumsum().tolist()
    return [ids[end - length : end].tolist() for end, length in zip(ends, lengths.tolist(), strict=True)]


def random_texts(seed: int, count: int) -> list[str]:
    rng, texts = random.Random(seed), []
    for _ in range(count):
        share = rng.choice((0, 0.1, 0.6))
        length = rng.choice((1, 2, 3, 5, 9, 30, 150))
        texts.append("".join(_any_character(rng) if rng.random() < share else rng.choice(HARD_CHARACTERS) for _ in range(length)))
    return texts


def _any_character(rng: random.Random) -> str:
    character = chr(rng.randrange(rng.choice((0x800, 0x3100, 0x10000, 0x20000, 0x110000))))
    return " " if unicodedata.category(character) == "Cs" else character


def tik_tokenizer(scheme: str) -> BytePairEncoding:
    """A tokenizer by tiktoken whose ids show the cuts."""
    pairs = [bytes((left, right)) for left in ASCII for right in (*FIRST_BYTES, *ASCII)]
    pairs += [bytes((left, right)) for left in NEXT_BYTES for right in (*ASCII, *FIRST_BYTES)]
    ranks = {token: rank for rank, token in enumerate([*(bytes((byte,)) for byte in range(256)), *pairs])}
    pattern = PATTERN if scheme == "gpt2" else PATTERNS["v2"]
    return BytePairEncoding(pattern, ranks, np.arange(len(ranks), dtype=np.int32), {}, fast_scheme=scheme)


@pytest.mark.parametrize(
    ("patterns", "normalizer"),
    [(patterns, {"type": "NFC"} if number % 2 else None) for number, patterns in enumerate(ALL_PATTERNS)],
    ids=NAMES,
)
def test_any_text_has_the_ids_of_package_tokenizers(tmp_path: Path, patterns: tuple[str, ...] | None, normalizer: object) -> None:
    tokenizer = load(tmp_path, cut_tokenizer(patterns, normalizer=normalizer, ignore_merges=normalizer is None))
    assert tokenizer.prepare_batches() == SERVED
    texts = random_texts(seed=len(str(patterns)), count=400)
    assert ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]


@pytest.mark.parametrize("scheme", ["gpt2", "nemotron"])
def test_any_text_has_the_ids_of_tiktoken(scheme: str) -> None:
    tokenizer = tik_tokenizer(scheme)
    assert tokenizer.prepare_batches() == "gigatoken encodes, with the ids of tiktoken."
    texts = random_texts(seed=7, count=500)
    assert ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]


def borders() -> list[str]:
    """The first and the last character of every stretch of one category, in all planes."""
    categories = [unicodedata.category(chr(point)) for point in range(0x110000)]
    changes = [point for point, (before, now) in enumerate(pairwise(categories), 1) if before != now]
    return [chr(point) for change in changes for point in (change - 1, change) if categories[point] != "Cs"]


@pytest.mark.parametrize("patterns", [ALL_PATTERNS[0], ALL_PATTERNS[7]], ids=[NAMES[0], NAMES[7]])
def test_characters_at_the_borders_of_categories_are_cut_alike(tmp_path: Path, patterns: tuple[str, ...] | None) -> None:
    tokenizer = load(tmp_path, cut_tokenizer(patterns))
    texts = [PROBE.format(character) for character in borders()]
    assert ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]


@pytest.mark.long
@pytest.mark.parametrize("patterns", ALL_PATTERNS, ids=NAMES)
def test_every_character_of_all_planes_is_cut_alike(tmp_path: Path, patterns: tuple[str, ...] | None) -> None:
    tokenizer = load(tmp_path, cut_tokenizer(patterns))
    for start in range(0, 0x110000, 256):
        texts = [PROBE.format(chr(point)) for point in range(start, start + 256) if not 0xD800 <= point < 0xE000]
        assert ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]


def test_texts_with_young_or_unassigned_characters_are_not_accepted_nor_those_that_would_be_normalized() -> None:
    plain, normalizing = KnownCharacters(normalizes=False), KnownCharacters(normalizes=True)
    young = [chr(int(part.partition("-")[0], 16)) for part in YOUNG.split()]
    assert not any(plain(f"known{character}") for character in [*young, "\U000e0fff", "\u0378"])
    assert not plain("é" * 70_000 + young[0])
    assert plain("é漢字🎉 e\u0301") and normalizing("é漢字🎉") and not normalizing("e\u0301")


def test_added_tokens_in_a_text_have_their_ids_also_where_they_overlap(tmp_path: Path) -> None:
    names = ["<a>", "<a>b", "b<c>", " <d>", "漢", "\n\n"]
    tokenizer = load(tmp_path, cut_tokenizer(ALL_PATTERNS[3], added_tokens=names))
    assert tokenizer.prepare_batches() == SERVED
    rng = random.Random(3)
    texts = ["".join(rng.choice([*names, "<|endoftext|>", "b", " ", "x", "\n", "字", "<", "a>"]) for _ in range(12)) for _ in range(500)]
    assert ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]


def test_a_template_puts_its_ids_around_every_text(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<b>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "<e>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<b>": {"id": "<b>", "ids": [8, 9], "tokens": ["a", "b"]}, "<e>": {"id": "<e>", "ids": [7], "tokens": ["c"]}},
    }
    tokenizer = load(tmp_path, cut_tokenizer(post_processor={"type": "Sequence", "processors": [template]}))
    assert tokenizer.prepare_batches() == SERVED
    texts = ["", "x", "xé\u0378", "<|endoftext|>"]
    assert ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]
    assert ids_of(tokenizer, [""]) == [[8, 9, 7]]


def test_words_of_a_million_letters_have_their_ids(tmp_path: Path) -> None:
    gpt2 = GPT2BPETokenizer(*write_gpt2_files(tmp_path))
    rng = random.Random(1)
    words = ["a" * 1_000_000, "".join(rng.choices("etaoinshrdlué", k=1_000_000))]
    assert ids_of(gpt2, words) == [gpt2.tokenize(word) for word in words]
    assert ids_of(gpt2, [" " * 1_000_000 + "x"]) == [gpt2.tokenize(" " * 1_000_000 + "x")]


def isolated(**changes: object) -> dict[str, Any]:
    assert ALL_PATTERNS[2] is not None
    split = {"type": "Split", "pattern": {"Regex": ALL_PATTERNS[2][0]}, "behavior": "Isolated", "invert": False, **changes}
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, last]}}


# cl100k: gigatoken takes patterns with and without the possessive quantifiers, and with and without \s++$, for the same.
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
ROBERTA = {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True, "add_prefix_space": False}
OTHER_CUTS = "pre-tokenizer other than"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"normalizer": {"type": "NFKC"}}, "normalizer NFKC"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, "normalizer Sequence"),
        ({"dropout": 0.1}, "model with dropout"),
        ({"end_of_word_suffix": "é"}, "model with end_of_word_suffix"),
        ({"byte_fallback": True}, "model with byte_fallback"),
        ({"pre_tokenizer": {**BYTES, "add_prefix_space": True}}, "pre-tokenizer ByteLevel"),
        ({"pre_tokenizer": {**BYTES, "use_regex": False}}, "pre-tokenizer ByteLevel"),
        ({"pre_tokenizer": None}, "pre-tokenizer none"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}}, OTHER_CUTS),
        (isolated(behavior="Removed"), OTHER_CUTS),
        (isolated(invert=True), OTHER_CUTS),
        (isolated(pattern={"String": " "}), OTHER_CUTS),
        (isolated(pattern={"Regex": CL100K}), OTHER_CUTS),
        ({"post_processor": ROBERTA}, "post-processor RobertaProcessing"),
    ],
)  # fmt: skip
def test_a_tokenizer_with_other_properties_is_left_to_its_package(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    tokenizer = load(tmp_path, cut_tokenizer(**changes))
    description = tokenizer.prepare_batches()
    assert description.startswith("tokenizers encodes, because gigatoken cannot: ") and reason in description
    texts = ["don't 12345 \n\u00a0", "", "é"]
    assert changes.get("dropout") or ids_of(tokenizer, texts) == [tokenizer.tokenize(text) for text in texts]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content["added_tokens"][0].update(lstrip=True), "with lstrip"),
        (lambda content: content["added_tokens"][0].update(single_word=True), "with single_word"),
        (lambda content: content["added_tokens"].append(added_token("<n>", 90_000, normalized=True)), "that are normalized"),
        (lambda content: content["model"]["vocab"].update({"漢": 90_000}), "not one of bytes"),
        (lambda content: content["model"]["vocab"].update({"\u0100x": 1 << 21}), "ids of 2097152 and more"),
        (lambda content: (content["model"]["vocab"].pop("a"), content["model"].update(merges=[])), "not one of bytes"),
    ],
)
def test_a_tokenizer_with_unusual_tokens_is_left_to_its_package(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], reason: str
) -> None:
    content = cut_tokenizer()
    change(content)
    assert reason in load(tmp_path, content).prepare_batches()


def test_a_pattern_or_ranks_that_gigatoken_does_not_serve_are_left_to_tiktoken(tmp_path: Path) -> None:
    ranks = {bytes((byte,)): byte for byte in range(256)}
    # No two tokens make abc.
    odd = BytePairEncoding(PATTERN, {**ranks, b"abc": 256}, np.arange(257, dtype=np.int32), {}, fast_scheme="gpt2")
    assert "it refuses the tokenizer" in odd.prepare_batches()
    assert ids_of(odd, ["abc", "ab"]) == [[256], [97, 98]]
    (tmp_path / "t.tiktoken").write_text(tiktoken_lines(list(ranks)))
    first = TikTokenizer(str(tmp_path / "t.tiktoken"), "v1", num_special_tokens=3)
    assert "it does not know the pattern" in first.prepare_batches()


def test_contractions_marks_and_pictures_are_compared_at_the_start_of_every_job() -> None:
    for normalizes in (False, True):
        compared = "".join(filter(KnownCharacters(normalizes=normalizes), fast_encoder.HARD_TEXTS))
        assert all(part in compared for part in ("WE'RE", "\u0301\u0301", "\u200d"))


def test_ids_that_differ_at_the_start_of_a_job_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(tmp_path, cut_tokenizer())
    monkeypatch.setattr(tokenizer, "tokenize", lambda text: Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids + [1])
    assert "its ids differ, for example for" in tokenizer.prepare_batches()


@pytest.mark.parametrize(
    ("package", "version", "reason"),
    [
        ("gigatoken", None, "package gigatoken is not installed; run: pip install gigatoken==0.10.0"),
        (
            "gigatoken",
            "9.9",
            "version 9.9 of gigatoken is installed, and the ids are proven for 0.10.0; run: pip install gigatoken==0.10.0",
        ),
        ("tokenizers", "9.9", "version 9.9 of tokenizers is installed, and the ids are proven for 0.23.3; run: pip install tokenizers=="),
    ],
)
def test_without_the_proven_packages_the_ids_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, reason: str
) -> None:
    def find(name: str) -> str:
        if name == package and version is None:
            raise fast_encoder.importlib.metadata.PackageNotFoundError(name)
        return str(version) if name == package else fast_encoder.PROVEN_VERSIONS[name]

    expected = ids_of(load(tmp_path, cut_tokenizer()), training_texts()[:2])
    monkeypatch.setattr(fast_encoder.importlib.metadata, "version", find)
    tokenizer = load(tmp_path, cut_tokenizer())
    assert reason in tokenizer.prepare_batches()
    assert ids_of(tokenizer, training_texts()[:2]) == expected


def test_proven_versions_are_those_of_the_tests() -> None:
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert all(f"{package}=={version}" in pinned for package, version in fast_encoder.PROVEN_VERSIONS.items())


def test_what_it_remembers_is_bounded_and_changes_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = GPT2BPETokenizer(*write_gpt2_files(tmp_path))
    expected, starts = ids_of(tokenizer, training_texts()), []
    start = fast_encoder.FastEncoder._start
    monkeypatch.setattr(fast_encoder.FastEncoder, "_start", lambda self: (starts.append(1), start(self)))
    monkeypatch.setattr(fast_encoder, "_resident_bytes", iter(range(0, 1 << 60, 1 << 28)).__next__)
    assert [ids_of(tokenizer, [text])[0] for text in training_texts()] == expected
    assert len(starts) > 3


def test_it_starts_no_threads_and_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    tokenizer = GPT2BPETokenizer(*write_gpt2_files(tmp_path))
    before = len(os.listdir("/proc/self/task"))
    expected = ids_of(tokenizer, training_texts())
    assert len(os.listdir("/proc/self/task")) == before
    assert ids_of(pickle.loads(pickle.dumps(tokenizer)), training_texts()) == expected
