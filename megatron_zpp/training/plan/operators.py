"""What operators cost: products by their operations, copies between device and host by their bytes, AdamW on a host by its values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_zpp.ops.planned import CodecWork
from megatron_zpp.training.plan.live_memory import LiveMemory
from megatron_zpp.training.plan.program import COMPUTATION, ComeDown, Copy, UpdateOnHost
from megatron_zpp.training.plan.recorder import Recorder

_aten = torch.ops.aten


def _product(left: Tensor, right: Tensor) -> float:
    return 2.0 * left.numel() * right.shape[-1]


def _attention(query_BNSD: Tensor, key_BKSD: Tensor) -> float:
    """Two products, of a causal half each. Plain products are counted whole."""
    return 2.0 * query_BNSD.numel() * key_BKSD.shape[2]


# By operator, its operations. Backward of attention counts twice its forward, as model FLOPs do, although kernels repeat products.
FLOPS: dict[Any, Callable[..., float]] = {
    **dict.fromkeys((_aten.mm.default, _aten.mm.out, _aten.bmm.default), _product),
    **dict.fromkeys((_aten.addmm.default, _aten.addmm.out, _aten.baddbmm.default), lambda added, left, right: _product(left, right)),
    **{
        getattr(_aten, f"_scaled_dot_product_{kernel}").default: lambda query, key, *rest: _attention(query, key)
        for kernel in ("flash_attention", "efficient_attention", "flash_attention_for_cpu")
    },
    **{
        getattr(_aten, f"_scaled_dot_product_{kernel}_backward").default: lambda grad, query, key, *rest: 2 * _attention(query, key)
        for kernel in ("flash_attention", "efficient_attention", "flash_attention_for_cpu")
    },
}


class Operators:
    """Notes what operators cost. live: knows what is on the host."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.live: LiveMemory | None = None

    def __call__(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        flops = FLOPS.get(operator)
        if flops is not None:
            self._recorder.compute(flops(*args))
        elif operator is _aten.copy_.default:
            self._copy(args[0], args[1])
        elif operator is _aten._fused_adamw_.default and self._is_on_host(args[0][0]):
            self._recorder.items.append(UpdateOnHost(sum(values.numel() for values in args[0])))
        elif operator is _aten.sub.Tensor and self._recorder.of_hop is not None:
            self._recorder.of_hop.add(CodecWork(subtracted=result.numel()))

    def _is_on_host(self, tensor: Tensor) -> bool:
        return self.live is not None and self.live.is_on_host(tensor)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        recorder, down = self._recorder, self._is_on_host(target)
        if down is self._is_on_host(source):
            return
        if recorder.of_hop is not None:
            recorder.of_hop.come_up += source.nbytes
        elif recorder.notes_streams:
            recorder.items.append(Copy(recorder.stream, source.nbytes, down))
        elif recorder.stream != COMPUTATION:
            recorder.came_down[recorder.stream] = recorder.came_down.get(recorder.stream, 0) + 1
            recorder.items.append(ComeDown(source.nbytes))
