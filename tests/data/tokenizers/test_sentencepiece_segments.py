import io
import pickle
from functools import cache
from typing import Any

import pytest
import sentencepiece
from harness.trained_tokenizers import training_texts
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_zpp.data.tokenizers import sentencepiece_segments
from megatron_zpp.data.tokenizers.sentencepiece_segments import segment_encoder

PLAIN = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
# Options as in tools/train_tokenizer.py, as in Llama 2, with pieces added by users, and with pieces that contain line ends.
MODELS: dict[str, dict[str, Any]] = {
    "own": {**PLAIN, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "llama": {**PLAIN, "add_dummy_prefix": True, "split_digits": True},
    "symbols": {**PLAIN, "user_defined_symbols": ["<EOD>", "▁▁x", "\n\n"], "control_symbols": ["<c>"]},
}
OTHERS: dict[str, dict[str, Any]] = {
    "unigram": {**PLAIN, "model_type": "unigram"},
    "normalising": {**PLAIN, "normalization_rule_name": "nmt_nfkc"},
    "stripping": {**PLAIN, "remove_extra_whitespaces": True},
    "without bytes": {**PLAIN, "byte_fallback": False, "character_coverage": 0.98},
    "across words": {**PLAIN, "split_by_whitespace": False},
    "spaces last": {**PLAIN, "treat_whitespace_as_suffix": True},
    "symbol across": {**PLAIN, "user_defined_symbols": ["x▁y"]},
}


@cache
def model(name: str) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    lines = [line for text in training_texts() for line in text.splitlines() if line]
    options = {"vocab_size": 700, "minloglevel": 2, **{**MODELS, **OTHERS}[name]}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=written, **options)
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def ids_in_segments(name: str, texts: list[str]) -> list[list[int]]:
    encoder = segment_encoder(model(name))
    assert encoder is not None
    ids, lengths = encoder.encode(texts)
    ends = lengths.cumsum().tolist()
    return [ids[end - length : end].tolist() for end, length in zip(ends, lengths.tolist(), strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_sources_have_sentencepieces_own_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*training_texts(), "", " ", "\n", "▁▁x y▁z", "<EOD> x<c>\n\n\n", "é漢字🎉\u2028\0", "a" * 5000, " " * 500 + "b"]
    expected = [model(name).encode(text) for text in texts]
    assert ids_in_segments(name, texts) == expected
    # With a cache that is cleared all the time.
    monkeypatch.setattr(sentencepiece_segments, "CACHED_SEGMENTS", 3)
    assert ids_in_segments(name, texts) == expected


@settings(max_examples=300)
@given(
    name=st.sampled_from(sorted(MODELS)),
    text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t▁x<EOD>edrtnsi0123(_"), max_size=60),
)
def test_any_text_has_sentencepieces_own_ids(name: str, text: str) -> None:
    assert ids_in_segments(name, [text]) == [model(name).encode(text)]


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_look_further_than_a_word_are_left_to_sentencepiece(name: str) -> None:
    assert segment_encoder(model(name)) is None


def test_it_can_be_sent_to_other_processes_without_its_memory() -> None:
    encoder = segment_encoder(model("own"))
    assert encoder is not None
    before = len(pickle.dumps(encoder))
    expected = encoder.encode(training_texts())
    sent = pickle.dumps(encoder)
    assert len(sent) == before
    assert pickle.loads(sent).encode(training_texts()).ids.tolist() == expected.ids.tolist()
