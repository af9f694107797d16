from itertools import islice

import pytest
import torch

from megatron_zpp.data.documents import DocumentRules
from megatron_zpp.data.loader import MicroBatch, MicroBatches
from megatron_zpp.data.mock_dataset import MockDataset
from megatron_zpp.data.sampler import MicroBatchSampler

NO_RULES = DocumentRules(eod=0, resets_positions=False, resets_attention=False, masks_loss=False)


def first_batches(num_workers: int, count: int, rules: DocumentRules = NO_RULES) -> list[MicroBatch]:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    return list(islice(MicroBatches(dataset, MicroBatchSampler(100, 8, 2, 1, 2), num_workers, rules), count))


def test_a_micro_batch_stacks_the_samplers_samples() -> None:
    dataset = MockDataset(seed=1, stream=0, seq_length=6, vocab_size=50, sample_count=100)
    batch = first_batches(0, 2)[1]
    assert batch.first_sample == 14
    for row, index in enumerate((14, 15)):
        assert batch.tokens[row].tolist() == dataset[index]["tokens"].tolist()
        assert batch.labels[row].tolist() == dataset[index]["labels"].tolist()
    assert (batch.tokens.dtype, batch.labels.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.float32)
    assert batch.loss_mask.tolist() == [[1.0] * 6] * 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(num_workers: int) -> None:
    for alone, worked in zip(first_batches(0, 8), first_batches(num_workers, 8), strict=True):
        assert alone.first_sample == worked.first_sample
        assert torch.equal(alone.tokens, worked.tokens)
        assert torch.equal(alone.labels, worked.labels)
        assert torch.equal(alone.loss_mask, worked.loss_mask)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loading_does_not_touch_torchs_random_state(num_workers: int) -> None:
    before = torch.random.get_rng_state()
    first_batches(num_workers, 2)
    assert torch.equal(torch.random.get_rng_state(), before)
