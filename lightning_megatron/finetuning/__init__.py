"""Fine-tuning of BERT on GLUE, RACE and SQuAD: data, modules, metrics and ensembles."""
