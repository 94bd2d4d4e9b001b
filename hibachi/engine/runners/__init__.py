"""Runners turn plans into calls of the model: inputs, sampling, faults."""
