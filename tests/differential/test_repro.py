"""Failures as files, and back; reports as files."""

import ast
import inspect
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
import torch
from conftest import FAULTS_FILE

from dualmla.differential import check, repro
from dualmla.differential.check import Plan, run_check
from dualmla.differential.files import to_html, to_json, to_junit
from dualmla.differential.grids import GRIDS
from dualmla.differential.judge import judge
from dualmla.differential.problems import OPERATIONS, DecodeProblem, unpack
from dualmla.differential.random_problems import DTYPES, random_problems
from dualmla.differential.verdict import Finding, Verdict
from dualmla.differential.worker import WorkerFailed
from dualmla.testing import DecodeCase, assert_bits_equal
from dualmla.testing.cases import Data

CASES = (
    DecodeCase(num_heads=2, seq_lens=(20, 5), query_lens=(2, 1), page_size=3, kv_cache_dtype=torch.float8_e4m3fn, k_scale=0.5),
    DecodeCase(num_heads=2, seq_lens=(3,), dtype=torch.float32),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A check of a sound and a faulty backend that failed."""
    plan = Plan(["fault-sound", "fault-heads"], "cpu", "two cases", load=(FAULTS_FILE,), save=tmp_path_factory.mktemp("repros"))
    return run_check([lambda case=case: DecodeProblem.draw(case) for case in CASES], plan)


def test_a_random_problem_is_a_function_of_seed_and_place():
    one, two = ([draw() for draw, _ in zip(random_problems(seed), range(40), strict=False)] for seed in (3, 3))
    assert [problem.title for problem in one] == [problem.title for problem in two]
    assert {problem.operation for problem in one} >= {"decode", "prefill", "forward"}
    assert one[0].title != next(random_problems(4))().title


def test_random_problems_reach_every_edge():
    """Of 400, the default seed's."""
    problems = [draw() for draw in itertools.islice(random_problems(0), 400)]
    assert {problem.operation for problem in problems} == set(OPERATIONS)
    decodes = [problem.case for problem in problems if problem.operation == "decode"]
    lengths = {length for case in decodes for length in case.seq_lens}
    assert lengths >= {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257}
    assert {case.data for case in decodes} == set(get_args(Data))
    assert {case.num_heads for case in decodes} >= {1, 2, 3, 4, 8, 16, 17, 32, 64, 128}
    assert {case.page_size for case in decodes} == {1, 3, 16, 64}
    assert {case.dtype for case in decodes} == set(DTYPES)
    assert {case.num_kv_splits for case in decodes} >= {None, 1, 2, 3, 16}
    for edge in (
        lambda case: any(length % case.page_size == 1 for length in case.seq_lens if case.page_size > 1),  # a tail of one token
        lambda case: any(length % case.page_size == 0 for length in case.seq_lens if length and case.page_size > 1),
        lambda case: any(0 < length < new for length, new in zip(case.seq_lens, case.new_tokens, strict=True)),
        lambda case: len(set(case.new_tokens)) > 1,
        lambda case: max(case.new_tokens) == 9,
        lambda case: case.full_shared_pages > 0 and len(case.seq_lens) > 1,
        lambda case: case.first_page * case.page_size * case.latent_dim > 2**31,
        lambda case: case.padding_tokens > 0,
        lambda case: case.strided,
        lambda case: not case.causal,
        lambda case: case.cache_dtype.itemsize == 1 and case.k_scale is not None,
        lambda case: case.num_kv_splits is not None and 0 in case.seq_lens,
    ):
        assert sum(map(edge, decodes)) >= 2, inspect.getsource(edge)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_problem_survives_packing(operation):
    problem = next(p for draw in random_problems(11) if (p := draw()).operation == operation)
    fields, tensors = problem.pack()
    again = unpack(operation, json.loads(json.dumps(fields)), tensors)
    assert again.title == problem.title
    for name, tensor in again.pack()[1].items():
        assert_bits_equal(tensor, tensors[name], name)


@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_can_be_drawn(grid):
    draws = GRIDS[grid]()
    assert len(draws) > 15
    assert judge(draws[0](), "reference").status == "pass"


def test_the_first_failure_of_each_kind_is_shrunk_and_saved(report):
    assert [[v.status for v in row] for row in report.rows] == [["pass", "fail"], ["pass", "fail"]]
    (failure,) = report.failures
    assert failure.shrunk.kind == "heads"
    assert failure.problem.case.seq_lens in ((1,), (2,))
    saved = repro.load(failure.path)
    assert saved.backend == "fault-heads"
    assert saved.findings[0]["contract"] == "Error budget"
    assert saved.problem.title == failure.problem.title


def test_the_script_runs_and_fails_alone(report):
    failure = report.failures[0]
    script = failure.path.with_suffix(".py")
    assert len(failure.script.split('"""', 2)[2].strip().splitlines()) <= 10
    paths = [path for path in sys.path if path]
    done = subprocess.run([sys.executable, script], env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, check=False)
    assert "head 0 holds the attention of head 1" in done.stdout
    assert "AssertionError" in done.stderr


def test_what_is_no_repro_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"not all of it: there is no .*x\.safetensors"):
        repro.load(tmp_path / "x.json")
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is not a repro, or is damaged: KeyError"):
        repro.load(tmp_path / "x.json")
    (tmp_path / "x.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="has format 99, this version reads format 1"):
        repro.load(tmp_path / "x.safetensors")


DAMAGE = {
    "numbers cut short": lambda about, numbers: (about, numbers[: len(numbers) // 2]),
    "no numbers": lambda about, numbers: (about, b""),
    "no JSON": lambda about, numbers: ("\x00", numbers),
    "a list": lambda about, numbers: ("[]", numbers),
    "another operation": lambda about, numbers: (about.replace('"operation": "decode"', '"operation": "encode"'), numbers),
    "more heads than the numbers have": lambda about, numbers: (about.replace('"num_heads": 2', '"num_heads": 3'), numbers),
    "heads of another type": lambda about, numbers: (about.replace('"num_heads": 2', '"num_heads": "two"'), numbers),
    "a dtype that is none": lambda about, numbers: (about.replace('"bfloat16"', '"bfloat17"'), numbers),
    "no finding": lambda about, numbers: (about.replace('"sentence"', '"sentenced"'), numbers),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_repro_is_refused(tmp_path, damage):
    """In one sentence that names the file, whatever is wrong with it."""
    problem = DecodeProblem.draw(DecodeCase(num_heads=2, seq_lens=(5,)))
    verdict = Verdict("decode", problem.title, "x", (Finding("accuracy", "wrong"),))
    path = repro.save(tmp_path, problem, verdict, device="cpu", made={})
    assert repro.load(path).findings == [{"contract": "Error budget", "kind": "accuracy", "sentence": "wrong"}]
    about, numbers = DAMAGE[damage](path.with_suffix(".json").read_text(), path.read_bytes())
    path.with_suffix(".json").write_text(about)
    path.write_bytes(numbers)
    with pytest.raises(ValueError, match=rf"{path.name} is not a repro, or is damaged: \w+: "):
        repro.load(path)


def test_a_script_stands_whatever_the_backend_said(tmp_path):
    """Beside it lies what registers the backend, as it was then; a second one of that name is another file."""
    problem = DecodeProblem.draw(DecodeCase(num_heads=2, seq_lens=(5,)))
    verdict = Verdict("decode", problem.title, "it's", (Finding("exception", 'RuntimeError: """ \\N \\x "'),))
    scripts = []
    for text in ("registered = 1", "registered = 2", "registered = 2"):
        (tmp_path / "mine.py").write_text(text)
        path = repro.save(tmp_path / "repros", problem, verdict, device="cpu", made={}, load_files=(tmp_path / "mine.py",))
        scripts.append(path.with_suffix(".py").read_text())
    assert ['with_name("mine-2.py")' in script.replace("'", '"') for script in scripts] == [False, True, True]
    assert (tmp_path / "repros" / "mine.py").read_text() == "registered = 1"
    assert all(ast.get_docstring(ast.parse(script)).count("RuntimeError: ''' \\N \\x") == 1 for script in scripts)


def test_json(report):
    fields = json.loads(to_json(report), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert fields["backends"] == ["fault-sound", "fault-heads"]
    assert [verdict["status"] for verdict in fields["rows"][0]] == ["pass", "fail"]
    assert fields["failures"][0]["repro"] == str(report.failures[0].path)


def test_junit(report):
    suites = ElementTree.fromstring(to_junit(report)).findall("testsuite")
    assert [(suite.get("name"), suite.get("tests"), suite.get("failures")) for suite in suites] == [
        ("fault-sound", "2", "0"),
        ("fault-heads", "2", "2"),
    ]
    assert suites[1].find("testcase/failure").get("type") == "Error budget"


def test_html_is_one_page(report):
    page = to_html(report)
    assert page.count("<circle") == page.count("<rect") == 2
    assert all(str(case) in page for case in CASES)
    assert "head 0 holds the attention of head 1" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "src=" not in page


def test_a_backend_that_only_crashes_ends_the_check(monkeypatch):
    monkeypatch.setattr(check, "MOST_DEATHS", 3)
    plan = Plan(["fault-abort"], "cpu", load=(FAULTS_FILE,), shrink_seconds=0)
    case = DecodeCase(num_heads=1, seq_lens=(3,), query_lens=(2,))
    report = run_check([lambda: DecodeProblem.draw(case)] * 9, plan)
    assert len(report.rows) == 3
    assert report.ended == "fault-abort crashed or hung 3 times"
    assert Path(FAULTS_FILE).name in report.rows[0][0].findings[0].sentence


def test_processes_share_the_work():
    """In the order of the problems, and of each kind of failure the first is shrunk once."""
    seen = []
    plan = Plan(["fault-sound", "fault-heads"], "cpu", load=(FAULTS_FILE,), jobs=2)
    draws = [lambda case=case: DecodeProblem.draw(case) for case in CASES * 4]
    report = run_check(draws, plan, seen.append)
    assert [row[0].title for row in report.rows] == [str(case) for case in CASES * 4]
    assert sorted(map(id, seen)) == sorted(map(id, report.rows))
    assert [[v.status for v in row] for row in report.rows] == [["pass", "fail"]] * 8
    (failure,) = report.failures
    assert failure.problem.case.num_heads == 2
    assert report.backends == ("fault-sound", "fault-heads")


def test_a_lane_that_can_not_start_ends_all():
    with pytest.raises(WorkerFailed, match="must be one of auto"):
        run_check(random_problems(0), Plan(["tritn"], "cpu", jobs=2))


def test_how_many_processes(monkeypatch):
    monkeypatch.setattr(check.os, "sched_getaffinity", lambda pid: range(16), raising=False)
    assert [check.default_jobs(problems) for problems in (None, 1, 49, 50, 400, 5000)] == [16, 1, 1, 2, 16, 16]


def test_time_is_up():
    report = run_check(random_problems(0), Plan(["reference"], "cpu", seconds=0.5))
    assert report.ended == "time was up after 0.5 s"
    assert not report.failed
