"""Whatever an engine does, the refit ends within its deadline and 5 s, says who and what, and leaves nothing behind."""

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait

import pytest
import torch
from gloo_engine import GlooEngine, manifest_of
from gloo_process import GlooProcess, die, sockets_and_threads

from nemo_rl.distributed.weight_transfer import rollout_engines
from nemo_rl.distributed.weight_transfer.buckets import iter_named_tensor_buckets
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec, Receiver
from nemo_rl.distributed.weight_transfer.rollout_engines import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
)
from nemo_rl.distributed.weight_transfer.sender import BucketSender

NUM_VALUES = 300_000
"""More than the kernel's socket buffers take: a send that nobody receives stays under way."""
WEIGHTS = [(f"w{i}", torch.full((NUM_VALUES,), float(i))) for i in range(4)]
_names = (f"group_{i}" for i in itertools.count())
Engines = Sequence[GlooEngine | GlooProcess]


def connect(engines: Engines, timeout_s: float = 20.0, **changes: str) -> WeightUpdateGroup:
    arguments = {"group_name": next(_names), "backend": "gloo", "master_address": "127.0.0.1"} | changes
    return connect_rollout_engines_from_distributed(
        rollout_engines=engines,
        engine_gpu_counts=[engine.num_ranks for engine in engines],
        deadline=Deadline(timeout_s),
        **arguments,
    )


def send(engines: Engines, group: WeightUpdateGroup, timeout_s: float = 20.0) -> BucketSender:
    """One tensor per bucket."""
    manifest = manifest_of(WEIGHTS)
    sender = BucketSender(engines, group, manifest, Deadline(timeout_s))
    try:
        for bucket in iter_named_tensor_buckets(iter(WEIGHTS), 1, manifest):
            sender.send(sender.prepare(bucket))
        sender.finish()
    except TransferError:
        sender.abandon()
        raise
    return sender


def failed_send(engines: Engines, group: WeightUpdateGroup, timeout_s: float) -> tuple[TransferError, float]:
    """The error, and the seconds until the sender had it and had let go of the engines."""
    start_s = time.monotonic()
    with pytest.raises(TransferError) as caught:
        send(engines, group, timeout_s)
    return caught.value, time.monotonic() - start_s


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("send-", "form-"))]


def refuse_at(index: int, text: str) -> Callable[[int], None]:
    def act(bucket: int) -> None:
        if bucket == index:
            raise RuntimeError(text)

    return act


def engines_around(faulty: GlooEngine, layout: str) -> list[GlooEngine]:
    healthy = GlooEngine("healthy"), GlooEngine("also healthy")
    return {
        "alone": [faulty],
        "second of two": [healthy[0], faulty],
        "middle of three": [healthy[0], faulty, healthy[1]],
    }[layout]


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """For an engine that hangs: lets it go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("layout", ["alone", "second of two", "middle of three"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_refusal_ends_the_refit_at_once_and_frees_every_engine(layout: str, num_ranks: int, when: str) -> None:
    act = refuse_at(1, "Unaligned received tensor")
    faulty = GlooEngine("faulty", num_ranks, **{"on_bucket" if when == "before" else "after_bucket": act})
    engines = engines_around(faulty, layout)
    error, seconds = failed_send(engines, connect(engines), timeout_s=20.0)
    assert seconds < 3.0
    assert error.facts.engine == "faulty"
    assert error.facts.bucket == 1
    assert error.facts.tensors == ("w1", "w1")
    assert error.facts.engine_text == "Unaligned received tensor"
    assert error.engines_failed == tuple(engine.name for engine in engines)
    assert error.partly_updated
    calls = [call for engine in engines for call in engine.calls]
    assert not wait(calls, timeout=3.0).not_done
    assert eventually(lambda: not own_threads())
    faulty.mend()
    send(engines, connect(engines))
    assert all(set(engine.received) == {"w0", "w1", "w2", "w3"} for engine in engines)


def test_the_error_crosses_processes_whole_and_says_what_to_do() -> None:
    engine = GlooEngine("engine 0 at http://h:1", on_bucket=refuse_at(0, "disk full"))
    error, _ = failed_send([engine], connect([engine]), timeout_s=20.0)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is TransferError
    assert copy.facts == error.facts
    assert str(copy) == str(error)
    assert str(error) == (
        "engine 0 at http://h:1 failed at bucket 0 (1 tensors, w0 ... w0): disk full; these may hold a part of the new "
        "weights, replace them or send all of it before they serve: engine 0 at http://h:1"
    )


@pytest.mark.parametrize("layout", ["alone", "second of two"])
def test_an_engine_that_says_nothing_ends_at_the_deadline(layout: str, released: threading.Event) -> None:
    engines = engines_around(GlooEngine("faulty", on_bucket=lambda _: released.wait(20) and None), layout)
    error, seconds = failed_send(engines, connect(engines), timeout_s=1.0)
    assert 1.0 <= seconds < 3.0
    assert "faulty did not answer for bucket 0 (1 tensors, w0 ... w0) within 1 s" in str(error)
    assert error.engines_failed == tuple(engine.name for engine in engines)


@pytest.mark.parametrize("layout", ["alone", "second of two"])
def test_an_engine_that_lies_about_success_is_found_out_by_the_deadline(layout: str) -> None:
    engines = engines_around(GlooEngine("faulty", lies_at=2), layout)
    error, seconds = failed_send(engines, connect(engines), timeout_s=2.0)
    assert seconds < 4.0
    assert (
        error.what
        == "every engine says that it has loaded bucket 2 (1 tensors, w2 ... w2), yet the broadcast is not done"
    )
    assert error.partly_updated


def test_a_slow_engine_is_waited_for() -> None:
    engines = engines_around(GlooEngine("slow", after_bucket=lambda _: time.sleep(0.3)), "second of two")
    assert send(engines, connect(engines), timeout_s=20.0).stats.num_buckets == 4
    assert {name: tensor[0].item() for name, tensor in engines[1].received.items()} == {f"w{i}": i for i in range(4)}


@pytest.mark.parametrize("layout", ["alone", "second of two"])
def test_an_engine_that_closes_its_connections_is_noticed_at_once(layout: str, released: threading.Event) -> None:
    def close(bucket: int) -> None:
        if bucket == 1:
            faulty.drop_connections()
            released.wait(20)

    faulty = GlooEngine("faulty", on_bucket=close)
    engines = engines_around(faulty, layout)
    error, seconds = failed_send(engines, connect(engines), timeout_s=30.0)
    assert seconds < 6.0
    assert "bucket 1" in error.what
    assert error.partly_updated


@pytest.fixture
def processes() -> Iterator[Callable[..., GlooProcess]]:
    made: list[GlooProcess] = []

    def make(*arguments: object, **options: object) -> GlooProcess:
        made.append(GlooProcess(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for process in made:
        process.stop()


@pytest.mark.parametrize("layout", ["refuses", "waits"])
def test_nothing_is_left_of_a_failed_group_in_either_process(
    processes: Callable[..., GlooProcess], layout: str, released: threading.Event
) -> None:
    """`refuses`: the trainer sends and nobody receives. `waits`: the engine receives and the trainer does not send."""
    engine = processes("engine 0", on_bucket=_refuse_bucket_1 if layout == "refuses" else None)
    first = connect([engine])  # starts the threads of the fake
    disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=first, deadline=Deadline(5))
    before = sockets_and_threads(), engine.call("sockets")
    group = connect([engine])
    assert sockets_and_threads() - before[0]
    start_s = time.monotonic()
    if layout == "refuses":
        failed_send([engine], group, timeout_s=20.0)
    else:
        sender = BucketSender([engine], group, manifest_of(WEIGHTS), Deadline(20))
        header = _header_of(0)
        answer = engine.announce(header, group.spec.name, 20)
        time.sleep(0.5)
        start_s = time.monotonic()
        sender.abandon()
        assert "Connection closed by peer" in str(answer.exception(timeout=1.0))
    assert time.monotonic() - start_s < 1.0
    # What earlier tests left may end meanwhile: only what is new counts.
    assert eventually(lambda: not sockets_and_threads() - before[0]), sockets_and_threads() - before[0]
    assert eventually(lambda: not engine.call("sockets") - before[1])
    again = connect([engine])
    assert again.spec.master_port != group.spec.master_port
    disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=again, deadline=Deadline(5))
    assert eventually(lambda: not sockets_and_threads() - before[0]), sockets_and_threads() - before[0]
    assert eventually(lambda: not engine.call("sockets") - before[1])


def _refuse_bucket_1(bucket: int) -> None:
    refuse_at(1, "no")(bucket)


def _header_of(index: int):  # type: ignore[no-untyped-def]
    from nemo_rl.distributed.weight_transfer.buckets import make_header

    return make_header(0, [WEIGHTS[index]], flattened=True)


def _die_at_bucket_2(bucket: int) -> None:
    if bucket == 2:
        die()


@pytest.mark.parametrize("silent", [False, True], ids=["its server notices", "its server answers nothing"])
def test_an_engine_that_is_killed_in_mid_refit_is_noticed_at_once(
    processes: Callable[..., GlooProcess], silent: bool
) -> None:
    healthy, faulty = processes("healthy"), processes("faulty", on_bucket=_die_at_bucket_2, silent_death=silent)
    error, seconds = failed_send([healthy, faulty], connect([healthy, faulty]), timeout_s=30.0)
    assert seconds < 6.0
    assert "bucket 2" in error.what
    assert error.engines_failed == ("healthy", "faulty")
    # The engine that lives takes the whole model, beside one that replaces the other.
    engines = [healthy, processes("replacement")]
    send(engines, connect(engines))
    assert healthy.call("first values") == engines[1].call("first values") == {f"w{i}": float(i) for i in range(4)}


def test_an_engine_in_mid_payload_receives_it_to_the_end_and_is_free(processes: Callable[..., GlooProcess]) -> None:
    """gloo never wakes a receiver whose payload has arrived in part, so the payload goes on though the refit has failed."""
    healthy, faulty = processes("healthy"), GlooEngine("faulty", on_bucket=refuse_at(0, "no"))
    large = [("large", torch.ones(25_000_000))]
    group, start_s = connect([healthy, faulty]), time.monotonic()
    sender = BucketSender([healthy, faulty], group, manifest_of(large), Deadline(30))
    sender.send(sender.prepare(large))
    with pytest.raises(TransferError, match="faulty failed at bucket 0"):
        sender.finish()
    sender.abandon()
    assert healthy.call("ready") is None
    assert time.monotonic() - start_s < 5.0
    assert eventually(lambda: not own_threads())


def test_an_engine_that_is_killed_while_the_group_forms_leaves_the_others_free(
    processes: Callable[..., GlooProcess],
) -> None:
    healthy, dead = processes("healthy"), processes("dead")
    dead.stop()
    start_s = time.monotonic()
    with pytest.raises(
        TransferError, match="dead did not join the weight-update group: its process has ended"
    ) as caught:
        connect([healthy, dead], timeout_s=60.0)
    assert time.monotonic() - start_s < 4.0
    assert caught.value.engines_failed == ("dead",)
    assert not caught.value.partly_updated
    send([healthy], connect([healthy]))


class UnaskableEngine(GlooEngine):
    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        raise RuntimeError("can't start new thread")


def test_rank_0_that_fails_while_it_asks_frees_the_engines_that_it_has_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_engines, "_LET_IN_S", 0.5)
    asked = GlooEngine("asked")
    with pytest.raises(TransferError, match="trainer rank 0 could not ask every engine to join: can't start") as caught:
        connect([asked, UnaskableEngine("unasked")], timeout_s=60.0)
    assert not wait(asked.calls, timeout=5.0).not_done
    assert caught.value.engines_failed == ()
    send([asked], connect([asked]))


class LyingEngine(GlooEngine):
    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_an_engine_that_lies_about_joining_is_found_out_at_the_deadline() -> None:
    with pytest.raises(TransferError, match="not formed within 1 s; lying say that they have joined") as caught:
        connect([GlooEngine("honest"), LyingEngine("lying")], timeout_s=1.0)
    assert caught.value.engines_failed == ("lying",)


def test_reconnect_under_one_name_after_an_orderly_parting_and_three_refits_in_a_row() -> None:
    engine = GlooEngine("engine 0")
    ports = []
    for _ in range(3):
        group = connect([engine], group_name="the same")
        ports.append(group.spec.master_port)
        send([engine], group)
        send([engine], group)
        disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=group, deadline=Deadline(5))
        group.close()  # idempotent
    assert len(set(ports)) == 3
    assert eventually(lambda: not own_threads())


def test_all_joins_are_asked_at_once() -> None:
    """Each engine waits for the other to have been asked."""
    both = threading.Barrier(2, timeout=10)
    engines = [GlooEngine(f"engine {i}", on_join=lambda: both.wait() and None) for i in range(2)]
    connect(engines)
    assert both.broken is False


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_the_group_forms_at_an_ipv6_address_and_at_a_name(address: str) -> None:
    engines: list[Receiver] = [GlooEngine("engine 0")]
    group = connect(engines, master_address=address)  # type: ignore[arg-type]
    send(engines, group)  # type: ignore[arg-type]
    group.close()
