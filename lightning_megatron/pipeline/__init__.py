"""Microbatches, and the executor that runs any schedule over the stages."""
