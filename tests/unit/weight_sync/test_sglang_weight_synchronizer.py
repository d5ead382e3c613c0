"""The refit as the driver leads it: order of events, what holds after success, what holds after a failure."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl.config.errors import ConfigError
from nemo_rl.config.schema import PolicyConfig, RefitConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError, TransferFacts
from nemo_rl.distributed.weight_transfer.sender import RefitStats
from nemo_rl.distributed.weight_transfer.timeline import Span
from nemo_rl.models.generation.interfaces import (
    EnginesFailedError,
    EnginesLostError,
    ReplacementsUsedUpError,
    UpdatableGeneration,
)
from nemo_rl.models.policy.interfaces import LossFunction, PolicyInterface, TrainResult
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.factory import create_weight_synchronizer
from nemo_rl.weight_sync.recovering_generation import RecoveringGeneration
from nemo_rl.weight_sync.sglang_weight_synchronizer import MEMORY_RATIO_VARIABLE, SGLangDisaggregatedWeightSynchronizer

GIB = 2**30
SPANS = (Span("gather", 0, 0, 1), Span("broadcast", 0, 1, 3), Span("broadcast", 1, 2, 4), Span("load", 1, 4, 6))


def make_config(**keys: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {
            "model_name": "m",
            "train_global_batch_size": 1,
            "train_micro_batch_size": 1,
            "max_total_sequence_length": 8,
            "generation": {"max_new_tokens": 4, **keys.pop("generation", {})},
            **keys,
        }
    )


@dataclass(frozen=True)
class FakeReceiver:
    name: str


class FakePolicy(PolicyInterface):
    def __init__(self, events: list[str], cfg: PolicyConfig | None = None, free_bytes: int = GIB) -> None:
        self.cfg = cfg or make_config()
        self.events = events
        self.free_bytes = free_bytes
        self.failure: Exception | None = None
        self.failures: list[Exception] = []
        """One for each of the next calls."""
        self.sent: list[dict[str, Any]] = []
        self.connect_failures: list[Exception] = []
        """One for each of the next calls."""
        self.disconnect_failure: Exception | None = None
        self.time_limits: dict[str, float | None] = {}

    def free_memory_bytes(self) -> int:
        self.events.append("free memory")
        return self.free_bytes

    def connect_sglang_rollout_engines_distributed(
        self,
        *,
        rollout_engines: Sequence[Any],
        engine_gpu_counts: list[int],
        group_name: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.events.append(f"connect {engine_gpu_counts}")
        if self.connect_failures:
            raise self.connect_failures.pop(0)

    def prepare_weight_update(self, *, buffer_size_bytes: int, timeout_s: float | None = None) -> str:
        self.events.append("prepare")
        return "ticket"

    def update_weights_to_sglang_distributed(self, **arguments: Any) -> RefitStats:  # type: ignore[override]
        self.events.append("send negated" if arguments["negated"] else "send")
        self.sent.append(arguments)
        if self.failure is not None:
            raise self.failure
        if self.failures:
            raise self.failures.pop(0)
        return RefitStats(num_bytes=6_000_000, num_tensors=3, num_buckets=2, spans=SPANS)

    def disconnect_sglang_rollout_engines_distributed(self, *, timeout_s: float | None = None) -> None:
        self.events.append("disconnect")
        self.time_limits["disconnect"] = timeout_s
        if self.disconnect_failure is not None:
            raise self.disconnect_failure

    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        raise AssertionError

    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        raise AssertionError

    def train(self, data: BatchedDataDict, loss_fn: LossFunction) -> TrainResult:
        raise AssertionError

    def export_adapter(self, folder: str) -> None:
        raise NotImplementedError

    def export_hf(self, folder: str, *, timeout_s: float | None = None) -> None:
        self.events.append("export")
        self.time_limits["export"] = timeout_s
        Path(folder).mkdir()

    def shutdown(self) -> None:
        raise AssertionError


class FakeGeneration(UpdatableGeneration):
    replaces_failed_engines = False
    failed_engines: Mapping[str, str] = {}

    def __init__(self, events: list[str], num_engines: int = 2) -> None:
        self.events = events
        self.versions = [0] * num_engines
        self.first_id = 0
        self.digests = [{"0/w": "a", "0/v": "b"} for _ in range(num_engines)]
        self.negated = [{"0/w": "-a", "0/v": "-b"} for _ in range(num_engines)]
        self.after_send: list[dict[str, str]] | None = None
        self.after_load: list[dict[str, str]] | None = None
        self.end_failure: Exception | None = None
        self.failures: dict[str, Exception] = {}
        """Of the next `begin` or `resume`."""
        self._num_new = num_engines
        self.free_bytes = 8 * GIB
        self.replaces_failed_engines = False
        self.failed_engines = {}
        self.replace_failure: Exception | None = None
        self.lost_before_pause = 0
        """Engines that the next `pause` finds lost: no other engine is."""

    @property
    def rollout_engines(self) -> Sequence[Any]:
        return [FakeReceiver(f"engine {self.first_id + i}") for i in range(len(self.versions))]

    @property
    def engine_gpu_counts(self) -> list[int]:
        return [1] * len(self.versions)

    def quarantine(self, names: Iterable[str], why: str = "") -> None:
        for name in names:
            self.events.append(f"quarantine {name}")
            self.failed_engines = {**self.failed_engines, name: why}

    def replace_failed(self, deadline: Deadline) -> list[str]:
        if self.replace_failure is not None:
            raise self.replace_failure
        names = [f"new {name}" for name in self.failed_engines]
        self.events.append(f"replace {len(names)}")
        self._num_new = len(names)
        self.failed_engines = {}
        return names

    def resume_generate(self) -> BatchedDataDict:
        self.events.append("resume generate")
        return BatchedDataDict(done=[True])

    @property
    def refit_timeout_s(self) -> float:
        return 60.0

    @property
    def num_new_engines(self) -> int:
        return self._num_new

    def clear_updatable_num_new_engines(self) -> None:
        self._num_new = 0

    def free_memory_bytes(self, deadline: Deadline) -> int:
        return self.free_bytes

    def pause(self, deadline: Deadline) -> None:
        self.events.append("pause")
        for _ in range(self.lost_before_pause):
            for per_engine in (self.versions, self.digests, self.negated):
                per_engine.pop()
            self._num_new += 1
        self.lost_before_pause = 0

    def begin_weight_update(self, deadline: Deadline) -> None:
        self.events.append("begin")
        if "begin" in self.failures:
            raise self.failures.pop("begin")

    def end_weight_update(self, deadline: Deadline) -> None:
        self.events.append("end")
        if self.end_failure is not None:
            raise self.end_failure

    def weight_checksums(self, deadline: Deadline) -> list[dict[str, str]]:
        self.events.append("checksums")
        last = next((event for event in reversed(self.events) if event in ("send", "send negated", "load")), "")
        changed = {"send": self.after_send, "send negated": self.negated, "load": self.after_load or self.after_send}
        return changed.get(last) or self.digests

    def update_weights_from_disk(self, folder: str, deadline: Deadline) -> None:
        assert Path(folder).is_dir()
        self.events.append("load")

    def set_weight_version(self, version: int, deadline: Deadline) -> None:
        self.events.append(f"version {version}")
        self.versions = [version] * len(self.versions)

    def resume(self, deadline: Deadline) -> None:
        self.events.append("resume")
        if "resume" in self.failures:
            raise self.failures.pop("resume")

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        raise AssertionError

    def shutdown(self) -> None:
        raise AssertionError


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def policy(events: list[str]) -> FakePolicy:
    return FakePolicy(events)


@pytest.fixture
def generation(events: list[str]) -> FakeGeneration:
    return FakeGeneration(events)


def make(
    policy: FakePolicy,
    generation: FakeGeneration,
    size_gb: float | None = None,
    verify: str = "engines",
    export_folder: Path = Path("unused"),
) -> Any:
    return create_weight_synchronizer(
        policy=policy,
        generation=generation,
        generation_backend="sglang",
        colocated=False,
        refit_buffer_size_gb=size_gb,
        refit=RefitConfig.model_validate({"verify": verify}),
        export_folder=export_folder,
    )


def test_first_refit_then_the_next(policy: FakePolicy, generation: FakeGeneration, events: list[str]) -> None:
    synchronizer = make(policy, generation)
    assert synchronizer.is_stale
    synchronizer.init_communicator()
    timer = Timer()
    synchronizer.sync_weights(timer=timer)
    probe = ["pause", "checksums", "begin", "send negated", "end", "checksums"]
    first = [*probe, "begin", "send", "end", "checksums", "version 1", "resume"]
    assert events == ["free memory", "connect [1, 1]", *first]
    assert not synchronizer.is_stale
    assert timer.take().keys() == {"refit", "refit_verify"}
    events.clear()
    synchronizer.mark_stale()
    assert synchronizer.is_stale
    synchronizer.sync_weights()
    assert events == ["prepare", "pause", "begin", "send", "end", "checksums", "version 2", "resume"]
    assert [sent["ticket"] for sent in policy.sent] == [None, None, "ticket"]
    metrics = synchronizer.metrics()
    assert metrics.pop("refit/megabytes_per_s") > 0
    assert metrics == {
        "refit/bytes": 6_000_000,
        "refit/buckets": 2,
        "refit/tensors": 3,
        "refit/weight_version": 2,
        "refit/recoveries": 0,
        "refit/gather_s": 1.0,
        "refit/broadcast_s": 3.0,
        "refit/load_s": 2.0,
    }


def test_a_failed_transfer_ends_the_session_but_does_not_resume(
    policy: FakePolicy, generation: FakeGeneration, events: list[str]
) -> None:
    synchronizer = make(policy, generation)
    synchronizer.init_communicator()
    synchronizer.sync_weights()
    events.clear()
    policy.failure = TransferError("engine 1 failed at bucket 2")
    with pytest.raises(TransferError, match="engine 1 failed at bucket 2"):
        synchronizer.sync_weights()
    assert events == ["prepare", "pause", "begin", "send", "end"]
    assert synchronizer.is_stale
    assert generation.versions == [1, 1]
    policy.failure = None
    events.clear()
    synchronizer.sync_weights()
    # The group of the failed refit is gone: the next one makes its own.
    assert events[0] == "connect [1, 1]"
    assert generation.versions == [2, 2]
    assert not synchronizer.is_stale


@pytest.mark.parametrize(
    "call",
    ["pause", "begin_weight_update", "end_weight_update", "weight_checksums", "set_weight_version", "resume"],
)
def test_of_three_refits_the_one_that_fails_anywhere_does_not_move_the_version(
    policy: FakePolicy, generation: FakeGeneration, events: list[str], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise EnginesFailedError({"engine 1": "died"})

    synchronizer = make(policy, generation)
    synchronizer.sync_weights()
    with monkeypatch.context() as patch:
        patch.setattr(generation, call, fail)
        with pytest.raises(EnginesFailedError, match="engine 1: died"):
            synchronizer.sync_weights()
    assert (synchronizer.version, synchronizer.metrics()["refit/weight_version"]) == (1, 1)
    assert synchronizer.is_stale
    assert events.count("resume") == 1
    assert generation.versions == ([2, 2] if call == "resume" else [1, 1])
    synchronizer.sync_weights()
    assert synchronizer.version == 2
    assert generation.versions == [2, 2]
    assert events[-2:] == ["version 2", "resume"]


def test_the_first_error_is_the_one_told(policy: FakePolicy, generation: FakeGeneration, events: list[str]) -> None:
    synchronizer = make(policy, generation)
    synchronizer.sync_weights()
    policy.failure = TransferError("engine 1 failed at bucket 2")
    generation.end_failure = RuntimeError("engine 1 is dead")
    with pytest.raises(TransferError, match="engine 1 failed at bucket 2"):
        synchronizer.sync_weights()


def test_a_first_refit_that_changes_a_digest_stops_the_run(
    policy: FakePolicy, generation: FakeGeneration, events: list[str]
) -> None:
    generation.after_send = [{"0/w": "a", "0/v": "b"}, {"0/w": "a", "0/v": "other"}]
    synchronizer = make(policy, generation)
    synchronizer.init_communicator()
    with pytest.raises(TransferError, match=r"engine 1: the first refit sent .* 1 of 2 tensors differ: 0/v"):
        synchronizer.sync_weights()
    assert "resume" not in events
    assert generation.versions == [0, 0]
    assert synchronizer.is_stale


def test_a_first_refit_that_failed_its_proof_fails_again(
    policy: FakePolicy, generation: FakeGeneration, events: list[str]
) -> None:
    generation.after_send = [{"0/w": "a", "0/v": "other"}] * 2
    synchronizer = make(policy, generation)
    for _ in range(2):
        with pytest.raises(TransferError, match="1 of 2 tensors differ: 0/v"):
            synchronizer.sync_weights()
    assert generation.versions == [0, 0]


@pytest.mark.parametrize(
    ("negated", "says"),
    [
        ([{"0/w": "-a", "0/v": "b"}] * 2, "engine 0: no weight of the policy reaches 1 of 2 tensors.*: 0/v; "),
        ([{"0/w": "-a", "0/v": "-b"}, {"0/w": "a", "0/v": "b"}], "engine 1: no weight .* 2 of 2 .*: 0/v, 0/w; "),
    ],
)
def test_engine_tensors_that_no_weight_reaches_stop_the_run(
    policy: FakePolicy, generation: FakeGeneration, events: list[str], negated: list[dict[str, str]], says: str
) -> None:
    generation.negated = negated
    synchronizer = make(policy, generation)
    with pytest.raises(TransferError, match=says):
        synchronizer.sync_weights()
    assert "send" not in events
    assert "resume" not in events
    assert synchronizer.is_stale


@pytest.mark.parametrize(
    ("named", "says"),
    [(["odd.table"], None), ([], r"reaches 1 of 3 tensors, .*: 0/odd.table; .* refit.engine_constants$")],
)
def test_what_the_engine_makes_of_its_config_may_stay(
    policy: FakePolicy, generation: FakeGeneration, named: list[str], says: str | None
) -> None:
    constants = {"0/rotary_emb.axis_map": "c", "0/odd.table": "d"}
    generation.digests = [{"0/w": "a", **constants}] * 2
    generation.negated = [{"0/w": "-a", **constants}] * 2
    synchronizer = create_weight_synchronizer(
        policy=policy,
        generation=generation,
        generation_backend="sglang",
        colocated=False,
        refit=RefitConfig(engine_constants=named),
    )
    with pytest.raises(TransferError, match=says) if says else nullcontext():
        synchronizer.sync_weights()
    assert generation.versions == ([0, 0] if says else [1, 1])


@pytest.mark.parametrize("digests", [[], [{}], [{"0/w": "a"}, {}]])
def test_engines_that_digest_nothing_prove_nothing(
    policy: FakePolicy, generation: FakeGeneration, digests: list[dict[str, str]]
) -> None:
    generation.digests = digests
    with pytest.raises(TransferError, match="digests no weight"):
        make(policy, generation).sync_weights()


W1 = {"0/w": "c", "0/v": "d"}


@pytest.mark.parametrize(
    ("verify", "num_engines", "after_first"),
    [
        ("off", 1, []),
        ("off", 2, []),
        ("engines", 1, []),
        ("engines", 2, ["checksums"]),
        ("full", 1, ["checksums", "export", "load", "checksums"]),
        ("full", 2, ["checksums", "export", "load", "checksums"]),
    ],
)
def test_what_each_level_of_proof_asks(
    events: list[str], tmp_path: Path, verify: str, num_engines: int, after_first: list[str]
) -> None:
    generation = FakeGeneration(events, num_engines)
    synchronizer = make(FakePolicy(events), generation, verify=verify, export_folder=tmp_path / "export")
    synchronizer.sync_weights()
    assert events.count("checksums") == (4 if verify == "full" else 3)
    events.clear()
    generation.digests = [W1] * num_engines
    synchronizer.sync_weights()
    assert events == ["prepare", "pause", "begin", "send", "end", *after_first, "version 2", "resume"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verify", "after_send", "after_load", "says"),
    [
        ("engines", [W1, W1 | {"0/v": "e"}], None, "engine 1: .*compared with engine 0, 1 of 2 tensors differ: 0/v"),
        ("engines", [W1, {"0/w": "c"}], None, "engine 1: .*compared with engine 0, 1 of 2 tensors differ: 0/v"),
        ("full", [W1, W1], [W1, W1 | {"0/w": "e"}], "engine 1: .*exported folder, 1 of 2 tensors differ: 0/w"),
    ],
)
def test_a_later_refit_that_is_not_proven_leaves_the_engines_unused(
    events: list[str], tmp_path: Path, verify: str, after_send: Any, after_load: Any, says: str
) -> None:
    generation = FakeGeneration(events)
    synchronizer = make(FakePolicy(events), generation, verify=verify, export_folder=tmp_path / "export")
    synchronizer.sync_weights()
    events.clear()
    generation.after_send, generation.after_load = after_send, after_load
    with pytest.raises(TransferError, match=says):
        synchronizer.sync_weights()
    assert "resume" not in events
    assert synchronizer.is_stale
    assert generation.versions == [1, 1]
    assert list(tmp_path.iterdir()) == []


def test_off_as_yaml_reads_it() -> None:
    assert RefitConfig.model_validate({"verify": False}).verify == "off"


def test_a_new_engine_means_a_new_group(policy: FakePolicy, generation: FakeGeneration, events: list[str]) -> None:
    synchronizer = make(policy, generation)
    synchronizer.sync_weights()
    assert events[:2] == ["free memory", "connect [1, 1]"]
    events.clear()
    generation._num_new = 1
    synchronizer.sync_weights()
    assert events[0] == "connect [1, 1]"


@pytest.mark.parametrize(
    ("size_gb", "trainer_bytes", "engine_bytes", "ratio", "expected"),
    [
        (0.5, GIB, GIB, None, 500_000_000),
        (1e-9, GIB, GIB, None, 1),
        (None, GIB, 8 * GIB, None, int(0.3 * GIB)),
        (None, 8 * GIB, GIB, None, int(0.3 * GIB)),
        (None, 100 * GIB, 100 * GIB, None, 2 * GIB),
        (None, 10, GIB, None, 2**20),
        (None, GIB, 8 * GIB, "0.5", GIB // 2),
    ],
)
def test_one_bucket_size_is_decided_on_the_driver_and_handed_out(
    events: list[str],
    monkeypatch: pytest.MonkeyPatch,
    size_gb: float | None,
    trainer_bytes: int,
    engine_bytes: int,
    ratio: str | None,
    expected: int,
) -> None:
    monkeypatch.delenv(MEMORY_RATIO_VARIABLE, raising=False)
    if ratio is not None:
        monkeypatch.setenv(MEMORY_RATIO_VARIABLE, ratio)
    policy, generation = FakePolicy(events, free_bytes=trainer_bytes), FakeGeneration(events)
    generation.free_bytes = engine_bytes
    synchronizer = make(policy, generation, size_gb)
    synchronizer.init_communicator()
    policy.free_bytes = 1  # what is free later, or another value of the variable, changes nothing
    monkeypatch.setenv(MEMORY_RATIO_VARIABLE, "0.01")
    synchronizer.sync_weights()
    synchronizer.sync_weights()
    assert [sent["buffer_size_bytes"] for sent in policy.sent] == [expected] * 3


@pytest.mark.parametrize("ratio", ["0", "-1", "1.5", "nan", "much", ""])
def test_a_bad_memory_ratio_is_refused_before_anything_is_asked(
    policy: FakePolicy, generation: FakeGeneration, events: list[str], monkeypatch: pytest.MonkeyPatch, ratio: str
) -> None:
    monkeypatch.setenv(MEMORY_RATIO_VARIABLE, ratio)
    with pytest.raises(ConfigError, match=f"{MEMORY_RATIO_VARIABLE}: got"):
        make(policy, generation)
    assert events == []


@pytest.mark.parametrize(("precision", "target"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_the_wire_dtype_is_the_precision(events: list[str], precision: str, target: str) -> None:
    policy = FakePolicy(events, make_config(precision=precision))
    make(policy, FakeGeneration(events)).sync_weights()
    assert policy.sent[0]["target_precision"] == target


@pytest.mark.parametrize(
    ("arguments", "keys", "says"),
    [
        ({"generation_backend": "vllm"}, {}, "policy.generation.backend: got 'vllm'"),
        ({"colocated": True}, {}, "policy.generation.colocated.enabled: got true"),
        ({}, {"dtensor_cfg": {"_v2": False}}, "policy.dtensor_cfg._v2: got false"),
        ({}, {"megatron_cfg": {"enabled": True}}, "policy.megatron_cfg.enabled: got true"),
        (
            {},
            {"generation": {"sglang_cfg": {"sglang_server_config": {"weight_transfer_mode": "ipc"}}}},
            "weight_transfer_mode: got 'ipc'",
        ),
    ],
)
def test_the_factory_refuses_before_it_touches_anything(
    generation: FakeGeneration, events: list[str], arguments: dict[str, Any], keys: dict[str, Any], says: str
) -> None:
    asked = {"generation_backend": "sglang", "colocated": False, **arguments}
    with pytest.raises(ConfigError, match=says):
        create_weight_synchronizer(policy=FakePolicy(events, make_config(**keys)), generation=generation, **asked)
    assert events == []


def test_the_factory_makes_the_disaggregated_synchronizer(policy: FakePolicy, generation: FakeGeneration) -> None:
    assert isinstance(make(policy, generation), SGLangDisaggregatedWeightSynchronizer)


def test_shutdown_leaves_the_group(policy: FakePolicy, generation: FakeGeneration, events: list[str]) -> None:
    synchronizer = make(policy, generation)
    synchronizer.sync_weights()
    synchronizer.shutdown()
    assert events[-1] == "disconnect"


def test_kv_scales_are_refused(policy: FakePolicy, generation: FakeGeneration) -> None:
    with pytest.raises(NotImplementedError, match="kv_scales"):
        make(policy, generation).sync_weights(kv_scales={"k": torch.ones(1)})


def broken(*engines: str) -> TransferError:
    return TransferError("bucket 2 failed", TransferFacts(engines_failed=engines, partly_updated=True))


@pytest.fixture
def tolerant(events: list[str]) -> FakeGeneration:
    generation = FakeGeneration(events)
    generation.replaces_failed_engines = True
    return generation


@pytest.mark.parametrize(
    "failure", [broken("engine 0", "engine 1"), EnginesFailedError({"engine 1": "died"})], ids=["transfer", "call"]
)
def test_failed_engines_are_replaced_and_all_is_sent_again(
    policy: FakePolicy, tolerant: FakeGeneration, events: list[str], failure: Exception
) -> None:
    synchronizer = make(policy, tolerant)
    synchronizer.sync_weights()
    events.clear()
    policy.failures = [failure]
    synchronizer.sync_weights()
    failed = ["engine 0", "engine 1"] if isinstance(failure, TransferError) else ["engine 1"]
    recovery = [*(f"quarantine {name}" for name in failed), "end", f"replace {len(failed)}", "connect [1, 1]"]
    again = ["prepare", "pause", "begin", "send", "end", "checksums", "version 2", "resume"]
    assert events == ["prepare", "pause", "begin", "send", *recovery, *again]
    assert not synchronizer.is_stale
    assert synchronizer.version == 2
    assert synchronizer.metrics()["refit/recoveries"] == 1


def test_an_engine_that_refuses_to_begin_leaves_no_session_open_on_the_others(
    policy: FakePolicy, tolerant: FakeGeneration, events: list[str]
) -> None:
    synchronizer = make(policy, tolerant)
    synchronizer.sync_weights()
    events.clear()
    tolerant.failures = {"begin": EnginesFailedError({"engine 1": "no"})}
    synchronizer.sync_weights()
    assert events[:6] == ["prepare", "pause", "begin", "quarantine engine 1", "end", "replace 1"]
    assert synchronizer.version == 2


def test_the_version_moves_when_every_engine_serves_and_not_before(
    policy: FakePolicy, generation: FakeGeneration
) -> None:
    synchronizer = make(policy, generation)
    generation.failures = {"resume": EnginesFailedError({"engine 1": "stays paused"})}
    with pytest.raises(EnginesFailedError, match="stays paused"):
        synchronizer.sync_weights()
    assert synchronizer.version == 0
    assert synchronizer.is_stale


def test_a_failure_that_no_engine_caused_ends_the_run(policy: FakePolicy, tolerant: FakeGeneration) -> None:
    synchronizer = make(policy, tolerant)
    policy.failures = [TransferError("trainer rank 1: MemoryError")]
    with pytest.raises(TransferError, match="trainer rank 1"):
        synchronizer.sync_weights()
    assert synchronizer.is_stale


def test_without_fault_tolerance_engines_are_quarantined_and_the_run_ends(
    policy: FakePolicy, generation: FakeGeneration, events: list[str]
) -> None:
    synchronizer = make(policy, generation)
    policy.failures = [broken("engine 0")]
    with pytest.raises(TransferError, match="bucket 2 failed"):
        synchronizer.sync_weights()
    assert "quarantine engine 0" in events
    assert "resume" not in events


def test_replacement_that_fails_ends_the_run(policy: FakePolicy, tolerant: FakeGeneration, events: list[str]) -> None:
    synchronizer = make(policy, tolerant)
    policy.failures = [broken("engine 0")]
    tolerant.replace_failure = ReplacementsUsedUpError("more than 10 replacements")
    tolerant.replaces_failed_engines = True
    with pytest.raises(ReplacementsUsedUpError, match="more than 10 replacements"):
        synchronizer.sync_weights()
    assert "resume" not in events


def test_engines_that_died_between_refits_are_replaced_first(
    policy: FakePolicy, tolerant: FakeGeneration, events: list[str]
) -> None:
    synchronizer = make(policy, tolerant)
    synchronizer.sync_weights()
    events.clear()
    tolerant.failed_engines = {"engine 1": "nobody listens"}
    synchronizer.sync_weights()
    assert events[:4] == ["replace 1", "connect [1, 1]", "prepare", "pause"]
    assert synchronizer.version == 2


def test_lost_engines_come_back_under_the_same_version_and_sampling_goes_on(
    policy: FakePolicy, tolerant: FakeGeneration, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synchronizer = make(policy, tolerant)
    synchronizer.sync_weights()
    events.clear()

    def lose(data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        tolerant.failed_engines = {"engine 0": "died", "engine 1": "died"}
        raise EnginesLostError(tolerant.failed_engines)

    monkeypatch.setattr(tolerant, "generate", lose)
    assert RecoveringGeneration(tolerant, synchronizer).generate(BatchedDataDict())["done"] == [True]
    assert events[:2] == ["replace 2", "connect [1, 1]"]
    assert events[-3:] == ["version 1", "resume", "resume generate"]
    assert synchronizer.version == 1
    tolerant.replaces_failed_engines = False
    with pytest.raises(EnginesLostError):
        RecoveringGeneration(tolerant, synchronizer).generate(BatchedDataDict())


@pytest.mark.parametrize(
    "failure",
    [
        TransferError("engine 1 did not join", TransferFacts(engines_failed=("engine 1",))),
        EnginesFailedError({"engine 1": "died"}),
    ],
    ids=["join", "call"],
)
def test_an_engine_that_fails_before_the_first_refit_is_replaced_too(
    policy: FakePolicy, tolerant: FakeGeneration, events: list[str], failure: Exception
) -> None:
    policy.connect_failures = [failure]
    synchronizer = make(policy, tolerant)
    synchronizer.init_communicator()
    assert events == ["free memory", "connect [1, 1]", "quarantine engine 1", "replace 1", "connect [1, 1]"]
    synchronizer.sync_weights()
    assert synchronizer.version == 1
    tolerant.replaces_failed_engines = False
    policy.connect_failures = [failure]
    with pytest.raises(type(failure)):
        make(policy, tolerant).init_communicator()


def test_engines_that_could_not_be_restored_are_stale(policy: FakePolicy, tolerant: FakeGeneration) -> None:
    synchronizer = make(policy, tolerant)
    synchronizer.sync_weights()
    assert not synchronizer.is_stale
    policy.failures = [TransferError("trainer rank 1: MemoryError")]
    tolerant.failed_engines = {"engine 1": "died"}
    with pytest.raises(TransferError, match="MemoryError"):
        synchronizer.restore_engines()
    assert synchronizer.is_stale
    synchronizer.restore_engines()
    assert not synchronizer.is_stale


def test_an_engine_lost_while_the_others_were_about_to_be_paused_is_not_in_the_group(
    policy: FakePolicy, tolerant: FakeGeneration, events: list[str]
) -> None:
    synchronizer = make(policy, tolerant)
    synchronizer.sync_weights()
    events.clear()
    tolerant.lost_before_pause = 1
    synchronizer.sync_weights()
    assert events[:5] == ["prepare", "pause", "connect [1]", "begin", "send"]
    assert [receiver.name for receiver in policy.sent[-1]["rollout_engines"]] == ["engine 0"]


def test_an_engine_that_is_lost_after_the_last_refit_does_not_fail_the_run(
    policy: FakePolicy, generation: FakeGeneration, caplog: pytest.LogCaptureFixture
) -> None:
    synchronizer = make(policy, generation)
    synchronizer.sync_weights()
    for failure in (TransferError("group g is still held: {'engine 1': 'no answer'}"), TimeoutError("not within 8 s")):
        policy.disconnect_failure = failure
        synchronizer.shutdown()
        assert str(failure) in caplog.text
    limit_s = policy.time_limits["disconnect"]
    assert limit_s is not None
    assert limit_s <= 10.0


def test_the_export_that_proves_a_refit_has_what_is_left_of_its_time(events: list[str], tmp_path: Path) -> None:
    policy = FakePolicy(events)
    make(policy, FakeGeneration(events), verify="full", export_folder=tmp_path / "export").sync_weights()
    limit_s = policy.time_limits["export"]
    assert limit_s is not None
    assert 0 < limit_s <= FakeGeneration(events).refit_timeout_s


def test_a_failed_proof_names_the_engine_and_not_its_place(policy: FakePolicy, generation: FakeGeneration) -> None:
    generation.first_id = 5
    generation.after_send = [{"0/w": "a", "0/v": "b"}, {"0/w": "a", "0/v": "other"}]
    with pytest.raises(TransferError, match="^engine 6: the first refit sent"):
        make(policy, generation).sync_weights()
    generation.after_send, generation.negated = None, [{"0/w": "-a", "0/v": "b"}] * 2
    with pytest.raises(TransferError, match="^engine 5: no weight of the policy"):
        make(policy, generation).sync_weights()
