"""The session of timm, which needs torchvision, has packages of its own: `PYTHONPATH=.timm pytest tests/vision`.

Without them nothing is collected here: the session of all other tests has no torchvision.

PyPI's torchvision is built for CUDA. Beside a torch for the CPU it fails to import, and transformers with it, at one
module, which gives PyTorch the shapes of operators that are not there. No test uses them.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import torch

collect_ignore_glob = [] if importlib.util.find_spec("timm") else ["test_*.py"]
SHAPES = "torchvision._meta_registrations"

if importlib.util.find_spec("torchvision") and torch.version.cuda is None:
    sys.modules.setdefault(SHAPES, ModuleType(SHAPES))
