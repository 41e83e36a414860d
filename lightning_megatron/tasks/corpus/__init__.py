"""Cleaning of raw text: character repair, length filter, deduplication and decontamination."""

from lightning_megatron.tasks.corpus.cleaning import clean as clean
from lightning_megatron.tasks.corpus.examination import CleaningOptions as CleaningOptions
