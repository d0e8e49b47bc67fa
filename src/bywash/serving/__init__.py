"""Serving engines: the exchange inside vLLM and SGLang, switched on from their plugin entry points.

Importing this package imports neither engine, nor torch.
"""
