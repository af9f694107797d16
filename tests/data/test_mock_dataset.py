from hypothesis import given
from hypothesis import strategies as st

from megatron_zpp.data.gpt_dataset import MockDataset


def mock(*, seed: int = 1234, stream: int = 0, seq_length: int = 16, vocab_size: int = 100, sample_count: int = 10) -> MockDataset:
    return MockDataset(seed=seed, stream=stream, seq_length=seq_length, vocab_size=vocab_size, sample_count=sample_count)


@given(
    seq_length=st.integers(1, 70),
    vocab_size=st.sampled_from([1, 2, 3, 511, 512, 513, 50257, 2**31]),
    index=st.integers(0, 2**40),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_sample_has_seq_length_ids_of_the_vocabulary(seq_length: int, vocab_size: int, index: int, seed: int) -> None:
    sample = mock(seq_length=seq_length, vocab_size=vocab_size, seed=seed)[index]
    assert len(sample["tokens"]) == len(sample["labels"]) == len(sample["loss_mask"]) == seq_length
    assert 0 <= sample["tokens"].min() <= sample["tokens"].max() < vocab_size
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()


def test_a_sample_depends_on_seed_stream_and_index_alone() -> None:
    dataset = mock()
    for index in (7, 3, 7):
        assert dataset[index]["tokens"].tolist() == mock(sample_count=99)[index]["tokens"].tolist()
    others = [mock(seed=1)[7], mock(stream=1)[7], mock()[8]]
    assert all(dataset[7]["tokens"].tolist() != other["tokens"].tolist() for other in others)


def test_samples_stay_the_same_from_one_numpy_to_the_next() -> None:
    assert [mock(seq_length=4)[index]["tokens"].tolist() for index in range(3)] == [[30, 31, 32, 33], [98, 99, 0, 1], [28, 29, 30, 31]]


def test_the_next_token_follows_from_the_two_before_it() -> None:
    for index in range(20):
        tokens = mock()[index]["tokens"].tolist()
        assert all((b - a) % 100 == (c - b) % 100 for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False))
        assert 1 <= (tokens[1] - tokens[0]) % 100 <= 3
