"""Excite inside other training frameworks: Lightning, Transformers, Accelerate.

No module of this package is imported by the rest of Excite.
"""
