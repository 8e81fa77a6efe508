"""What `watch`, `ab` and `export` make of what doors say; here processes are plain answers."""

import csv
import importlib.util
import io
import json
import re
from pathlib import Path

import click
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from trtllm_pp_progress.door.place import DoorError
from trtllm_pp_progress.telemetry import DRIVER, SENDS, StatusCollector
from trtllm_pp_progress.tools.watch import ab, export, live, readings, trace
from trtllm_pp_progress.tools.watch.ab import Phase
from trtllm_pp_progress.tools.watch.readings import Reading, compare


def table(posts=0, drives=0, parked=None, pending=(), **counters):
    """Return what a process says of a table."""
    waiting = [{"slot": slot, "age_s": age} for slot, age in enumerate(pending)]
    counted = dict.fromkeys(SENDS, 0) | {"posts": posts, "drives": drives} | counters
    return counted | {"pending": waiting, "parked_histogram": {str(b): n for b, n in (parked or {}).items()}}


def executor(number=0, rank=0, action="patch", off=False, ticks=0, era="E2", abandoned=(), **tables):
    """Return what a process says of an executor."""
    return {
        "number": number,
        "rank": rank,
        "off": off,
        "verdict": {"era": era, "action": action},
        "driver": {"runs": "native", "state": "asleep", **dict.fromkeys(DRIVER, 0), "ticks": ticks},
        "tables": tables,
        "abandoned": list(abandoned),
    }


def process(*executors, era="E2"):
    """Return what a process says."""
    return {"tensorrt_llm": {"installed": [{"target": "PyExecutor", "era": era, "executors": list(executors)}]}}


def reading(at, problems=(), **said):
    """Return what processes said at a time: p7={...} for pid 7."""
    return Reading("host", at, {int(name[1:]): one for name, one in said.items()}, list(problems))


def test_a_window_is_what_happened_in_it():
    """Rates over its seconds, parked times of its own sends alone, totals of all tables."""
    before = executor(ticks=10, a=table(100, 50, {0: 7, 80: 1000}), b=table(10, stalls=1))
    now = executor(ticks=30, a=table(140, 70, {0: 7, 80: 1000, 104: 3}, [0.5]), b=table(20, stalls=3, pending=[0.1]))
    (ring,) = compare(reading(5.0, p7=process(before)), reading(7.0, p7=process(now)))
    assert (ring.host, ring.pid, ring.rank, ring.executor, ring.era, ring.mode) == ("host", 7, 0, 0, "E2", "native")
    assert (ring.sends_per_s, ring.drives_per_s, ring.native_per_s) == (25.0, 10.0, 10.0)
    assert ring.parked_ms_p50 == ring.parked_ms_max == pytest.approx(8.192, rel=0.09)
    assert (ring.pending, ring.oldest_s, ring.stalls, ring.abandoned) == (2, 0.5, 2, 0)
    assert (ring.driver, ring.off, ring.may_be_off) == ("asleep", False, True)


def test_a_process_that_came_in_between_has_no_rate_yet():
    """Since its start nobody knows how long ago that was; without a first reading that is so of all."""
    now = reading(7.0, p7=process(executor(a=table(40))), p8=process(executor(rank=1, a=table(60))))
    seen = {ring.pid: ring.sends_per_s for ring in compare(reading(5.0, p7=process(executor(a=table(20)))), now)}
    assert seen == {7: 10.0, 8: 0.0}
    assert [ring.sends_per_s for ring in compare(None, now)] == [0.0, 0.0]


def test_an_executor_that_came_in_between_begins_at_zero():
    """Its number is nobody else's, so no other's counters are taken off."""
    before = reading(0.0, p7=process(executor(number=1, a=table(1000))))
    (ring,) = compare(before, reading(2.0, p7=process(executor(number=2, a=table(30)))))
    assert ring.sends_per_s == 15.0


def test_rings_come_by_rank():
    """Whoever knows no rank comes last; who has ended, or has no executor, has no line."""
    said = {f"p{pid}": process(executor(rank=rank)) for pid, rank in ((5, None), (6, 1), (7, 0))}
    rings = compare(reading(0.0, p4=process(executor(rank=9)), **said), reading(1.0, p9={"vllm": {}}, **said))
    assert [ring.rank for ring in rings] == [0, 1, None]


@pytest.fixture
def doors(monkeypatch):
    """Return the processes that have doors, by pid, what they say, and what they were ordered."""

    class Doors:
        def __init__(self):
            self.said = {7: process(executor(a=table(1))), 8: process(executor(rank=1, a=table(1)))}
            self.orders, self.broken = [], {}

        def ask(self, path, **request):
            """Answer, and go on."""
            if path in self.broken:
                raise self.broken[path]
            order = request.get("order")
            if order in ("on", "off"):
                self.orders.append((path, order))
                return {"tensorrt_llm": {"turned": 1, "refused": []}}
            for one in self.said[path]["tensorrt_llm"]["installed"][0]["executors"]:
                one["tables"]["a"]["posts"] += 10
                one["off"] = [done for pid, done in self.orders if pid == path][-1:] == ["off"]
            return json.loads(json.dumps(self.said[path]))

        def last(self):
            """Return what each process was ordered last."""
            return dict(self.orders)

    one = Doors()
    monkeypatch.setattr(readings, "doors", lambda: {pid: pid for pid in one.said})
    monkeypatch.setattr(ab, "doors", lambda: {pid: pid for pid in one.said})
    monkeypatch.setattr(readings, "ask", one.ask)
    return one


def test_all_doors_are_asked_or_those_that_were_named(doors):
    """One that does not answer is a problem, not the end."""
    assert sorted(readings.read().said) == [7, 8]
    assert sorted(readings.read([8]).said) == [8]
    doors.broken[7] = DoorError("7-1.sock does not answer: timed out")
    seen = readings.read()
    assert (sorted(seen.said), seen.problems) == ([8], ["7-1.sock does not answer: timed out"])


def test_a_process_without_a_door_is_named(doors):
    """With those that have one."""
    with pytest.raises(DoorError, match="process 9 has no door: those that have one are 7, 8"):
        readings.read([9])


# ab


@pytest.fixture
def time(monkeypatch):
    """Return the hours of a clock that only sleeps move; `after` is called then."""

    class Time:
        now, after = 0.0, staticmethod(lambda: None)

        def monotonic(self):
            """Return the time."""
            return self.now

        def sleep(self, seconds):
            """Let time pass."""
            self.now += seconds
            self.after()

    one = Time()
    monkeypatch.setattr(ab, "time", one)
    monkeypatch.setattr(readings, "time", one)
    return one


def test_driving_goes_off_and_on_in_turns_and_ends_on(doors, time):
    """One value a period; parked times are known while it is on."""
    said = []
    phases = ab.ab([], 6.0, 1.0, said.append)
    assert said == ["driving goes off and on in turns, 1 s each, for 6 s, in 2 processes"]
    assert [order for pid, order in doors.orders if pid == 7] == ["off", "on", "off", "on", "off", "on", "on"]
    assert doors.last() == {7: "on", 8: "on"}
    assert phases["off"].sends_per_s == phases["on"].sends_per_s == [10.0] * 3
    assert phases["off"].parked_ms_p50 == phases["off"].parked_ms_p99 == []
    assert phases["on"].parked_ms_p50 == [0.0] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("odd")])
@pytest.mark.parametrize("sleeps", [1, 2, 5, 6])
def test_whatever_raises_it_ends_with_driving_on(error, sleeps, doors, time):
    """In any phase."""
    left = [sleeps]

    def after():
        left[0] -= 1
        if not left[0]:
            raise error

    time.after = after
    with pytest.raises(type(error)):
        ab.ab([], 60.0, 1.0, str)
    assert "off" in [order for _, order in doors.orders]
    assert doors.last() == {7: "on", 8: "on"}


def test_a_process_that_ends_meanwhile_does_not_keep_the_others_off(doors, time):
    """Also where it was named: the end is for those who are left."""
    time.after = lambda: doors.said.pop(7, None)
    with pytest.raises(DoorError, match="process 7 has no door"):
        ab.ab([7, 8], 60.0, 1.0, str)
    assert doors.last()[8] == "on"


def test_those_named_are_gone_and_nobody_else_is_ordered(doors, time):
    """An empty list would be everybody."""
    time.after = lambda: doors.said.pop(7, None)
    with pytest.raises(DoorError):
        ab.ab([7], 60.0, 1.0, str)
    assert {pid for pid, _ in doors.orders} == {7}


def test_where_off_is_not_safe_nothing_is_turned_off(doors, time):
    """One such executor is enough."""
    doors.said[8] = process(executor(rank=1, action="partial", era="G", a=table(1)))
    with pytest.raises(click.ClickException, match="rank 1, process 8, era G: a drain relies on"):
        ab.ab([], 60.0, 1.0, str)
    assert doors.orders == []


def test_a_process_that_refuses_ends_it_with_driving_on(doors, time, monkeypatch):
    """What became unsafe meanwhile is not seen beforehand."""
    ask = doors.ask

    def refuse(path, **request):
        answer = ask(path, **request)
        if path == 8 and request.get("order") == "off":
            return {"tensorrt_llm": {"turned": 0, "refused": ["era G, partial: a drain"]}}
        return answer

    monkeypatch.setattr(readings, "ask", refuse)
    with pytest.raises(click.ClickException, match="era G"):
        ab.ab([], 60.0, 1.0, str)
    assert doors.last() == {7: "on", 8: "on"}


def test_with_nobody_there_it_says_so(doors, time):
    """And orders nobody."""
    doors.said.clear()
    with pytest.raises(click.ClickException, match="no patched process"):
        ab.ab([], 60.0, 1.0, str)


def test_what_both_kinds_saw_is_told_with_its_spread():
    """And what driving is worth; what is not known is not called 0."""
    out = io.StringIO()
    phases = {"off": Phase([10, 20, 30]), "on": Phase([50, 60, 40], [1, 2, 3], [4, 4, 4])}
    ab.print_phases(phases, Console(file=out, width=120))
    text = out.getvalue()
    assert "20.00 (10.00 to 30.00)" in text
    assert "2.00 (1.00 to 3.00)" in text
    assert text.count("not known") == 2
    assert "sends 2.50 times as often" in text


# The forms of watch


def shown(form):
    """Return what one window looks like."""
    now = reading(1.0, ["8-1.sock does not answer"], p7=process(executor(a=table(5, pending=[0.25]))))
    out = io.StringIO()
    live._print(compare(reading(0.0, p7=process(executor(a=table()))), now), now, form, out, 1.0)
    return out.getvalue()


def test_json_has_the_window_and_every_ring():
    """A line a window."""
    found = json.loads(shown("json"))
    assert found["schema"] == live.SCHEMA
    assert (found["host"], found["window_s"], found["problems"]) == ("host", 1.0, ["8-1.sock does not answer"])
    (ring,) = found["rings"]
    assert (ring["rank"], ring["pid"], ring["sends_per_s"], ring["oldest_s"]) == (0, 7, 5.0, 0.25)


def test_csv_has_a_row_for_every_ring():
    """Under the names that JSON has."""
    (row,) = csv.DictReader(io.StringIO(shown("csv")))
    assert (row["rank"], row["pid"], row["sends_per_s"]) == ("0", "7", "5.0")


def test_the_table_names_every_column_and_every_problem():
    """In plain characters where there is no terminal."""
    text = shown("table")
    assert all(title in text for title in live.COLUMNS.values())
    assert "8-1.sock does not answer" in text
    assert "\x1b" not in text


def test_a_table_says_who_is_off_and_who_serves_vllm():
    """A line each."""
    worker = {"role": "receiver", "active": True, "steps": 41, "rank": 3}
    now = reading(1.0, p7=process(executor(off=True, a=table())), p9={"vllm": {"workers": [worker]}})
    out = io.StringIO()
    live._print(compare(None, now), now, "table", out, 0.0)
    assert "OFF" in out.getvalue()
    assert "receiver, at work, 41 steps" in out.getvalue()


def test_with_nobody_there_the_table_says_what_to_look_at():
    """And the exit code is 1."""
    out = io.StringIO()
    live._print([], reading(1.0), "table", out, 0.0)
    assert "no patched process" in " ".join(out.getvalue().split())


# export and trace


def test_every_process_is_exported_with_its_own_labels(doors):
    """By a real registry: pid, rank, era, executor and table, and the same label sets however often it is scraped."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(export.processes))

    def scrape():
        rows = generate_latest(registry).decode().splitlines()
        return dict(row.rsplit(" ", 1) for row in rows if row.startswith("trtllm_pp_progress_"))

    first, second = scrape(), scrape()
    assert first.keys() == second.keys()
    name = 'trtllm_pp_progress_posts_total{era="E2",executor="0",pid="7",rank="0",table="a"}'
    assert float(second[name]) == float(first[name]) + 10
    assert name.replace('pid="7",rank="0"', 'pid="8",rank="1"') in first
    del doors.said[7]
    assert name not in scrape()


def test_label_sets_are_stable_over_the_lives_of_executors(doors):
    """A later executor has a number of its own, and brings no label that the first had not."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(export.processes))
    names = [{frozenset(sample.labels) for family in registry.collect() for sample in family.samples}]
    doors.said[7] = process(executor(number=4, a=table(1)))
    names.append({frozenset(sample.labels) for family in registry.collect() for sample in family.samples})
    of_executor = frozenset(["pid", "rank", "era", "executor"])
    assert names[0] == names[1] == {frozenset(["version"]), of_executor, of_executor | {"table"}}


def test_a_trace_has_counters_by_process():
    """As the Trace Event Format wants them: a name for each process, and a counter with a time in microseconds."""
    rings = compare(reading(0.0, p7=process(executor(a=table()))), reading(1.0, p7=process(executor(a=table(5)))))
    events = trace.events(rings, 1.5)
    assert {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "rank 0, era E2"}} in events
    assert {"ph": "C", "name": "sends/s", "pid": 7, "ts": 1.5e6, "args": {"value": 5.0}} in events
    assert {event["name"] for event in events if event["ph"] == "C"} == set(trace.COUNTERS)


def test_a_recorded_trace_is_one_json_document(doors, monkeypatch, tmp_path):
    """With what every reading saw."""
    monkeypatch.setattr(trace, "PERIOD_S", 0.001)
    assert trace.record([], 0.02, tmp_path / "trace.json") == 0
    found = json.loads((tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in found["traceEvents"]} == {7, 8}
    times = [event["ts"] for event in found["traceEvents"] if event["ph"] == "C"]
    assert times == sorted(times)


PICTURE = Path(__file__).parents[3] / "ci" / "picture.py"


def words(svg):
    """Return what can be read in a picture."""
    return " ".join(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg)).replace("&#160;", " ").split())


@pytest.mark.skipif(not hasattr(Console, "export_svg"), reason="the picture is drawn by a newer rich, watch needs none")
def test_the_picture_of_readme_is_what_watch_shows():
    """Drawn anew from the recorded readings it says the same: `python ci/picture.py` draws it."""
    spec = importlib.util.spec_from_file_location("picture", PICTURE)
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    drawn = words(picture.draw())
    assert drawn == words((PICTURE.parents[1] / "docs" / "watch.svg").read_text())
    assert all(title in drawn for title in live.COLUMNS.values())
