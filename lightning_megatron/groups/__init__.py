"""Process groups and communication: the only sub-package that calls torch.distributed."""
