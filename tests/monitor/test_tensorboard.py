"""TensorBoard points, read back from the files."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from megatron_zpp.monitor.tensorboard import TensorboardWriter
from megatron_zpp.system.user_error import UserError


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


def test_points_are_written_against_iterations_and_where_asked_against_samples(tmp_path):
    writer = TensorboardWriter(str(tmp_path), 10, {})
    writer.write({"lm loss": 3.0}, 5, 40)
    writer.write({"throughput": 1.5}, 5)
    writer.close()
    assert read_back(tmp_path).scalars == {"lm loss": [(5, 3.0)], "lm loss vs samples": [(40, 3.0)], "throughput": [(5, 1.5)]}


def test_arguments_are_written_as_texts(tmp_path):
    writer = TensorboardWriter(str(tmp_path), 10, {"num_layers": "2"})
    writer.close()
    assert read_back(tmp_path).texts == ["num_layers/text_summary"]


def test_missing_package_names_flag_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=f"^--tensorboard-dir {tmp_path} needs the package tensorboard.*pip install tensorboard"):
        TensorboardWriter(str(tmp_path), 10, {})


def test_importing_the_writers_leaves_their_packages_out():
    imports = "import sys, megatron_zpp.monitor.tensorboard, megatron_zpp.monitor.wandb_writer"
    program = f"{imports}; sys.exit('tensorboard' in sys.modules or 'wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
