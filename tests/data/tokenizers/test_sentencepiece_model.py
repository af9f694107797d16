import io
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from harness.trained_tokenizers import training_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.tokenizers.sentencepiece import PieceTokenizer

pytest.importorskip("gigatoken")

PLAIN = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
# Options as in tools/train_tokenizer.py, as in Llama 2, and with pieces that reach over several words.
MODELS: dict[str, dict[str, Any]] = {
    "own": {**PLAIN, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "llama": {**PLAIN, "add_dummy_prefix": True, "split_digits": True, "control_symbols": ["<c>"]},
    "across words": {**PLAIN, "split_by_whitespace": False},
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "unigram": ("no byte-pair encoding", {**PLAIN, "model_type": "unigram"}),
    "normalising": ("changes texts", {**PLAIN, "normalization_rule_name": "nmt_nfkc"}),
    "stripping": ("changes texts", {**PLAIN, "remove_extra_whitespaces": True}),
    "spaces last": ("changes texts", {**PLAIN, "treat_whitespace_as_suffix": True}),
    "without bytes": ("without the 256 bytes", {**PLAIN, "byte_fallback": False, "character_coverage": 0.98}),
    "symbols": ("pieces of users", {**PLAIN, "user_defined_symbols": ["<EOD>", "▁▁x"]}),
    "control with a space": ("spaces in its control pieces", {**PLAIN, "control_symbols": ["a▁b"]}),
}


@cache
def model(name: str) -> bytes:
    written = io.BytesIO()
    lines = [line for text in training_texts() for line in text.splitlines() if line]
    options = MODELS[name] if name in MODELS else OTHERS[name][1]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, vocab_size=700, minloglevel=2, **options)
    return written.getvalue()


@cache
def served(name: str) -> PieceTokenizer:
    with tempfile.NamedTemporaryFile() as file:
        file.write(model(name))
        file.flush()
        tokenizer = PieceTokenizer(file.name)
    assert tokenizer.prepare_batches() == "gigatoken encodes, with the ids of sentencepiece."
    return tokenizer


@pytest.mark.parametrize("name", MODELS)
def test_sources_have_sentencepieces_own_ids(name: str) -> None:
    texts = [*training_texts(), "", " ", "\n", "▁▁x y▁z", "<EOD> x<c>\n\n\n", "é漢字🎉\u2028\0", "a" * 5000, " " * 500 + "b"]
    texts += ["</s><s> <unk>", "<0x41>", "<0x0", " <c>"]
    ids, lengths = served(name).tokenize_batch(texts)
    expected = [served(name).tokenize(text) for text in texts]
    assert ids.tolist() == [token for members in expected for token in members]
    assert lengths.tolist() == [len(members) for members in expected]


def test_a_model_that_merges_letters_without_pieces_is_left_to_sentencepiece(tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(model("own").replace(b"\n\x01e\x15", b"\n\x01\x7f\x15"))
    tokenizer = PieceTokenizer(str(tmp_path / "a.model"))
    assert "letters that are no pieces" in tokenizer.prepare_batches()
    assert tokenizer.tokenize_batch(["the values"]).ids.tolist() == tokenizer.tokenize("the values")


CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from([*" \n\t▁x<EOD>edrtnsi0123(_", "<c>", "</s>", "<0x41>"])


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(MODELS)), text=st.lists(CHARACTERS, max_size=60).map("".join))
def test_any_text_has_sentencepieces_own_ids(name: str, text: str) -> None:
    assert served(name).tokenize_batch([text]).ids.tolist() == served(name).tokenize(text)


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_ids_are_not_proven_are_left_to_sentencepiece(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.model").write_bytes(model(name))
    tokenizer = PieceTokenizer(str(tmp_path / "a.model"))
    assert OTHERS[name][0] in tokenizer.prepare_batches()
    assert tokenizer.tokenize_batch(["<EOD> x ▁▁x"]).ids.tolist() == tokenizer.tokenize("<EOD> x ▁▁x")
