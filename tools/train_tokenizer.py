"""Trains a SentencePiece model, PREFIX.model, on the text of JSON lines. It decodes every text unchanged, with tabs and line ends.

(One exception: SentencePiece writes a space as U+2581, so that character in a text is decoded as a space.)
"""

import argparse
import io
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cli.command import add_line_limit, megabytes, run_command, vocabulary_size  # first, so that Ctrl-C ends what follows in one line

# isort: split

import sentencepiece

from megatron_zpp.data.preprocess.document_encoder import read_texts
from megatron_zpp.data.preprocess.json_lines import (
    STANDARD_INPUT,
    Position,
    count_text_bytes,
    find_inputs,
    line_batches,
)
from megatron_zpp.system.output_file import naming_file, new_file
from megatron_zpp.system.user_error import UserError

LONGEST_SENTENCE = 4192  # characters
# The trainer drops sentences with one of these characters. Byte pieces will encode them.
RESERVED = re.compile("[\t\u2585]")
# Longer ones are cut, before a space if there is one. By default the trainer drops those of more than 4192 bytes, and an old trainer ends
# the program at a word of 65536 characters.
CUT = re.compile(rf".{{1,{LONGEST_SENTENCE}}}(?= |\Z)|.{{1,{LONGEST_SENTENCE}}}", re.DOTALL)


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Writes the model. Raises UserError for an unreadable line, or for a vocabulary that is too large for the text."""
    if STANDARD_INPUT in args.input:
        raise UserError("--input - cannot be read twice; give files.")
    started = time.monotonic()
    print(f"Training a {args.model_type} model of {args.vocab_size} pieces on {' '.join(args.input)} ...", flush=True)
    texts = list(spread_texts(find_inputs(args.input, print), args.json_key, int(args.max_megabytes * 1e6), args.longest_line_bytes))
    if next(_sentences(texts), None) is None:
        raise UserError(f"--input {' '.join(args.input)} holds no text under --json-key {args.json_key}; give the key that holds it.")
    model = train_model(texts, vocab_size=args.vocab_size, model_type=args.model_type)
    path = Path(f"{args.model_prefix}.model")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming_file(path), new_file(temporary) as file:
            file.write(model)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{path}: {args.vocab_size} pieces, trained in {time.monotonic() - started:.1f} s")


def train_model(texts: Sequence[str], *, vocab_size: int, model_type: str) -> bytes:
    """The serialized model. The same texts give the same bytes."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            # Indentation becomes one piece.
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * LONGEST_SENTENCE,  # bytes
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UserError(_why_not(vocab_size, str(error))) from None
    return model.getvalue()


def _why_not(vocab_size: int, message: str) -> str:
    """What to do about SentencePiece's message, in whose text are the smallest and the largest number of pieces."""
    if (least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)) is not None:
        return f"--vocab-size {vocab_size} is too small: this text needs at least {least[1]} pieces."
    if (most := re.search(r"too high .*value <= (\d+)", message)) is not None:
        return f"--vocab-size {vocab_size} is too large: this text allows at most {most[1]} pieces; choose fewer, or give more text."
    return f"SentencePiece cannot train {vocab_size} pieces ({message}); try another --vocab-size or more text."


def _sentences(texts: Sequence[str]) -> Iterator[str]:
    """Lines of the texts, because the trainer does not split at line ends, in parts that it does not drop."""
    return (part for text in texts for line in text.splitlines() for piece in RESERVED.split(line) for part in CUT.findall(piece))


def spread_texts(paths: Sequence[str], key: str, max_bytes: int, longest_line_bytes: int) -> Iterator[str]:
    """The texts in files of JSON lines. If they have more than max_bytes, about max_bytes of evenly spread texts."""
    stride = max(1, -(-count_text_bytes(paths) // max_bytes))
    count = first_line = 0
    for batch in line_batches(paths, Position(), longest_line_bytes):
        first_line = 0 if batch.offset == 0 else first_line
        lines = batch.text.removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, first_line + 1):
            if count % stride == 0 and not line.isspace() and line:
                try:
                    yield read_texts(line, (key,))[key]
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{paths[batch.source]}, line {number}: {str(error).replace('--json-keys', '--json-key')}") from None
            count += 1
        first_line += len(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="train_tokenizer.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="JSON lines, plain, .gz or .zst: files, globs or folders")
    parser.add_argument("--model-prefix", required=True, help="the model is named PREFIX.model")
    parser.add_argument(
        "--vocab-size", type=vocabulary_size, default=4096, help="pieces, with byte pieces and sentence ends (default: 4096)"
    )
    parser.add_argument("--json-key", "--json-keys", default="text", help="key of the text (default: text)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe")
    add_line_limit(parser)
    parser.add_argument("--max-megabytes", type=megabytes, default=20, help="text to train on at most, spread over the file (default: 20)")
    return parser


if __name__ == "__main__":
    main()
