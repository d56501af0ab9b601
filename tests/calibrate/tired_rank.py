"""glm5q under torchrun, except that the rank named first once runs out of device memory."""

from __future__ import annotations

import os
import sys

import torch

from calibrate import states
from glm5q.cli import main

TIRES, AT = int(sys.argv[1]), 7
calls = 0
original = states.decoder_layer


def decoder_layer(*arguments):  # type: ignore[no-untyped-def]
    global calls
    calls += 1
    if int(os.environ["RANK"]) == TIRES and calls == AT:
        raise torch.OutOfMemoryError("planted")
    return original(*arguments)


states.decoder_layer = decoder_layer
main(sys.argv[2:])
