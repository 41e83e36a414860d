"""Train Transformers that are too large or too slow for one GPU, with an ordinary LightningModule.

Public names are imported at first use, so ``from lightning_megatron import ParallelLayout`` needs
neither torch nor Lightning.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_megatron.version import __version__ as __version__

if TYPE_CHECKING:
    from lightning_megatron.data.bert_datamodule import BERTDataModule as BERTDataModule
    from lightning_megatron.data.chat_datamodule import ChatDataModule as ChatDataModule
    from lightning_megatron.data.datamodule import TokenDataModule as TokenDataModule
    from lightning_megatron.data.preference_datamodule import (
        PreferenceDataModule as PreferenceDataModule,
    )
    from lightning_megatron.data.streaming import Streaming as Streaming
    from lightning_megatron.data.text_datamodule import TextDataModule as TextDataModule
    from lightning_megatron.errors import CaptureError as CaptureError
    from lightning_megatron.errors import CheckpointMismatchError as CheckpointMismatchError
    from lightning_megatron.errors import CheckpointSaveError as CheckpointSaveError
    from lightning_megatron.errors import CorruptDataError as CorruptDataError
    from lightning_megatron.errors import MissingExtraError as MissingExtraError
    from lightning_megatron.errors import NonFiniteError as NonFiniteError
    from lightning_megatron.errors import NonFiniteGradientError as NonFiniteGradientError
    from lightning_megatron.errors import ParallelPlanError as ParallelPlanError
    from lightning_megatron.errors import RankMismatchError as RankMismatchError
    from lightning_megatron.errors import ReplicaMismatchError as ReplicaMismatchError
    from lightning_megatron.errors import UnsupportedError as UnsupportedError
    from lightning_megatron.finetuning.glue_datamodule import GlueDataModule as GlueDataModule
    from lightning_megatron.finetuning.modules import BERTClassifier as BERTClassifier
    from lightning_megatron.finetuning.modules import BERTMultipleChoice as BERTMultipleChoice
    from lightning_megatron.finetuning.modules import BERTQuestionAnswering as BERTQuestionAnswering
    from lightning_megatron.finetuning.race_datamodule import RaceDataModule as RaceDataModule
    from lightning_megatron.finetuning.squad_datamodule import SquadDataModule as SquadDataModule
    from lightning_megatron.generation.decoding import generate as generate
    from lightning_megatron.generation.decoding import generated_tokens as generated_tokens
    from lightning_megatron.generation.sampling import GenerationSettings as GenerationSettings
    from lightning_megatron.groups.mesh import ParallelMesh as ParallelMesh
    from lightning_megatron.layers.context_parallel.position_wise import (
        position_wise as position_wise,
    )
    from lightning_megatron.models.bert_pretraining import BERTPretraining as BERTPretraining
    from lightning_megatron.models.causal_lm import CausalLM as CausalLM
    from lightning_megatron.models.config import GPTConfig as GPTConfig
    from lightning_megatron.models.encoder import Encoder as Encoder
    from lightning_megatron.models.encoder import EncoderResult as EncoderResult
    from lightning_megatron.models.encoder_config import EncoderConfig as EncoderConfig
    from lightning_megatron.models.encoder_rows import EncoderInput as EncoderInput
    from lightning_megatron.models.gpt import GPT as GPT
    from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM as HuggingFaceCausalLM
    from lightning_megatron.models.lora import LoraSettings as LoraSettings
    from lightning_megatron.models.lr_schedules import ConstantSchedule as ConstantSchedule
    from lightning_megatron.models.lr_schedules import CosineSchedule as CosineSchedule
    from lightning_megatron.models.lr_schedules import InverseSqrtSchedule as InverseSqrtSchedule
    from lightning_megatron.models.lr_schedules import LinearSchedule as LinearSchedule
    from lightning_megatron.models.lr_schedules import WSDSchedule as WSDSchedule
    from lightning_megatron.models.weight_decay import WeightDecaySchedule as WeightDecaySchedule
    from lightning_megatron.plan.cuda_graphs import CudaGraphs as CudaGraphs
    from lightning_megatron.plan.expert_clones import ExpertClones as ExpertClones
    from lightning_megatron.plan.fp8 import FP8 as FP8
    from lightning_megatron.plan.global_batch import RampUp as RampUp
    from lightning_megatron.plan.layout import ParallelLayout as ParallelLayout
    from lightning_megatron.plan.recomputation import Recomputation as Recomputation
    from lightning_megatron.preferences.dpo import DPO as DPO
    from lightning_megatron.strategy.callbacks.expert_load import ExpertLoad as ExpertLoad
    from lightning_megatron.strategy.callbacks.loss_curve import LossCurve as LossCurve
    from lightning_megatron.strategy.callbacks.memory_report import MemoryReport as MemoryReport
    from lightning_megatron.strategy.callbacks.progress import (
        TokensProgressBar as TokensProgressBar,
    )
    from lightning_megatron.strategy.cli import MegatronCLI as MegatronCLI
    from lightning_megatron.strategy.megatron_strategy import MegatronStrategy as MegatronStrategy

# Public name -> the module that defines it.
_HOMES = {
    "BERTClassifier": "finetuning.modules",
    "BERTDataModule": "data.bert_datamodule",
    "BERTMultipleChoice": "finetuning.modules",
    "BERTPretraining": "models.bert_pretraining",
    "BERTQuestionAnswering": "finetuning.modules",
    "CaptureError": "errors",
    "CausalLM": "models.causal_lm",
    "ChatDataModule": "data.chat_datamodule",
    "CheckpointMismatchError": "errors",
    "CheckpointSaveError": "errors",
    "ConstantSchedule": "models.lr_schedules",
    "CorruptDataError": "errors",
    "CosineSchedule": "models.lr_schedules",
    "CudaGraphs": "plan.cuda_graphs",
    "DPO": "preferences.dpo",
    "Encoder": "models.encoder",
    "EncoderConfig": "models.encoder_config",
    "EncoderInput": "models.encoder_rows",
    "EncoderResult": "models.encoder",
    "ExpertClones": "plan.expert_clones",
    "ExpertLoad": "strategy.callbacks.expert_load",
    "FP8": "plan.fp8",
    "GPT": "models.gpt",
    "GPTConfig": "models.config",
    "GenerationSettings": "generation.sampling",
    "GlueDataModule": "finetuning.glue_datamodule",
    "HuggingFaceCausalLM": "models.hugging_face_lm",
    "InverseSqrtSchedule": "models.lr_schedules",
    "LinearSchedule": "models.lr_schedules",
    "LoraSettings": "models.lora",
    "LossCurve": "strategy.callbacks.loss_curve",
    "MegatronCLI": "strategy.cli",
    "MegatronStrategy": "strategy.megatron_strategy",
    "MemoryReport": "strategy.callbacks.memory_report",
    "MissingExtraError": "errors",
    "NonFiniteError": "errors",
    "NonFiniteGradientError": "errors",
    "ParallelLayout": "plan.layout",
    "ParallelMesh": "groups.mesh",
    "ParallelPlanError": "errors",
    "PreferenceDataModule": "data.preference_datamodule",
    "RaceDataModule": "finetuning.race_datamodule",
    "RampUp": "plan.global_batch",
    "RankMismatchError": "errors",
    "Recomputation": "plan.recomputation",
    "ReplicaMismatchError": "errors",
    "SquadDataModule": "finetuning.squad_datamodule",
    "Streaming": "data.streaming",
    "TextDataModule": "data.text_datamodule",
    "TokenDataModule": "data.datamodule",
    "TokensProgressBar": "strategy.callbacks.progress",
    "UnsupportedError": "errors",
    "WSDSchedule": "models.lr_schedules",
    "WeightDecaySchedule": "models.weight_decay",
    "generate": "generation.decoding",
    "generated_tokens": "generation.decoding",
    "position_wise": "layers.context_parallel.position_wise",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(
            f"module 'lightning_megatron' has no attribute {name!r}; its names are "
            f"{', '.join(__all__)}"
        )
    return getattr(import_module(f"lightning_megatron.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


# Register the strategy's name if Lightning was imported first: `Trainer(strategy="megatron")` then
# needs no further import. Otherwise importing this package stays cheap.
if "lightning.pytorch" in sys.modules:
    import_module("lightning_megatron.strategy")
