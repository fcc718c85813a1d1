"""`bench ops`: verified forms, counted work and reports. Times are not checked."""

import json
import math
import multiprocessing
import os
import platform
import re
import signal
import sys
import time
from argparse import Namespace

import pytest
import torch

from lion.files import read_json
from lion.ops import linear_attention
from tests.helpers import ROOT, assert_in, column, here, refuse, refused
from tests.processes import CONTEXT
from tests.tools.queues import Forked
from tools import probe, processes
from tools.bench import clock, engine, lengths, operators, ops
from tools.bench.floors import Size, floor, flops, published_flops, traffic
from tools.bench.operators import OPERATORS
from tools.bench.ops_report import OpsReport, crossing, crossovers, note, setting_of
from tools.store import SCHEMA

RATES = {"flops": 1e9, "bytes": 1e9}
JOB = Namespace(
    mixer="lion_s",
    form=("full", "chunk", "rnn"),
    length=(24,),
    passes=("forward", "both"),
    chunk_size=(8,),
    heads=2,
    dim=8,
    tokens=48,
    rounds=2,
    seconds=1,
    dtype="float32",
    eager=True,
    threads=torch.get_num_threads(),
    rates=RATES,
    command="./run.sh bench ops",
)


def measure(**changes) -> tuple[list, list]:
    """Run a job in this process; return its rows and notes."""
    sent = []
    ops.measure(engine.job_of(JOB, **changes), sent.append)
    rows = [message["row"] for message in sent if message["kind"] == "row"]
    notes = [message for message in sent if message["kind"] == "missing"]
    return rows, notes


def row(length: int = 64, ratio: float = 2.0, **changes) -> dict:
    made = setting_of(JOB) | {"mixer": "lion_s", "form": "chunk", "chunk_size": 8, "length": length, "pass": "forward"}
    made |= {"ms": 4 * ratio, "sdpa_ms": 4.0, "ratio": ratio, "rounds": [ratio], "compiled": True, "error": 1e-7}
    made |= {"arithmetic_ms": 2.0, "bytes_ms": 1.0, "floor_ms": 2.0, "peak_bytes": 3 * 2**20, "flops": 1, "bytes": 1}
    return made | {"batch": 1, "torch": "2", "date": "2026-01-01T00:00:00", "command": "x"} | changes


def sdpa(**changes) -> dict:
    return row(ratio=1.0, mixer="sdpa", form="sdpa", chunk_size=None, compiled=False, error=None, **changes)


@pytest.mark.parametrize("mixer", ["lion_s", "deltanet", "lightnet"])
@pytest.mark.slow
def test_mixers_are_verified_and_measured(mixer):
    rows, notes = measure(mixer=mixer, form=("full", "chunk"), passes=("both",), rounds=1)
    assert not notes
    first, *own = rows
    assert (first["mixer"], first["form"], first["chunk_size"]) == ("sdpa", "sdpa", None)
    assert [(r["mixer"], r["form"], r["chunk_size"]) for r in own] == [(mixer, "full", None), (mixer, "chunk", 8)]
    for each in own:
        assert each["error"] <= ops.TOLERANCE


@pytest.mark.parametrize("mixer", OPERATORS)
def test_every_operator_is_its_definition(mixer):
    """Check features made before, and, as a GPU times it, a feature map inside the operator."""
    operator = OPERATORS[mixer]
    results = []
    for featurized in (True, False):
        size = (2, 8, 1, 24, torch.device("cpu"), torch.float32)
        tensors, fixed = operator.inputs(*size, featurized=featurized)
        exact = operator.definition({name: tensor.detach().double() for name, tensor in tensors.items()}, fixed)
        for form in ("full", "chunk"):
            got = operator.run(tensors, fixed, form, 8)
            assert torch.allclose(got.double(), exact, rtol=1e-4, atol=1e-5), form
        results.append(exact)
    assert torch.allclose(*results, rtol=1e-4, atol=1e-5)


def test_dtype_and_threads_reach_the_measurement(tmp_path, monkeypatch):
    jobs, threads = [], torch.get_num_threads()
    monkeypatch.setattr(engine, "in_a_process", lambda measure, job, receive: jobs.append(job))
    monkeypatch.setattr(ops, "measure_rates", lambda *_: RATES)  # a minute on CPUs without bfloat16 units
    call = ("bench", "ops", "--mixer", "lion_s", "--dtype", "bfloat16", "--threads", 1, "--eager", "--out", tmp_path)
    try:
        assert here(*call) == 1  # no measurements were made
    finally:
        torch.set_num_threads(threads)
    assert [(job.mixer, job.dtype, job.threads) for job in jobs] == [("lion_s", "bfloat16", 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.slow
def test_half_precision_is_measured(dtype):
    rows, notes = measure(mixer="lion_s", form=("chunk",), passes=("forward",), rounds=1, dtype=dtype)
    assert not notes and column(rows, "dtype") == [dtype, dtype]


@pytest.mark.slow
def test_rows_hold_time_ratio_floor_and_memory():
    rows, _ = measure(chunk_size=(8, 16))
    assert [r["form"] for r in rows if r["pass"] == "both"] == ["sdpa", "full", "chunk", "chunk"]  # rnn: inference only
    assert [r["chunk_size"] for r in rows if r["form"] == "rnn"] == [8, 16]
    for r in rows:
        assert r["batch"] == len(r["rounds"]) == 2
        assert r["ms"] > 0
        assert not r["compiled"]
        assert r["floor_ms"] == max(r["arithmetic_ms"], r["bytes_ms"]) > 0
        assert r["peak_bytes"] is None or r["peak_bytes"] >= 0
        assert r["ratio"] == pytest.approx(1) or r["form"] != "sdpa"
    json.dumps(rows)


def test_rows_say_what_measured_them():
    made = probe.stamp("./run.sh bench ops --out /tmp/there/reports data.path='/home/ü b/some text' 'x: [a, /tmp/b]'")
    assert (made["python"], made["torch"]) == (platform.python_version(), torch.__version__)
    assert re.fullmatch("[0-9a-f]{40}", made["commit"]) and made["changed"] in (True, False)
    assert made["command"] == "./run.sh bench ops --out reports 'data.path=some text' 'x: [a, b]'"


def inputs(mixer, tokens=24, heads=1, dtype=torch.float32):
    return OPERATORS[mixer].inputs(2, 8, heads, tokens, torch.device("cpu"), dtype)


def test_inputs_are_what_the_layer_hands_over():
    tensors, fixed = inputs("rwkv6", heads=2, dtype=torch.bfloat16)
    assert (tensors["q"].dtype, tensors["log_decay"].dtype) == (torch.bfloat16, torch.float32)
    assert tensors["bonus"].shape == (2, 8)
    assert fixed["decay_convention"] == "between"
    assert "beta" not in fixed
    for t in tensors.values():
        assert t.is_leaf and t.is_contiguous() and t.requires_grad
    turned, _ = inputs("retnet")
    assert not turned["angles"].requires_grad  # positions are not learned
    assert inputs("deltanet")[0]["beta"].shape == (1, 2, 24)
    for mixer in ("lightnet", "lightnet_forward"):  # decays come from k
        assert set(inputs(mixer)[0]) == {"q", "k", "v"}
    orders = inputs("lion_s_multiscan", tokens=26)[1]["orders"]
    assert orders.shape == (2, 26)
    assert (orders[:, 0] == 0).all()  # a class token and 5 x 5 patches


@pytest.mark.parametrize("wrong", [1 + 1e-4, math.nan])
@pytest.mark.slow
def test_a_wrong_form_is_not_timed(monkeypatch, wrong):
    def off(*args, **kwargs):
        return linear_attention(*args, **kwargs) * (wrong if kwargs["settings"].form == "chunk" else 1)

    monkeypatch.setattr(operators, "linear_attention", off)
    rows, (note,) = measure(passes=("forward",), rounds=1)
    assert set(column(rows, "form")) == {"sdpa", "full", "rnn"}
    assert note["failed"]
    assert "lion_s chunk 8: off by" in note["text"]


@pytest.mark.slow
def test_what_cannot_be_measured_is_a_line(monkeypatch):
    monkeypatch.setattr(probe, "free_bytes", lambda device: 1000.0)
    rows, (note,) = measure(form=("full", "chunk"), passes=("forward",), rounds=1)
    assert column(rows, "form") == ["sdpa", "chunk"]
    assert "more than is free" in note["text"]
    assert not note["failed"]
    assert note["row"]["length"] == 24
    rows, notes = measure(mixer="lion_lit", form=("full",), passes=("forward",), rounds=1)
    assert len(rows) == 2  # the product without decay has no L x L matrix
    assert not notes


@pytest.mark.slow
def test_the_image_of_the_readme(tmp_path):
    held = read_json(ROOT / "reports/ops.json")
    pytest.importorskip("matplotlib")
    chunks = [row | {"chunk_size": 16} for row in held["rows"] if row["form"] == "chunk" and row["length"] == 1024]
    for rows in (held["rows"] + chunks, [r | {"peak_bytes": None} for r in held["rows"] if r["pass"] == "forward"]):
        (tmp_path / "ops.json").write_text(json.dumps({**held, "rows": rows}))
        report = OpsReport(tmp_path).load()
        for which in lengths.PASSES:
            for lines in lengths.panels(report.widest(), which).values():
                for line in lines:
                    assert len(line.lengths) == len({*line.lengths}) == len(line.values) > 0
        assert tmp_path / "lengths.png" in report.pictures()
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    clocked = clock.ClockReport(ROOT / "reports").load()
    on_gpus = lengths.fastest_on_gpus(clocked.rows.values(), "lion_s")
    assert list(on_gpus) == [197, 1024, 4096]
    assert on_gpus[197] > 3 > 1 > on_gpus[4096]


def chunk_flops(n):
    return flops("chunk", "decay", "forward", n)


def test_floors_by_hand():
    n = Size(batch=1, heads=1, length=8, dim=2, chunk=4)
    square, inside, state = 2 * 8 * 8 * 2, 2 * 8 * 4 * 2, 2 * 8 * 2 * 2
    assert flops("sdpa", "plain", "forward", n) == flops("full", "decay", "forward", n) == 2 * square
    assert flops("sdpa", "plain", "both", n) == 6 * square  # four products backward: dV, dP, dQ, dK
    assert flops("full", "plain", "forward", n) == 2 * state
    carried = 2 * 2 * 2 * 2 * 2  # directions, multiply and add, chunks, D D
    assert chunk_flops(n) == 2 * inside + 4 * state + carried
    assert flops("rnn", "decay", "both", n) == 3 * (2 * inside + 4 * state + carried)
    assert chunk_flops(n._replace(chunk=8)) == 2 * square  # one chunk is the full form
    one = n._replace(directions=1)
    assert chunk_flops(one) == 2 * inside + 2 * state + carried // 2
    assert chunk_flops(n._replace(scans=2)) == 2 * chunk_flops(n)
    assert {flops(form, "one_scan", "forward", n) for form in ("full", "chunk", "rnn")} == {2 * state}
    assert flops("full", "delta", "forward", n) == 3.5 * square
    assert flops("chunk", "delta", "forward", n) == 4.5 * inside + 6 * state
    tensors = [torch.zeros(4, requires_grad=True), torch.zeros(2)]
    assert traffic(tensors, torch.zeros(3), "forward") == 4 * 9
    assert traffic(tensors, torch.zeros(3), "both") == 4 * (9 + 4 + 3)
    held = floor(2_000_000, 5_000_000, RATES)
    assert held == {"arithmetic_ms": 2.0, "bytes_ms": 5.0, "floor_ms": 5.0}


def test_the_papers_flops():
    """Check C.12 for DeiT-S at 224 px: 197 tokens of width 384."""
    softmax, rnn = published_flops(197, 384)
    assert softmax == 197 * (6 * 384**2 + 4 * 197 * 384 + 2 * 197) and rnn == 197 * (16 * 384**2 + 24 * 384 + 7)
    assert published_flops(10_000, 384)[0] > published_flops(10_000, 384)[1], "for long sequences, the RNN takes less"


@pytest.mark.parametrize(
    "first, second, tokens, text",
    [
        ((100, 4.0), (400, 0.25), 200, "200"),
        ((100, 0.5), (1600, 2.0), 400, "400 (slower above)"),
        ((100, 0.5), (400, 0.2), None, "< 100"),
        ((100, 2.0), (4000, 1.5), None, "> 4,000"),
        ((100, 1.0), (200, 0.5), 100, "100"),
    ],
)
def test_crossing(first, second, tokens, text):
    found = crossing([first, second])
    assert found["tokens"] == (tokens and pytest.approx(tokens))
    assert found["text"] == text


def test_crossovers_are_of_a_mixer_and_a_pass():
    (found,) = crossovers([row(400, 0.25), sdpa(), row(100, 4.0)])
    assert (found["mixer"], found["pass"], found["text"]) == ("lion_s", "forward", "200")


def report_of(folder, rows) -> OpsReport:
    report = OpsReport(folder)
    report.add(setting_of(JOB) | RATES, "rates")
    for each in rows:
        report.add(each)
    return report


def test_reports_are_merged_by_key(tmp_path):
    first = report_of(tmp_path, (row(), row(128), sdpa(), row(chunk_size=16)))
    missing = note(JOB, "not today", False, probe.Variant("full"), length=64, **{"pass": "forward"})
    first.add(missing["row"], "notes")
    first.missing(JOB, "its process ended")
    first.write()
    again = OpsReport(tmp_path).load()
    assert len(again.rows) == 4
    assert "not today" in again.markdown()
    for each in (row(ratio=3.0), row(form="full", chunk_size=None), row(dtype="bfloat16")):
        again.add(each)
    again.write()
    held = read_json(tmp_path / "ops.json")
    assert held["schema"] == SCHEMA
    assert len(held["rows"]) == 6
    assert not held["notes"]
    assert [r["ratio"] for r in held["rows"] if again.key_of(r) == again.key_of(row())] == [3.0]
    assert set(column(held["crossovers"], "dtype")) == {"float32", "bfloat16"}


def test_markdown_and_table(tmp_path):
    both = row(**{"pass": "both"}, compiled=False, peak_bytes=None)
    report = report_of(tmp_path, (row(128, 0.5), row(), sdpa(), both))
    text = report.markdown()
    assert_in(
        text,
        "float32, 2 heads of 8, about 48 tokens a batch, or one sequence, without torch.compile",
        "1 GFLOP/s in a large product, 1.0 GB/s in a large copy",
        "| 64 | SDPA |  | 4.00 | 1.00 | 2.00 | 1.00 | 2.0 | 3.00 |  |",
        "| 64 | lion_s | chunk 8 | 8.00 | 2.00 | 2.00 | 1.00 | 4.0 | 3.00 | 1e-07 |",
        "| 64 | lion_s | chunk 8* | 8.00 | 2.00 | 2.00 | 1.00 | 4.0 | - | 1e-07 |",
        "| lion_s | chunk 8 | 91 | > 64 |",
    )
    assert text.index("### Forward\n") < text.index("### Forward and backward") < text.index("### Crossover")
    assert "Crossover with SDPA" in report.terminal()
    assert "chunk 8*" in report.terminal()


def test_rows_that_another_command_has_removed_are_not_printed(tmp_path):
    report = report_of(tmp_path, (row(), row(128)))
    report.write()
    other = OpsReport(tmp_path).load(fresh=True)
    other.add(setting_of(JOB) | RATES, "rates")
    other.add(row(256))
    other.write()
    report.add(row(512))
    report.write()
    assert column(report.new_rows(), "length") == [512]
    assert "512" in report.terminal()


def test_images_need_matplotlib(tmp_path, monkeypatch):
    rows = (row(128, 0.5), row(), sdpa(), sdpa(length=128), row(form="full", chunk_size=None))
    report = report_of(tmp_path, rows)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        assert report.pictures() == [None, None]
        assert not (tmp_path / "ops.png").exists()
        assert "no plot, because matplotlib is missing" in report.files_and(None)
    pytest.importorskip("matplotlib")
    assert report.pictures() == [tmp_path / "ops.png", tmp_path / "lengths.png"]
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    call = ("bench", "ops", "--eager", "--out")
    assert "rnn' is timed in inference only" in refuse(capsys, "bench", "ops", "--form", "rnn", "--pass", "both")
    assert "unknown mixer 'lion', did you mean 'lion_" in refuse(capsys, "bench", "ops", "--mixer", "lion")
    out.write_text("")
    assert "is not a folder" in refuse(capsys, *call, out / "deeper")
    out.unlink()
    out.mkdir()
    with monkeypatch.context() as patched:  # this process may be root's, who can write anywhere
        patched.setattr("os.access", lambda place, mode: place != out)
        assert f"{out} cannot be written to" in refuse(capsys, *call, out / "deeper")
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 1, "rows": [{}], "notes": [], "rates": []}'):
        (out / "ops.json").write_text(text)
        assert "not a report of this command" in refuse(capsys, *call, out)
    (out / "ops.json").write_text('{"schema": 0}')
    refused("schema 0", OpsReport(out).load)


SMALL = "--eager --length 24 --tokens 48 --heads 2 --dim 8 --chunk-size 8 --rounds".split()


@pytest.mark.slow
def test_the_command_in_pieces(tmp_path, in_this_process, monkeypatch, capsys):
    monkeypatch.setattr(ops, "measure_rates", lambda *args: RATES)
    for mixer in ("lion_d", "lion_lit"):
        assert ops.main([*SMALL, "1", "--form", "full", "chunk", "--mixer", mixer, "--out", str(tmp_path)]) == 0
        out, err = capsys.readouterr()
        assert "1 GFLOP/s" in out
        assert "Crossover" in out
        assert f"[1/1] {mixer}" in err
    rows = read_json(tmp_path / "ops.json")["rows"]
    assert set(column(rows, "mixer")) == {"lion_d", "lion_lit", "sdpa"}
    assert len(rows) == 2 * (1 + 2 * 2)
    assert "| lion_d | chunk 8* |" in (tmp_path / "ops.md").read_text()
    monkeypatch.setattr(engine, "in_a_process", lambda measure, job, receive: "died")
    assert ops.main([*SMALL, "2", "--out", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()


@pytest.fixture
def ctrl_c():
    """Enable Ctrl-C: a background job of a shell, e.g. in a CI, starts with Ctrl-C ignored, and children inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def sleepy(job, send):
    time.sleep(60)


def test_ctrl_c_while_a_process_starts_is_not_lost(ctrl_c, monkeypatch):
    kind, started = multiprocessing.get_context("spawn").Process, []
    start = kind.start

    def start_and_interrupt(self):
        start(self)
        started.append(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(kind, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        processes.in_a_process(sleepy, None, print)
    started[0].join(10)
    assert started[0].exitcode == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.process
def test_sigterm_keeps_what_was_measured(tmp_path):
    run = Forked("bench", "ops", *SMALL, "1000000", "--seconds", "1", "--mixer", "all", "--out", tmp_path)
    end = time.monotonic() + 300
    while not (tmp_path / "ops.json").exists() and time.monotonic() < end and run.poll() is None:
        time.sleep(0.2)
    os.kill(run.pid, signal.SIGTERM)
    done = run.wait(60)
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted\n")
    assert "Traceback" not in done.stderr
    assert "lion_lit" in done.stdout
    assert read_json(tmp_path / "ops.json")["rows"]


def die(job, send):
    os._exit(3)


def fail(job, send):
    raise RuntimeError("no such thing\nand more")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("work, said", [(die, "its process ended with exit code 3"), (fail, "no such thing")])
def test_a_process_that_dies_or_raises_is_one_line(work, said, monkeypatch):
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda kind: CONTEXT)
    assert processes.in_a_process(work, JOB, print) == said
