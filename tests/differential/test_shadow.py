"""Shadow mode: what is sampled, what is found, what it leaves alone."""

import contextlib
import logging
import random
import re
import time

import pytest
import torch

import dualmla
from dualmla import DecodeGraphs, MLAGraphState, advance_step
from dualmla.backends.reference import ReferenceMLABackend
from dualmla.differential import environment, repro, shadow
from dualmla.differential.judge import judge
from dualmla.differential.shadow import Shadow
from dualmla.differential.snapshot import DecodeSeen, Snapshot
from dualmla.testing import DecodeCase, assert_bits_equal, assert_decode_agrees, make_decode_inputs
from dualmla.testing.layer import LayerCase, make_layer_inputs


def decode(backend, case, *, with_lse=True):
    inputs = make_decode_inputs(case)
    lse = torch.full((case.num_heads, len(inputs.q)), torch.nan) if with_lse else None
    k_scale = case.k_scale or 1.0
    backend.mla_decode(
        inputs.q, inputs.kv_cache, inputs.meta, case.softmax_scale, causal=case.causal, out=inputs.out, lse=lse, k_scale=k_scale,
        num_kv_splits=case.num_kv_splits,
    )  # fmt: skip
    return inputs, lse


def cases(n, seed=0):
    rng = random.Random(seed)
    for k in range(n):
        lens = tuple(rng.choice((0, 1, 3, 16, 40, 70)) for _ in range(rng.randint(1, 4)))
        yield DecodeCase(
            num_heads=3,
            seq_lens=lens,
            query_lens=tuple(rng.choice((1, 1, 2, 4)) for _ in lens),
            padding_tokens=rng.choice((0, 2)),
            page_size=rng.choice((1, 16)),
            dtype=rng.choice((torch.bfloat16, torch.float16, torch.float32)),
            kv_cache_dtype=rng.choice((None, None, torch.float8_e4m3fn)),
            k_scale=0.5,
            data=rng.choice(("normal", "flat", "peaked", "huge", "denormal")),
            seed=k,
        )


def test_a_sound_backend_never_diverges(faulty):
    watcher = Shadow("reference", share=1.0, per_second=1e9)
    backend = watcher.watch(faulty["fault-sound"])
    for case in cases(40):
        decode(backend, case, with_lse=case.seed % 2 == 0)
    counts = watcher.drain()
    assert (counts.calls, counts.sampled, counts.agreed, counts.diverged) == (40, 40, 40, 0)


@pytest.mark.parametrize("fault", ["fault-scale", "fault-mask"])
def test_a_wrong_backend_is_found_named_and_saved(faulty, fault, tmp_path, caplog):
    watcher = Shadow("reference", share=1.0, per_second=1e9, save=tmp_path, most_repros=2)
    backend = watcher.watch(faulty[fault])
    with caplog.at_level(logging.WARNING, "dualmla"):
        for seed in range(4):
            decode(backend, DecodeCase(num_heads=2, seq_lens=(5, 20), query_lens=(1, 3), page_size=16, dtype=torch.float32, seed=seed))
        counts = watcher.drain()
    assert counts.diverged == 4
    assert counts.wrong == {fault: 4}
    assert f"{fault} is wrong: out is" in caplog.text
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    saved = repro.load(next(tmp_path.glob("*.json")))
    assert saved.backend == fault
    assert judge(saved.problem, fault).kind == fault.removeprefix("fault-")
    assert judge(saved.problem, "reference").status == "pass"


@pytest.mark.parametrize("case", [*cases(6, seed=3)], ids=str)
def test_a_snapshot_is_what_the_call_read(case):
    inputs, lse = decode(ReferenceMLABackend, case)
    k_scale = 1.0 if case.k_scale is None else case.k_scale
    seen = DecodeSeen(inputs.q, inputs.kv_cache, inputs.meta, case.softmax_scale, True, inputs.out, lse, k_scale, None)
    snapshot = Snapshot.take(seen, slice(0, len(case.seq_lens)), max(case.seq_lens))
    inputs.kv_cache.zero_()  # the engine goes on
    problem = snapshot.problem()
    fitting = [i for i, n in enumerate(case.seq_lens) if n]
    assert problem.case.seq_lens == tuple(case.seq_lens[i] for i in fitting)
    assert problem.case.query_lens == tuple(case.new_tokens[i] for i in fitting)
    out, its_lse = snapshot.result()
    call = problem.lay_out("cpu", poison=True)
    assert_decode_agrees(out, its_lse, call.inputs)


def test_requests_that_do_not_fit_are_left_out():
    case = DecodeCase(num_heads=2, seq_lens=(4, 100, 7), page_size=4)
    inputs, lse = decode(ReferenceMLABackend, case)
    seen = DecodeSeen(inputs.q, inputs.kv_cache, inputs.meta, case.softmax_scale, True, inputs.out, lse, 1.0, None)
    snapshot = Snapshot.take(seen, slice(0, 3), 8)
    assert snapshot.problem().case.seq_lens == (4, 7)
    assert snapshot.pages.shape[0] == 3 * 2
    assert snapshot.valid.tolist() == [True, False, True]


def test_memory_and_rate_are_bounded(faulty):
    case = DecodeCase(num_heads=2, seq_lens=(40,) * 3)
    small = Shadow("reference", share=1.0, per_second=1e9, max_bytes=1000)
    decode(small.watch(faulty["fault-scale"]), case)
    assert (small.drain().sampled, small.counts.skipped) == (0, {"size": 1})

    slow = Shadow("reference", share=1.0, per_second=1e-3)
    backend = slow.watch(faulty["fault-sound"])
    for _ in range(5):
        decode(backend, case)
    assert (slow.drain().sampled, slow.counts.skipped) == (1, {"rate": 4})


def test_the_share_is_a_share():
    watcher = Shadow("reference", share=0.02)
    gaps = [watcher._gap() for _ in range(5000)]
    assert min(gaps) == 1
    assert sum(gaps) / len(gaps) == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"share": 0}, "share must be above 0 and at most 1, got 0"),
        ({"share": "some"}, "share must be above 0 and at most 1, got 'some'"),
        ({"per_second": 0}, "per_second must be above 0, got 0"),
        ({"max_bytes": -1}, "max_bytes must be an int of at least 1, got -1"),
        ({"most_repros": 1.5}, "most_repros must be an int of at least 0, got 1.5"),
        ({"second": "tritn"}, "second must be auto or the name of a registered backend, got 'tritn'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_at_once(argument, words):
    """Not at the first sample, in the middle of an engine's step."""
    with pytest.raises(ValueError, match=re.escape(words)):
        Shadow(**argument)


def test_a_second_backend_that_fails_is_no_failure_of_the_call(faulty, caplog):
    watcher = Shadow("fault-raises", share=1.0, per_second=1e9)
    inputs, _ = decode(watcher.watch(faulty["fault-sound"]), DecodeCase(num_heads=2, seq_lens=(70,)))
    assert bool(inputs.out.isfinite().all())
    assert watcher.drain().skipped == {"fault-raises failed: AssertionError: too long": 1}
    assert "no comparison of a decode, fault-raises failed" in caplog.text


def test_a_place_that_can_not_be_written_is_said(faulty, tmp_path, caplog):
    (tmp_path / "file").touch()
    watcher = Shadow("reference", share=1.0, per_second=1e9, save=tmp_path / "file" / "repros")
    decode(watcher.watch(faulty["fault-scale"]), DecodeCase(num_heads=2, seq_lens=(5,)))
    assert watcher.drain().wrong == {"fault-scale": 1}
    assert "nothing was saved to" in caplog.text


def test_the_watched_result_is_untouched(faulty):
    case = DecodeCase(num_heads=2, seq_lens=(40, 3))
    plain, plain_lse = decode(faulty["fault-sound"], case)
    watched, watched_lse = decode(Shadow("reference", share=1.0).watch(faulty["fault-sound"]), case)
    assert_bits_equal(watched.out, plain.out)
    assert_bits_equal(watched_lse, plain_lse)
    assert_bits_equal(watched.kv_cache, plain.kv_cache)


def test_a_second_backend_that_refuses_stops_nothing(faulty):
    watcher = Shadow("aiter", share=1.0, per_second=1e9)
    decode(watcher.watch(faulty["fault-sound"]), DecodeCase(num_heads=2, seq_lens=(4,)))
    assert watcher.drain().sampled == 0
    assert len(watcher.counts.skipped) == 1


class Engine:
    """A layer of a backend, its tensors at fixed addresses, and its decode captured at some batch sizes."""

    def __init__(self, backend, device, *, sizes, advance=False, num_heads=2, length=9):
        self.case = LayerCase(seq_lens=(length, 5), query_lens=(1, 1), num_heads=num_heads)
        self.cfg, most = self.config(num_heads), max(sizes)
        self.inputs = make_layer_inputs(self.case, device)
        self.layer = backend.get_impl_cls()(self.cfg, self.inputs.w_uk, self.inputs.w_uv)
        self.advance = advance
        self.q = torch.zeros(most, *self.inputs.q.shape[1:], dtype=self.cfg.dtype, device=device)
        self.latents = torch.zeros(most, self.cfg.latent_dim, dtype=self.cfg.dtype, device=device)
        self.q[:2] = self.inputs.q
        self.latents[:2] = torch.cat([self.inputs.kv_c, self.inputs.k_pe], -1)
        self.tokens = [torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)]
        self.state = MLAGraphState(self.cfg, device, max_batch_size=most, max_num_pages_per_seq=64)
        self.graphs = DecodeGraphs(self.state, sizes, self.step)

    @staticmethod
    def config(num_heads):
        return LayerCase(seq_lens=(1,), query_lens=(1,), num_heads=num_heads).config

    def step(self, meta):
        n, rank = meta.num_tokens, self.cfg.kv_lora_rank
        out = self.layer.forward(self.q[:n], self.latents[:n, :rank], self.latents[:n, rank:], self.inputs.kv_cache, meta)
        if self.advance:
            advance_step(meta, *(tensor[:n] for tensor in self.tokens))
        return out

    def replay(self):
        return self.graphs.replay(self.inputs.meta.decode_metadata)


def test_graphs_replay_as_before(faulty):
    """On a CPU a replay runs the step, which is sampled as any decode."""
    watcher = Shadow("reference", share=1.0, per_second=1e9)
    backends = faulty["fault-sound"], watcher.watch(faulty["fault-sound"])
    plain, watched = (Engine(backend, "cpu", sizes=[4]).replay() for backend in backends)
    torch.testing.assert_close(watched, plain, atol=2e-2, rtol=2e-2)  # matrix products on a CPU depend on alignment
    counts = watcher.drain()
    assert counts.sampled >= 1
    assert counts.diverged == 0


@pytest.mark.parametrize("fault", ["fault-sound", "fault-scale"])
def test_what_was_captured_is_sampled_after_each_replay(faulty, monkeypatch, fault, tmp_path):
    """As on a GPU, where no code of ours runs in a replay: every decode counts as being captured. The step moves the batch on."""
    monkeypatch.setattr(shadow, "_being_captured", lambda tensor: True)
    watcher = Shadow("reference", share=1.0, per_second=1e9, save=tmp_path)
    engine = Engine(watcher.watch(faulty[fault]), "cpu", sizes=[4, 2], advance=True)
    assert watcher.counts.calls == 0
    for _ in range(3):
        engine.replay()
    counts = watcher.drain()
    assert (counts.calls, counts.sampled) == (3, 3)
    assert counts.diverged == (3 if fault == "fault-scale" else 0)
    for path in tmp_path.glob("*.json"):
        assert repro.load(path).problem.case.seq_lens in ((9,), (5,), (9, 5))  # as the decode read them, not as the step left them


def test_replays_are_sampled_by_the_variable_alone(faulty, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(environment, "_from_environment", {})
    monkeypatch.setattr(shadow, "_being_captured", lambda tensor: True)
    monkeypatch.setattr(environment, "_second", lambda backend, device: "reference")
    monkeypatch.setenv("DUALMLA_SHADOW", "1")
    engine = Engine(dualmla.select_backend(Engine.config(2), "cpu", "fault-scale"), "cpu", sizes=[2])
    engine.replay()
    (told,) = engine.state._buffers.on_replay
    deadline = time.monotonic() + 20
    while not list((tmp_path / "dualmla-shadow").glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
        told(1)  # a batch size that was not captured is no decode
    assert repro.load(next((tmp_path / "dualmla-shadow").glob("*.safetensors"))).backend == "fault-scale"


def test_within_graphs_memory_is_bounded_and_sizes_are_spread(faulty, monkeypatch):
    """Of ten sizes as many as fit are kept, the largest and small ones among them, one layer each."""
    monkeypatch.setattr(shadow, "_being_captured", lambda tensor: True)
    row = 2 * (576 + 512) * 2 + 4
    watcher = Shadow("reference", share=1.0, per_second=1e9, max_bytes=row * 24)
    engine = Engine(watcher.watch(faulty["fault-sound"]), "cpu", sizes=range(1, 11))
    with engine.state.graph_capture(10):
        for size in range(10, 0, -1):  # on a CPU nothing is captured until a replay
            engine.step(engine.state.graph_capture_get_metadata_for_batch(size))
    kept = [key.batch_size for key in watcher._captured]
    assert sum(call.held_bytes for call in watcher._captured.values()) <= row * 24
    assert max(kept) == 10
    assert min(kept) == 1
    assert len(kept) >= 4
    lost = next(size for size in range(1, 11) if size not in kept)
    engine.state.replayed(lost)
    assert watcher.counts.skipped == {"graph not kept": 1}


def test_the_environment_turns_it_on(monkeypatch, faulty, tmp_path):
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(environment, "_from_environment", {})
    cfg = dualmla.MLAConfig(num_heads=2, softmax_scale=0.1)
    monkeypatch.setenv("DUALMLA_SHADOW", "0.5")
    chosen = dualmla.select_backend(cfg, "cpu", "fault-sound")
    assert issubclass(chosen, faulty["fault-sound"])
    assert chosen is dualmla.select_backend(cfg, "cpu", "fault-sound")
    assert chosen.get_impl_cls().ops is chosen
    monkeypatch.setenv("DUALMLA_SHADOW", "much")
    with pytest.raises(ValueError, match="DUALMLA_SHADOW is 'much'; it must be a share of calls"):
        dualmla.select_backend(cfg, "cpu", "fault-sound")
    monkeypatch.delenv("DUALMLA_SHADOW")
    assert dualmla.select_backend(cfg, "cpu", "fault-sound") is faulty["fault-sound"]


def test_a_call_that_is_not_sampled_costs_little():
    class Nothing(ReferenceMLABackend):
        name = "nothing"

        @classmethod
        def mla_decode(cls, *args, **rest):
            pass

    inputs = make_decode_inputs(DecodeCase(num_heads=2, seq_lens=(4,)))
    rest = {"causal": True, "out": inputs.out, "lse": None, "k_scale": 1.0, "num_kv_splits": None}

    def seconds(backend):
        start = time.process_time()
        for _ in range(2000):
            backend.mla_decode(inputs.q, inputs.kv_cache, inputs.meta, 0.1, **rest)
        return (time.process_time() - start) / 2000

    watched = Shadow("reference", share=1e-9).watch(Nothing)
    assert min(seconds(watched) for _ in range(3)) - min(seconds(Nothing) for _ in range(3)) < 20e-6


@pytest.fixture
def halved(faulty):
    """Triton with a wrong factor."""

    class Halved(faulty["triton"]):
        name = "halved"

        @classmethod
        def get_impl_cls(cls):
            return type("Layer", (super().get_impl_cls(),), {"ops": cls})

        @classmethod
        def mla_decode(cls, q, kv_cache, meta, softmax_scale, *, out, **rest):
            super().mla_decode(q, kv_cache, meta, softmax_scale, out=out, **rest)
            out.mul_(0.5)

    dualmla.register_backend("halved", Halved)
    return Halved


@contextlib.contextmanager
def no_waiting():
    """Within, a wait for the device is an error; work that is under way goes on."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_on_a_gpu_eager_and_replayed_decodes_are_sampled_without_a_wait(halved, tmp_path):
    """A wrong layer over Triton: no sync on the engine's path, divergences found in both ways, and repros that are true."""
    for graphs in (False, True):
        save = tmp_path / str(graphs)
        watcher = Shadow("triton", share=1.0, per_second=1e9, save=save)
        engine = Engine(watcher.watch(halved), "cuda", sizes=[2, 4], advance=True, num_heads=16, length=300)
        call = engine.replay if graphs else lambda engine=engine: engine.step(engine.inputs.meta)
        engine.advance = graphs
        call()  # the lengths are asked for
        call()
        watcher.drain()
        before = watcher.counts.diverged
        with no_waiting():
            for _ in range(3):
                call()
        counts = watcher.drain()
        assert counts.diverged > before, counts
        assert counts.wrong == {"halved": counts.diverged}, counts
        lengths = {repro.load(path).problem.case.seq_lens for path in save.glob("*.json")}
        assert lengths <= {(300,), (5,), (300, 5)}, lengths


@pytest.mark.gpu
def test_on_a_gpu_the_variable_alone_samples_replays_and_is_never_wrong(monkeypatch, tmp_path, halved):
    """A sound backend agrees in every replay, a wrong one is found in every one; captures and what they give stay as they were."""
    monkeypatch.setattr(environment.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(environment, "_from_environment", {})
    monkeypatch.setattr(environment, "_second", lambda backend, device: "triton")
    made = []
    monkeypatch.setattr(environment, "Shadow", lambda second, **rest: made.append(Shadow(second, per_second=1e9, **rest)) or made[-1])
    plain = Engine(dualmla.select_backend(Engine.config(16), "cuda", "triton"), "cuda", sizes=[2, 4], num_heads=16, length=300)
    want = plain.replay().clone()
    monkeypatch.setenv("DUALMLA_SHADOW", "1")
    for name in ("triton", "halved"):
        backend = dualmla.select_backend(Engine.config(16), "cuda", name)
        watcher = made[-1]
        engine = Engine(backend, "cuda", sizes=[2, 4], num_heads=16, length=300)
        before = watcher.drain().sampled  # decodes of empty batches, run before each is captured: 0 is right whatever the factor
        for _ in range(20):
            got = engine.replay()
            torch.cuda.synchronize()
            watcher.drain()
        counts = watcher.counts
        replays = counts.sampled - before
        assert replays >= 19, counts  # of the first the lengths may have been asked for
        assert counts.diverged == (0 if name == "triton" else replays), counts
        if name == "triton":
            assert_bits_equal(got, want)
