"""The demo agrees with transformers' attention where it should, and says so where it does not."""

from __future__ import annotations

import importlib.metadata
import io
import itertools
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from dualmla import attention as core
from dualmla.demo import attention, model, report, runner
from dualmla.demo.engine import EagerEngine, PagedEngine, Request
from dualmla.demo.pages import PagePool
from dualmla.selection import select_backend

PROMPTS = ("abcdef", "xyz")
NEW_TOKENS = 3
CPU = torch.device("cpu")


def run_small(**changes):
    """A run of seconds, and what it printed."""
    output = io.StringIO()
    arguments = {"num_heads": 2, "num_layers": 1, "prompts": PROMPTS, "new_tokens": NEW_TOKENS, "device": "cpu", "backend": "reference"}
    agreed = runner.run(**{**arguments, **changes}, console=Console(file=output, width=200))
    return agreed, output.getvalue()


def small_model(dtype=torch.float32):
    return model.build_model(num_heads=2, num_layers=2, dtype=dtype, device=CPU, seed=0)


def paged_engine(eager_model, requests, *, page_size, num_pages=24, chunk_tokens=None):
    config = model.mla_config(eager_model, page_size=page_size)
    backend = select_backend(config, device="cpu", backend="reference")
    builder = backend.get_builder_cls()(config, CPU, max_num_seqs=len(requests), max_num_pages_per_seq=num_pages)
    patched = attention.with_dualmla(eager_model, config, backend, num_pages=num_pages)
    return PagedEngine(patched, config, builder, PagePool(num_pages, page_size, seed=0), requests, chunk_tokens=chunk_tokens)


def decode(engine):
    while not all(request.done for request in engine.requests):
        engine.step()
    return [request.generated for request in engine.requests]


def requests_of(*prompts):
    return [Request(list(prompt.encode()), NEW_TOKENS) for prompt in prompts]


def as_run(requests):
    return report.Run("name", 1, requests, 1.0, 1.0, 0, 0)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_same_tokens_as_the_library(name):
    agreed, printed = run_small(backend=name, device=None)
    assert agreed
    assert "PASS" in printed
    assert re.search(rf"{name} +│ runs ", printed)
    for run in ("_MLA +1", "_MLA +16", "_MLA, shared +16"):
        assert re.search(rf"{name.upper()}{run} +6/6 ", printed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [1, 16])
def test_a_wrong_scale_of_one_run_fails(monkeypatch, dtype, wrong):
    """The scale that a backend would take from the head size alone, YaRN's factor forgotten."""

    def config(*args, page_size):
        right = model.mla_config(*args, page_size=page_size)
        return replace(right, softmax_scale=192**-0.5) if page_size == wrong else right

    monkeypatch.setattr(runner, "mla_config", config)
    agreed, printed = run_small(dtype=dtype)
    assert not agreed
    assert "FAIL" in printed
    assert "PASS" not in printed
    disagree = re.findall(r"(_MLA.*), page size (\d+):", printed)
    assert disagree == ([("_MLA", "1")] if wrong == 1 else [("_MLA", "16"), ("_MLA, shared", "16")])
    assert "instead of" in printed


def shared_prompts(**changes):
    """The demo's own prompts, of which the last run shares two pages, on two layers: the first one's latent rows need no attention."""
    agreed, printed = run_small(**{"prompts": runner.PROMPTS, "num_layers": 2, "page_sizes": (16,), **changes})
    return agreed, re.findall(r"(_MLA.*), page size (\d+):", printed)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_shared_and_chunked_prompts_give_the_same_tokens(monkeypatch, name):
    shown, keys = [], []
    print_comparison, up_project = report.print_comparison, core.MLAImpl._up_project
    monkeypatch.setattr(report, "print_comparison", lambda *args: shown.extend(args) or print_comparison(*args))
    monkeypatch.setattr(core.MLAImpl, "_up_project", lambda self, kv_c, k_pe: keys.append(len(kv_c)) or up_project(self, kv_c, k_pe))
    assert shared_prompts(backend=name) == (True, [])
    _, truth, runs, _, _ = shown
    for run in runs:
        assert [request.generated for request in run.requests] == [request.generated for request in truth.requests]
    total = sum(map(len, runner.PROMPTS))
    assert [(run.prompt_tokens, run.reused_tokens, run.mixed_steps) for run in runs] == [(total, 0, 0), (total - 64, 64, 3)]
    first, *others = runs[-1].requests
    cached = total + len(runner.PROMPTS) * (NEW_TOKENS - 1)
    assert (runs[0].cache_bytes - runs[1].cache_bytes) * cached == pytest.approx(64 * 2304), "a page counts once"
    for request in others:
        assert request.pages[:2] == first.pages[:2]
        assert request.pages[2] not in first.pages, "what they share does not fill it"
    assert [80, 24, 8] in [keys[at : at + 3] for at in range(len(keys))], "a context in two pieces, where short prefills are absorbed too"


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_context_ignored_fails(monkeypatch, name):
    prefill_plan = core.prefill_plan
    monkeypatch.setattr(core, "prefill_plan", lambda *args: replace(prefill_plan(*args), chunks=[]))
    assert shared_prompts(backend=name, new_tokens=2) == (False, [("_MLA, shared", "16")])


@pytest.mark.parametrize("first", [runner.PROMPTS[0], runner.INSTRUCTIONS], ids=["goes on otherwise", "ends in the page"])
def test_a_shared_page_that_is_not_full_of_the_prefix_fails(monkeypatch, first):
    class Careless(PagePool):
        tokens, pages = (), ()

        def publish(self, tokens, pages):
            self.tokens, self.pages = tokens, pages

        def find(self, tokens):
            same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, tokens, strict=False)))
            return list(self.pages[: -(-same // self.page_size)])

    monkeypatch.setattr(runner, "PagePool", Careless)
    assert shared_prompts(prompts=(first, runner.PROMPTS[1])) == (False, [("_MLA, shared", "16")])


def test_says_why_a_better_backend_does_not_run():
    _, printed = run_small(backend="reference")
    assert re.search(r"aiter +│ unusable │ \w+", printed)
    assert re.search(r"triton +│ usable +│ reference was asked for", printed)


@pytest.mark.parametrize("nothing", [{"page_sizes": ()}, {"prompts": ()}, {"prompts": ("a", "")}, {"new_tokens": 1}, {"chunk_tokens": 0}])
def test_refuses_to_decode_nothing(nothing):
    with pytest.raises(ValueError, match="page_sizes and prompts must not be empty"):
        run_small(**nothing)


def test_low_precision_is_fed_the_truth_on_the_same_weights(monkeypatch):
    models, shown = [], []
    monkeypatch.setattr(runner, "EagerEngine", lambda *args: models.append(args[0]) or EagerEngine(*args))
    monkeypatch.setattr(report, "print_comparison", lambda *args: shown.extend(args))
    run_small(dtype=torch.bfloat16)
    _, truth, runs, _, rounding = shown
    for run in (*runs, rounding):
        assert [request.forced for request in run.requests] == [request.generated for request in truth.requests]
    precise, rounded = models
    for (name, exact), other in zip(precise.named_parameters(), rounded.parameters(), strict=True):
        assert exact.dtype == torch.float32
        assert torch.equal(exact, other.float()), name


def test_low_precision_is_judged_by_the_librarys_own_rounding():
    agreed, printed = run_small(dtype=torch.bfloat16)
    assert agreed
    assert "eager bfloat16" in printed
    assert "PASS" in printed


@pytest.mark.parametrize("page_size", [1, 4])
def test_only_live_slots_are_written(page_size):
    engine = paged_engine(small_model(), requests_of(*PROMPTS), page_size=page_size)
    decode(engine)
    live = {(request.pages[token // page_size], token % page_size) for request in engine.requests for token in range(request.num_cached)}
    assert len(live) == sum(len(prompt) + NEW_TOKENS - 1 for prompt in PROMPTS), "no page is given out twice"
    for layer in engine.model.model.layers:
        written = layer.self_attn.kv_cache.isfinite().all(-1)
        assert {tuple(slot) for slot in written.nonzero().tolist()} == live
        assert layer.self_attn.kv_cache[~written].isnan().all()


@pytest.mark.parametrize("chunk_tokens", [1, 3])
@pytest.mark.parametrize("prompts", [PROMPTS, ("abcdefgh", "abcdefgh", "abcdxy", "bbcdxy")])
def test_pieces_of_prompts_decode_the_same(prompts, chunk_tokens):
    eager_model = small_model()
    engine = paged_engine(eager_model, requests_of(*prompts), page_size=4, chunk_tokens=chunk_tokens)
    assert decode(engine) == decode(EagerEngine(eager_model, requests_of(*prompts)))
    if prompts is not PROMPTS:
        first, same, begins_the_same, other = (request.pages for request in engine.requests)
        assert same[0] == begins_the_same[0] == first[0]
        assert len({*first, *same, *begins_the_same, *other}) == len(first + same + begins_the_same + other) - 2, "the last token is fed"


@pytest.mark.parametrize("interleave", [True, False])
def test_rotates_as_the_config_says(interleave):
    eager_model = small_model()
    eager_model.config.rope_interleave = interleave
    eager = decode(EagerEngine(eager_model, requests_of(*PROMPTS)))
    assert decode(paged_engine(eager_model, requests_of(*PROMPTS), page_size=1)) == eager


def test_a_request_decodes_the_same_alone_and_in_a_batch():
    eager_model = small_model()
    together = decode(paged_engine(eager_model, requests_of(*PROMPTS), page_size=4))
    assert together == [decode(paged_engine(eager_model, requests_of(prompt), page_size=4))[0] for prompt in PROMPTS]


def test_the_patched_model_shares_weights_and_leaves_the_original():
    eager_model = small_model()
    before = decode(EagerEngine(eager_model, requests_of(*PROMPTS)))
    engine = paged_engine(eager_model, requests_of(*PROMPTS), page_size=1)
    assert {id(parameter) for parameter in engine.model.parameters()} == {id(parameter) for parameter in eager_model.parameters()}
    assert decode(EagerEngine(eager_model, requests_of(*PROMPTS))) == before


def test_the_model_is_deepseeks():
    config = model.mla_config(small_model(), page_size=16)
    assert config.softmax_scale == pytest.approx(0.135234, abs=1e-6), "(0.1 ln 40 + 1)^2 / sqrt(192)"
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim) == (512, 64, 128, 128)
    assert (config.num_heads, config.page_size, config.dtype) == (2, 16, torch.float32)


def test_lower_precision_leaves_rotary_frequencies_alone():
    precise, rounded = (small_model(dtype).model.rotary_emb.inv_freq for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(precise, rounded)


def test_compare_stops_where_texts_part():
    logits = [torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 3.0]), torch.tensor([0.0, 2.5, 3.0])]
    truth = as_run([Request([], 3, generated=[2, 2, 2], logits=logits)])
    shifted = [logits[0], logits[1] + torch.tensor([0.0, 4.0, 0.0]), logits[2] + 100]
    free = report.compare(as_run([Request([], 3, generated=[2, 1, 2], logits=shifted)]), truth)
    assert free == report.Comparison(1, [(0, 1)], 4.0, pytest.approx(4 / 6), 1.0)
    forced = report.compare(as_run([Request([], 3, forced=[2, 2, 2], generated=[2, 1, 2], logits=shifted)]), truth)
    assert forced == report.Comparison(2, [(0, 1)], 100.0, pytest.approx(304 / 9), 0.5)


def test_the_verdict():
    def comparison(difference, margin=0.5):
        return report.Comparison(0, [], difference, difference, margin)

    assert comparison(0.2).agrees(None)
    assert not comparison(0.3).agrees(None), "any token could have come out"
    assert not comparison(float("nan")).agrees(None)
    rounding = comparison(0.3)
    assert comparison(0.55).agrees(rounding)
    assert not comparison(0.65).agrees(rounding)
    assert not comparison(float("nan")).agrees(rounding)


def test_the_same_tokens_by_chance_fail():
    logits = torch.tensor([0.0, 1.0, 3.0])
    truth, off = (as_run([Request([], 1, generated=[2], logits=[these])]) for these in (logits, logits + 1.5))
    output = io.StringIO()
    console = Console(file=output, width=200)
    config = model.mla_config(small_model(), page_size=1)
    assert not report.print_comparison(console, truth, [off], config, None)
    assert "by chance" in output.getvalue()


def test_forced_tokens_are_fed_in_place_of_the_own():
    request = Request([5, 6], 2, forced=[7, 8])
    assert request.pending == [5, 6]
    request.advance(2, torch.tensor([0.0, 1.0]))
    assert (request.generated, request.pending, request.num_cached) == ([1], [7], 2)


def test_a_piece_of_a_prompt_decodes_nothing():
    request = Request([5, 6], 1)
    request.advance(1, torch.tensor([0.0, 1.0]))
    assert (request.generated, request.pending, request.num_cached, request.done) == ([], [6], 1, False)
    request.advance(1, torch.tensor([0.0, 1.0]))
    assert (request.generated, request.pending, request.num_cached, request.done) == ([1], [1], 2, True)


def test_pages_come_in_no_order_and_run_out():
    pages: list[int] = []
    pool = PagePool(8, 4, seed=0)
    pool.extend(pages, 31)
    assert sorted(pages) == list(range(8))
    assert pages not in (sorted(pages), sorted(pages, reverse=True))
    pool.extend(pages, 32)
    with pytest.raises(RuntimeError, match="33 tokens need 9 pages"):
        pool.extend(pages, 33)


def test_a_page_is_found_by_all_tokens_up_to_its_end():
    pool = PagePool(8, 2, seed=0)
    pool.publish([1, 2, 3, 4, 5], [7, 6, 5])
    assert pool.find([1, 2, 3, 4, 5, 6]) == [7, 6], "the last one is not full"
    assert pool.find([1, 2, 3]) == [7]
    assert pool.find([1, 2, 9, 4]) == [7]
    assert pool.find([9, 2, 3, 4]) == []
    pool.publish([1, 2, 9, 4], [7, 3])
    pool.publish([1, 2, 3, 4], [2, 1])
    assert pool.find([1, 2, 9, 4]) == [7, 3]
    assert pool.find([1, 2, 3, 4]) == [7, 6], "the first that was found stays"


@pytest.mark.parametrize(("found", "message"), [(None, "not installed"), ("5.16.1", "found 5.16.1"), ("4.57.6", "found 4.57.6")])
def test_names_the_extra_without_a_good_transformers(monkeypatch, found, message):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=message) as error:
        run_small()
    assert "pip install 'dualmla[demo]'" in str(error.value)
