"""The interval of the ZeRO++ tutorial's screenshot, as far as it shows it."""

from megatron_zpp.monitor.interval_report import IntervalReport
from megatron_zpp.monitor.memory import MemoryReading

REPORT = IntervalReport(
    iteration=20,
    train_iters=27465820,
    interval_iterations=10,
    consumed_samples=1280,
    consumed_tokens=655360,
    global_batch_size=64,
    samples_per_iteration=64.0,
    seq_length=512,
    world_size=64,
    elapsed_ms_per_iteration=7122.7,
    data_ms_per_iteration=0.5,
    learning_rate=3e-4,
    lm_loss=14.90005,
    loss_scale=2048.0,
    grad_norm=1.2345,
    skipped_iterations=0,
    nan_iterations=0,
    tflops_per_gpu=10.7,
    model_tflops_per_gpu=8.0,
    inter_node_bytes=11,
    inter_node_bytes_per_iteration=11.5,
    intra_node_bytes=22,
    tensor_link_bytes=55,
    model_state_bytes=33,
    memory=MemoryReading(40, 44),
)
