"""Seconds of a refit as formulas of bytes, tensors, buckets, ranks and links; `cost_model.py` makes a table of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Shape = Literal["ring", "tree"]


@dataclass(frozen=True)
class Constants:
    """Engine terms as published for SGLang; links as stated, per GPU and direction; what is 0 has to be measured."""

    load_s_per_tensor: float = 40e-6
    load_s_per_gb: float = 17.6e-3
    load_s_per_bucket: float = 4.3e-3
    """With the announcement and its answer."""
    gather_s_per_tensor: float = 0.0
    gather_s_per_gb: float = 0.0
    """On top of the wire: copies into the flat buffer."""
    gather_s_per_bucket: float = 0.0
    session_s: float = 0.0
    """Pause, flush, begin, end, version: once per refit."""
    hop_s: float = 5e-6
    """Latency of one link."""
    chunk_gb: float = 1e-3
    """What a rank of a broadcast hands on at a time."""
    node_gb_per_s: float = 350.0
    """NVLink between GPUs of one node."""
    network_gb_per_s: float = 50.0
    """400 Gb/s per GPU between nodes."""
    gpus_per_node: int = 8
    gpu_memory_gb: float = 141.0


@dataclass(frozen=True)
class Model:
    name: str
    billion_parameters: float
    num_tensors: int
    """As they are announced."""

    @property
    def total_gb(self) -> float:
        """In bfloat16."""
        return 2 * self.billion_parameters


@dataclass(frozen=True)
class Cluster:
    """FSDP over all trainer ranks. What fits one node is one node; else trainers and engines have nodes of their own."""

    num_trainers: int
    num_engine_ranks: int
    constants: Constants

    @property
    def is_one_node(self) -> bool:
        return self.num_trainers + self.num_engine_ranks <= self.constants.gpus_per_node

    @property
    def num_engine_nodes(self) -> int:
        return math.ceil(self.num_engine_ranks / self.constants.gpus_per_node)

    def holds(self, model: Model) -> bool:
        """Trainers keep 16 bytes per parameter (float32 weight, gradient, two moments), engines 2; 90 % is usable."""
        usable_gb = 0.9 * self.constants.gpu_memory_gb
        trains = 16 * model.billion_parameters <= usable_gb * self.num_trainers
        return trains and model.total_gb <= usable_gb * self.num_engine_ranks


@dataclass(frozen=True)
class Bucket:
    gather_s: float
    broadcast_s: float
    load_s: float


def make_buckets(
    model: Model, cluster: Cluster, bucket_gb: float, *, num_senders: int = 1, shape: Shape = "ring"
) -> list[Bucket]:
    """Cut the model into ceil(size / bucket) equal buckets with equally many tensors.

    Senders are capped at the trainer ranks, and at the GPUs of a node, since share i enters a node through its GPU i.
    """
    num_senders = min(num_senders, cluster.num_trainers, cluster.constants.gpus_per_node)
    num_buckets = math.ceil(model.total_gb / bucket_gb)
    size_gb, num_tensors = model.total_gb / num_buckets, model.num_tensors / num_buckets
    bucket = Bucket(
        gather_s(size_gb, num_tensors, cluster, num_senders),
        broadcast_s(size_gb, cluster, num_senders, shape),
        load_s(size_gb, num_tensors, cluster.constants),
    )
    return [bucket] * num_buckets


def gather_s(size_gb: float, num_tensors: float, cluster: Cluster, num_senders: int) -> float:
    """Seconds until `num_senders` ranks hold a bucket between them, each its share.

    size / senders x (max(inside / node link, outside / network) + gather_s_per_gb) + tensors / senders x
    gather_s_per_tensor + gather_s_per_bucket, where inside = (min(T, 8) - 1) / T and outside = (T - min(T, 8)) / T are the parts of a share that lie on the sender's own node
    and on others, for T trainer ranks. A sender receives and sends at once (full duplex).
    """
    constants, num_trainers = cluster.constants, cluster.num_trainers
    neighbours = min(num_trainers, constants.gpus_per_node)
    inside, outside = (neighbours - 1) / num_trainers, (num_trainers - neighbours) / num_trainers
    wire_s_per_gb = max(inside / constants.node_gb_per_s, outside / constants.network_gb_per_s)
    per_sender_s = size_gb * (wire_s_per_gb + constants.gather_s_per_gb) + num_tensors * constants.gather_s_per_tensor
    return per_sender_s / num_senders + constants.gather_s_per_bucket


def broadcast_s(size_gb: float, cluster: Cluster, num_senders: int, shape: Shape) -> float:
    """Seconds until every engine rank holds a bucket: chunks one behind the other over a chain of links.

    The sum over links of (hop_s + s) + (chunks - 1) x the slowest s, where s = chunk / bandwidth. Links:
    `ring`: one per engine node (network), then the other GPUs of the last node (node link); in one node, one per rank.
    `tree`: ceil(log2(nodes + 1)) of the network, with twice the bytes on each, since a chunk goes on to two children.
    S senders cut each chunk in S: share i goes over the GPUs i of all nodes and from there to the other GPUs of the
    node, so that a GPU's network link carries 1/S of the bytes, and the node link all of them.
    """
    constants = cluster.constants
    num_chunks = math.ceil(size_gb / constants.chunk_gb)
    chunk_gb = size_gb / num_chunks
    inside_s = chunk_gb / constants.node_gb_per_s
    if cluster.is_one_node:
        return cluster.num_engine_ranks * (constants.hop_s + inside_s) + (num_chunks - 1) * inside_s
    per_node, num_nodes = min(cluster.num_engine_ranks, constants.gpus_per_node), cluster.num_engine_nodes
    num_copies = 2 if shape == "tree" and num_nodes > 1 else 1
    num_hops = math.ceil(math.log2(num_nodes + 1)) if shape == "tree" else num_nodes
    outside_s = num_copies * chunk_gb / num_senders / constants.network_gb_per_s
    fill_s = num_hops * (constants.hop_s + outside_s) + (per_node - 1) * (constants.hop_s + inside_s)
    return fill_s + (num_chunks - 1) * max(outside_s, inside_s if per_node > 1 else 0.0)


def load_s(size_gb: float, num_tensors: float, constants: Constants) -> float:
    """Seconds of one engine for a bucket, in one thread; engines load side by side.

    tensors x load_s_per_tensor + size x load_s_per_gb + load_s_per_bucket.
    """
    per_tensor_s, per_gb_s = constants.load_s_per_tensor, constants.load_s_per_gb
    return num_tensors * per_tensor_s + size_gb * per_gb_s + constants.load_s_per_bucket


def serial_s(buckets: Sequence[Bucket]) -> float:
    """One thing after the other: the sum over buckets of gather + broadcast + load."""
    return sum(bucket.gather_s + bucket.broadcast_s + bucket.load_s for bucket in buckets)


def pipeline_s(buckets: Sequence[Bucket], num_buffers: int = 2) -> float:
    """A bucket is gathered while another travels and loads, event by event.

    gathered[k] = max(gathered[k - 1], sent[k - num_buffers]) + gather, since a buffer is free once it is sent;
    sent[k] = max(gathered[k], loaded[k - 1]) + broadcast, since an engine receives in the thread that loads;
    loaded[k] = sent[k] + load. The end is the last load: never below max(sum of gathers, sum of broadcasts and loads).
    """
    gathered_s = loaded_s = 0.0
    sent_s: list[float] = []
    for index, bucket in enumerate(buckets):
        buffer_free_s = sent_s[index - num_buffers] if index >= num_buffers else 0.0
        gathered_s = max(gathered_s, buffer_free_s) + bucket.gather_s
        sent_s.append(max(gathered_s, loaded_s) + bucket.broadcast_s)
        loaded_s = sent_s[-1] + bucket.load_s
    return loaded_s
