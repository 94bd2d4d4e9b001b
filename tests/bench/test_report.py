"""Tables, page and pictures of results: ratios by hand, what was contended or failed is marked."""

import pytest

from benchmarks.bench.growth import Cliff, Point
from benchmarks.bench.plot import plot_growth, plot_profile, plot_results
from benchmarks.bench.profile import StepProfile
from benchmarks.bench.report import page, tables, text
from hibachi.errors import ConfigError

from .test_figures import run

PNG = b"\x89PNG"


def document(*runs, **more):
    machine = {"system": "Linux x86_64", "processor": "Fast One", "cores": 2, "memory_gib": 24.0, "python": "3.11.9"}
    return {"date": "2026-03-04T05:06:07+00:00", "hibachi": "0.1.0", "machine": machine, "runs": list(runs), **more}


def offline():
    return document(
        run(tokens_per_second=120.0),
        run(engine="vllm", tokens_per_second=100.0),
        run(engine="slow", tokens_per_second=50.0, contended=True, complete=False),
        run(engine="gone") | {"failed": "why"},
        bounds={"W1": 240.0},
    )


def online():
    some = {"rate": 2.0, "goodput": 1.5, "slo_share": 0.75}
    return document(
        run(ttft={"p50": 0.1, "p99": 0.3}, itl={"p50": 0.01, "p99": 0.04}, **some),
        run(engine="vllm", ttft={"p50": 0.1, "p99": 0.2}, itl={"p50": 0.01, "p99": 0.08}, **some),
    )


def column(table, name):
    _, head, rows = table
    return {row[1]: row[head.index(name)] for row in rows}


def test_ratios_are_to_the_best_peer():
    [table] = tables([offline()])
    assert column(table, "to best peer")["hibachi (numpy)"] == "1.20x"
    assert column(table, "to best peer")["slow"] == "0.50x"
    assert column(table, "of bound")["hibachi (numpy)"] == "50%"
    assert column(table, "start s (+ import)")["vllm"] == "1.50 (+ 0.50)"


def test_without_a_peer_there_is_no_ratio():
    [table] = tables([document(run(), run(engine="vllm", dtype="q8_0"))])
    assert column(table, "to best peer")["hibachi (numpy)"] == ""
    [table] = tables([document(run())])
    assert column(table, "to best peer") == {"hibachi (numpy)": ""} == column(table, "of bound")


def test_latencies_are_compared_at_the_same_rate():
    [table] = tables([online()])
    _, head, rows = table
    ours = dict(zip(head, rows[0], strict=True))
    assert ours["work"] == "W1 2/s" and ours["goodput/s"] == "1.50" and ours["SLO kept"] == "75%"
    places = [i for i, name in enumerate(head) if name == "p99 to best"]
    assert [rows[0][i] for i in places] == ["1.50x", "0.50x"]


def test_ceilings_of_a_busy_machine_bound_nothing():
    [table] = tables([offline() | {"ceilings": {"contended": True}}])
    assert column(table, "of bound")["hibachi (numpy)"] == ""


def test_several_documents_are_one_table():
    [table] = tables([document(run(tokens_per_second=120.0)), document(run(engine="vllm", tokens_per_second=60.0))])
    assert column(table, "to best peer")["hibachi (numpy)"] == "2.00x"


def test_what_is_wrong_is_marked():
    shown = text([offline()])
    assert "1, all contended" in shown and "(incomplete)" in shown and "failed: why" in shown
    some = document(run(), run(contended=True))
    assert "2, 1 contended and left out" in text([some])


def test_the_page_names_machine_versions_and_date():
    limits = {"bandwidth": 7e10, "products": {"64": 6.5e11}, "dtype": "bfloat16", "contended": True}
    shown = page([offline() | {"ceilings": limits}])
    assert "2026-03-04: 2 cores of Fast One" in shown and "24 GiB" in shown and "Python 3.11.9" in shown
    assert "vllm 1;" in shown and "Ceilings (contended): memory 70 GB/s" in shown and "0.65 at 64 rows" in shown
    assert "| W1 | hibachi (numpy) | float32 | 120.0 | 1.20x |  |" in shown
    widths = {line.count("|") for line in shown.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_pictures(tmp_path):
    plot_results([offline(), online()], tmp_path / "a.png")
    steps = [StepProfile(4, 64, {"linear": 0.02, "rest": 0.001})] + [
        StepProfile(4, 4, {"linear": 0.002, "sample": 0.001})
    ] * 20
    plot_profile(steps, "W1", tmp_path / "b.png")
    points = [Point(r, 128, 0.01) for r in (1, 2)] + [Point(1, 256, 0.011)]
    plot_growth(points, [Cliff("rows", points[0], points[1], 1.3)], "m", tmp_path / "c.png")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("a.png", "b.png", "c.png"))
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        plot_results([offline()], tmp_path / "a.pdf")


def test_int8_is_called_so_and_compared_with_eight_bits():
    about = {"kernels": "native int8", "quantization": "int8"}
    some = document(
        run(dtype="bfloat16", tokens_per_second=100.0),
        run(dtype="bfloat16", engine="hibachi (torch, native int8)", about=about, tokens_per_second=150.0),
        run(dtype="q8_0", engine="llamacpp", tokens_per_second=120.0),
        ceilings={"dtype": "int8", "computes": "bfloat16", "contended": False},
        bounds={"W1": 300.0},
    )
    [table] = tables([some])
    assert column(table, "dtype")["hibachi (torch, native int8)"] == "int8"
    assert column(table, "to best peer")["hibachi (torch, native int8)"] == "1.25x"
    # The bound is that of int8, and of this model.
    assert column(table, "of bound") == {
        "hibachi (numpy)": "",
        "hibachi (torch, native int8)": "50%",
        "llamacpp": "40%",
    }
    other = document(run(model="other", tokens_per_second=100.0))
    assert [column(t, "of bound")["hibachi (numpy)"] for t in tables([some, other])] == ["", ""]
