"""Disables the registrations of PyPI's torchvision, which is built for CUDA: they fail on a CPU."""

import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
