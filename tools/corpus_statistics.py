"""Prints the loss that a language model must beat: the validation cross-entropy under the token frequencies of the training split."""

import argparse
import json

from cli.command import run_command, vocabulary_size

from megatron_zpp.data.indexed_dataset import IndexedDataset, check_token_ids
from megatron_zpp.data.split import split_documents
from megatron_zpp.data.statistics import count_tokens, unigram_cross_entropy


def main() -> None:
    run_command(_parser(), run)


def run(args: argparse.Namespace) -> None:
    """Prints one sentence and one JSON object. Raises UserError for unusable data, or for a --split without validation tokens."""
    dataset = IndexedDataset(args.data_path)
    check_token_ids(dataset, args.vocab_size)
    documents = split_documents(args.split, len(dataset))
    train_counts, valid_counts = (count_tokens(dataset, documents[name], args.vocab_size) for name in ("train", "valid"))
    nats = unigram_cross_entropy(train_counts, valid_counts)
    print(f"Unigram cross-entropy of the validation split: {nats:.4f} nats per token")
    figures = {"train_tokens": int(train_counts.sum()), "valid_tokens": int(valid_counts.sum()), "unigram_cross_entropy_nats": nats}
    print(json.dumps({"data_path": args.data_path, "split": args.split, "vocab_size": args.vocab_size, **figures}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="corpus_statistics.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("--data-path", required=True, help="common prefix of the .bin and the .idx file")
    parser.add_argument("--split", default="969, 30, 1", help='training, validation and test shares (default: "969, 30, 1")')
    parser.add_argument("--vocab-size", type=vocabulary_size, required=True, help="number of ids, padding left out")
    return parser


if __name__ == "__main__":
    main()
