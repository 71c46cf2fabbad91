"""Propagation of values through an exported graph: one interpreter, and the values that the columns of the operator table compute with."""
