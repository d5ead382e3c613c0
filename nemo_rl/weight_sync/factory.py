"""The one way to make a synchronizer: refuse first, then choose."""

from pathlib import Path
from typing import Any

from nemo_rl.config.schema import RefitConfig
from nemo_rl.config.support import check_support
from nemo_rl.models.generation.interfaces import UpdatableGeneration
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.weight_sync.interfaces import WeightSynchronizer
from nemo_rl.weight_sync.proof import RefitProof
from nemo_rl.weight_sync.sglang_weight_synchronizer import SGLangDisaggregatedWeightSynchronizer


def create_weight_synchronizer(
    *,
    policy: PolicyInterface,
    generation: UpdatableGeneration,
    generation_backend: str,
    colocated: bool,
    train_cluster: Any = None,
    inference_cluster: Any = None,
    refit_buffer_size_gb: float | None = None,
    refit: RefitConfig | None = None,
    export_folder: Path = Path("refit_export"),
) -> WeightSynchronizer:
    """Make the synchronizer for a policy and a generation backend.

    Args:
        train_cluster, inference_cluster: part of the ecosystem's signature; the broadcast needs neither.
        refit: how a refit is proven; None: the defaults.
        export_folder: where `refit.verify: full` writes the model, for as long as the engines load it.

    Raises:
        ConfigError: the combination is not supported; nothing has been touched.
    """
    asked = policy.cfg.model_dump(by_alias=True)
    asked["generation"]["backend"] = generation_backend
    asked["generation"]["colocated"]["enabled"] = colocated
    check_support({"policy": asked})

    proof = RefitProof(policy, generation, refit or RefitConfig(), export_folder)
    return SGLangDisaggregatedWeightSynchronizer(policy, generation, refit_buffer_size_gb, proof)
