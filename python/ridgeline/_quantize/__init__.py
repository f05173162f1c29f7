"""Quantising: the layers of any module tree, or a checkpoint into a new one.

``modules`` and ``smooth`` work on ``nn.Module``s in memory. ``checkpoint`` writes files, layer by
layer: ``calibration`` runs a text through the layers, ``moments`` keeps what their products saw,
``folding`` moves scales of columns into what makes them, ``scaling`` (AWQ) and ``gptq`` choose
scales and codes, which ``schemes`` defines.
"""
