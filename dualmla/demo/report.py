"""What the demo shows, and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dualmla.backends.base import BackendReport, MLABackend
from dualmla.config import MLAConfig
from dualmla.demo.engine import Request


@dataclass(frozen=True)
class Run:
    """What one way of decoding gave.

    `page_size` is None for the library's own cache. `tokens_per_second` is that of the median decode step. `cache_bytes` is
    what one token takes in one layer's cache, with its share of the unfilled slots of pages; a page that requests share counts
    once. `prompt_tokens` were computed, of all requests; `mixed_steps` had prompt tokens and decodes in one batch.
    """

    name: str
    page_size: int | None
    requests: list[Request]
    tokens_per_second: float
    cache_bytes: float
    prompt_tokens: int
    mixed_steps: int

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens that were not computed: their rows lay in pages of an earlier request."""
        return sum(len(request.prompt) for request in self.requests) - self.prompt_tokens


@dataclass(frozen=True)
class Comparison:
    """A run's tokens and logits against the truth's, as far as both were fed the same tokens.

    `same_tokens` of these are equal; `first_partings` are (request, step) of the first that is not, for requests that have one.
    The differences are those of the logits, absolute; `closest_margin` is the smallest of the truth's margins.
    """

    same_tokens: int
    first_partings: list[tuple[int, int]]
    max_difference: float
    mean_difference: float
    closest_margin: float

    def agrees(self, rounding: Comparison | None) -> bool:
        """The verdict: the tokens must be the same, and not by chance: no logit may be off by half the closest margin.

        With `rounding` the run is of a lower precision than the truth, where rounding alone can turn one token into another. Then
        the mean difference may be twice that of `rounding`, which is the library's own run in that precision.
        """
        if rounding is None:
            return self.max_difference < self.closest_margin / 2  # no token can differ then
        return self.mean_difference <= 2 * rounding.mean_difference


def compare(run: Run, truth: Run) -> Comparison:
    """Compare two runs of the same prompts."""
    same_tokens, first_partings, differences, margins = 0, [], [], []
    for index, (ours, theirs) in enumerate(zip(run.requests, truth.requests, strict=True)):
        same = [a == b for a, b in zip(ours.generated, theirs.generated, strict=True)]
        if not all(same):
            first_partings.append((index, same.index(False)))
            if ours.forced is None:  # from here on each continues a text of its own
                same = same[: same.index(False) + 1]
        same_tokens += sum(same)
        differences.append((torch.stack(ours.logits[: len(same)]) - torch.stack(theirs.logits[: len(same)])).abs())
        margins += [margin(theirs, step) for step in range(len(same))]
    everything = torch.cat(differences)
    return Comparison(same_tokens, first_partings, float(everything.max()), float(everything.mean()), min(margins))


def margin(request: Request, step: int) -> float:
    """How far the most likely token's logit is above the next one's."""
    first, second = request.logits[step].topk(2).values.tolist()
    return float(first - second)


def print_model(console: Console, model: Any, config: MLAConfig, transformers_version: str) -> None:
    """Say what is being run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"[bold]DeepseekV3ForCausalLM[/] of transformers {transformers_version} with random weights: "
        f"{model.config.num_hidden_layers} layers, {config.num_heads} heads, {parameters / 1e6:.1f} M parameters, "
        f"{_name(config.dtype)}, on {model.device}. "
        f"Attention as in DeepSeek-V3: latent {config.kv_lora_rank} + {config.qk_rope_head_dim}, heads {config.qk_nope_head_dim} + "
        f"{config.qk_rope_head_dim} and {config.v_head_dim}, YaRN factor 40, softmax scale {config.softmax_scale:.4f}."
    )


def print_backends(console: Console, reports: Sequence[BackendReport], chosen: type[MLABackend]) -> None:
    """A table of `dualmla.explain`'s reports: which backend runs, and why the better ones, listed before it, do not."""
    table = Table(title="backends, best first", title_justify="left")
    for header in ("backend", "state", "reasons against it"):
        table.add_column(header)
    rank = [entry.name for entry in reports].index(chosen.name)
    for place, entry in enumerate(reports):
        state = "[yellow]unusable[/]" if entry.reasons else "[bold green]runs[/]" if place == rank else "usable"
        asked = [f"{chosen.name} was asked for"] if entry.usable and place < rank else []
        table.add_row(entry.name, state, "\n".join(entry.reasons or asked))
    console.print(table)


def print_comparison(console: Console, truth: Run, runs: Sequence[Run], config: MLAConfig, rounding: Run | None) -> bool:
    """A table of all runs and the verdict.

    Arguments:
        truth: the library's attention in float32.
        runs: dualmla's.
        config: of dualmla's attention.
        rounding: the library's attention in dualmla's dtype where that is not float32.

    Returns:
        Whether each of `runs` agrees with `truth`; see `Comparison.agrees`.
    """
    noise = compare(rounding, truth) if rounding else None
    comparisons = [compare(run, truth) for run in runs]
    compared = ([(rounding, noise)] if rounding and noise else []) + list(zip(runs, comparisons, strict=True))
    _print_runs(console, truth, compared, "mean" if noise else "max")
    _print_cache(console, config)

    if noise:
        console.print(
            f"{_name(config.dtype)} can turn one token, or one expert, into another by rounding alone. So each run was fed float32's "
            f"tokens and is judged by its logits: their mean error may be twice that of the library's own {_name(config.dtype)} run."
        )
    else:
        closest = min(comparison.closest_margin for comparison in comparisons)
        worst = max(comparison.max_difference for comparison in comparisons)
        console.print(f"The closest choice between two tokens had a margin of {closest:.1e} in the logits; dualmla's are {worst:.1e} off.")
    agrees = all(comparison.agrees(noise) for comparison in comparisons)
    for run, comparison in zip(runs, comparisons, strict=True):
        if not comparison.agrees(noise):
            _print_disagreement(console, truth, run, comparison)
    passed = "the same tokens throughout" if noise is None else "within the library's own rounding"
    console.print(f"[bold green]PASS[/]: {passed}" if agrees else "[bold red]FAIL[/]: dualmla and the library's attention disagree")
    return agrees


def _print_runs(console: Console, truth: Run, compared: Sequence[tuple[Run, Comparison]], judged_by: Literal["max", "mean"]) -> None:
    total = sum(len(request.generated) for request in truth.requests)
    prompts = sum(len(request.prompt) for request in truth.requests)
    table = Table(
        title=f"{len(truth.requests)} requests, {prompts} tokens of prompts, {total} tokens decoded",
        caption="error: of a logit. tokens/s: of the median decode step; the library runs one request at a time. "
        "bytes: of a token in one layer's cache. reused: prompt tokens found in pages of an earlier request. "
        "mixed: steps with a piece of a prompt beside decodes.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("attention", no_wrap=True)
    error_header = f"{judged_by}\nerror"
    for header in ("page\nsize", "same\ntokens", error_header, "tokens\n/s", "cache\nbytes", "tokens\nreused", "mixed\nsteps"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_row(truth.name, "", "", "", *_figures(truth))
    for run, comparison in compared:
        error = comparison.max_difference if judged_by == "max" else comparison.mean_difference
        table.add_row(run.name, str(run.page_size or ""), f"{comparison.same_tokens}/{total}", f"{error:.1e}", *_figures(run))
    console.print(table)


def _print_cache(console: Console, config: MLAConfig) -> None:
    itemsize = config.cache_dtype.itemsize
    latent, plain = config.latent_dim * itemsize, config.num_heads * (config.qk_head_dim + config.v_head_dim) * itemsize
    console.print(
        f"A latent row takes {latent} bytes a token and layer. A plain KV cache, with keys and values of all {config.num_heads} heads, "
        f"would take {plain}: {plain / latent:.1f} times as much."
    )


def _print_disagreement(console: Console, truth: Run, run: Run, comparison: Comparison) -> None:
    console.print(f"[red]{run.name}, page size {run.page_size}[/]: mean logit error {comparison.mean_difference:.1e}")
    if not comparison.first_partings:
        console.print("  the tokens are the same, but by chance: with such an error the closest choice could have gone either way")
    for index, step in comparison.first_partings:
        ours, theirs = run.requests[index], truth.requests[index]
        console.print(
            f"  request {index}, token {step}: {ours.generated[step]} instead of {theirs.generated[step]}, where the margin is "
            f"{margin(theirs, step):.1e} and the logits differ by {(ours.logits[step] - theirs.logits[step]).abs().max():.1e}"
        )


def _figures(run: Run) -> tuple[str, ...]:
    return f"{run.tokens_per_second:.1f}", f"{run.cache_bytes:.0f}", str(run.reused_tokens), str(run.mixed_steps)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
