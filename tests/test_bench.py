"""`dualmla bench` and what it stands on: the table of timed cases, the clock, the check before the clock, peers, reports, the picture."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import DEVICE
from test_cli import FAULTS, dualmla_

import dualmla.bench.run
from dualmla.bench import clock as clocks
from dualmla.bench.clock import Captured, Ceilings, Clock, Timing
from dualmla.bench.inputs import draw
from dualmla.bench.peers import Peer
from dualmla.bench.report import comparisons, geometric_mean
from dualmla.bench.results import Row, from_json, to_json
from dualmla.bench.run import measure
from dualmla.bench.subjects import MOST_INTERPRETED, Prepared, Registered
from dualmla.bench.truth import judge_of
from dualmla.differential.grids import GRIDS
from dualmla.testing import DecodeCase, PrefillCase, compare_decode, run_decode, run_prefill
from dualmla.testing.timed import DECODE_LENGTHS, TIMED_GRIDS, TimedCase, timed_grid

CPU = torch.device("cpu")
SMALL = ("--device", "cpu", "--heads", "3", "--rounds", "5")
DECODE = TimedCase("3 x 1..40", DecodeCase(num_heads=3, seq_lens=(40, 1, 17), query_lens=(2, 1, 1), page_size=16))
PREFILL = TimedCase("2 x 5, 200", PrefillCase(num_heads=3, query_lens=(5, 200), key_lens=(9, 200)))
CEILINGS = Ceilings(1e12, {"bfloat16": 1e14})

# Peers in the form that `dualmla bench --peers` takes: plain attention in fp32.
RIGHT_PEER = """
import torch
import shared_by_peers

def make(batch, seq_lens, heads, page_size, dtype, inputs):
    assert inputs.page == page_size and inputs.heads == heads and inputs.batch == batch and inputs.seq_lens.tolist() == seq_lens
    out = torch.empty(batch, heads, 512, dtype=dtype, device=inputs.q.device)
    def decode():
        for i, n in enumerate(inputs.seq_lens_list):
            rows = inputs.kv[inputs.block_table[i].long()].flatten(0, 1)[:n].float()
            out[i] = shared_by_peers.attend(inputs.q[i].float()[:, None], rows, rows[:, :512], inputs.scale)[:, 0]
        return out
    return decode

def make_prefill(seq_lens, heads, dtype, inputs):
    out = torch.empty(sum(seq_lens), heads, 128, dtype=dtype, device=inputs.q.device)
    def prefill():
        for a, b in zip(inputs.cu.tolist(), inputs.cu.tolist()[1:]):
            q, k, v = (x[a:b].float().transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
            mask = torch.ones(b - a, b - a).tril().bool()
            out[a:b] = shared_by_peers.attend(q, k, v, inputs.scale, mask).transpose(0, 1)
    prefill.result = lambda: (prefill(), out)[1]
    return prefill
"""
SHARED = """
import torch

def attend(q, k, v, scale, mask=True):
    s = (scale * q @ k.transpose(-1, -2)).masked_fill(~torch.as_tensor(mask), float("-inf"))
    return s.softmax(-1) @ v
"""
WRONG_PEER = """
import right_one as right  # a peer may stand on another

def make(batch, seq_lens, heads, page_size, dtype, inputs):
    call = right.make(batch, seq_lens, heads, page_size, dtype, inputs)
    return lambda: call().mul_(1.02)
"""
PICKY_PEER = """
def make(batch, seq_lens, heads, page_size, dtype, inputs):
    assert page_size == 64
"""


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder of peers, forgotten afterwards."""
    monkeypatch.setattr("sys.path", __import__("sys").path[:])
    files = {"right_one": RIGHT_PEER, "shared_by_peers": SHARED, "wrong_one": WRONG_PEER, "picky_one": PICKY_PEER}
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "driver.py").write_text("raise OSError('it is no peer and must not be imported')")
    return tmp_path


@pytest.fixture
def no_ceilings(monkeypatch):
    """Measuring what this machine can do takes seconds and is tested once."""
    monkeypatch.setattr(dualmla.bench.run, "measure_ceilings", lambda clock, dtypes: CEILINGS)


def rows_of(path):
    return {row["backend"]: row for row in json.loads(path.read_text())["rows"]}


# ---- the table of cases


@pytest.mark.parametrize("case", [DECODE, PREFILL, TimedCase("", PrefillCase(query_lens=(7, 2), key_lens=(3, 8)))], ids=str)
def test_what_a_case_costs_is_counted(case):
    """Pair by pair, and tensor by tensor of what is drawn for it."""
    pairs = sum(1 for new, keys in case.lengths for i, j in itertools.product(range(new), range(keys)) if j <= keys - new + i)
    assert case.scores == case.case.num_heads * pairs
    inputs = draw(case.case, CPU)
    if case.operation == "decode":
        assert case.flops == 2 * case.scores * (576 + 512)
        tensors, keys = (inputs.q, inputs.out), sum(case.case.seq_lens) * 576 * 2
    else:
        assert case.flops == 2 * case.scores * (192 + 128)
        tensors, keys = (inputs.q, inputs.k, inputs.v, inputs.out), 0
    assert case.least_bytes == keys + sum(tensor.numel() * 2 for tensor in tensors)


def test_a_float8_cache_halves_the_bytes_of_the_cache_alone():
    plain, float8 = (DecodeCase(seq_lens=(1000,), kv_cache_dtype=dtype) for dtype in (None, torch.float8_e4m3fn))
    assert TimedCase("", plain).least_bytes - TimedCase("", float8).least_bytes == 1000 * 576


def test_grids_hold_what_their_names_say():
    grids = {name: timed_grid(name, CPU) for name in TIMED_GRIDS}
    for cases in grids.values():
        assert len({str(timed) for timed in cases}) == len(set(cases)) == len(cases)
    peers = grids["peers"]
    assert {(t.operation, t.case.num_heads) for t in peers} == set(itertools.product(("decode", "prefill"), (16, 128)))
    assert all(len(lens) == int(title.split(" x ")[0]) for title, lens in DECODE_LENGTHS.items())
    assert {t.case.cache_dtype for t in grids["fp8"]} == {torch.bfloat16, torch.float8_e4m3fn}
    assert {t.case.num_heads for t in grids["heads"]} == {8, 16, 32, 64, 128}
    assert {t.case.page_size for t in grids["pages"]} == {1, 16, 64, 128}
    with pytest.raises(ValueError, match="grid must be one of peers, fp8, heads, pages, got 'quick'"):
        timed_grid("quick", CPU)


def test_check_runs_the_decodes_that_are_timed():
    draws = GRIDS["peers"]()
    assert len(draws) == 2 * len(DECODE_LENGTHS)
    assert draws[0]().case == timed_grid("peers", CPU)[0].case


# ---- inputs and their truth


def test_drawn_memory_is_a_paged_cache():
    """Each page belongs to one request, and float64 agrees with a backend that reads it."""
    inputs = draw(DECODE.case, DEVICE)
    pages = [-(-length // 16) for length in DECODE.case.seq_lens]
    owned = torch.cat([inputs.meta.block_table[i, :n] for i, n in enumerate(pages)])
    assert owned.sort().values.tolist() == list(range(sum(pages)))
    assert inputs.meta.decode_metadata is inputs.meta
    result = run_decode(inputs, "reference")
    assert compare_decode(*result, inputs).agrees
    assert judge_of(inputs)(*result).agrees


def test_only_sizes_can_be_timed():
    with pytest.raises(ValueError, match="of a case can be timed"):
        draw(replace(DECODE.case, strided=True), CPU)
    with pytest.raises(ValueError, match="of a case can be timed"):
        draw(replace(PREFILL.case, padding_tokens=1), CPU)


@pytest.mark.parametrize("token", [0, 4, 5, 68, 204])
def test_a_wrong_row_of_a_prefill_is_seen(token):
    """First and last rows of each request and the edges of tiles are among those computed in float64."""
    inputs = draw(PREFILL.case, CPU)
    out, lse = run_prefill(inputs, "reference")
    judge = judge_of(inputs)
    assert judge(out, lse).agrees
    out[token, 2, 7] += 0.1
    assert not judge(out, None).agrees


def test_a_row_of_a_prefill_that_was_never_written_is_seen():
    inputs = draw(PREFILL.case, CPU)
    out, lse = run_prefill(inputs, "reference")
    out[torch.arange(6, 205), 1] = math.nan
    out[[5, 204, 68, 69, 132, 133]] = run_prefill(draw(PREFILL.case, CPU), "reference")[0][[5, 204, 68, 69, 132, 133]]
    failures = judge_of(inputs)(out, lse).failures
    assert any("out has inf or nan in" in failure and "first at (6, 1)" in failure for failure in failures)


# ---- the clock


def test_calls_take_turns():
    order = []
    timings = Clock(CPU, rounds=6).times({name: lambda name=name: order.append(name) for name in "abc"})
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds[-6:] == ["abc", "bca", "cab"] * 2
    assert {timing.rounds for timing in timings.values()} == {6}


def test_time_is_up(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: float(next(now)))
    timing = Clock(CPU, rounds=100, seconds=20).times({"": lambda: None})[""]
    assert clocks.LEAST_ROUNDS <= timing.rounds < 20
    assert timing.median == 1.0


def test_quartiles():
    timing = Timing.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (timing.low, timing.median, timing.high, timing.rounds) == (2.0, 3.0, 4.0, 5)
    assert timing.spread == pytest.approx(1 / 3)


class Broken(Clock):
    """A graph whose replay writes nothing, or that can't be made."""

    def __init__(self, fault):
        super().__init__(CPU, rounds=2)
        self.fault = fault

    def captured(self, call):
        if self.fault == "capture":
            raise RuntimeError("operation not permitted when stream is capturing")
        return Captured(lambda: None, call())


def test_a_replay_is_checked_as_the_call_is():
    (row,) = measure([(DECODE, Registered("reference", CPU))], Broken("replay"), CEILINGS)
    assert row.status == "wrong"
    assert row.why.startswith("replayed from a graph: out is nan")
    assert row.eager is None


def test_what_can_not_be_captured_is_timed_without():
    (row,) = measure([(DECODE, Registered("reference", CPU))], Broken("capture"), CEILINGS)
    assert (row.status, row.graph) == ("timed", None)
    assert row.note == "no graph: RuntimeError: operation not permitted when stream is capturing"
    assert row.best is row.eager


def test_the_interpreter_is_spared_what_would_take_minutes():
    timed = TimedCase("", DecodeCase(num_heads=1, seq_lens=(MOST_INTERPRETED + 1,)))
    row, prepared = dualmla.bench.run._checked(timed, Registered("triton", CPU), None, None, CEILINGS)
    assert (row.status, prepared) == ("refused", None)
    assert "300,001 scores would take minutes" in row.why


def test_a_backend_without_an_lse_is_timed_without(monkeypatch):
    def refusing(*args, return_lse, **kwargs):
        if return_lse:
            raise dualmla.BackendUnavailable("reference", ["no LSE"])
        return dualmla.mla_decode(*args, **kwargs)

    monkeypatch.setattr("dualmla.bench.subjects.mla_decode", refusing)
    prepared = Registered("reference", CPU).prepare(draw(DECODE.case, CPU))
    assert isinstance(prepared, Prepared)
    assert prepared.note == "without the LSE, which it refuses"
    assert prepared.result()[1] is None


@pytest.mark.gpu
@pytest.mark.parametrize("timed", [DECODE, PREFILL], ids=str)
def test_a_gpu_has_graphs_and_a_host(timed):
    """Both ways are checked and timed, and the call returns before the device is done with many."""
    (row,) = measure([(timed, Registered("triton", DEVICE))], Clock(DEVICE, rounds=20), CEILINGS)
    assert (row.status, row.note) == ("timed", "")
    assert row.eager is not None
    assert row.graph is not None
    assert row.host is not None
    assert 0 < row.graph.median < 1e-3


def test_what_an_earlier_call_left_is_no_result(monkeypatch):
    """A backend that writes once and never again is wrong, and so is a peer."""
    calls = itertools.count()

    def lazy(*args, **kwargs):
        return dualmla.mla_decode(*args, **kwargs) if next(calls) == 0 else (kwargs["out"], None)

    monkeypatch.setattr("dualmla.bench.subjects.mla_decode", lazy)
    (row,) = measure([(DECODE, Registered("reference", CPU))], Clock(CPU, rounds=2), CEILINGS)
    assert row.status == "wrong"

    def make(batch, seq_lens, heads, page_size, dtype, inputs):
        out = dualmla.mla_decode(inputs.q, inputs.kv, given.meta, inputs.scale, backend="reference")
        return lambda: out

    one_token = TimedCase("2 x 20", DecodeCase(num_heads=3, seq_lens=(20, 20), page_size=16))
    given = draw(one_token.case, CPU)
    (row,) = measure([(one_token, Peer("lazy", SimpleNamespace(make=make)))], Clock(CPU, rounds=2), CEILINGS)
    assert row.status == "wrong"
    assert "nan" in row.why


# ---- the command


def test_bench_on_a_cpu(tmp_path):
    """Without anything given but a small shape: the reference timed, Triton checked, and the machine's ceilings measured."""
    result = dualmla_("bench", *SMALL, "--batch", "2", "--kv", "3..40", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "r.json")
    assert rows["triton"]["status"] == "checked"
    assert rows["reference"]["status"] == "timed"
    eager = rows["reference"]["eager"]
    assert eager["rounds"] == 5
    assert 0 < eager["low"] <= eager["median"] <= eager["high"]
    assert rows["reference"]["gb_s"] == pytest.approx(rows["reference"]["least_bytes"] / eager["median"] / 1e9)
    assert 0 < rows["triton"]["budget_used"] <= 1
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["versions"]["torch"] == torch.__version__
    assert document["device"].startswith("cpu")
    assert document["date"]
    assert document["ceilings"]["bandwidth"] > 1e8
    assert document["ceilings"]["rates"]["bfloat16"] > 1e8
    assert len(rows["triton"]["case"]["seq_lens"]) == 2
    assert "triton checked: Triton interprets it on a CPU: right, and not timed" in result.stdout
    assert "aiter not usable:" in result.stdout
    assert "decode, 3 heads, page size 64, bf16" in result.stdout


@pytest.mark.usefixtures("no_ceilings")
def test_a_wrong_backend_gets_no_time(tmp_path):
    names = ("--load", FAULTS, "--backend", "fault-sound", "--backend", "fault-scale", "--backend", "fault-raises")
    result = dualmla_("bench", *SMALL, *names, "--batch", "2", "--kv", "80", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 1, result.output
    rows = rows_of(tmp_path / "r.json")
    assert {name: row["status"] for name, row in rows.items()} == {
        "fault-sound": "timed",
        "fault-scale": "wrong",
        "fault-raises": "failed",
    }
    assert rows["fault-scale"]["eager"] is None
    assert rows["fault-scale"]["budget_used"] > 1
    assert "WRONG: fault-scale, decode, 3 heads, page size 64, bf16, 2 x 80: out is" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("no_ceilings")
def test_peers_beside_a_backend(peers, tmp_path):
    names = [option for name in ("reference", "right_one", "wrong_one", "picky_one") for option in ("--backend", name)]
    shape = ("--batch", "2", "--kv", "5..30", "--page-size", "4", "--peers", str(peers), "--json", str(tmp_path / "r.json"))
    result = dualmla_("bench", *SMALL, *names, *shape)
    assert result.exit_code == 1, result.output
    rows = rows_of(tmp_path / "r.json")
    assert {name: row["status"] for name, row in rows.items()} == {
        "reference": "timed",
        "right_one": "timed",
        "wrong_one": "wrong",
        "picky_one": "failed",
    }
    assert rows["picky_one"]["why"] == "AssertionError: assert page_size == 64"
    assert "reference against the best peer, decode, 3 heads, page size 4, bf16:" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("no_ceilings")
def test_peers_in_a_prefill(peers, tmp_path):
    shape = ("--op", "prefill", "--batch", "2", "--kv", "5..30", "--peers", str(peers), "--json", str(tmp_path / "r.json"))
    result = dualmla_("bench", *SMALL, *shape)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "r.json")
    assert (rows["right_one"]["status"], rows["triton"]["status"]) == ("timed", "checked")
    assert (rows["wrong_one"]["status"], rows["wrong_one"]["why"]) == ("refused", "it has no prefill")


@pytest.mark.usefixtures("no_ceilings")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--query-len", "2"), "peers know decodes of one token, not of 2"),
        (("--kv-dtype", "fp8"), "peers know caches of the queries' dtype, not torch.float8_e4m3fn"),
        (("--op", "prefill", "--query-len", "3"), "peers know prefills of as many keys as queries"),
    ],
)
def test_what_a_peer_can_not_be_asked(peers, options, why):
    result = dualmla_("bench", *SMALL, "--backend", "right_one", "--batch", "2", "--kv", "20", "--peers", str(peers), *options)
    assert result.exit_code == 2
    assert f"right_one refused: {why}" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--op", "attention"), "--op must be one of decode, prefill, got 'attention'"),
        (("--batch", "0"), "--batch must be from 1 to 65536, got 0"),
        (("--heads", "-3"), "--heads must be from 1 to 1024, got -3"),
        (("--page-size", "0"), "--page-size must be from 1 to 65536, got 0"),
        (("--kv", "0"), "--kv must be a length from 1 to 16777216 such as 4096, or a range such as 1..8192, got '0'"),
        (("--kv", "9..3"), "got '9..3'"),
        (("--kv", "long"), "got 'long'"),
        (("--query-len", "1..x"), "--query-len must be a length"),
        (("--op", "prefill", "--kv", "-1"), "--query-len or --kv must be a length"),
        (("--dtype", "int8"), "--dtype must be one of bf16, bfloat16, fp16, float16, fp32, float32, got 'int8'"),
        (("--kv-dtype", "fp16"), "--kv-dtype must be one of fp8, bf16, bfloat16, e4m3fn"),
        (("--op", "prefill", "--kv-dtype", "fp8"), "--kv-dtype is an option of --op decode"),
        (("--op", "prefill", "--page-size", "1"), "--page-size is an option of --op decode"),
        (("--grid", "quick"), "--grid must be one of peers, fp8, heads, pages, got 'quick'"),
        (("--grid", "peers", "--batch", "3"), "--batch must not be given beside --grid"),
        (("--grid", "fp8", "--heads", "3"), "--heads must be one of 16 beside --grid fp8, got 3"),
        (("--grid", "fp8", "--op", "prefill"), "--op must be decode beside --grid fp8, got 'prefill'"),
        (("--backend", "tritn"), "--backend must be one of aiter, triton, reference"),
        (("--backend", "aiter"), "backend 'aiter' can't be used"),
        (("--device", "cuda:99"), "it must be cpu"),
        (("--device", "gpu"), "it must be cpu"),
        (("--batch", "65536", "--kv", "1000000"), "--batch, --kv and --heads must fit into memory: decode, 16 heads"),
        (("--json", "no/such/r.json"), "--json no/such/r.json: there is no directory no/such"),
        (("--plot", "no/such/r.png"), "--plot no/such/r.png: there is no directory no/such"),
        (("--plot", "roof.bmp"), "--plot must end in .png, .svg, .pdf, got 'roof.bmp'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_run(options, words, monkeypatch):
    monkeypatch.setattr(dualmla.bench.run, "run_bench", lambda *args, **kwargs: pytest.fail("something was run"))
    result = dualmla_("bench", *(() if "--device" in options else ("--device", "cpu")), *options)
    assert result.exit_code == 2, result.output
    assert words in " ".join(result.stderr.split())


def test_folders_that_hold_no_peers(tmp_path, peers):
    (tmp_path / "none").mkdir()
    result = dualmla_("bench", "--device", "cpu", "--peers", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "--peers must be a folder with modules that define make or make_prefill" in " ".join(result.stderr.split())
    (peers / "triton.py").write_text(PICKY_PEER)
    assert "--peers has triton.py, and a backend is registered by that name" in " ".join(
        dualmla_("bench", "--device", "cpu", "--peers", str(peers)).stderr.split()
    )
    (peers / "broken.py").write_text("import no_such_module\ndef make(): ...")
    assert "broken.py, which can't be imported: ModuleNotFoundError" in "".join(
        dualmla_("bench", "--device", "cpu", "--peers", str(peers)).stderr.splitlines()
    )


def test_a_file_that_can_not_be_run_is_said(tmp_path):
    (tmp_path / "broken.py").write_text("raise KeyError('no such kernel')")
    result = dualmla_("bench", "--device", "cpu", "--load", str(tmp_path / "broken.py"))
    assert result.exit_code == 2
    assert "broken.py can't be run: KeyError: 'no such kernel'" in "".join(result.stderr.splitlines())


@pytest.mark.usefixtures("no_ceilings")
def test_what_was_timed_before_memory_ran_out_is_kept(monkeypatch, tmp_path):
    def scarce(case, device):
        if case.num_heads > 3:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")
        return draw(case, device)

    monkeypatch.setattr(dualmla.bench.run, "draw", scarce)
    options = ("--batch", "2", "--kv", "20", "--backend", "reference", "--heads", "4", "--json", str(tmp_path / "r.json"))
    result = dualmla_("bench", *SMALL, *options)
    assert result.exit_code == 2
    assert "ended early: decode, 4 heads, page size 64, bf16, 2 x 20: OutOfMemoryError: tried to allocate 9 GiB" in result.stdout
    assert rows_of(tmp_path / "r.json")["reference"]["status"] == "timed"


# ---- reports


def row(backend, title="64 x 4096", seconds=1e-3, group=DECODE.group, heads=16, status="timed"):
    timing = Timing(seconds, seconds, seconds, 9) if status == "timed" else None
    flops = 2 * heads * 1088 * 64 * 4096
    return Row("decode", group, title, {"num_heads": heads}, backend, status, 64 * 4096 * 1152, flops, 5e-4, eager=timing, graph=timing)


def report(*rows, peers=("fast", "slow")):
    return dualmla.bench.results.Report("a GPU", {"torch": "2"}, {}, "2026-01-01T00:00:00+00:00", CEILINGS, list(rows), list(peers))


def test_backends_stand_against_the_best_peer_of_each_case():
    rows = [row("triton"), row("fast", seconds=0.8e-3), row("slow", seconds=4e-3)]
    rows += [row("triton", "b"), row("fast", "b", status="wrong"), row("slow", "b", seconds=5e-3)]
    assert comparisons(report(*rows)) == [f"triton against the best peer, {DECODE.group}: 2.000 (geometric mean), least 0.800 at 64 x 4096"]
    assert geometric_mean([0.5, 8.0]) == pytest.approx(2.0)


def test_the_better_of_eager_and_graph_counts():
    slow, fast = Timing.of([3.0, 3.0]), Timing.of([2.0, 2.0])
    assert replace(row("triton"), eager=slow, graph=fast).seconds == 2.0
    assert replace(row("triton"), eager=fast, graph=None).seconds == 2.0


def test_the_ceiling_that_is_met_first():
    assert CEILINGS.roof(10**12, 10**12, "bfloat16") == 1.0
    assert CEILINGS.roof(10**10, 10**14, "bfloat16") == 1.0
    assert row("triton").of_roof == 0.5


def test_a_report_survives_its_json_and_is_drawn_elsewhere(tmp_path):
    made = report(row("triton"), row("fast", seconds=0.8e-3), row("slow", status="wrong"), row("triton", "1 x 8192", 2e-3))
    (tmp_path / "r.json").write_text(to_json(made))
    assert from_json(to_json(made)) == made
    result = dualmla_("bench", "--replot", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg"))
    assert result.exit_code == 1, result.output  # as the run did: one was wrong
    drawing = (tmp_path / "r.svg").read_text()
    for words in ("copy 1 TB/s", "bfloat16 product 100 TFLOP/s", "64 x 4096   (1)", "1 x 8192   (2)", "triton", "fast", DECODE.group):
        assert f"<!-- {words} -->" in drawing, words
    assert "<!-- slow -->" not in drawing


def test_what_is_no_report_is_said(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    result = dualmla_("bench", "--replot", str(tmp_path / "r.json"))
    assert result.exit_code == 2
    assert "not a report of `dualmla bench --json`" in result.stderr


def test_a_picture_needs_a_time(tmp_path):
    (tmp_path / "r.json").write_text(to_json(report(row("triton", status="checked"))))
    result = dualmla_("bench", "--replot", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png"))
    assert result.exit_code == 2
    assert "--plot has nothing to draw" in result.stderr
