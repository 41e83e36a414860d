"""Fine-tuning of encoders on tasks: their files, modules, scores and ensembles."""
