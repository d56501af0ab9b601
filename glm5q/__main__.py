"""`python -m glm5q`, which torchrun needs."""

from glm5q.cli import main

main()
