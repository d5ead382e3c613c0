"""How the cluster's slots are divided between trainer ranks and engines. A slot is a GPU, or stands for one on CPU."""

from dataclasses import dataclass

from nemo_rl.config.errors import ConfigError, refusal
from nemo_rl.config.schema import ClusterConfig, MasterConfig

_CLUSTER = "cluster.gpus_per_node"
_RESOURCES = "policy.generation.colocated.resources"
_SERVER = "policy.generation.sglang_cfg.sglang_server_config"


@dataclass(frozen=True)
class Layout:
    num_nodes: int
    """Nodes of the whole cluster."""
    num_train_slots: int
    """One trainer rank each."""
    num_engines: int
    num_slots_per_engine: int
    shares_gpus: bool = False
    """The engines' slots are the trainer ranks'."""

    @property
    def num_slots(self) -> int:
        if self.shares_gpus:
            return self.num_train_slots
        return self.num_train_slots + self.num_engines * self.num_slots_per_engine

    @property
    def meets_rank0(self) -> bool:
        """Whether an engine stands on the GPU of trainer rank 0, which sends: NCCL takes no two ranks on one GPU."""
        return self.shares_gpus and self.num_engines >= self.num_train_slots

    @property
    def trainer_shares(self) -> list[float]:
        """Slots that each trainer rank reserves. More than half: no two of them meet on one GPU."""
        if not self.shares_gpus:
            return [1] * self.num_train_slots
        return [0.6 if self.meets_rank0 else 1, *[0.6] * (self.num_train_slots - 1)]

    @property
    def engine_share(self) -> float:
        """Slots that one engine reserves: with `shares_gpus` what a trainer rank leaves, and no more."""
        return 0.4 if self.shares_gpus else self.num_slots_per_engine


def make_layout(config: MasterConfig) -> Layout:
    """Divide the slots; raises ConfigError with what is asked, what there is and the keys to change."""
    cluster = config.cluster
    resources = config.policy.generation.colocated.resources
    server = config.policy.generation.sglang_cfg.sglang_server_config
    total = cluster.num_nodes * cluster.gpus_per_node
    most = total if cluster.share_gpus else total - 1
    inference_nodes = resources.num_nodes or 1
    if inference_nodes > cluster.num_nodes:
        allowed = f"at most cluster.num_nodes = {cluster.num_nodes}"
        raise ConfigError([refusal(f"{_RESOURCES}.num_nodes", inference_nodes, allowed)])
    if resources.gpus_per_node is None:
        raise ConfigError(
            [
                refusal(
                    f"{_RESOURCES}.gpus_per_node",
                    None,
                    f"engines need 1 to {most} of the {total} slots of {_CLUSTER}",
                )
            ]
        )
    inference = inference_nodes * resources.gpus_per_node
    if cluster.num_nodes > 1 and resources.gpus_per_node != cluster.gpus_per_node:
        allowed = f"on several nodes the engines take whole nodes: {cluster.gpus_per_node}, as {_CLUSTER}"
        raise ConfigError([refusal(f"{_RESOURCES}.gpus_per_node", resources.gpus_per_node, allowed)])
    if inference > most:
        raise ConfigError([_refuse_slots(inference_nodes, resources.gpus_per_node, total, cluster)])
    engine_slots = inference if server.num_gpus is None else server.num_gpus
    if engine_slots > inference:
        allowed = f"asked {engine_slots}, available {inference} (num_nodes x gpus_per_node of {_RESOURCES})"
        raise ConfigError([refusal(f"{_SERVER}.num_gpus", engine_slots, allowed)])
    if engine_slots % server.num_gpus_per_engine:
        allowed = f"asked {server.num_gpus_per_engine} per engine, available {engine_slots}, which it must divide"
        raise ConfigError(
            [
                refusal(
                    f"{_SERVER}.num_gpus_per_engine",
                    server.num_gpus_per_engine,
                    f"{allowed}; or change {_RESOURCES}.gpus_per_node",
                )
            ]
        )
    return Layout(
        num_nodes=cluster.num_nodes,
        num_train_slots=total if cluster.share_gpus else total - inference,
        num_engines=engine_slots // server.num_gpus_per_engine,
        num_slots_per_engine=server.num_gpus_per_engine,
        shares_gpus=cluster.share_gpus,
    )


def _refuse_slots(nodes: int, per_node: int, total: int, cluster: ClusterConfig) -> str:
    key, value = (f"{_RESOURCES}.gpus_per_node", per_node)
    if cluster.num_nodes > 1:
        key, value = (f"{_RESOURCES}.num_nodes", nodes)
    allowed = f"asked {nodes * per_node} slots for engines, available {total}"
    if not cluster.share_gpus:
        allowed += " of which 1 or more must train"
    return refusal(key, value, f"{allowed}; raise {_CLUSTER} or lower this")
