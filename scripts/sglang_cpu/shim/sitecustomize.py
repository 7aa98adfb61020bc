"""Changes to torch and torchvision that let SGLang run on a CPU.

The registrations of PyPI's torchvision, which is built for CUDA, are disabled: they fail on a CPU. SGLang's
LoRA code requests page-locked memory, which only an accelerator's driver provides: ordinary memory is given.
So it is for the experts that tokens chose. Weights in fp8 are dequantized by SGLang's own function.
"""

import functools
import importlib.abc
import importlib.util
import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")


class Before(importlib.abc.MetaPathFinder):
    """Changes torch when a module of SGLang's is about to be imported, in every process that imports it."""

    def __init__(self, module, change):
        self.module, self.change = module, change

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            self.change()


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


def define_kernels():
    """Define the kernels that SGLang's file of Qwen3.5 reads when it is imported."""
    importlib.import_module("sgl_kernel.mamba")


class Changed(importlib.abc.MetaPathFinder):
    """Changes a module of SGLang's as soon as it has been imported."""

    def __init__(self, module, change):
        self.module, self.change = module, change

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)  # of the other finders
        execute = spec.loader.exec_module

        def execute_and_change(module):
            execute(module)
            self.change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def keep_routes_in_memory(module):
    """Have `--enable-return-routed-experts` keep the experts in memory that no driver knows."""
    module._cuda_host_register = lambda *args: None


def multiply_dequantized(module):
    """Have layers of fp8 blocks multiply by dequantized weights: SGLang has AMX kernels alone on a CPU."""
    import torch
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    def weight(method, layer, name, dtype):
        codes, scales = getattr(layer, name), getattr(layer, f"{name}_scale_inv")
        return block_quant_dequant(codes, scales, method.quant_config.weight_block_size, dtype)

    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, weight(self, layer, "weight", x.dtype), bias)

    def apply_experts(self, layer, dispatch_output):
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        x = dispatch_output.hidden_states
        names = ("w13_weight", "w2_weight")
        experts = types.SimpleNamespace(
            num_experts=layer.num_experts, **{name: weight(self, layer, name, x.dtype) for name in names}
        )
        output = moe_forward_native(experts, x, dispatch_output.topk_output, self.moe_runner_config)
        return StandardCombineInput(hidden_states=output)

    for method in (module.Fp8LinearMethod, module.Fp8MoEMethod):
        method.process_weights_after_loading = lambda self, layer: None
    module.Fp8LinearMethod.apply, module.Fp8MoEMethod.apply = apply, apply_experts


def norm_with_gate_on_cpu(module):
    """Have the norm of recurrent layers call the kernel for a CPU: without AMX it calls Triton's."""
    module._use_cpu = True


sys.meta_path[:0] = [
    Before("sglang.srt.lora.layers", ignore_pin_memory),
    Before("sglang.srt.models.qwen3_5", define_kernels),
    Changed("sglang.kernels.ops.attention.fla.layernorm_gated", norm_with_gate_on_cpu),
    Changed("sglang.srt.mem_cache.pool_host.common", keep_routes_in_memory),
    Changed("sglang.srt.layers.quantization.fp8", multiply_dequantized),
]
