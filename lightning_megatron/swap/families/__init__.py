"""Families of Hugging Face models: how their settings and tensors map to a GPT or Encoder."""

from lightning_megatron.swap.families.bert import EncoderNames as EncoderNames
from lightning_megatron.swap.families.exported import exported_form as exported_form
from lightning_megatron.swap.families.family import DecoderNames as DecoderNames
from lightning_megatron.swap.families.family import Family as Family
from lightning_megatron.swap.families.family import ModelConfig as ModelConfig
from lightning_megatron.swap.families.fields import ConfigTable as ConfigTable
from lightning_megatron.swap.families.fields import Field as Field
from lightning_megatron.swap.families.known import families as families
from lightning_megatron.swap.families.known import family_of as family_of
from lightning_megatron.swap.families.known import find_family as find_family
from lightning_megatron.swap.families.rotary import rotary_fields as rotary_fields
