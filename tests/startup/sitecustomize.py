"""What every Python that the tests start does first: look for garbage rarely, since nearly all that imports make stays.

With the usual thresholds that is a fifth of the seconds in which a program imports Lightning.
"""

import gc

gc.set_threshold(1_000_000)
