"""Preference training (DPO) of language models on pairs of a chosen and a rejected answer."""

from lightning_megatron.tasks.preferences.dpo import DPO as DPO
from lightning_megatron.tasks.preferences.pair_loss import PairLoss as PairLoss
from lightning_megatron.tasks.preferences.preference_datamodule import (
    PreferenceDataModule as PreferenceDataModule,
)
