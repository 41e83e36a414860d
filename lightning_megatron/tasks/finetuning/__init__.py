"""Fine-tuning of BERT and RoBERTa on GLUE, RACE and SQuAD: data, modules, metrics and ensembles."""

from lightning_megatron.tasks.finetuning.glue_datamodule import GlueDataModule as GlueDataModule
from lightning_megatron.tasks.finetuning.modules import BERTClassifier as BERTClassifier
from lightning_megatron.tasks.finetuning.modules import BERTMultipleChoice as BERTMultipleChoice
from lightning_megatron.tasks.finetuning.modules import (
    BERTQuestionAnswering as BERTQuestionAnswering,
)
from lightning_megatron.tasks.finetuning.race_datamodule import RaceDataModule as RaceDataModule
from lightning_megatron.tasks.finetuning.seeds import SeedRun as SeedRun
from lightning_megatron.tasks.finetuning.seeds import summary as summary
from lightning_megatron.tasks.finetuning.squad_datamodule import SquadDataModule as SquadDataModule
