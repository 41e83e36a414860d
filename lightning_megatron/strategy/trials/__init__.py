"""Trial steps that compare parts of the first batch with the whole batch."""
