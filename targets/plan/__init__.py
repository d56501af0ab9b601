"""What a model needs on a chip before anything is run: memory, layouts, a floor for its speed.

Pure functions of a model's shape, a recipe and a chip's figures. Nothing here reads weights.
"""
