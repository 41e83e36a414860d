"""Preference training (DPO) of language models on pairs of a chosen and a rejected answer."""
