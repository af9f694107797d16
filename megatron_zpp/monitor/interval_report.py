"""The measurements of the iterations since the last training line."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.monitor.memory import MemoryReading


@dataclass(frozen=True)
class IntervalReport:
    """The values behind the training line, the JSON object and the TensorBoard points of one logged iteration."""

    iteration: int
    train_iters: int
    interval_iterations: int  # steps since the line before, over which the means are taken
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int  # of the latest iteration
    samples_per_iteration: float  # mean over the interval, in which the batch may have grown
    seq_length: int
    world_size: int
    elapsed_ms_per_iteration: float
    data_ms_per_iteration: float  # part of elapsed_ms_per_iteration: this rank's wait for micro-batches
    learning_rate: float
    lm_loss: float  # mean over the interval without skipped iterations
    loss_scale: float
    grad_norm: float
    skipped_iterations: int
    nan_iterations: int
    tflops_per_gpu: float  # hardware FLOPs: attention as the full square, recomputation counted
    model_tflops_per_gpu: float  # model FLOPs: causal attention as half of the square, recomputation not counted
    inter_node_bytes: int  # weights and gradients into one node from others, per optimizer step
    inter_node_bytes_per_iteration: float  # mean over the interval: the same, and what attention exchanges between nodes
    intra_node_bytes: int  # weights and gradients into one rank from its own node, per optimizer step
    tensor_link_bytes: int  # into one rank from those that share its layers, per optimizer step
    model_state_bytes: int
    memory: MemoryReading
    peak_tflops: float | None = None  # of one device; None if it is not known
    params_norm: float | None = None  # None if not requested
    num_zeros: int | None = None  # None if not requested
    host_state_bytes: int = 0  # of an optimizer on the host
    context_link_bytes: int = 0  # into one rank from those that divide its samples, per optimizer step
    context_inter_node_bytes: int = 0  # the same into one node from others

    @property
    def samples_per_second(self) -> float:
        return self.samples_per_iteration * 1000.0 / self.elapsed_ms_per_iteration

    @property
    def tokens_per_second(self) -> float:
        return self.samples_per_second * self.seq_length

    @property
    def tokens_per_gpu_per_second(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, a fraction of the peak; None if the peak is not known."""
        return None if self.peak_tflops is None else self.model_tflops_per_gpu / self.peak_tflops

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilization, a fraction of the peak; None if the peak is not known."""
        return None if self.peak_tflops is None else self.tflops_per_gpu / self.peak_tflops

    @property
    def eta_seconds(self) -> float:
        """Time to the last iteration at the speed of this interval, without validation and checkpoints."""
        return (self.train_iters - self.iteration) * self.elapsed_ms_per_iteration / 1000.0

    def json_object(self) -> dict[str, int | float | None]:
        """The fields that --log-jsonl writes, floats unrounded; None for values that are not known or not requested."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "consumed_tokens": self.consumed_tokens,
            "lm_loss": self.lm_loss,
            "learning_rate": self.learning_rate,
            "global_batch_size": self.global_batch_size,
            "grad_norm": self.grad_norm,
            "loss_scale": self.loss_scale,
            "skipped_iterations": self.skipped_iterations,
            "nan_iterations": self.nan_iterations,
            "elapsed_ms_per_iteration": self.elapsed_ms_per_iteration,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_gpu": self.tflops_per_gpu,
            "inter_node_bytes": self.inter_node_bytes,
            "intra_node_bytes": self.intra_node_bytes,
            "model_state_bytes": self.model_state_bytes,
            "max_memory_bytes": self.memory.max_allocated_bytes,
            "data_ms_per_iteration": self.data_ms_per_iteration,
            "model_tflops_per_gpu": self.model_tflops_per_gpu,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "params_norm": self.params_norm,
            "num_zeros": self.num_zeros,
            "eta_seconds": self.eta_seconds,
            "tensor_link_bytes": self.tensor_link_bytes,
            "host_state_bytes": self.host_state_bytes,
            "context_link_bytes": self.context_link_bytes,
            "context_inter_node_bytes": self.context_inter_node_bytes,
            "train_iters": self.train_iters,
            "interval_iterations": self.interval_iterations,
            "inter_node_bytes_per_iteration": self.inter_node_bytes_per_iteration,
        }
