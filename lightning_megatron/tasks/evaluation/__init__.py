"""Evaluation of language models: metrics, data modules and an adapter for lm-eval.

Metrics are ``torchmetrics.Metric`` objects that reduce over the data-parallel ranks, so they have
the same value in every layout. The logits stay sharded over tp.
"""

from lightning_megatron.tasks.evaluation.datamodules import EvaluationData as EvaluationData
from lightning_megatron.tasks.evaluation.datamodules import LambadaData as LambadaData
from lightning_megatron.tasks.evaluation.datamodules import WikiTextData as WikiTextData
from lightning_megatron.tasks.evaluation.evaluated_lm import EvaluatedLM as EvaluatedLM
from lightning_megatron.tasks.evaluation.harness import harness_lm as harness_lm
from lightning_megatron.tasks.evaluation.metrics import ClozeAccuracy as ClozeAccuracy
from lightning_megatron.tasks.evaluation.metrics import WordPerplexity as WordPerplexity
