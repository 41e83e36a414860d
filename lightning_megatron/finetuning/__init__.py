"""Fine-tuning of BERT and RoBERTa on GLUE, RACE and SQuAD: data, modules, metrics and ensembles."""
