"""Fine-tuning of BERT and RoBERTa on GLUE, RACE and SQuAD: data, modules, metrics and ensembles."""

from lightning_megatron.tasks.finetuning.seeds import SeedRun as SeedRun
from lightning_megatron.tasks.finetuning.seeds import summary as summary
