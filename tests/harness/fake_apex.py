"""Packages called apex to put on sys.path: NVIDIA's interface with plain torch behind it, and the other program of that name."""

from __future__ import annotations

from pathlib import Path

FUSED_ADAM = """
import torch

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0):
        assert bias_correction and adam_w_mode
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                variance = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                p.sub_(group["lr"] * (mean / (variance.sqrt() + group["eps"]) + group["weight_decay"] * p))
"""
APPLIER = """
def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)
"""
KERNELS = """
import torch

def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor):
    return torch.cat([t.flatten() for t in tensor_lists[0]]).norm().view(1), torch.empty(0)
"""
NORMALIZATION = """
import torch

class FusedLayerNorm(torch.nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__(normalized_shape, eps=eps)

class FusedRMSNorm(torch.nn.RMSNorm):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__(normalized_shape, eps=eps)
"""


def write_nvidia_apex(folder: Path, *, has_extensions: bool = True) -> None:
    """NVIDIA's apex as far as megatron_zpp takes anything from it."""
    files = {"apex/__init__.py": "", "apex/optimizers/fused_adam.py": FUSED_ADAM, "apex/multi_tensor_apply/__init__.py": APPLIER}
    files |= {"apex/optimizers/__init__.py": "from .fused_adam import FusedAdam", "apex/normalization/__init__.py": NORMALIZATION}
    if has_extensions:
        files |= {"amp_C.py": KERNELS, "fused_layer_norm_cuda.py": ""}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def write_other_apex(folder: Path) -> None:
    """The other program: importing it fails where its own requirements are missing."""
    (folder / "apex").mkdir(parents=True)
    (folder / "apex" / "__init__.py").write_text("raise ImportError('this is a toolkit for web applications')")
