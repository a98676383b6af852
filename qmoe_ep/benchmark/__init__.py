"""Measuring layers on a GPU beside the time that reading their bytes takes; ``qmoe-ep bench``."""
