"""All public names, and the modules that define them; ``docs/api.md`` is generated from here."""

from lightning_megatron.data.datamodule import TokenDataModule as TokenDataModule
from lightning_megatron.data.streaming import Streaming as Streaming
from lightning_megatron.data.text_datamodule import TextDataModule as TextDataModule
from lightning_megatron.forecast.cluster import Cluster as Cluster
from lightning_megatron.generation.decoding import generate as generate
from lightning_megatron.generation.decoding import generated_tokens as generated_tokens
from lightning_megatron.generation.sampling import GenerationSettings as GenerationSettings
from lightning_megatron.groups.mesh import ParallelMesh as ParallelMesh
from lightning_megatron.layers.context_parallel.position_wise import position_wise as position_wise
from lightning_megatron.models.bert_pretraining import BERTPretraining as BERTPretraining
from lightning_megatron.models.causal_lm import CausalLM as CausalLM
from lightning_megatron.models.config import GPTConfig as GPTConfig
from lightning_megatron.models.encoder import Encoder as Encoder
from lightning_megatron.models.encoder import EncoderInput as EncoderInput
from lightning_megatron.models.encoder import EncoderResult as EncoderResult
from lightning_megatron.models.encoder_config import EncoderConfig as EncoderConfig
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
from lightning_megatron.strategy.callbacks.expert_load import ExpertLoad as ExpertLoad
from lightning_megatron.strategy.callbacks.memory_report import MemoryReport as MemoryReport
from lightning_megatron.strategy.callbacks.profile import Profile as Profile
from lightning_megatron.strategy.callbacks.progress import TokensProgressBar as TokensProgressBar
from lightning_megatron.strategy.callbacks.run_record import RunCheckpoint as RunCheckpoint
from lightning_megatron.strategy.callbacks.run_record import RunLogger as RunLogger
from lightning_megatron.strategy.callbacks.run_report import RunReport as RunReport
from lightning_megatron.strategy.callbacks.stragglers import StragglerWatch as StragglerWatch
from lightning_megatron.strategy.callbacks.training_metrics import (
    TrainingMetrics as TrainingMetrics,
)
from lightning_megatron.strategy.cli import MegatronCLI as MegatronCLI
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy as MegatronStrategy
from lightning_megatron.strategy.options.records import ContextOptions as ContextOptions
from lightning_megatron.strategy.options.records import ExpertOptions as ExpertOptions
from lightning_megatron.strategy.options.records import JobOptions as JobOptions
from lightning_megatron.strategy.options.records import LinearOptions as LinearOptions
from lightning_megatron.strategy.options.records import OptimizerOptions as OptimizerOptions
from lightning_megatron.strategy.options.records import PipelineOptions as PipelineOptions
from lightning_megatron.strategy.plan_layout import plan_layout as plan_layout
from lightning_megatron.version import __version__ as __version__
