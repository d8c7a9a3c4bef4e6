"""The run directory's names, records and checkpoints; lines and units; signals."""

import io
import json
import os
import signal

import pytest

from run.errors import Interrupted
from run.progress import Interval, Screen, clock, count, size
from run.rundir import RunDir, next_numbered, read_jsonl
from run.signals import StopRequest


def make(run: RunDir, *names: str) -> None:
    for name in names:
        (run.path / "checkpoints" / name).mkdir(parents=True)


def test_checkpoints_are_in_the_order_of_time(tmp_path):
    run = RunDir(tmp_path)
    make(run, "step-10", "step-9", "step-9.micro-12", "step-9.micro-3", "other", ".step-11.tmp")
    assert [p.name for p in run.checkpoints()] == ["step-9", "step-9.micro-3", "step-9.micro-12", "step-10"]
    run.prune(None)
    assert len(run.checkpoints()) == 4
    run.prune(1)
    assert [p.name for p in run.checkpoints()] == ["step-10"] and (tmp_path / "checkpoints" / "other").is_dir()


def test_records_are_cut_back(tmp_path):
    run = RunDir(tmp_path)
    run.append(run.metrics, {"step": 1, "text": "é\u2028"})
    sizes = run.sizes()
    run.append(run.metrics, {"step": 2})
    run.append(run.samples, {"step": 2})
    run.rewind(sizes)
    assert [json.loads(line) for line in run.metrics.read_text().split("\n")[:-1]] == [{"step": 1, "text": "é\u2028"}]
    assert run.samples.read_text() == ""


def test_a_record_that_is_no_json_is_refused(tmp_path):
    with pytest.raises(ValueError):
        RunDir(tmp_path).append(tmp_path / "metrics.jsonl", {"loss": float("nan")})


def test_a_line_cut_off_by_a_crash_is_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n{"st')
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 3}]
    assert RunDir(tmp_path).progress() == "step 3"


def test_numbered_folders(tmp_path):
    assert [next_numbered(tmp_path / "runs", "q").name for _ in range(3)] == ["q-1", "q-2", "q-3"]


def test_units():
    assert [clock(s) for s in (5, 65, 3661, float("nan"))] == ["0:05", "1:05", "1:01:01", "?"]
    assert [size(b) for b in (1.5e6, 25e6, 1.1e9)] == ["1.5 MB", "25 MB", "1.1 GB"]
    assert [count(n) for n in (12, 4.9e6, 134.5e6, 2e9, 1500)] == ["12", "4.9M", "134.5M", "2.0B", "1.5k"]


def test_interval_weighs_by_trained_tokens():
    part = Interval()
    part.add(2.0, 1, 5, 0.5)
    part.add(1.0, 3, 5, 0.5)
    assert part.loss == 0.75 and Interval(**json.loads(json.dumps(part.to_dict()))) == part


def test_a_bar_only_on_a_terminal():
    plain = Screen(10, stream=io.StringIO())
    plain.advance(1)
    plain.line("hello")
    assert plain.bar is None and plain.stream.getvalue() == "hello\n" and plain.eta_s() >= 0

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Screen(10, stream=Terminal())
    terminal.advance(3)
    terminal.line("hello")
    terminal.close()
    assert "hello" in terminal.stream.getvalue() and "3/10" in terminal.stream.getvalue() and terminal.bar is None


def test_a_signal_before_training_stops_at_once_and_during_it_is_remembered():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(), pytest.raises(Interrupted) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143
    with StopRequest() as stop:
        stop.training = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stop and stop.signum == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is before
