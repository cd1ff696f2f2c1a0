"""torchtitan 0.2 on a CPU, for which it has no switch. The ranks run this before they import it; for tests alone."""

import sys
import types

import torch
from torch.distributed.fsdp import FSDPModule


class _CPU(types.ModuleType):
    """`torch.cpu`, with what torchtitan asks of a GPU."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def set_device(self, device):
        """There is one."""

    def device_count(self):
        return 1

    def current_device(self):
        return 0

    def get_device_name(self, device=None):
        return "cpu"

    def get_device_properties(self, device=None):
        return types.SimpleNamespace(total_memory=8 << 30, name="cpu")

    def memory_stats(self, device=None):
        return {}

    def synchronize(self, device=None):
        """Nothing runs by itself."""

    reset_peak_memory_stats = empty_cache = synchronize


# Kernels of mixtures of experts, which are imported for any model, are Triton's.
kernels = types.ModuleType("torchtitan.models.moe.kernels")
kernels.generate_permute_indices = kernels.fill_indices_wrapper = None
sys.modules[kernels.__name__] = kernels

_cpu = _CPU("cpu_as_device")
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda kind: _cpu

# gloo cannot scale while it sums: FSDP2 is to do one after the other.
_divide = FSDPModule.set_gradient_divide_factor


def _divide_after(self, factor):
    _divide(self, factor)
    self.set_force_sum_reduction_for_comms(True)


FSDPModule.set_gradient_divide_factor = _divide_after
