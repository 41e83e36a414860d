"""Data for pre-training BERT: masked pairs of segments from token files of sentences."""
