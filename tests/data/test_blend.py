import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from harness.tiny_corpus import counting_documents, write_corpus, write_golden_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_zpp.config.schema import DataConfig
from megatron_zpp.data.blend import normalized, plan_by_epochs, plan_by_weights
from megatron_zpp.data.blended_dataset import BlendedDataset, build_blend_indices
from megatron_zpp.data.datasets import DataRequest, Datasets, SampleCounts, build_datasets
from megatron_zpp.data.gpt_dataset import GPTDataset
from megatron_zpp.system.user_error import UserError


def build(data: DataConfig, counts: tuple[int, int, int] = (6, 3, 1), seq_length: int = 8) -> Datasets:
    return build_datasets(data, DataRequest(seq_length, 1234, SampleCounts(*counts), vocab_size=100, eod=99))


def blend_of(datasets: Datasets) -> BlendedDataset:
    assert isinstance(datasets.train, BlendedDataset)
    return datasets.train


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), sample_count=st.integers(1, 10**9))
def test_sizes_of_a_weighted_blend_are_megatrons(weights: list[float], sample_count: int) -> None:
    plan = plan_by_weights(weights, sample_count, 0.005, "twice")
    total = np.sum(np.array(weights))
    shares = [weight / total for weight in weights]
    again = np.sum(np.array(shares))
    assert plan.weights == tuple(share / again for share in shares)
    assert plan_by_weights(weights, sample_count, 0.005, "once") == replace(plan, weights=tuple(shares), normalization="once")
    assert plan.least_samples == tuple(math.ceil(math.ceil(sample_count * share) * 1.005) for share in shares)
    assert plan.sample_count == sum(math.ceil(sample_count * share) for share in shares) >= sample_count


def dealt_by_the_rule(weights: np.ndarray, corpora: np.ndarray, counts: np.ndarray, samples: int) -> np.ndarray:
    """[samples, blends] corpus of each sample of many blends at once, written from the rule; blends end after their own counts.

    Weights are divided by their sum, the shares again by theirs. Sample i goes to the corpus whose share of max(i, 1) samples is furthest
    above the samples it has, to the first among equals. weights: [blends, corpora], 0 where a blend has fewer.
    """
    shares = weights.copy()
    for _ in range(2):
        sums = np.array([np.sum(row[:count]) for row, count in zip(shares, corpora, strict=True)])
        shares /= sums[:, None]
    shares[np.arange(shares.shape[1]) >= corpora[:, None]] = -np.inf
    had = np.zeros(shares.shape)
    dealt = np.full((samples, len(weights)), -1)
    blends = np.arange(len(weights))
    for sample in range(samples):
        furthest = np.argmax(shares * max(sample, 1) - had, axis=1)
        had[blends, furthest] += 1
        dealt[sample] = np.where(sample < counts, furthest, -1)
    return dealt


def test_3000_random_blends_are_dealt_by_shares_that_are_normalized_twice() -> None:
    random = np.random.RandomState(21)
    blends, most_corpora, samples = 3000, 8, 400
    corpora = random.randint(1, most_corpora + 1, blends)
    # Weights that people write have few digits, and their ties are what the last bit decides.
    digits = random.randint(1, 4, blends)
    weights = np.ceil(random.rand(blends, most_corpora) * 10.0 ** digits[:, None]) / 10.0 ** digits[:, None]
    counts = random.randint(1, samples - most_corpora, blends)
    plans = [
        {rule: plan_by_weights(row[:count].tolist(), int(size), 0.005, rule) for rule in ("twice", "once")}
        for row, count, size in zip(weights, corpora, counts, strict=True)
    ]
    lengths = np.array([plan["twice"].sample_count for plan in plans])
    expected = dealt_by_the_rule(np.where(np.arange(most_corpora) < corpora[:, None], weights, 0), corpora, lengths, int(lengths.max()))
    dealt_otherwise = 0
    for blend, plan in enumerate(plans):
        reference = expected[: lengths[blend], blend]
        assert np.array_equal(build_blend_indices(plan["twice"].weights, plan["twice"].sample_count).dataset, reference)
        dealt_otherwise += not np.array_equal(build_blend_indices(plan["once"].weights, plan["once"].sample_count).dataset, reference)
    assert dealt_otherwise > 100


def test_blends_of_different_normalization_are_stored_under_different_names(tmp_path: Path) -> None:
    words = [word for number in range(3) for word in ("1", write_corpus(tmp_path, [[number] * 30], name=f"c{number}"))]
    cache = tmp_path / "cache"
    for rule in ("once", "twice"):
        build(DataConfig(data_path=tuple(words), split="1", data_cache_path=str(cache), blend_normalization=rule), (20, 0, 0))
    assert len(list(cache.glob("*-BlendedDataset-train-description.txt"))) == 2


def test_a_blend_by_epochs_has_the_shares_of_the_samples() -> None:
    assert plan_by_epochs([30, 10], 20).weights == normalized([3, 1]) == (0.75, 0.25)


def test_one_corpus_with_a_weight_is_a_blend_of_one_with_its_surplus(tmp_path: Path) -> None:
    prefix = write_golden_corpus(tmp_path)
    weighted = blend_of(build(DataConfig(data_path=("30", prefix), split="80,10,10"), (200, 3, 1)))
    plain = build(DataConfig(data_path=(prefix,), split="80,10,10"), (201, 3, 1)).train
    assert isinstance(plain, GPTDataset) and len(weighted) == 200
    assert [weighted[index]["tokens"].tolist() for index in range(200)] == [plain[index]["tokens"].tolist() for index in range(200)]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_blend_however_small_its_corpora_runs_out_of_samples(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Megatron raises IndexError if the blend draws more samples of a corpus than that was cut into."""
    folder = tmp_path_factory.mktemp("blend")
    corpora = data.draw(st.integers(2, 6))
    weights = data.draw(st.none() | st.lists(st.floats(1e-3, 1.0), min_size=corpora, max_size=corpora))
    lengths = data.draw(st.lists(st.integers(5 if weights is None else 1, 40), min_size=corpora, max_size=corpora))
    prefixes = [write_corpus(folder, [[1] * length], name=f"c{number}") for number, length in enumerate(lengths)]
    words = prefixes if weights is None else [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair]
    settings_of_run = DataConfig(data_path=tuple(words), split="1", data_cache_path=str(folder), mid_level_dataset_surplus=0.0)
    count = data.draw(st.integers(1, 300))
    datasets = build(settings_of_run, (count, 0, 0), seq_length=4)
    assert len(datasets.train) >= count
    for index in range(len(datasets.train)):
        assert datasets.train[index]["tokens"].shape == (4,)


def test_corpora_without_weights_are_drawn_in_the_shares_of_one_epoch_and_start_over_when_it_ends(tmp_path: Path) -> None:
    long, short = (write_corpus(tmp_path, [[1] * length], name=f"c{length}") for length in (61, 21))
    blend = blend_of(build(DataConfig(data_path=(long, short), split="1"), (40, 0, 0), seq_length=4))
    assert blend.count_by_source(0, 20) == {long: 15, short: 5}
    assert blend.count_by_source(0, 40) == {long: 30, short: 10}
    one_epoch = blend_of(build(DataConfig(data_path=(long, short), split="1"), (20, 0, 0), seq_length=4))
    assert [len(part.indices.document) for part in one_epoch.datasets] == [1, 1]


def test_corpora_shorter_than_a_sample_are_left_out_where_one_epoch_is_their_share(tmp_path: Path) -> None:
    long, short = (write_corpus(tmp_path, [[1] * length], name=f"c{length}") for length in (61, 4))
    datasets = build(DataConfig(data_path=(long, short), split="1"), (40, 0, 0), seq_length=4)
    assert [part.source.prefix for part in blend_of(datasets).datasets] == [long]
    assert any(f"split of {short} is shorter than one sample" in message for message in datasets.messages)
    with pytest.raises(UserError, match="shorter than one sample"):
        build(DataConfig(data_path=(short, short), split="1"), (40, 0, 0), seq_length=4)


def test_more_than_255_corpora_blend(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path, [[number] * 30], name=f"c{number}") for number in range(260)]
    words = [word for prefix in prefixes for word in ("1", prefix)]
    (tmp_path / "words.txt").write_text(" ".join(words))
    datasets = build(
        DataConfig(data_args_path=str(tmp_path / "words.txt"), split="1", data_cache_path=str(tmp_path / "cache")), (520, 0, 0)
    )
    assert sorted(int(datasets.train[index]["tokens"][0]) for index in range(520)) == sorted([*range(260)] * 2)
    assert len(datasets.sources) == 260


def test_each_split_may_have_corpora_of_its_own_and_uses_them_whole(tmp_path: Path) -> None:
    train, valid = (write_corpus(tmp_path, [[number] * 50], name=f"c{number}") for number in (1, 2))
    datasets = build(DataConfig(train_data_path=(train,), valid_data_path=("0.5", train, "0.5", valid)))
    assert datasets.test is None and datasets.messages == ()
    assert len(datasets.sources) == 2
    assert {int(datasets.train[index]["tokens"][0]) for index in range(len(datasets.train))} == {1}
    assert {int(datasets.valid[""][index]["tokens"][0]) for index in range(len(datasets.valid[""]))} == {1, 2}


def test_a_corpus_that_is_empty_in_a_split_is_left_out_of_it_and_said(tmp_path: Path) -> None:
    large = write_corpus(tmp_path, counting_documents([9] * 10), name="large")
    small = write_corpus(tmp_path, counting_documents([50]), name="small")
    datasets = build(DataConfig(data_path=("0.5", large, "0.5", small), split="80,20"))
    valid = datasets.valid[""]
    assert isinstance(valid, BlendedDataset)
    assert [part.source.prefix for part in valid.datasets] == [large]
    assert any(f"The validation split of {small} is empty" in message and "leaves it out" in message for message in datasets.messages)


def test_a_weighted_corpus_without_training_tokens_is_refused(tmp_path: Path) -> None:
    full, empty = write_corpus(tmp_path, [[1] * 50], name="full"), write_corpus(tmp_path, [[]], name="empty")
    with pytest.raises(UserError, match="The training split of .*empty is empty.* leave it out of the blend"):
        build(DataConfig(data_path=("1", full, "1", empty), split="1"))


def test_a_corpus_named_twice_is_said(tmp_path: Path) -> None:
    prefix = write_golden_corpus(tmp_path)
    datasets = build(DataConfig(data_path=("1", prefix, "1", prefix), split="1"))
    assert any("more than once" in message for message in datasets.messages)


def test_a_second_run_loads_the_blend_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [write_corpus(tmp_path, [[number] * 50], name=f"c{number}") for number in range(2)]
    data = DataConfig(data_path=("0.3", prefixes[0], "0.7", prefixes[1]), split="1", data_cache_path=str(tmp_path / "cache"))
    first = blend_of(build(data))
    for builder in ("megatron_zpp.data.blend.build_blend_indices", "megatron_zpp.data.corpus.indices_of"):
        monkeypatch.setattr(builder, lambda *_, **__: pytest.fail("built although it is there"))
    again = blend_of(build(data))
    for left, right in zip(first.indices, again.indices, strict=True):
        assert np.array_equal(left, right)


@pytest.mark.parametrize("ends", [True, False])
def test_flags_that_look_for_ends_of_documents_where_there_are_none_are_said(tmp_path: Path, ends: bool) -> None:
    prefix = write_corpus(tmp_path, [[1] * 20 + ([99] if ends else [])] * 3)
    datasets = build(DataConfig(data_path=(prefix,), split="1", reset_attention_mask=True))
    assert any("--append-eod" in message for message in datasets.messages) != ends
