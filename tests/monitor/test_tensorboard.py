"""TensorBoard points, read back from the files."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.tensorboard import TensorboardWriter

REPORT = IntervalReport(
    iteration=5,
    train_iters=10,
    consumed_samples=40,
    global_batch_size=8,
    samples_per_iteration=8.0,
    seq_length=16,
    world_size=2,
    elapsed_ms_per_iteration=250.0,
    data_ms_per_iteration=0.5,
    learning_rate=0.5,
    lm_loss=3.0,
    loss_scale=64.0,
    grad_norm=0.25,
    skipped_iterations=0,
    nan_iterations=0,
    tflops_per_gpu=1.5,
    inter_node_bytes=0,
    intra_node_bytes=0,
    model_state_bytes=0,
    max_memory_bytes=1024,
)
AGAINST_BOTH = {"learning-rate": 0.5, "batch-size": 8, "lm loss": 3.0, "loss-scale": 64.0, "world-size": 2, "grad-norm": 0.25}
AGAINST_ITERATION = {"iteration-time": 0.25, "throughput": 1.5, "mem-max-allocated-bytes": 1024}


@dataclass
class Events:
    scalars: dict
    texts: list


def read_back(directory):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(directory))
    accumulator.Reload()
    tags = accumulator.Tags()
    return Events({tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}, tags["tensors"])


def test_interval_is_written_under_megatrons_tags(tmp_path):
    writer = TensorboardWriter(str(tmp_path), 10)
    writer.write_interval(REPORT)
    writer.close()
    expected = {tag: [(5, value)] for tag, value in {**AGAINST_BOTH, **AGAINST_ITERATION}.items()}
    expected |= {f"{tag} vs samples": [(40, value)] for tag, value in AGAINST_BOTH.items()}
    assert read_back(tmp_path).scalars == expected


def test_validation_is_written_with_its_perplexity(tmp_path):
    writer = TensorboardWriter(str(tmp_path), 10)
    writer.write_validation(5, 40, 0.0)
    writer.close()
    tags = {"lm loss validation": 0.0, "lm loss validation ppl": 1.0}
    expected = {tag: [(5, value)] for tag, value in tags.items()} | {f"{tag} vs samples": [(40, value)] for tag, value in tags.items()}
    assert read_back(tmp_path).scalars == expected


def test_arguments_are_written_as_texts(tmp_path):
    writer = TensorboardWriter(str(tmp_path), 10)
    writer.write_arguments({"num_layers": "2"})
    writer.close()
    assert read_back(tmp_path).texts == ["num_layers/text_summary"]


def test_missing_package_names_flag_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=f"^--tensorboard-dir {tmp_path} needs the package tensorboard.*pip install tensorboard"):
        TensorboardWriter(str(tmp_path), 10)


def test_importing_the_writer_leaves_tensorboard_out():
    program = "import sys, megatron_zpp.monitor.tensorboard; sys.exit('tensorboard' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
