"""Evaluation of language models: metrics, data modules and an adapter for lm-eval.

Metrics are ``torchmetrics.Metric`` objects that reduce over the data-parallel ranks, so they have
the same value in every layout. The logits stay sharded over tp.
"""

from lightning_megatron.evaluation.datamodules import LambadaData as LambadaData
from lightning_megatron.evaluation.datamodules import WikiTextData as WikiTextData
from lightning_megatron.evaluation.evaluated_lm import EvaluatedLM as EvaluatedLM
from lightning_megatron.evaluation.metrics import ClozeAccuracy as ClozeAccuracy
from lightning_megatron.evaluation.metrics import WordPerplexity as WordPerplexity
from lightning_megatron.evaluation.token_scores import TokenScores as TokenScores
from lightning_megatron.evaluation.token_scores import token_losses as token_losses
from lightning_megatron.evaluation.token_scores import token_scores as token_scores
