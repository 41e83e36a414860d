"""Tests of the package lightning_megatron.plan."""
