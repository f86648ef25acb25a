"""Predictions are true: the numbers of a network come out of a measurement as they went in."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import relaxmpi as rx
from relaxmpi import checks_network
from relaxmpi.primitives.simulation import prices

ROOT = Path(__file__).parent.parent
CODECS = [rx.Quantizer(bits=8), rx.ErrorFeedback(rx.OneBit())]
WORK = {
    "reduce": (2e-6, 3e-10),
    f"{rx.Quantizer(bits=8)}.encode": (9e-6, 6e-10),
    f"{rx.Quantizer(bits=8)}.encode_difference": (9e-6, 7e-10),
    f"{rx.Quantizer(bits=8)}.decode": (8e-6, 5e-10),
    f"{rx.Quantizer(bits=8)}.decode_add": (7e-6, 4e-10),
    f"{rx.Quantizer(bits=8)}.decode_follow": (8e-6, 5e-10),
    f"{rx.OneBit()}.encode_feedback": (6e-6, 3e-10),
    f"{rx.OneBit()}.decode": (5e-6, 2e-10),
    f"{rx.OneBit()}.decode_add": (4e-6, 1e-10),
    f"{rx.OneBit()}.decode_follow": (5e-6, 2e-10),
}
NETWORKS = [
    rx.Network(
        latency=latency,
        bandwidth=bandwidth,
        local_latency=2e-6,
        local_bandwidth=4e8,
        send_cost=7e-6,
        receive_cost=4e-6,
        send_byte=2e-10,
        receive_byte=9e-10,
        batch_delay=5e-5,
        agree_cost=9e-6,
        call_cost=6e-5,
        work=WORK,
    )
    for latency, bandwidth in ((2e-5, 1.25e8), (1e-4, 1.25e8), (5e-3, 1.25e7))
]
FITTED = (
    "latency",
    "bandwidth",
    "send_cost",
    "receive_cost",
    "send_byte",
    "receive_byte",
    "batch_delay",
    "agree_cost",
    "call_cost",
)
LOCAL = ("local_latency", "local_bandwidth")


@pytest.fixture(scope="module")
def prediction():
    """The benchmark, as a module."""
    spec = importlib.util.spec_from_file_location("prediction", ROOT / "benchmarks/prediction.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["prediction"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["prediction"]


@pytest.fixture
def few(monkeypatch):
    """Virtual prices are the same for all numbers, so that fewer are enough."""
    monkeypatch.setattr(prices, "_MANY", 2**14)
    monkeypatch.setattr(prices, "_CACHED", 2**16)


def fit(n, network, codecs=(), **others):
    def program():
        with rx.Comm.world() as comm:
            return rx.Network.from_measurement(comm, codecs)

    world = rx.SimulatedWorld(n, network=network, **others)
    found = world.run(program)
    assert all(other == found[0] for other in found)
    return found[0], max(world.clocks)


def close(found, true, names):
    for name in names:
        slack = 2e-8 if "byte" not in name else 2e-12
        true_value = getattr(true, name)
        assert getattr(found, name) == pytest.approx(true_value, rel=0.02, abs=slack), name


@pytest.mark.parametrize(
    ("n", "per_node", "network"),
    [
        (2, 1, NETWORKS[0]),
        (2, 1, NETWORKS[1]),
        (3, 1, NETWORKS[2]),
        (4, 2, NETWORKS[1]),
        (4, 2, NETWORKS[2]),
        pytest.param(7, 3, NETWORKS[0], marks=pytest.mark.long),
    ],
)
def test_what_went_in_comes_out(few, network, n, per_node):
    found, seconds = fit(n, network, ranks_per_node=per_node)
    close(found, network, FITTED)
    if per_node > 1:
        close(found, network, LOCAL)
    assert seconds < 8


def test_one_node_gives_the_local_values_for_both(few):
    network = NETWORKS[0]
    found, _ = fit(4, network, ranks_per_node=4)
    close(found, network, LOCAL)
    assert found.send_byte == found.receive_byte == found.batch_delay == 0
    assert (found.latency, found.bandwidth) == (found.local_latency, found.local_bandwidth)


def test_headers_become_a_part_of_the_bandwidth(few):
    network = rx.Network.ethernet(1e9, latency=1e-4)
    found, _ = fit(2, network)
    assert found.bandwidth == pytest.approx(125e6 * 1448 / (1448 + 90), rel=0.01)
    assert found.overhead == 0


def test_long_calls_work_on_other_numbers_each_time_and_short_ones_on_the_same(few):
    memory = prices._Memory(0)

    def where(count):
        return [x.ctypes.data for x in memory.take(count, 2)]

    seen = [where(prices._MANY) for _ in range(4)]
    assert len({begin for pair in seen[:2] for begin in pair}) == 4
    assert seen[2] == seen[0]  # there are four times as many, and it begins again
    assert where(1024) == where(1024)
    assert all(len(x) == prices._MANY for x in memory.take(prices._MANY, 2))


def test_arithmetic_has_its_price(few):
    found, _ = fit(2, NETWORKS[1], CODECS)
    assert set(found.work) == {*WORK, "divide", "copy"}
    assert found.work["divide"] == found.work["copy"] == (0.0, 0.0)
    for name, price in WORK.items():
        assert found.work[name] == pytest.approx(price, rel=0.01)


def test_prices_are_charged_for_what_a_call_does():
    def program(codec):
        with rx.Comm.world() as comm:
            x = np.ones(30_000, np.float32)
            rx.allreduce(comm, x, op=rx.MEAN, codec=codec)
            return comm.now()

    free = rx.Network(eager=10**9)
    name, n, count = rx.OneBit().describe(), 3, 30_000
    for work, codec, seconds in (
        ({"reduce": (1e-3, 1e-6)}, None, (n - 1) * (1e-3 + count / n * 1e-6)),
        ({"divide": (1e-3, 1e-6)}, None, 1e-3 + count / n * 1e-6),
        ({f"{name}.encode": (1e-3, 1e-6)}, rx.OneBit(), (n + 1) * (1e-3 + count / n * 1e-6)),
        ({f"{name}.decode": (1e-3, 1e-6)}, rx.OneBit(), (n + 1) * (1e-3 + count / n * 1e-6)),
        ({f"{name}.decode_add": (1e-3, 1e-6)}, rx.OneBit(), (n - 1) * (1e-3 + count / n * 1e-6)),
    ):
        cheap = max(rx.SimulatedWorld(n, network=free).run(program, codec))
        dear = max(rx.SimulatedWorld(n, network=replace(free, work=work)).run(program, codec))
        assert dear - cheap == pytest.approx(seconds, rel=0.1)
        for other in (rx.Quantizer(bits=4), rx.Identity()):
            if codec is not None:
                world = rx.SimulatedWorld(n, network=replace(free, work=work))
                same = rx.SimulatedWorld(n, network=free)
                assert world.run(program, other) == same.run(program, other)


def test_prices_change_no_bytes_and_grow_with_the_scale():
    def program(nodes):
        with rx.Comm.world() as world:
            comm = world.by_node() if nodes else world
            x = np.random.default_rng(comm.rank).standard_normal(5000).astype("f4")
            memory = rx.ErrorFeedback(rx.OneBit())
            for codec in (None, rx.Quantizer(bits=8), memory):
                rx.allreduce(comm, x, op=rx.MEAN, codec=codec)
            rx.allgather(comm, x, codec=rx.OneBit())
            if nodes:
                comm.close()
            return x.tobytes()

    for nodes in (False, True):
        free = rx.SimulatedWorld(4, ranks_per_node=2)
        dear = rx.SimulatedWorld(4, network=rx.Network(work=WORK), ranks_per_node=2)
        more = rx.SimulatedWorld(4, network=rx.Network(work=WORK, scale=100.0), ranks_per_node=2)
        assert free.run(program, nodes) == dear.run(program, nodes) == more.run(program, nodes)
        assert max(free.clocks) < max(dear.clocks) < max(more.clocks)


def test_the_repr_can_be_pasted(few):
    found, _ = fit(2, NETWORKS[0])
    assert eval(repr(found), {"Network": rx.Network}) == found
    assert rx.Network(**asdict(found)) == found
    assert hash(found) == hash(replace(found))


def test_one_rank_has_no_network():
    with pytest.raises(ValueError, match="two ranks"):
        fit(1, rx.Network())
    with pytest.raises(ValueError, match="work"):
        rx.Network(work={"reduce": (-1.0, 0.0)})


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("per_node", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_on_mpi_all_ranks_hear_the_same_numbers(comm, per_node, monkeypatch):
    if per_node:
        monkeypatch.setenv("RELAXMPI_RANKS_PER_NODE", str(per_node))
    with rx.Comm.world() as split:
        found = rx.Network.from_measurement(split, CODECS)
    assert len(set(comm.mpi.allgather(repr(found)))) == 1
    assert found.bandwidth > 1e6
    assert found.latency < 0.1
    assert set(WORK) < set(found.work)


# ----------------------------------------------------------------------- the benchmark


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("network", NETWORKS[1:], ids=["fast", "slow"])
def test_a_prediction_is_what_the_same_calls_take(few, prediction, network, n):
    sizes = [2**12, 2**16, 2**20]

    def program():
        with rx.Comm.world() as comm:
            return prediction.measure(comm, sizes, (3, 3))

    fitted, measured = rx.SimulatedWorld(n, network=network).run(program)[0]
    predicted = prediction.predict(fitted, n, sizes)
    for what, seconds in measured.items():
        assert predicted[what] == pytest.approx(seconds, rel=0.03), what
    assert measured["1 bit"][-1] < measured["8 bit"][-1] < measured["fp32"][-1]


def test_the_table_and_its_summary(prediction):
    cases = [
        prediction.Case(2, "5ms", "1Gbit", "fp32", "64 KiB", 0.011, 0.010, 0.001),
        prediction.Case(4, "5ms", "1Gbit", "8 bit", "1 MiB", 0.003, 0.004, 0.0024),
        prediction.Case(4, "5ms", "1Gbit", "1 bit", "1 MiB", 0.004, 0.004, 0.0008),
    ]
    assert prediction.table(cases).splitlines()[2:] == [
        "| 2 | 5ms | 1Gbit | fp32 | 64 KiB | 11.00 | 10.00 | 1.10 | 9% |",
        "| 4 | 5ms | 1Gbit | 8 bit | 1 MiB | 3.00 | 4.00 | 0.75 | 80% (x) |",
        "| 4 | 5ms | 1Gbit | 1 bit | 1 MiB | 4.00 | 4.00 | 1.00 | 20% |",
    ]
    every = (
        "All rows: median error 10.0%; 2 of 3 within 20 %; worst 25% "
        "(4 hosts, 5ms, 1Gbit, 8 bit, 1 MiB)."
    )
    assert prediction.summary(cases) == (
        f"{every}\n\nRows without a mark: median error 5.0%; 2 of 2 within 20 %; worst 10% "
        "(2 hosts, 5ms, 1Gbit, fp32, 64 KiB)."
    )
    assert prediction.summary(cases[:1]).count("median") == 1


def test_the_processors_share_is_what_fast_links_leave(few, prediction, monkeypatch):
    monkeypatch.setattr(prediction, "SIZES", {"1 MiB": 2**20})
    free = rx.Network(latency=5e-3, bandwidth=1e7, send_cost=0.0, receive_cost=0.0, agree_cost=0.0)
    dear = replace(free, latency=1e-5, bandwidth=1e9, work={"reduce": (0.0, 1e-8)})
    for network, share in ((free, 0.0), (dear, 0.5)):
        measured = prediction.predict(network, 2, [2**20])
        cases = prediction.compared(2, "5ms", "80Mbit", network, measured)
        assert [case.what for case in cases] == ["fp32", "8 bit", "1 bit"]
        assert all(case.ratio == 1 for case in cases)
        assert cases[0].share == pytest.approx(share, abs=0.2)
    assert cases[0].processors == pytest.approx(2**17 * 1e-8, rel=0.1)


def test_results_of_several_runs_make_one_page(prediction, tmp_path):
    case = prediction.Case(2, "5ms", "1Gbit", "fp32", "64 KiB", 0.011, 0.010, 0.001)
    result = prediction.Result(2, "5ms", "1Gbit", NETWORKS[0], 0.25, [case])
    file = tmp_path / "results.json"
    assert prediction.load(file) == {}
    prediction.save(file, {"a": result})
    kept = prediction.load(file)["a"]
    assert kept.cases == [case]
    assert {k: tuple(v) for k, v in kept.network.work.items()} == WORK
    text = prediction.page("before\n<!-- results -->\nold\n<!-- end of results -->\nafter", [kept])
    assert text.startswith(
        "before\n<!-- results -->\n\nAll rows: median error 10.0%; 1 of 1 within 20 %"
    )
    assert "| 2 | 5ms | 1Gbit | 0.020 | 1000.0 | 7 | 4 | 36 | 50 | 9 | 60 | 25% |" in text
    assert text.endswith("<!-- end of results -->\nafter")
    assert "old" not in text
    assert prediction.page(text, [kept]) == text


# -------------------------------------------------------------------------- the doctor


def told(network, nodes=(0, 1), hosts=("a", "b")):
    return {f.subject: f for f in checks_network.findings(network, nodes, hosts)}


def test_the_doctor_says_what_looks_wrong():
    good = rx.Network(latency=5e-5, bandwidth=1.25e9)
    found = told(good)
    assert {f.status for f in found.values()} == {"OK"}
    assert "latency 50 us one way, 10 Gbit/s each way, 1 us" in found["between nodes"].text
    assert found["within a node"].text == "not measured: one rank on each"
    assert found["to paste"].text == repr(good)
    for network, subject, words, nodes, hosts in (
        (good, "between nodes", "loopback", (0, 1), ("a", "a")),
        (replace(good, bandwidth=1.2e7), "between nodes", "ethtool", (0, 1), ("a", "b")),
        (replace(good, latency=5e-3), "between nodes", "large buckets", (0, 1), ("a", "b")),
        (replace(good, local_latency=4e-5), "within a node", "OMPI_MCA_btl", (0, 0), ("a", "a")),
        (replace(good, send_cost=4e-5), "processors", "fewer ranks", (0, 1), ("a", "b")),
    ):
        found = told(network, nodes, hosts)[subject]
        assert found.status == "warn", subject
        assert words in found.advice
    assert "in flight" not in told(replace(good, latency=1e-4, bandwidth=1e9))
    alone = told(good, (0, 0), ("a", "a"))["between nodes"]
    assert "relaxmpi lab" in alone.advice
    local = replace(good, latency=2e-6, bandwidth=4e9, local_latency=2e-6, local_bandwidth=4e9)
    paste = told(local, (0, 0), ("a", "a"))["to paste"]
    assert "nothing between nodes" in paste.advice
    assert eval(paste.text, {"Network": rx.Network}) == rx.Network(
        local_latency=2e-6, local_bandwidth=4e9
    )


def test_the_doctor_bounds_what_tcp_has_under_way(monkeypatch):
    monkeypatch.delenv("OMPI_MCA_btl_tcp_sndbuf", raising=False)
    long_way = rx.Network(latency=5e-3, bandwidth=1.18e8)
    found = told(long_way)["in flight"]
    assert found.status == "warn"
    assert "1.2 MB" in found.text
    assert "OMPI_MCA_btl_tcp_sndbuf=800000 " in found.advice
    monkeypatch.setenv("OMPI_MCA_btl_tcp_sndbuf", "800000")
    assert told(long_way)["in flight"].status == "OK"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_doctor_measures_the_job(ranks):
    launcher = Path(sys.executable).with_name("mpiexec")
    path = str(launcher) if launcher.exists() else shutil.which("mpiexec")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [path, "-n", str(ranks), sys.executable, "-m", "relaxmpi", "doctor", "--network", "--json"],
        env={**os.environ, **allowed, "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = {f["subject"]: f for f in json.loads(done.stdout)}
    if ranks == 1:
        assert found["network"]["status"] == "bad"
        assert "relaxmpi lab" in found["network"]["advice"]
    else:
        network = eval(found["to paste"]["text"], {"Network": rx.Network})
        assert network.latency == rx.Network().latency, "not measured"
        assert found["nodes"]["text"].endswith("2 ranks on each of 1")
    assert (done.returncode != 0) == (ranks == 1)
