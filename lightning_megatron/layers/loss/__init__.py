"""Cross entropy over a sharded vocabulary."""
