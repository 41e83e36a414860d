"""Parts of a profile: ranges, clocks, one trace of all ranks, and the parts of a step's time."""
