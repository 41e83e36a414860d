"""Process groups and communication: the only sub-package that calls torch.distributed."""

from lightning_megatron.groups.axis import MeshAxis as MeshAxis
from lightning_megatron.groups.mesh import ParallelMesh as ParallelMesh
from lightning_megatron.groups.mesh_groups import Rendezvous as Rendezvous
from lightning_megatron.groups.random import RandomStreams as RandomStreams
from lightning_megatron.groups.shard_spec import FlatSlice as FlatSlice
from lightning_megatron.groups.shard_spec import Placement as Placement
from lightning_megatron.groups.shard_spec import ShardSpec as ShardSpec
