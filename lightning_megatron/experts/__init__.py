"""Mixture-of-experts layers: routing, token dispatch and grouped computation."""
