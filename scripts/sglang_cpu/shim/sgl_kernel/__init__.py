"""In place of SGLang's CUDA kernels on a CPU, where plain torch computes the models: any name imports."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.7"


class Missing:
    """A kernel that is not there: it may be passed around, not called."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, part: str):
        if part.startswith("__"):
            raise AttributeError(part)
        return Missing(f"{self.name}.{part}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self.name} is not available on a CPU")


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module below sgl_kernel that has no file here."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())
