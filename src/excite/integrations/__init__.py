"""Excite where people train already (Lightning, Transformers) and where they look (TensorBoard, W&B, MLflow).

Nothing here is imported by the rest of Excite until it is asked for by name.
"""
