"""The torchvision of PyPI is built for CUDA: its registrations fail on a CPU, and nobody needs them there."""

import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
