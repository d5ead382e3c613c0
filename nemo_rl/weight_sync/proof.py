"""What shows that a refit arrived: the engines' own digests of what they hold, compared three ways."""

import logging
import shutil
from pathlib import Path

from nemo_rl.config.schema import RefitConfig
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.manifest import listed
from nemo_rl.models.generation.interfaces import UpdatableGeneration
from nemo_rl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

Digests = dict[str, str]


class RefitProof:
    """One per synchronizer; `begin` before the weights are sent, `finish` after, both while generation is paused."""

    def __init__(
        self, policy: PolicyInterface, generation: UpdatableGeneration, refit: RefitConfig, export_folder: Path
    ):
        """`export_folder` is written and deleted by `verify: full`; every engine must see it."""
        self._policy = policy
        self._generation = generation
        self._refit = refit
        self._export_folder = export_folder
        self._proven = False
        self._before: list[Digests] | None = None

    def begin(self, deadline: Deadline) -> None:
        self._before = None if self._proven else self._generation.weight_checksums(deadline)

    def finish(self, deadline: Deadline) -> None:
        """Raises TransferError with the tensors that are not what they should be."""
        compares_engines = self._refit.verify != "off" and len(self._generation.rollout_engines) > 1
        if self._before is None and not compares_engines and self._refit.verify != "full":
            return
        digests = self._generation.weight_checksums(deadline)
        if self._before is not None:
            _compare_each("the first refit sent the checkpoint that the engine had loaded, yet", self._before, digests)
            self._before, self._proven = None, True
            logger.info("first refit: all %d engine checksums unchanged", sum(map(len, digests)))
        if compares_engines:
            _compare_each("after the refit, compared with engine 0,", digests[:1] * len(digests), digests)
        if self._refit.verify == "full":
            self._compare_with_export(digests, deadline)

    def _compare_with_export(self, digests: list[Digests], deadline: Deadline) -> None:
        self._policy.export_hf(str(self._export_folder))
        try:
            self._generation.update_weights_from_disk(str(self._export_folder), deadline)
            loaded = self._generation.weight_checksums(deadline)
        finally:
            shutil.rmtree(self._export_folder)
        _compare_each("after the engine had loaded the trainer's exported folder,", digests, loaded)
        logger.info("refit: all %d engine checksums equal those of the exported folder", sum(map(len, digests)))


def _compare_each(when: str, expected: list[Digests], found: list[Digests]) -> None:
    for index, (old, new) in enumerate(zip(expected, found, strict=True)):
        differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if differing:
            raise TransferError(
                f"engine {index}: {when} {len(differing)} of {len(old)} tensors differ: {listed(differing)}"
            )
