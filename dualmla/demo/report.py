"""What the demo shows, and its verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dualmla.config import MLAConfig
from dualmla.demo.engine import Request, Timing


@dataclass(frozen=True)
class Run:
    """What one way of decoding gave. `cache_bytes`: of one token in one layer, unfilled slots of pages included."""

    name: str
    requests: list[Request]
    timing: Timing
    cache_bytes: float


@dataclass(frozen=True)
class Comparison:
    """A run against the eager one.

    `partings` are (request, step) of the first token that differs. `max_logit_difference` is taken over the steps up to there:
    after it the two decode different texts.
    """

    partings: list[tuple[int, int]]
    max_logit_difference: float

    @property
    def agrees(self) -> bool:
        return not self.partings and math.isfinite(self.max_logit_difference)


def compare(eager: Run, run: Run) -> Comparison:
    """Compare the tokens, and the logits as long as the tokens are the same."""
    partings, difference = [], torch.tensor(0.0)
    for index, (ours, theirs) in enumerate(zip(run.requests, eager.requests, strict=True)):
        same = [a == b for a, b in zip(ours.generated, theirs.generated, strict=True)]
        comparable = len(same)
        if not all(same):
            comparable = same.index(False) + 1
            partings.append((index, comparable - 1))
        logits = torch.stack(ours.logits[:comparable]), torch.stack(theirs.logits[:comparable])
        difference = torch.maximum(difference, (logits[0] - logits[1]).abs().max())
    return Comparison(partings, float(difference))


def margin(request: Request, step: int) -> float:
    """How far the most likely token's logit is above the next one's."""
    first, second = request.logits[step].topk(2).values.tolist()
    return float(first - second)


def print_model(console: Console, model: Any, config: MLAConfig, transformers_version: str) -> None:
    """Say what is being run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"[bold]DeepseekV3ForCausalLM[/] of transformers {transformers_version}, random weights: {model.config.num_hidden_layers} layers, "
        f"{config.num_heads} heads, {parameters / 1e6:.1f} M parameters, {_name(config.dtype)}, on {model.device}. "
        f"Attention sizes of DeepSeek-V3: latent {config.kv_lora_rank} + {config.qk_rope_head_dim}, "
        f"heads {config.qk_nope_head_dim} + {config.qk_rope_head_dim} and {config.v_head_dim}, softmax scale {config.softmax_scale:.4f}."
    )


def print_backends(console: Console, reports: Sequence[Any], chosen: str) -> None:
    """A table of `dualmla.explain`'s reports: each backend, and all that speaks against it."""
    table = Table(title=f"backends: {chosen} runs", title_justify="left")
    table.add_column("backend")
    table.add_column("usable")
    table.add_column("reasons against it")
    for entry in reports:
        table.add_row(entry.name, "[green]yes[/]" if entry.usable else "[yellow]no[/]", "\n".join(entry.reasons))
    console.print(table)


def print_comparison(console: Console, eager: Run, runs: Sequence[Run], config: MLAConfig) -> bool:
    """A table of all runs and the verdict.

    Returns:
        Whether each of `runs` decoded the tokens of `eager`.
    """
    comparisons = [compare(eager, run) for run in runs]
    table = Table(title=f"{len(eager.requests)} requests, {len(eager.requests[0].generated)} tokens decoded after each", title_justify="left")
    table.add_column("attention")
    for header in ("same tokens", "max logit difference", "prefill s", "decode tokens/s", "cache bytes a token and layer"):
        table.add_column(header, justify="right")
    table.add_row(eager.name, "", "", *_figures(eager))
    for run, comparison in zip(runs, comparisons, strict=True):
        verdict = "[green]yes[/]" if comparison.agrees else "[red]no[/]"
        table.add_row(run.name, verdict, f"{comparison.max_logit_difference:.1e}", *_figures(run))
    console.print(table)

    itemsize = config.cache_dtype.itemsize
    latent, plain = config.latent_dim * itemsize, config.num_heads * (config.qk_head_dim + config.v_head_dim) * itemsize
    console.print(
        f"A latent row takes {latent} bytes a token and layer; keys and values of all {config.num_heads} heads, as a plain KV cache keeps "
        f"them, would take {plain}: {plain / latent:.1f} times as much."
    )
    steps = [(request, step) for request in eager.requests for step in range(len(request.generated))]
    console.print(
        f"The eager run's closest choice between two tokens had a margin of {min(margin(*at) for at in steps):.1e} in the logits; "
        f"dualmla's logits are at most {max(c.max_logit_difference for c in comparisons):.1e} away."
    )
    for run, comparison in zip(runs, comparisons, strict=True):
        _print_disagreement(console, eager, run, comparison)
    agrees = all(comparison.agrees for comparison in comparisons)
    console.print("[bold green]PASS[/]: the same tokens throughout" if agrees else "[bold red]FAIL[/]: dualmla and eager attention disagree")
    return agrees


def _print_disagreement(console: Console, eager: Run, run: Run, comparison: Comparison) -> None:
    for index, step in comparison.partings:
        ours, theirs = run.requests[index], eager.requests[index]
        console.print(
            f"[red]{run.name}[/]: request {index} parts at token {step}: {ours.generated[step]} instead of {theirs.generated[step]}, where "
            f"eager's margin is {margin(theirs, step):.1e} and the logits differ by {(ours.logits[step] - theirs.logits[step]).abs().max():.1e}"
        )
    if not math.isfinite(comparison.max_logit_difference):
        console.print(f"[red]{run.name}[/]: logits are not finite")


def _figures(run: Run) -> tuple[str, str, str]:
    timing = run.timing
    return f"{timing.prefill_s:.2f}", f"{timing.decoded / timing.decode_s:.1f}" if timing.decoded else "-", f"{run.cache_bytes:.0f}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
