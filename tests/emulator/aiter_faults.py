"""For `dualmla check --load`: AITER with two faults planted. Its kernel lacks waits, and our adapter leaves cache row 0 as it is."""

import sys
from pathlib import Path

import torch

from dualmla.emulator import aiter_release

sys.path.insert(0, str(Path(__file__).parent))
from mutations import without_waits_before

load_kernel = aiter_release.load_kernel
aiter_release.load_kernel = lambda hsa, arch, name: without_waits_before(load_kernel(hsa, arch, name), "V_MAX3_F32")
torch.Tensor.nan_to_num_ = lambda self, *args, **kwargs: self  # what the adapter cleans the row with
