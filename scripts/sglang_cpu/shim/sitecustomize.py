"""Changes to torch and torchvision that let SGLang run on a CPU.

The registrations of PyPI's torchvision, which is built for CUDA, are disabled: they fail on a CPU. SGLang's
LoRA code requests page-locked memory, which only an accelerator's driver provides: ordinary memory is given.
So it is for the experts that tokens chose.
"""

import functools
import importlib.abc
import importlib.util
import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")


class BeforeLora(importlib.abc.MetaPathFinder):
    """Changes torch when SGLang's LoRA code is about to be imported, in every process that imports it."""

    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.lora.layers":
            ignore_pin_memory()


def ignore_pin_memory():
    """Have torch ignore `pin_memory` where no accelerator could use such memory."""
    import torch

    if torch.cuda.is_available():
        return
    for name in MAKERS:
        setattr(torch, name, without_pin_memory(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def without_pin_memory(make):
    """Return a function that makes tensors, in ordinary memory."""

    @functools.wraps(make)
    def wrapped(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return wrapped


class WithRoutes(importlib.abc.MetaPathFinder):
    """Has `--enable-return-routed-experts` keep the experts in memory that no driver knows."""

    module = "sglang.srt.mem_cache.pool_host.common"

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)  # of the other finders
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            module._cuda_host_register = lambda *args: None

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path[:0] = [BeforeLora(), WithRoutes()]
