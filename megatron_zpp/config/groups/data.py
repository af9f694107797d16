"""Flags of corpora and tokenizers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import FRACTION, POSITIVE_VOCABULARY, PROCESSES, VOCABULARY, flag, is_on, needs, unless, when

TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "HFTokenizer",
    "TikTokenizer",
    "NullTokenizer",
)
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
TOKENIZER_FIELDS = (  # all that a tokenizer is built from
    "tokenizer_type",
    *TOKENIZER_FILES,
    "vocab_size",
    "legacy_tokenizer",
    "vocab_extra_ids",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tokenizer_special_tokens",
    "tokenizer_hf_no_include_special_tokens",
    "null_tokenizer_eod_id",
)
CORPUS_FIELDS = (  # all that name corpora
    "data_path",
    "data_args_path",
    "per_split_data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
)
CHANGED_TOKENIZERS = ("SentencePieceTokenizer", "Llama2Tokenizer")  # Megatron's generations differ in them


@dataclass(frozen=True)
class DataConfig:
    """Text and tokenizer."""

    data_path: tuple[str, ...] = flag(
        (),
        help="Prefix of the .bin and .idx files of the corpus; several make a blend: weight prefix weight prefix ..., or prefix prefix ... "
        "with their numbers of samples as weights.",
        unit="path",
    )
    train_data_path: tuple[str, ...] = flag(
        (), help="As --data-path, for training alone, without --split; excludes --data-path.", unit="path"
    )
    valid_data_path: tuple[str, ...] = flag((), help="As --train-data-path, for validation.", unit="path")
    test_data_path: tuple[str, ...] = flag((), help="As --train-data-path, for the test.", unit="path")
    multiple_validation_sets: bool = flag(
        False, help="Validate on every corpus separately, and report one loss for each; the corpora must have no weights."
    )
    validation_set_names: tuple[str, ...] = flag(
        (),
        help="Names of the sets of --multiple-validation-sets in printed lines and logs, in the order of the corpora.",
        otherwise="the file names of the corpora",
        needs=needs("multiple_validation_sets"),
    )
    data_args_path: str | None = flag(None, help="Text file with the words of --data-path, for many corpora.", unit="path")
    per_split_data_args_path: str | None = flag(
        None,
        help="JSON file with the words of --train-data-path, --valid-data-path and --test-data-path under train, valid and test.",
        unit="path",
    )
    split: str = flag("969, 30, 1", help="Shares of documents for training, validation and test.", unit="parts", is_phrase=True)
    mock_data: bool = flag(
        False, help="Train on generated tokens instead of files; assumed if no flag names a corpus or a tokenizer of texts."
    )
    tokenizer_type: str = flag(
        None,
        help="Tokenizer of the corpus.",
        allowed=TOKENIZER_TYPES,
        otherwise="NullTokenizer with mock data, else required",
    )
    tokenizer_model: str | None = flag(
        None,
        help="SentencePiece .model, tokenizer.json (or its folder) of HuggingFaceTokenizer, .tiktoken or .json of TikTokenizer.",
        unit="path",
        without_effect=when(tokenizer_type=("NullTokenizer", "GPT2BPETokenizer")),
    )
    vocab_file: str | None = flag(
        None,
        help="vocab.json of GPT2BPETokenizer.",
        unit="path",
        aliases=("--vocab",),
        without_effect=unless(tokenizer_type="GPT2BPETokenizer"),
    )
    merge_file: str | None = flag(
        None, help="merges.txt of GPT2BPETokenizer.", unit="path", without_effect=unless(tokenizer_type="GPT2BPETokenizer")
    )
    legacy_tokenizer: bool = flag(
        False,
        help="The tokenizers of Megatron before 2026: SentencePieceTokenizer adds <CLS>, <SEP>, <EOD> and <MASK> and ends documents with "
        "<EOD>, and Llama2Tokenizer begins texts with <s>. A run that resumes, and a corpus whose documents end in <EOD>, keep theirs.",
        without_effect=unless(tokenizer_type=CHANGED_TOKENIZERS),
    )
    vocab_extra_ids: int = flag(
        0,
        help="Number of tokens <extra_id_N> that SentencePieceTokenizer adds after its own, with --legacy-tokenizer.",
        unit="ids",
        allowed=VOCABULARY,
        without_effect=unless("legacy_tokenizer") + unless(tokenizer_type="SentencePieceTokenizer"),
    )
    tiktoken_pattern: str | None = flag(
        None,
        help="Megatron's name of the pattern by which TikTokenizer cuts text into words.",
        allowed=("v1", "v2"),
        otherwise="required by TikTokenizer",
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        help="Number of TikTokenizer's special tokens, whose ids come before those of its file.",
        unit="ids",
        allowed=POSITIVE_VOCABULARY,
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    tokenizer_special_tokens: tuple[str, ...] = flag(
        (),
        help="Names of TikTokenizer's first ids, with <unk>, <s> and </s> among them.",
        unit="tokens",
        aliases=("--tiktoken-special-tokens", "--special-tokens"),
        otherwise="<unk> <s> </s>",
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    tokenizer_hf_no_include_special_tokens: bool = flag(
        False,
        help="HuggingFaceTokenizer puts no special tokens around a text, whatever its file says.",
        without_effect=unless(tokenizer_type=("HuggingFaceTokenizer", "HFTokenizer")),
    )
    null_tokenizer_eod_id: int | None = flag(
        None,
        help="The id of NullTokenizer that ends a document.",
        unit="ids",
        allowed=VOCABULARY,
        otherwise="the last one",
        without_effect=unless(tokenizer_type="NullTokenizer"),
    )
    vocab_size: int | None = flag(
        None,
        help="Vocabulary size before padding: NullTokenizer needs it, TikTokenizer cuts its file to it, others must have it.",
        unit="tokens",
        allowed=POSITIVE_VOCABULARY,
        otherwise="50257 for NullTokenizer with mock data",
    )
    data_cache_path: str | None = flag(None, help="Folder of the index cache.", unit="path", otherwise="a folder beside each corpus")
    mid_level_dataset_surplus: float = flag(
        0.005,
        help="Extra samples that each corpus of a weighted blend prepares, as a share of the samples that its weight asks for.",
        unit="1",
        allowed=FRACTION,
    )
    blend_normalization: str = flag(
        "twice",
        help="How often the weights of a blend are divided by their sum before samples are dealt: twice as in Megatron, or once. The last "
        "bits of the shares decide which of equal corpora is drawn first. A run that resumes keeps its own.",
        allowed=("twice", "once"),
    )
    dataloader_type: str = flag(
        "single", help="Order of samples: one shuffled order, the same for any number of ranks.", allowed=("single",)
    )
    reset_position_ids: bool = flag(
        False, help="Positions start over after an end-of-document token.", without_effect=when(position_embedding_type="none")
    )
    reset_attention_mask: bool = flag(
        False, help="No token attends across an end-of-document token.", aliases=("--dataloader-inter-document-masking",)
    )
    eod_mask_loss: bool = flag(False, help="The loss leaves out the prediction of the token that follows an end-of-document token.")
    num_workers: int = flag(
        2, help="Processes that read data, per rank; 0 reads in the training process.", unit="processes", allowed=PROCESSES
    )

    @property
    def names_corpora(self) -> bool:
        """Whether any flag names files to train on."""
        return any(is_on(getattr(self, name)) for name in CORPUS_FIELDS)
