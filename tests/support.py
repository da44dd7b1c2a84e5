"""What tests name outside of fixtures: where they run and on which backends."""

from __future__ import annotations

from collections.abc import Callable

import torch

import dualmla

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
USABLE = [report.name for report in dualmla.explain(dualmla.MLAConfig(num_heads=16, softmax_scale=0.1), DEVICE) if report.usable]

RunPython = Callable[..., str]
"""The fixture `run_python`: code and its arguments to what it printed."""
