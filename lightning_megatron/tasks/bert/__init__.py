"""Data for pre-training BERT: masked pairs of segments from token files of sentences."""

from lightning_megatron.tasks.bert.bert_datamodule import BERTDataModule as BERTDataModule
