"""Public names for families of Hugging Face models: tables of configuration fields and tensors.

A family of your own is a :class:`Family`. ``docs/families.md`` shows a complete one.
"""

from __future__ import annotations

from lightning_megatron.swap.families.bert import EncoderNames as EncoderNames
from lightning_megatron.swap.families.family import DecoderNames as DecoderNames
from lightning_megatron.swap.families.family import Family as Family
from lightning_megatron.swap.families.family import ModelConfig as ModelConfig
from lightning_megatron.swap.families.fields import ConfigTable as ConfigTable
from lightning_megatron.swap.families.fields import Field as Field
from lightning_megatron.swap.families.known import families as families
from lightning_megatron.swap.families.known import family_of as family_of
from lightning_megatron.swap.families.known import find_family as find_family
from lightning_megatron.swap.families.layer_names import ExpertNames as ExpertNames
from lightning_megatron.swap.families.layer_names import LatentNames as LatentNames
from lightning_megatron.swap.families.rotary import rotary_fields as rotary_fields
from lightning_megatron.swap.tensors.packed import Packed as Packed
