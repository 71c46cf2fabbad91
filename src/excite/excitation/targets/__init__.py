"""The meaning of a model's outputs: which labels there are, how far an output is from its label, what is decided.

One class and file per target: `Binary` (one output and a threshold), `Codes` (many classes, equidistant codes), `Values` (a
regression), `Tokens` (a class for each token of a sequence); `choose` picks one by the arguments of a training method. The
hierarchy of binary classifiers is `excite.excitation.hierarchy`. A target sees outputs and labels only: it runs no model.
"""
