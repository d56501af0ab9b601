"""glm5q under torchrun, except that the rank named first dies as it is about to share its codes."""

from __future__ import annotations

import os
import sys

import torch

from calibrate.ranks import Ranks
from glm5q.cli import main

DIES, AFTER = int(sys.argv[1]), int(sys.argv[2])
shared = 0
original = Ranks.complete


def complete(self, stack):  # type: ignore[no-untyped-def]
    global shared
    shared += stack.dtype == torch.int8 and len(stack) > 1
    if self.rank == DIES and shared > AFTER:
        os._exit(9)
    original(self, stack)


Ranks.complete = complete  # type: ignore[method-assign]
main(sys.argv[3:])
