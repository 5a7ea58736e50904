"""Run torchtitan's own trainer on CPUs: `torchrun … titan_on_cpu.py [torchtitan's arguments]`.

torchtitan asks for an accelerator. This gives it the CPU as one, and runs its trainer unchanged.
"""

import os
import runpy
import sys
from types import SimpleNamespace

import torch
import torch._utils
import torch.nn.attention.flex_attention as flex_attention
from torch.distributed.fsdp import FSDPModule

CPU_AS_ACCELERATOR = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 33),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
    "memory_stats": lambda *_: {},
    "current_device": lambda *_: 0,
    "set_device": lambda *_: None,
}


def main() -> None:
    for name, function in CPU_AS_ACCELERATOR.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: getattr(torch, device_type)
    # torchtitan 0.3 has flex_attention alone, which refuses a backward on CPUs unless it is told
    # to run without its compiler.
    flex_attention._validate_device = lambda *_: None
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # gloo has no sum with a factor, which FSDP2 would take for the factor that torchtitan sets.
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_of_sum(module: FSDPModule, factor: float) -> None:
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_of_sum
    torch.set_num_threads(1)
    sys.argv[0] = "torchtitan.train"
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
