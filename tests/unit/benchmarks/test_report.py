"""What the benchmark of the refit writes."""

import io
import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
import report as report_module
from example_report import make_report
from picture import bucket_name
from rich.console import Console


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example report was written."""
    path = tmp_path_factory.mktemp("report") / "new"
    report_module.write_report(make_report(), path)
    return path


def test_the_report_is_written_as_it_is(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["refit.json", "refit.png", "trace.json"]
    assert json.loads((folder / "refit.json").read_text()) == make_report()


def test_the_picture_is_not_blank(folder: Path) -> None:
    picture = matplotlib.image.imread(folder / "refit.png")
    assert picture.shape[:2] == (900, 2040)
    assert picture[..., :3].std() > 0.1


def test_the_trace_has_every_span_in_microseconds_under_named_threads(folder: Path) -> None:
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    example = make_report()
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert processes == {1: "this path", 2: "usual path"}
    for pid, key in ((1, "timeline"), (2, "usual_timeline")):
        drawn = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        assert [(threads[pid, e["tid"]], e["args"]["bucket"], e["ts"], e["ts"] + e["dur"]) for e in drawn] == [
            (
                span["lane"],
                span["bucket"],
                pytest.approx(1e6 * span["start_s"], abs=1),
                pytest.approx(1e6 * span["end_s"], abs=1),
            )
            for lane in ("gather", "broadcast", "load")
            for span in example[key]
            if span["lane"] == lane
        ]


def test_the_table_names_machine_figures_ratios_and_proof(tmp_path: Path) -> None:
    lines = shown(make_report(), tmp_path)
    assert lines[0] == "135m: 0.27 GB, 272 tensors; 2 trainer ranks to 1 engine; gloo, median of 5"
    assert lines[1] == "2 cores, A CPU; torch 2.14.1; transformers 5.19.0; sglang 0.5.23"
    rows = {line.split("  ")[0].strip(): line.split() for line in (text.strip() for text in lines) if line}
    assert rows["raw broadcast"][2:] == ["0.140", "0.130", "to", "0.150", "1.92"]
    usual = ["1.260", "1.200", "to", "1.310", "0.21", "0.620", "0.350", "0.260", "0.030"]
    assert rows["usual path"][2:] == usual
    assert rows["this path, 64 MiB"][4:10] == ["5", "0.470", "0.450", "to", "0.520", "0.57"]
    assert rows["usual over refit"][3:] == ["2.68"]
    assert "proof: 182 of 182 engine checksums equal, 182 changed" in lines


@pytest.mark.parametrize(
    ("gpus", "cores", "name"),
    [
        (["NVIDIA H200"], 16, "one H200 (141 GB), 16 cores"),
        (["NVIDIA H200", "NVIDIA H200"], 32, "two H200 (141 GB), 32 cores"),
        (["NVIDIA A", "NVIDIA B", "NVIDIA B"], 1, "one A, two B, 1 core"),
        ([], 2, "2 cores"),
    ],
)
def test_a_machine_is_called_what_the_documentation_calls_it(gpus: list[str], cores: int, name: str) -> None:
    assert report_module.machine_name(gpus, cores) == name


def test_memory_that_was_measured_is_shown_with_its_bound(tmp_path: Path) -> None:
    example = make_report()
    example["refit"][1] |= {"extra_bytes": [140_000_000, 20_000_000], "bound_bytes": [190_836_736, 67_108_864]}
    lines = [line for line in shown(example, tmp_path) if line.startswith("memory")]
    assert lines == ["memory, 64 MiB buckets: rank 0 0.140 of 0.191 GB, rank 1 0.020 of 0.067 GB allowed"]


def test_the_machine_is_described_for_the_report() -> None:
    machine = report_module.describe_machine()
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert all(isinstance(name, str) for name in machine["gpus"])
    assert machine["name"].endswith(f"{machine['cores']} core" + "s" * (machine["cores"] > 1))


def test_every_event_of_a_trace_is_one_that_perfetto_reads() -> None:
    """Chrome's trace event format: complete events that nest within their thread, and names as metadata."""
    example = make_report()
    # The second bucket arrives while the engine still loads the first, and both are answered out of order.
    example["timeline"] += [
        {"lane": "load", "bucket": 5, "start_s": 1.0, "end_s": 1.3},
        {"lane": "load", "bucket": 6, "start_s": 1.1000004, "end_s": 1.4},
        {"lane": "load", "bucket": 7, "start_s": 1.2, "end_s": 1.35},
    ]
    trace = json.loads(json.dumps(report_module.make_trace(example), allow_nan=False))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    ends: dict[tuple[int, int], int] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert event["ph"] == "X"
        assert event["name"]
        assert isinstance(event["cat"], str)
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert event["dur"] >= 0
        thread = (event["pid"], event["tid"])
        assert event["ts"] >= ends.get(thread, 0)
        ends[thread] = event["ts"] + event["dur"]
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == ends.keys()
    loads = [(e["ts"], e["dur"]) for e in trace["traceEvents"] if e["name"] in ("load 5", "load 6", "load 7")]
    assert loads[:3] == [(1_000_000, 300_000), (1_300_000, 100_000), (1_400_000, 0)]


@pytest.mark.parametrize(("mebibytes", "name"), [(16, "16 MiB"), (1024, "1 GiB"), (1536, "1.5 GiB")])
def test_a_bucket_is_named_by_its_size(mebibytes: int, name: str) -> None:
    assert bucket_name(mebibytes * 2**20) == name


def shown(example: dict[str, Any], folder: Path) -> list[str]:
    stream = io.StringIO()
    report_module.show(example, folder, Console(file=stream, width=report_module.TABLE_WIDTH, highlight=False))
    return stream.getvalue().splitlines()
