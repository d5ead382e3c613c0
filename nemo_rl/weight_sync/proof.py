"""What shows that a refit arrived: the engines' own digests of what they hold, compared three ways."""

import logging
import shutil
from pathlib import Path

from nemo_rl.config.schema import RefitConfig
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.engine_rules import CONSTANT_TENSORS
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.generation.interfaces import UpdatableGeneration
from nemo_rl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

Digests = dict[str, str]


class RefitProof:
    """One per synchronizer; all of it while generation is paused.

    Engines answer 200 to tensors that they skip, and digests do not change by what is skipped. So the first refit goes
    in two: negated weights, which must change every digest, then the weights that the engines had loaded from disk,
    which must restore every one.
    """

    def __init__(
        self, policy: PolicyInterface, generation: UpdatableGeneration, refit: RefitConfig, export_folder: Path
    ):
        """`export_folder` is written and deleted by `verify: full`; every engine must see it."""
        self._policy = policy
        self._generation = generation
        self._refit = refit
        self._export_folder = export_folder
        self._proven = False
        self._from_disk: Digests = {}
        """Of an engine as it started; kept until a first refit is proven. All engines start from one folder."""

    def begin(self, deadline: Deadline) -> bool:
        """Before anything is sent. Returns whether negated weights are to be sent, and `check_reach` called, first."""
        if not self._proven and not self._from_disk:
            digests = self._digests(deadline)
            self._compare_each(f"as it started, compared with {self._names[0]},", digests[:1] * len(digests), digests)
            self._from_disk = digests[0]
        return not self._proven

    def check_reach(self, deadline: Deadline) -> None:
        """Raises TransferError with the engine tensors that the negated weights did not change."""
        old = self._from_disk
        for engine, new in zip(self._names, self._digests(deadline), strict=True):
            untouched = sorted(name for name in old if new.get(name) == old[name] and not self._is_constant(name))
            if untouched:
                raise TransferError(
                    f"{engine}: no weight of the policy reaches {len(untouched)} of {len(old)} tensors, which would "
                    f"never change: {listed(untouched)}; if the engine makes them of its config, name their endings in "
                    "refit.engine_constants"
                )

    def finish(self, deadline: Deadline) -> None:
        """After the weights were sent. Raises TransferError with the tensors that are not what they should be."""
        compares_engines = self._refit.verify != "off" and len(self._generation.rollout_engines) > 1
        if self._proven and not compares_engines and self._refit.verify != "full":
            return
        digests = self._digests(deadline)
        if not self._proven:
            expected = [self._from_disk] * len(digests)
            self._compare_each("the first refit sent the checkpoint that the engine had loaded, yet", expected, digests)
            self._proven = True
            logger.info("first refit: all %d engine checksums reached and unchanged", sum(map(len, digests)))
        if compares_engines:
            when = f"after the refit, compared with {self._names[0]},"
            self._compare_each(when, digests[:1] * len(digests), digests)
        if self._refit.verify == "full":
            self._compare_with_export(digests, deadline)

    @property
    def _names(self) -> list[str]:
        """Of the engines, in the order of their digests."""
        return [engine.name for engine in self._generation.rollout_engines]

    def _digests(self, deadline: Deadline) -> list[Digests]:
        digests = self._generation.weight_checksums(deadline)
        if not digests or not all(digests):
            raise TransferError("an engine digests no weight, so no refit of it can be proven")
        return digests

    def _is_constant(self, name: str) -> bool:
        return CONSTANT_TENSORS.search(name) is not None or name.endswith(tuple(self._refit.engine_constants))

    def _compare_with_export(self, digests: list[Digests], deadline: Deadline) -> None:
        try:
            self._policy.export_hf(str(self._export_folder), timeout_s=deadline.require("export to prove the refit"))
            self._generation.update_weights_from_disk(str(self._export_folder), deadline)
            loaded = self._digests(deadline)
        finally:
            shutil.rmtree(self._export_folder, ignore_errors=True)
        self._compare_each("after the engine had loaded the trainer's exported folder,", digests, loaded)
        logger.info("refit: all %d engine checksums equal those of the exported folder", sum(map(len, digests)))

    def _compare_each(self, when: str, expected: list[Digests], found: list[Digests]) -> None:
        for engine, old, new in zip(self._names, expected, found, strict=True):
            differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
            if differing:
                raise TransferError(
                    f"{engine}: {when} {len(differing)} of {len(old)} tensors differ: {listed(differing)}"
                )
